"""What AdamW's local updates cost beyond embeddings: variants of rounds with eight ranks, all bytes counted.

    python benchmarks/local_adamw.py SHARDS [--seed 9] [--variants NAME ...]

The program of `why_embeddings.py`, with codecs: embeddings are replayed in 4 bits, and the other differences travel in
one bit, both with error feedback, in rounds of 4, 8, then 14 steps. Prints a line of JSON for each of `VARIANTS`;
`local-adamw.jsonl` has them.

Shape legend: R = replicas, N = elements.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from why_embeddings import (
    EPSILON,
    POSITIONS,
    RATE,
    TOKENS,
    AdamW,
    Replicas,
    Run,
    Weights,
    every_step,
    mean_loss,
    part_of,
)

ROUNDS = {0: 4, 144: 8, 432: 14}  # steps of a round, from a step on
FLOAT32 = 32.0  # bits of an element
ONE_BIT = 1.265  # with the means of its block, and blocks that ranks' parts cut: what the library's records have


@dataclass(frozen=True)
class Variant:
    """Local updates that differ from the plain ones.

    Attributes:
        outer: Rate and Nesterov momentum of the outer step.
        rate: Factor of the learning rate.
        betas: AdamW's.
        bits: Of an embedding's element.
        moments: Whether ranks average first moments in one bit, too, at the end of a round: "raw", or "scaled", divided
            by the root of the rank's second moments.
        corrected: Whether a rank moves its first moments by how the mean difference differs from its own, without
            another message.
    """

    outer: tuple[float, float] = (1.0, 0.0)
    rate: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    bits: int = 4
    moments: str = ""
    corrected: bool = False


VARIANTS: dict[str, Variant | None] = {
    "every step": None,
    "plain": Variant(),
    "beta2 0.99": Variant(betas=(0.9, 0.99)),
    "first moments": Variant(moments="raw"),
    "first moments, beta2 0.99, embeddings in 2 bits": Variant(moments="raw", betas=(0.9, 0.99), bits=2),
    "beta1 0.8, beta2 0.99, outer momentum 0.3": Variant(outer=(1.0, 0.3), betas=(0.8, 0.99)),
    "outer momentum 0.4": Variant(outer=(1.0, 0.4)),
    "outer rate 1.5": Variant(outer=(1.5, 0.0)),
    "outer rate 2": Variant(outer=(2.0, 0.0)),
    "outer rate 1.5, beta2 0.99": Variant(outer=(1.5, 0.0), betas=(0.9, 0.99)),
    "outer rate 1.5, rate 1.4": Variant(outer=(1.5, 0.0), rate=1.4),
    "outer rate 1.5, scaled first moments": Variant(outer=(1.5, 0.0), moments="scaled"),
    "outer rate 1.5, corrected first moments": Variant(outer=(1.5, 0.0), corrected=True),
}


def in_blocks(x: Tensor, size: int) -> Tensor:
    """Consecutive elements, with zeros after the last: [..., N] to [..., N / size, size]."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def one_bit(x: Tensor) -> Tensor:
    """Each element as the mean of its side of zero, in its block of 256."""
    blocks = in_blocks(x, 256)
    negative = blocks < 0
    below, above = (
        (blocks * side).sum(-1, keepdim=True) / side.sum(-1, keepdim=True).clamp_min(1)
        for side in (negative, ~negative)
    )
    return torch.where(negative, below, above).flatten(-2)[..., : x.shape[-1]]


