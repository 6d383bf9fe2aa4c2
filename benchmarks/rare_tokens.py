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

from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import eval_batches
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, folder

EDGES = (0, 100, 300, 1000, 3000, 10_000)  # occurrences among the tokens that a run trained on


class Trained(NamedTuple):
    """What a run did to each token.

    Attributes:
        targets: How many validation targets are this token, ``[vocabulary]``.
        loss: Their summed loss in nats, ``[vocabulary]``.
        moved: Its input embedding less the initial one, ``[vocabulary, width]``.
    """

    targets: Tensor
    loss: Tensor
    moved: Tensor


def occurrences(shards: Shards) -> Tensor:
    """How often each token occurs in a split, ``[vocabulary]``."""
    counts = torch.zeros(shards.meta["vocab_size"], dtype=torch.float64)
    for sample in shards:
        counts += torch.bincount(sample.input_ids, minlength=len(counts))
    return counts


@torch.no_grad()
def trained(run: Path, shards: Path) -> Trained:
    """Evaluate a run's final model, and compare its embeddings with the initial ones.

    Raises:
        BadInput: If the loss is not that of the run's record, as with shards of another corpus.
    """
    record = json.loads((run / "record.json").read_text())
    val = Shards(shards, "val")
    model = folder.load(run / "final_model").eval()
    initial = causal.build(record["model"], val.meta["vocab_size"], val.meta["max_length"], record["seed"])
    targets, loss = torch.zeros(2, val.meta["vocab_size"], dtype=torch.float64)
    for batch in eval_batches(val, 32, 0, 1):
        logits = model(batch.input_ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = batch.labels[:, 1:].flatten()
        losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none").double()
        loss.index_add_(0, labels.clamp_min(0), losses)  # ignored targets have a loss of 0
        targets += torch.bincount(labels[labels >= 0], minlength=len(targets))
    mean = float(loss.sum() / targets.sum())
    if abs(mean - record["val_loss"]) > 1e-3:
        raise BadInput(
            f"{run} has a loss of {mean:.4f} on {shards}, but {record['val_loss']:.4f} in its record; give its shards."
        )
    weights = [each.get_input_embeddings().weight.double() for each in (model, initial)]
    return Trained(targets, loss, weights[0] - weights[1])


def lengths(moved: Tensor) -> Tensor:
    """Median length of the movement of some rows ``[n, width]``, whole and without the mean of all of them: ``[2]``."""
    return torch.stack([each.norm(dim=1).median() for each in (moved, moved - moved.mean(dim=0))])


def by_occurrence(seen: Tensor, first: Trained, other: Trained) -> str:
    """A row per range of occurrences that has targets; all tensors have a row per token.

    Args:
        seen: How often a token occurred in training.
        first: The run that is compared with.
        other: The other run. ``moved`` is how far its embeddings moved, over the same of the first; ``own part``, the
            same after subtracting the mean movement of the range's tokens.
    """
    more = other.loss - first.loss
    rows = []
    for low, high in pairwise((*EDGES, math.inf)):
        some = (seen >= low) & (seen < high)
        if n := float(first.targets[some].sum()):
            moved = lengths(other.moved[some]) / lengths(first.moved[some])  # the own part of one token: 0 / 0
            shares = (f"{100 * float(each[some].sum() / each.sum()):.1f} %" for each in (first.targets, more))
            losses = (float(each[some].sum()) / n for each in (first.loss, more))
            rows.append([low, int(some.sum()), *shares, *losses, *moved.tolist()])
    headers = ["seen from", "tokens", "of targets", "of the difference", "loss", "difference", "moved", "own part"]
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=".3f")


def compare(shards: Path, runs: list[Path]) -> None:
    """Print a table for each further run.

    Raises:
        BadInput: If the runs differ in model or seed, or are of other shards.
    """
    record, *further = (json.loads((run / "record.json").read_text()) for run in runs)
    if any((each["model"], each["seed"]) != (record["model"], record["seed"]) for each in further):
        raise BadInput(
            "the runs differ in model or seed, so their embeddings began elsewhere; give runs that share both."
        )
    train = Shards(shards, "train")
    seen = occurrences(train) * record["steps"] * record["world_size"] * record["batch_size"] / len(train)
    first, *others = (trained(run, shards) for run in runs)
    for run, other in zip(runs[1:], others, strict=True):
        difference = float((other.loss - first.loss).sum() / first.targets.sum())
        print(f"\n{run}, against {runs[0]}: {difference:+.4f} nats per target\n")
        print(by_occurrence(seen, first, other))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        compare(args.shards, args.runs)
    except (BadInput, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
