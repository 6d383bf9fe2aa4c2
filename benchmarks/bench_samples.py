"""What norms of samples and private steps cost in a training loop, against a plain one and Opacus.

    python benchmarks/bench_samples.py [--rounds 20] [--batch_size 16]

Variants take steps of SGD by turns, in one process of one thread; times are the processor's, and ratios those of
neighbouring steps. The memory is what another process grows by in five steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gradwire as gw

WIDTH, HEADS, LAYERS, TOKENS, VOCABULARY, CLASSES = 256, 4, 4, 128, 1024, 10
STEPS = 5  # of which the memory is taken
Step = Callable[[], object]


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Classifier(nn.Module):
    """A transformer that classifies texts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids)).mean(1))


def made(batch_size: int) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model, its optimizer, ids [B, T] and labels [B]."""
    torch.manual_seed(0)
    model = Classifier()
    ids, labels = torch.randint(VOCABULARY, (batch_size, TOKENS)), torch.randint(CLASSES, (batch_size,))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), ids, labels


def plain(batch_size: int) -> Step:
    model, optimizer, ids, labels = made(batch_size)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(ids), labels).backward()
        optimizer.step()

    return step


def norms(batch_size: int) -> Step:
    model, optimizer, ids, labels = made(batch_size)
    samples = gw.per_sample(model)

    def step() -> None:
        optimizer.zero_grad()
        with samples.norms() as norms:
            cross_entropy(model(ids), labels).backward()
        norms.values.tolist()
        optimizer.step()

    return step


def private(batch_size: int) -> Step:
    model, optimizer, ids, labels = made(batch_size)
    steps = gw.make_private(model, optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=batch_size, seed=0)

    def step() -> None:
        optimizer.zero_grad()
        steps.backward(cross_entropy(model(ids), labels, reduction="none"))
        optimizer.step()

    return step


def opacus(mode: str) -> Callable[[int], Step]:
    def begin(batch_size: int) -> Step:
        from opacus import PrivacyEngine

        model, optimizer, ids, labels = made(batch_size)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, labels), batch_size)
        given = {"module": model, "optimizer": optimizer, "data_loader": data, "criterion": nn.CrossEntropyLoss()}
        made_private = PrivacyEngine().make_private(
            **given, noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode, poisson_sampling=False
        )
        model, optimizer, *rest = made_private
        loss = rest[0] if mode == "ghost" else given["criterion"]

        def step() -> None:
            optimizer.zero_grad()
            loss(model(ids), labels).backward()
            optimizer.step()

        return step

    return begin


VARIANTS: dict[str, Callable[[int], Step]] = {
    "plain": plain,
    "plain again": plain,
    "per_sample(model).norms()": norms,
    "make_private": private,
    "Opacus, ghost clipping": opacus("ghost"),
    "Opacus, gradients of samples": opacus("hooks"),
}


def memory(name: str, batch_size: int) -> float:
    """Megabytes by which a process grows."""
    torch.set_num_threads(1)
    step = VARIANTS[name](batch_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(STEPS):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=16)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        grown = {name: pool.apply(memory, (name, options.batch_size)) for name in VARIANTS}
    torch.set_num_threads(1)
    steps = {name: begin(options.batch_size) for name, begin in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = np.random.default_rng(0)
    for number in range(options.rounds + 2):
        for name in order.permutation([*steps]).tolist():
            start = time.process_time()
            steps[name]()
            if number >= 2:
                seconds[name].append(time.process_time() - start)
    rows = [
        (
            name,
            1e3 * median(of),
            median(np.array(of) / np.array(seconds["plain"])),
            grown[name],
            grown[name] / grown["plain"],
        )
        for name, of in seconds.items()
    ]
    print(
        tabulate(rows, ["step", "ms", "x plain", "MB", "x plain"], "github", floatfmt=("", ".1f", ".2f", ".0f", ".2f"))
    )


if __name__ == "__main__":
    main()