def integers(x: Tensor, bits: int) -> Tensor:
    """Each element as a multiple of its block's scale, in blocks of 64."""
    blocks = in_blocks(x, 64)
    scale = blocks.abs().amax(-1, keepdim=True).div(2 ** (bits - 1) - 1).clamp_min(1e-30)
    return ((blocks / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]


@dataclass
class Exchange:
    """A mean over the replicas: each encodes its tensors, and who averages them encodes the mean, with error feedback.

    Attributes:
        encode: What is decoded of [..., N].
        bits: Of an element.
        names: The tensors.
    """

    encode: Callable[[Tensor], Tensor]
    bits: float
    names: Sequence[str]
    sent: float = 0.0  # bits so far
    lost: list[Tensor] = field(default_factory=list)  # in the last round, by each replica [R, N] and by the mean [N]

    def mean(self, tensors: Mapping[str, Tensor], kept: float = 1.0) -> Weights:
        """The mean of the replicas' tensors, [1, ...] of each; ``kept`` is the part of the last error that is sent."""
        x = torch.cat([tensors[name].flatten(1) for name in self.names], 1)
        self.sent += self.bits * x.shape[1]
        errors = self.lost or [torch.zeros_like(x), torch.zeros_like(x[0])]
        x = x + kept * errors[0]
        decoded = self.encode(x)
        mean = decoded.mean(0) + kept * errors[1]
        result = self.encode(mean)
        self.lost = [x - decoded, mean - result]
        sizes = [tensors[name][0].numel() for name in self.names]
        parts = zip(self.names, result.split(sizes), strict=True)
        return {name: part.view_as(tensors[name][:1]) for name, part in parts}


def ends_round(step: int, steps: int) -> bool:
    """Whether a step is the last one of a round."""
    start = max(begin for begin in ROUNDS if begin <= step)
    return step + 1 in (steps, *ROUNDS) or (step + 1 - start) % ROUNDS[start] == 0


def local_updates(run: Run, variant: Variant) -> tuple[Replicas, float]:
    """Train; return the replicas and how many times fewer bits than those of float32 in every step were sent."""
    single = Replicas.begin(run.model(), run.seed)
    single.adam.betas = variant.betas
    replicas = single.copies(run.ranks)
    embeddings = [name for name in replicas.weights if part_of(name) in (TOKENS, POSITIONS)]
    others = [name for name in replicas.weights if name not in embeddings]
    differences, first = Exchange(one_bit, ONE_BIT, others), Exchange(one_bit, ONE_BIT, others)
    gradients = Exchange(lambda x: integers(x, variant.bits), variant.bits + 0.5, embeddings)
    momentum = {name: torch.zeros_like(replicas.weights[name][:1]) for name in others}
    rate, nesterov = variant.outer
    replicas.begin_round(tuple(embeddings))
    for step, (ids, labels) in zip(range(run.steps), run.batches(), strict=False):
        replicas.step(ids, labels, run.rate(step))
        if not ends_round(step, run.steps):
            continue
        assert replicas.start is not None
        start, length = replicas.start[0], len(replicas.rates)
        changed = {name: start[name] - replicas.weights[name] for name in others}
        mean = differences.mean(changed)
        if variant.corrected:
            correct(replicas, changed, mean)
        for name, difference in mean.items():
            momentum[name].mul_(nesterov).add_(difference)
            replicas.weights[name][:] = start[name] - rate * (difference + nesterov * momentum[name])
        if variant.moments:
            average_moments(replicas.adam, first, length, scaled=variant.moments == "scaled")
        replicas.replay(gradients.mean({name: total / length for name, total in replicas.sums.items()}))
        replicas.begin_round(tuple(embeddings))
    elements = sum(value[0].numel() for value in replicas.weights.values())
    return replicas, FLOAT32 * elements * run.steps / (differences.sent + first.sent + gradients.sent)


def correct(replicas: Replicas, changed: Weights, mean: Weights) -> None:
    """Move first moments by what the mean difference, read as a step with them, differs from the replica's own."""
    beta1, beta2 = replicas.adam.betas
    unbiased = 1 - beta1**replicas.adam.steps
    for name, difference in mean.items():
        root = (replicas.adam.second[name] / (1 - beta2**replicas.adam.steps)).sqrt() + EPSILON
        replicas.adam.first[name] += (difference - changed[name]) / sum(replicas.rates) * root * unbiased


def average_moments(adam: AdamW, exchange: Exchange, length: int, *, scaled: bool) -> None:
    """Average first moments; an error decays as they do."""
    units = {name: adam.second[name].sqrt() + 1e-12 if scaled else torch.ones(()) for name in exchange.names}
    means = exchange.mean({name: adam.first[name] / units[name] for name in exchange.names}, adam.betas[0] ** length)
    for name, mean in means.items():
        adam.first[name][:] = mean * units[name]


def main(words: Sequence[str] | None = None) -> None:
    """Run variants, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    for name, value in (("ranks", 8), ("steps", 900), ("seed", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    for name in args.variants:
        variant = VARIANTS[name]
        peak = RATE * (variant.rate if variant else 1.0)
        run = Run(args.shards, args.ranks, args.steps, args.seed, peak)
        if variant is None:
            *_, (_, replicas) = every_step(run, "tied")
            ratio = 1.0
        else:
            replicas, ratio = local_updates(run, variant)
        perplexity = math.exp(mean_loss(run.loss_of_tokens(replicas)))
        line = {"variant": name, "seed": args.seed, "perplexity": perplexity, "ratio": ratio}
        print(json.dumps(line | (asdict(variant) if variant else {})), flush=True)


if __name__ == "__main__":
    main()
