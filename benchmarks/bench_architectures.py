"""Per-sample gradients of many architectures: which methods support them, how exact they are, and how fast.

``python benchmarks/bench_architectures.py [--samples 16] [--length 64] [--rounds 5]``: random models with two layers of
width 64. A deviation is the largest ``‖g - g'‖ / ‖g'‖`` of a sample, g' being one backward pass in float64. Rounds are
interleaved; times are medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.persample.batch import PerSample
from gradwire.lm.data.batches import Batch, collate
from gradwire.lm.data.shards import Sample
from gradwire.lm.models import causal

VOCABULARY, LONGEST, WIDTH = 257, 128, 64
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
ROTARY = {**SMALL, "intermediate_size": 96}
GROUPED = {**ROTARY, "num_key_value_heads": 2}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gptj": {**GPT2, "rotary_dim": 8},
    "gpt_neo": {"hidden_size": WIDTH, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "opt": {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": WIDTH},
    "phi": ROTARY,
    "falcon": SMALL,
    "llama": GROUPED,
    "mistral": GROUPED,
    "granite": GROUPED,
    "glm": {**GROUPED, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16},
    "qwen3": {**GROUPED, "head_dim": 16},
    "olmo2": GROUPED,
}
METHODS: dict[str, Callable[[nn.Module, Batch], PerSample]] = {
    "loop": loop.gradients,
    "vmap": vmap.gradients,
    "hooks": hooks.gradients,
}


def model_of(kind: str) -> nn.Module:
    """A random model; norms and biases are not at their initial ones and zeros."""
    model = causal.build(json.dumps({"architecture": kind, **ARCHITECTURES[kind]}), VOCABULARY, LONGEST, seed=0)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 0.5, 0.3)
    return model


def batch_of(samples: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (samples, length), generator=generator)
    return collate([Sample(f"s{row}", tokens[row]) for row in range(samples)], 0, samples)


def deviation(found: PerSample, exact: PerSample) -> float:
    """The largest error of a sample's gradient, relative to the gradient's norm."""
    error, size = (torch.zeros(len(exact.loss), dtype=torch.float64) for _ in range(2))
    for name, wanted in exact.gradient.items():
        error += (found.gradient[name].double() - wanted).flatten(1).square().sum(1)
        size += wanted.flatten(1).square().sum(1)
    return (error / size).sqrt().max().item()


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row(kind: str, batch: Batch, rounds: int) -> list[Any]:
    """One architecture: its methods' deviations, and samples per second against the loop's."""
    model = model_of(kind)
    exact = loop.gradients(copy.deepcopy(model).double(), batch)
    calls, deviations = {}, {}
    for name, method in METHODS.items():
        calls[name] = partial(method, model, batch)
        try:
            deviations[name] = deviation(calls[name](), exact)
        except Exception as error:  # a method that does not support the architecture
            print(f"{kind}, {name}: {error}"[:160])
            del calls[name]
    times = {name: median(each) for name, each in interleaved(calls, rounds).items()}
    columns: list[Any] = [kind, "hooks" if "hooks" in calls else "vmap" if "vmap" in calls else "loop"]
    columns += [f"{deviations[name]:.1e}" if name in deviations else "–" for name in METHODS]
    columns.append(f"{len(batch.labels) / times['loop']:.0f}")
    return columns + [f"{times['loop'] / times[name]:.2f}" if name in times else "–" for name in ("vmap", "hooks")]


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(seconds(call))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES), choices=list(ARCHITECTURES))
    args = parser.parse_args()
    batch = batch_of(args.samples, args.length)
    rows = [row(kind, batch, args.rounds) for kind in args.architectures]
    headers = [
        "architecture",
        "auto",
        *(f"deviation, {name}" for name in METHODS),
        "loop, samples/s",
        "vmap ×",
        "hooks ×",
    ]
    print(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
