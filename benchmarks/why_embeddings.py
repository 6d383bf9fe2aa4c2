"""Why embeddings are what many ranks cost: W replicas of a small GPT-2 in one process, with AdamW, in float32.

    python benchmarks/why_embeddings.py SHARDS [--parts drift rows runs] [--ranks 8] [--steps 900] [--seed 0]

A program that shares nothing with the library but its samples: no optimizer, no codec, no model. SHARDS is a folder of
`gradwire tokenize`, such as the one that `gradwire run configs/many-ranks-local.yaml` makes.

drift: how far a round of local steps ends from as many steps with averaged gradients, by tensor. Both begin at the same
    weights, in a run of local updates, and see the same samples. The averaged steps have the moments of the gradients
    averaged so far; the local ones their rank's own, or these for the second moments, or for both.
rows: the same for rows of the token embedding, by the number of ranks that met the token in the round.
runs: perplexity of whole runs, by what the embeddings are (tied to the head, untied, fixed) and how they are averaged,
    and the loss by how often a token occurs.
rates: perplexity of local steps, nothing replayed, with larger learning rates.

Shape legend: R = replicas, B = samples of one, T = tokens, E = width, V = vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from gradwire.lm.data.batches import eval_batches, train_batches
from gradwire.lm.data.shards import Shards

LAYERS, WIDTH, HEADS = 2, 128, 4  # `tiny`
BATCH, INTERVAL = 16, 5  # samples of all ranks in a step; steps of a round
RATE, WARMUP, DECAY, BETAS, EPSILON, CLIP = 0.006, 0.1, 0.1, (0.9, 0.95), 1e-8, 1.0
TOKENS, POSITIONS, HEAD, REST = "token embedding", "positions", "head", "norms and biases"
ATTENTION, MLP = "attention", "MLP"
REPLAYED: dict[str, dict[str, tuple[str, ...]]] = {  # by what the head is: the tensors that are replayed
    "tied": {
        "local": (),
        TOKENS: (TOKENS,),
        POSITIONS: (POSITIONS,),
        "embeddings": (TOKENS, POSITIONS),
        ATTENTION: (ATTENTION,),
        MLP: (MLP,),
        "all": (TOKENS, POSITIONS, ATTENTION, MLP, REST),
    },
    "untied": {"local": (), TOKENS: (TOKENS,), HEAD: (HEAD,), "both": (TOKENS, HEAD)},
    "fixed": {"local": ()},
}
PARTS = ("drift", "rows", "runs", "rates")
POINTS = (0.3, 0.6, 0.9)  # where drift is measured, as parts of the run

Weights = dict[str, Tensor]


@dataclass
class Model:
    """A GPT-2 whose weights have a leading dimension of R replicas.

    Attributes:
        head: "tied" to the token embedding, "untied", or "fixed": untied, and the token embedding is not trained.
    """

    vocabulary: int
    length: int
    head: str = "tied"

    def begin(self, seed: int) -> Weights:
        """Initial weights of one replica."""
        generator = torch.Generator().manual_seed(seed)
        std = 0.02 * math.sqrt(768 / WIDTH)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * std * scale

        weights = {"tokens": matrix(self.vocabulary, WIDTH), "positions": matrix(self.length, WIDTH)}
        if self.head != "tied":
            weights["head"] = matrix(self.vocabulary, WIDTH)
        into_residual = 1 / math.sqrt(2 * LAYERS)
        for layer in range(LAYERS):
            sizes = {"qkv": (1, 3, 1.0), "out": (1, 1, into_residual), "up": (1, 4, 1.0), "down": (4, 1, into_residual)}
            for name, (rows, columns, scale) in sizes.items():
                weights[f"{layer}.{name}"] = matrix(rows * WIDTH, columns * WIDTH, scale)
                weights[f"{layer}.{name}.bias"] = torch.zeros(columns * WIDTH)
        for norm in [f"{layer}.norm{part}" for layer in range(LAYERS) for part in (1, 2)] + ["norm"]:
            weights[norm], weights[f"{norm}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)
        return weights

    def losses(self, weights: Weights, ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of each target, 0 where there is none: [R, B, T - 1] for ids and labels [R, B, T]."""
        replicas, samples, length = ids.shape

        def linear(x: Tensor, name: str) -> Tensor:
            rows = x.reshape(replicas, samples * length, -1)
            return torch.baddbmm(weights[f"{name}.bias"][:, None], rows, weights[name]).view(
                replicas, samples, length, -1
            )

        def normed(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (WIDTH,)) * weights[name][:, None, None] + weights[f"{name}.bias"][:, None, None]

        def heads(x: Tensor) -> Tensor:
            return x.reshape(replicas * samples, length, HEADS, WIDTH // HEADS).transpose(1, 2)

        first = torch.arange(replicas)[:, None, None] * self.vocabulary
        x = F.embedding(ids + first, weights["tokens"].flatten(0, 1)) + weights["positions"][:, None, :length]
        for layer in range(LAYERS):
            query, key, value = linear(normed(x, f"{layer}.norm1"), f"{layer}.qkv").split(WIDTH, -1)
            mixed = F.scaled_dot_product_attention(heads(query), heads(key), heads(value), is_causal=True)
            x = x + linear(mixed.transpose(1, 2).reshape(replicas, samples, length, WIDTH), f"{layer}.out")
            x = x + linear(
                F.gelu(linear(normed(x, f"{layer}.norm2"), f"{layer}.up"), approximate="tanh"), f"{layer}.down"
            )
        hidden = normed(x, "norm")[:, :, :-1].reshape(replicas, -1, WIDTH)
        logits = hidden @ weights["head" if "head" in weights else "tokens"].transpose(1, 2)
        targets = labels[:, :, 1:].reshape(-1)
        losses = F.cross_entropy(logits.view(-1, self.vocabulary), targets, ignore_index=-100, reduction="none")
        return losses.view(replicas, samples, length - 1)


def repeated(tensors: Mapping[str, Tensor], replicas: int) -> Weights:
    """Copies of the first replica's tensors."""
    return {name: value[:1].repeat(replicas, *[1] * (value.ndim - 1)) for name, value in tensors.items()}


@dataclass
class AdamW:
    """Moments of some replicas' weights, and the number of steps that they have taken."""

    first: Weights
    second: Weights
    steps: int = 0
    betas: tuple[float, float] = BETAS

    def observe(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Update the moments of one tensor."""
        first, second = self.first[name].lerp_(gradient, 1 - self.betas[0]), self.second[name]
        return first, second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])

    def step(self, name: str, weight: Tensor, gradient: Tensor, rate: float) -> None:
        """Move one tensor; the caller counts the step before."""
        first, second = self.observe(name, gradient)
        if weight.ndim == 3:
            weight.mul_(1 - rate * DECAY)
        scale = (second / (1 - self.betas[1] ** self.steps)).sqrt_().add_(EPSILON)
        weight.addcdiv_(first / (1 - self.betas[0] ** self.steps), scale, value=-rate)

    def copies(self, replicas: int) -> AdamW:
        """Equal moments for as many replicas, from one."""
        return AdamW(repeated(self.first, replicas), repeated(self.second, replicas), self.steps, self.betas)


@dataclass
class Replicas:
    """R replicas in training, each with its own weights and moments, and its rounds."""

    model: Model
    weights: Weights
    adam: AdamW
    sums: Weights = field(default_factory=dict)  # of gradients that are replayed, in this round
    rates: list[float] = field(default_factory=list)  # of this round
    start: tuple[Weights, AdamW] | None = None
    averaged: AdamW | None = None  # the moments that averaged gradients would have

    @classmethod
    def begin(cls, model: Model, seed: int) -> Replicas:
        """One replica with initial weights."""
        weights = {name: value[None] for name, value in model.begin(seed).items()}
        zeros = [{name: torch.zeros_like(value) for name, value in weights.items()} for _ in range(2)]
        return cls(model, weights, AdamW(zeros[0], zeros[1]))

    def copies(self, replicas: int) -> Replicas:
        """As many replicas, equal to the first of these."""
        return Replicas(self.model, repeated(self.weights, replicas), self.adam.copies(replicas))

    def trained(self) -> list[str]:
        """Names of the tensors that are trained."""
        return [name for name in self.weights if not (self.model.head == "fixed" and name == "tokens")]

    def step(self, ids: Tensor, labels: Tensor, rate: float) -> None:
        """Each replica takes a step with the clipped mean gradient of its own samples: [R, B, T]."""
        names = self.trained()
        leaves = {name: value.detach().requires_grad_(name in names) for name, value in self.weights.items()}
        targets = (labels[:, :, 1:] != -100).sum() / len(labels)
        losses = self.model.losses(leaves, ids, labels).sum() / targets
        gradients = dict(zip(names, torch.autograd.grad(losses, [leaves[name] for name in names]), strict=True))
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients.values()]).sum(0).sqrt()
        clip = (CLIP / (norms + 1e-6)).clamp(max=1)
        self.adam.steps += 1
        self.rates.append(rate)
        for name, gradient in gradients.items():
            gradient *= clip.view(-1, *[1] * (gradient.ndim - 1))
            if name in self.sums:
                self.sums[name] += gradient
            if self.averaged is not None:
                self.averaged.observe(name, gradient.mean(0, keepdim=True))
            self.adam.step(name, self.weights[name], gradient, rate)

    def begin_round(self, replayed: tuple[str, ...] = ()) -> None:
        """Remember where a round begins."""
        self.sums = {name: torch.zeros_like(self.weights[name]) for name in replayed}
        self.rates, self.start = [], (self.copies(1).weights, self.copies(1).adam)

    def end_round(self) -> None:
        """Continue from the mean weights; replayed tensors from the round's steps with their mean gradients."""
        for name, value in self.weights.items():
            if name not in self.sums:
                value[:] = value.mean(0)
        self.replay({name: total.mean(0, keepdim=True) / len(self.rates) for name, total in self.sums.items()})

    def replay(self, gradients: Weights) -> None:
        """Take the round's steps with mean gradients, from where it began."""
        assert self.start is not None
        weights, adam = self.start
        for name, mean in gradients.items():
            began = adam.steps
            for rate in self.rates:
                adam.steps += 1
                adam.step(name, weights[name], mean, rate)
            adam.steps = began
            for kept, replayed in zip(
                (self.weights[name], self.adam.first[name], self.adam.second[name]),
                (weights[name], adam.first[name], adam.second[name]),
                strict=True,
            ):
                kept[:] = replayed


@dataclass
class Run:
    """What all runs share: samples, lengths and the learning rate."""

    shards: Path
    ranks: int
    steps: int
    seed: int
    peak: float = RATE

    def model(self, head: str = "tied") -> Model:
        """The model for these samples."""
        meta = Shards(self.shards, "train").meta
        return Model(-(-meta["vocab_size"] // 64) * 64, meta["max_length"], head)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and labels of each step, of all ranks: [W, B, T]."""
        split = Shards(self.shards, "train")
        streams = [train_batches(split, BATCH // self.ranks, rank, self.ranks, self.seed) for rank in range(self.ranks)]
        while True:
            batches = [next(stream) for stream in streams]
            yield stacked([batch.input_ids for batch in batches], 0), stacked([batch.labels for batch in batches], -100)

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to a tenth."""
        warmup = round(WARMUP * self.steps)
        if step < warmup:
            return self.peak * (step + 1) / warmup
        return self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (self.steps - warmup))))

    def loss_of_tokens(self, replicas: Replicas) -> Tensor:
        """Sum and number of the validation losses of each token of the vocabulary, as a target: float64 [2, V]."""
        weights = replicas.copies(1).weights
        sums = torch.zeros(2, replicas.model.vocabulary, dtype=torch.float64)
        for batch in eval_batches(Shards(self.shards, "val"), 32, 0, 1):
            losses = replicas.model.losses(weights, batch.input_ids[None], batch.labels[None]).flatten().double()
            targets = batch.labels[:, 1:].flatten()
            there = targets != -100
            sums[0].index_add_(0, targets[there], losses[there])
            sums[1] += torch.bincount(targets[there], minlength=replicas.model.vocabulary)
        return sums


def stacked(parts: Sequence[Tensor], padding: int) -> Tensor:
    """Ranks' samples, padded to the longest: [B, T] of each to [W, B, T]."""
    longest = max(part.shape[1] for part in parts)
    return torch.stack([F.pad(part, (0, longest - part.shape[1]), value=padding) for part in parts])


def joined(tokens: Tensor) -> Tensor:
    """All ranks' samples as those of one replica: [W, B, T] to [1, W B, T]."""
    return tokens.reshape(1, -1, tokens.shape[-1])


def every_step(run: Run, head: str) -> Iterator[tuple[int, Replicas]]:
    """Train with averaged gradients; yield the number of steps taken, before each step and at the end."""
    replicas = Replicas.begin(run.model(head), run.seed)
    for step, (ids, labels) in zip(range(run.steps), run.batches(), strict=False):
        yield step, replicas
        replicas.step(joined(ids), joined(labels), run.rate(step))
    yield run.steps, replicas


def local_updates(run: Run, head: str, replayed: tuple[str, ...]) -> Iterator[tuple[int, Replicas]]:
    """Train by rounds; yield as `every_step`."""
    initial = Replicas.begin(run.model(head), run.seed)
    replicas = initial.copies(run.ranks)
    replicas.averaged = initial.adam
    replicas.begin_round(replayed)
    for step, (ids, labels) in zip(range(run.steps), run.batches(), strict=False):
        yield step, replicas
        replicas.step(ids, labels, run.rate(step))
        if (step + 1) % INTERVAL == 0 or step + 1 == run.steps:
            replicas.end_round()
            replicas.begin_round(replayed)
    yield run.steps, replicas


@dataclass
class Round:
    """A round from one point of training.

    Attributes:
        met: Number of ranks that met each token: int64 [V].
        moved: By how much averaged steps moved the weights.
        local: The same of local steps, by whose moments they have.
    """

    met: Tensor
    moved: Weights
    local: dict[str, Weights]


def rounds(run: Run) -> list[Round]:
    """Rounds at some points of a run of local updates."""
    points = {int(part * run.steps) // INTERVAL * INTERVAL for part in POINTS}
    batches = list(zip(range(run.steps), run.batches(), strict=False))
    made = []
    for step, replicas in local_updates(run, "tied", ()):
        if step not in points:
            continue
        shared, start = replicas.averaged, replicas.copies(1).weights
        shared.steps = step
        own = copy.deepcopy(replicas.adam)
        moments = {"own": own, "shared second": AdamW(own.first, shared.copies(run.ranks).second, step)}
        moments |= {"shared": shared.copies(run.ranks)}
        alone = {
            whose: Replicas(replicas.model, repeated(start, run.ranks), copy.deepcopy(adam))
            for whose, adam in moments.items()
        }
        together = Replicas(replicas.model, repeated(start, 1), shared.copies(1))
        met = torch.zeros(run.ranks, replicas.model.vocabulary, dtype=torch.int64)
        for later, (ids, labels) in batches[step : step + INTERVAL]:
            met.scatter_(1, ids.flatten(1), 1)
            together.step(joined(ids), joined(labels), run.rate(later))
            for local in alone.values():
                local.step(ids, labels, run.rate(later))

        def moved(ranks: Replicas) -> Weights:
            return {name: value.mean(0) - start[name][0] for name, value in ranks.weights.items()}  # noqa: B023

        made.append(Round(met.sum(0), moved(together), {whose: moved(ranks) for whose, ranks in alone.items()}))
    return made


def part_of(name: str) -> str:
    """The kind of tensor, for a table."""
    kinds = {"tokens": TOKENS, "positions": POSITIONS, "qkv": ATTENTION, "out": ATTENTION, "up": MLP, "down": MLP}
    return (kinds | {"head": HEAD}).get(name.split(".")[-1], REST)


def drift(measured: Sequence[Round]) -> list[dict[str, object]]:
    """`compared`, by kind of tensor."""
    kinds: dict[str, list[str]] = {}
    for name in measured[0].moved:
        kinds.setdefault(part_of(name), []).append(name)
    groups = {kind: [dict.fromkeys(names, ...)] * len(measured) for kind, names in kinds.items()}
    return [{"tensors": kind, **row} for kind, row in compared(measured, groups).items()]


def rows(measured: Sequence[Round], ranks: int) -> list[dict[str, object]]:
    """`compared`, for rows of the token embedding by the number of ranks that met the token."""
    table = []
    bounds = {
        "0": (0, 0),
        "1": (1, 1),
        "2 to 3": (2, 3),
        f"4 to {ranks - 1}": (4, ranks - 1),
        f"{ranks}": (ranks, ranks),
    }
    groups = {
        name: [{"tokens": (part.met >= low) & (part.met <= high)} for part in measured]
        for name, (low, high) in bounds.items()
    }
    for name, row in compared(measured, groups).items():
        count = sum(int(places["tokens"].sum()) for places in groups[name]) / len(measured)
        table.append({"met by": name, "rows": round(count), **row})
    return table


def compared(
    measured: Sequence[Round], groups: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, float]]:
    """How far local steps end from averaged ones, in units of the length of these, over all rounds.

    Args:
        measured: The rounds.
        groups: By name, for each round the places of tensors that belong to the group.

    Returns:
        By group: for each kind of moments the distance, for ranks' own moments the share of all that is missed, and the
        part of the way that they go in the direction of averaged steps.
    """
    sums: dict[str, dict[str, list[float]]] = {}
    for group, places_by_round in groups.items():
        for part, places in zip(measured, places_by_round, strict=True):
            for name, place in places.items():
                moved = part.moved[name][place].double()
                for whose, local in part.local.items():
                    kept = sums.setdefault(group, {}).setdefault(whose, [0.0, 0.0, 0.0])
                    changed = local[name][place].double()
                    numbers = moved.square().sum(), (changed - moved).square().sum(), (changed * moved).sum()
                    kept[:] = [total + float(number) for total, number in zip(kept, numbers, strict=True)]
    missed = sum(kinds["own"][1] for kinds in sums.values())
    return {
        group: {f"distance, {whose}": math.sqrt(numbers[1] / numbers[0]) for whose, numbers in kinds.items()}
        | {"of all missed": kinds["own"][1] / missed, "way": kinds["own"][2] / kinds["own"][0]}
        for group, kinds in sums.items()
    }


def runs(run: Run, head: str) -> tuple[list[dict[str, object]], dict[str, Tensor]]:
    """Perplexity and the loss of each token, by what is replayed."""
    names = Replicas.begin(run.model(head), run.seed).trained()
    table, losses = [], {}
    kinds: dict[str, tuple[str, ...] | None] = {"every step": None, **REPLAYED[head]}
    for kind, parts in kinds.items():
        if parts is None:
            *_, (_, replicas) = every_step(run, head)
        else:
            replayed = tuple(name for name in names if part_of(name) in parts)
            *_, (_, replicas) = local_updates(run, head, replayed)
        losses[kind] = run.loss_of_tokens(replicas)
        ppl, least = (math.exp(mean_loss(losses[name])) for name in (kind, "every step"))
        table.append({"head": head, "averaged": kind, "perplexity": ppl, "above, %": 100 * (ppl / least - 1)})
        print(*table[-1].values(), flush=True)
    return table, losses


def mean_loss(sums: Tensor) -> float:
    """Mean of what `Run.loss_of_tokens` summed."""
    return float(sums[0].sum() / sums[1].sum())


def frequencies(losses: Mapping[str, Tensor]) -> list[dict[str, object]]:
    """Mean loss of targets by the frequency of their token, in quarters of all targets."""
    counts = losses["every step"][1]
    order = counts.argsort(descending=True)
    share = counts[order].cumsum(0) / counts.sum()
    table = []
    for quarter in range(4):
        tokens = order[(share > quarter / 4) & (share <= (quarter + 1) / 4) & (counts[order] > 0)]
        mean = {kind: mean_loss(sums[:, tokens]) for kind, sums in losses.items()}
        least = mean.pop("every step")
        table.append(
            {"tokens": len(tokens), "every step": least, **{kind: loss - least for kind, loss in mean.items()}}
        )
    return table


def show(title: str, table: list[dict[str, object]]) -> None:
    """Print a table."""
    print(f"\n{title}\n\n{tabulate(table, headers='keys', tablefmt='pipe', floatfmt='.3f')}", flush=True)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--heads", nargs="+", choices=list(REPLAYED), default=list(REPLAYED))
    for name, value in (("ranks", 8), ("steps", 900), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(args.shards, args.ranks, args.steps, args.seed)
    if {"drift", "rows"} & set(args.parts):
        measured = rounds(run)
        if "drift" in args.parts:
            show("drift", drift(measured))
        if "rows" in args.parts:
            show("rows", rows(measured, run.ranks))
    if "runs" in args.parts:
        for head in args.heads:
            perplexities, losses = runs(run, head)
            show(f"runs, {head}", perplexities)
            show("loss by a token's frequency, in quarters of all targets", frequencies(losses))
    if "rates" in args.parts:
        for factor in (1.4, 2.0):
            *_, (_, replicas) = local_updates(replace(run, peak=factor * RATE), "tied", ())
            print(f"local, {factor:g} times the rate:", math.exp(mean_loss(run.loss_of_tokens(replicas))), flush=True)


if __name__ == "__main__":
    main()
