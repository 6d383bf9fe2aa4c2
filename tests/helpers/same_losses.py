"""Whether an experiment ran the same way twice: ``python tests/helpers/same_losses.py results/smoke OTHER``.

Every run of the one is in the other, and every loss of every step and rank, evaluations and the perplexity included, is
the same number. Where and how it ran (in a container, on a cluster) must not show in what was learned.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from gradwire.base.files import read_json

STEPS = ["step", "rank", "loss", "grad_norm", "val_loss"]
RECORD = ["train_loss", "val_loss", "val_ppl"]
PERPLEXITY = ["avg_loss", "ppl"]


def losses(results: Path) -> dict[str, list]:
    """Every loss of every run, by the run's folder."""
    folders = sorted(record.parent for record in results.glob("runs/**/record.json"))
    return {str(folder.relative_to(results)): of_run(folder) for folder in folders}


def of_run(folder: Path) -> list:
    """The losses of one run: step by step, in its record and of the model that it saved."""
    steps = pd.read_parquet(folder / "steps.parquet")[STEPS].sort_values(["step", "rank"])
    record, perplexity = read_json(folder / "record.json"), read_json(folder / "perplexity.json")
    found = [*steps.to_numpy().ravel(), *(record[name] for name in RECORD), *(perplexity[name] for name in PERPLEXITY)]
    return [None if pd.isna(value) else float(value) for value in found]


def compare(one: Path, other: Path) -> int:
    """The number of runs that both have, if all their losses agree.

    Raises:
        AssertionError: With the runs that do not, or that only one of them has.
    """
    first, second = losses(one), losses(other)
    assert first, f"no run in {one}"
    assert first.keys() == second.keys(), f"only in one of them: {sorted(first.keys() ^ second.keys())}"
    different = [run for run in first if first[run] != second[run]]
    assert not different, f"other losses in {other} than in {one}: {', '.join(different)}"
    return len(first)


if __name__ == "__main__":
    try:
        print(f"the same losses in {compare(*map(Path, sys.argv[1:3]))} runs")
    except AssertionError as error:
        sys.exit(str(error))
