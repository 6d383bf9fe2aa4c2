"""Which tokens a method's perplexity is lost on: the loss of runs by how often their targets occur in training.

``python benchmarks/rare_tokens.py SHARDS RUN RUN…`` takes a shards folder, such as ``results/data/…/shards``, and run
folders, such as ``results/quality-small/runs/ddp/none/ws2/none/seed0``. All are compared with the first; they must have
its model and seed, and so its initial weights.
"""

from __future__ import annotations

import argparse
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from gradwire.data.batches import eval_batches
from gradwire.data.shards import Shards
from gradwire.models import causal, folder

EDGES = (0, 100, 300, 1000, 3000, 10_000)  # occurrences among the tokens that a run trained on


class Trained(NamedTuple):
    """What a run did to each token.

    Attributes:
        loss: Sum over the validation targets that are this token, in nats, ``[vocabulary]``.
        moved: How far its input embedding moved from its initial value, ``[vocabulary, width]``.
    """

    loss: Tensor
    moved: Tensor


def occurrences(shards: Shards, skip: int = 0) -> Tensor:
    """How often each token occurs in a split after each sample's first ``skip``, ``[vocabulary]``."""
    counts = torch.zeros(shards.meta["vocab_size"], dtype=torch.float64)
    for sample in shards:
        counts += torch.bincount(sample.input_ids[skip:], minlength=len(counts))
    return counts


@torch.no_grad()
def trained(run: Path, shards: Path) -> Trained:
    """Evaluate a run's final model, and compare its embeddings with the initial ones."""
    record = json.loads((run / "record.json").read_text())
    val = Shards(shards, "val")
    model = folder.load(run / "final_model").eval()
    initial = causal.build(record["model"], val.meta["vocab_size"], val.meta["max_length"], record["seed"])
    loss = torch.zeros(val.meta["vocab_size"], dtype=torch.float64)
    for batch in eval_batches(val, 32, 0, 1):
        logits = model(batch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = batch.labels[:, 1:].flatten()
        losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none").double()
        loss.index_add_(0, labels.clamp_min(0), losses)  # ignored targets have a loss of 0
    weights = [each.get_input_embeddings().weight.double() for each in (model, initial)]
    return Trained(loss, weights[0] - weights[1])


def lengths(moved: Tensor) -> Tensor:
    """Median length of the movement of some rows ``[n, width]``, whole and without the mean of all of them: ``[2]``."""
    return torch.stack([each.norm(dim=1).median() for each in (moved, moved - moved.mean(dim=0))])


def by_occurrence(seen: Tensor, targets: Tensor, first: Trained, other: Trained) -> str:
    """A row per range of occurrences that has targets; all tensors have a row per token.

    Args:
        seen: How often a token occurred in training.
        targets: How often it is a validation target.
        first: The run that is compared with.
        other: The other run. ``moved`` is how far its embeddings moved, over the same of the first; ``own part``, the
            same after subtracting the mean movement of the range's tokens.
    """
    more = other.loss - first.loss
    rows = []
    for low, high in pairwise((*EDGES, math.inf)):
        some = (seen >= low) & (seen < high)
        if n := float(targets[some].sum()):
            moved = lengths(other.moved[some]) / lengths(first.moved[some])  # the own part of one token: 0 / 0
            shares = (f"{100 * float(each[some].sum() / each.sum()):.1f} %" for each in (targets, more))
            losses = (float(each[some].sum()) / n for each in (first.loss, more))
            rows.append([low, int(some.sum()), *shares, *losses, *moved.tolist()])
    headers = ["seen from", "tokens", "of targets", "of the difference", "loss", "difference", "moved", "own part"]
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=".3f")


def main() -> None:
    """Print a table for each further run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record, *further = (json.loads((run / "record.json").read_text()) for run in args.runs)
    if any((each["model"], each["seed"]) != (record["model"], record["seed"]) for each in further):
        parser.error("the runs differ in model or seed, so their embeddings began elsewhere; give runs that share both")
    train, val = (Shards(args.shards, split) for split in ("train", "val"))
    epochs = record["steps"] * record["world_size"] * record["batch_size"] / len(train)
    seen, targets = epochs * occurrences(train), occurrences(val, skip=1)
    first, *others = (trained(run, args.shards) for run in args.runs)
    for run, other in zip(args.runs[1:], others, strict=True):
        difference = float((other.loss - first.loss).sum() / targets.sum())
        print(f"\n{run}, against {args.runs[0]}: {difference:+.4f} nats per target\n")
        print(by_occurrence(seen, targets, first, other))


if __name__ == "__main__":
    main()
