"""What a smaller row type keeps: scores and selections from stored rows of each type, against float32's.

``python benchmarks/bench_store.py --train DIR ... --validation DIR ... [--against DIR DIR]`` reads merged stores,
writes their float32 rows as each type, reads them back, and scores every training sample as `grads influence` does.
``training alone`` keeps the validation rows as float32. ``--against`` compares with the scores of two other stores of
the same samples, such as those of the gradients themselves (``--projection none``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from tabulate import tabulate

from gradwire.attribution.query import influence, search
from gradwire.attribution.store import row_types
from gradwire.attribution.store.row_file import RowFile, tensor_writer
from gradwire.base.errors import BadInput

TOP = 0.05
CHUNK = 1024  # rows at once
WAYS = [(metric, over) for metric in ("cosine", "dot") for over in ("mean", "max")]
Scores = dict[tuple[str, str], NDArray[np.float64]]


@contextmanager
def written_as(name: str, source: RowFile) -> Iterator[RowFile]:
    """Write rows as a type, and open the file."""
    codec = row_types.build(name, source.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.pt"
        with tensor_writer(path, source.shape, name) as writer:
            for chunk in source.chunks(CHUNK):
                writer.append(codec.encode(torch.from_numpy(chunk)).numpy())
        yield RowFile(path)


def overlap(scores: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    """Share of the best `TOP` that two rankings have in common."""
    count = max(1, round(TOP * len(exact)))
    best = [set(np.argsort(-of, kind="stable")[:count]) for of in (scores, exact)]
    return len(best[0] & best[1]) / count


def scores(train: RowFile, validation: RowFile) -> Scores:
    """Score the training rows in all ways."""
    return {
        (metric, over): search.scored(
            train, search.target(validation, metric, search.groups_of(over, validation.shape[0])), metric
        )
        for metric, over in WAYS
    }


def kept(found: Scores, exact: Scores) -> list[str]:
    """Spell the overlap in each way, and the rank correlation in the first."""
    rank = spearmanr(found[WAYS[0]], exact[WAYS[0]]).statistic
    return [*(f"{overlap(found[way], exact[way]):.1%}" for way in WAYS), f"{rank:.4f}"]


def similarity(rows: RowFile, exact: RowFile) -> float:
    """Mean cosine of rows and their float32 originals."""
    found = []
    for one, other in zip(rows.chunks(CHUNK), exact.chunks(CHUNK), strict=True):
        products = (one.astype(np.float64) * other).sum(1)
        norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        found.append((products / np.where(norms, norms, 1))[norms > 0])
    return float(np.concatenate(found).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, nargs="+", required=True, metavar="DIR", help="merged stores of float32")
    parser.add_argument("--validation", type=Path, nargs="+", required=True, metavar="DIR", help="as many, in order")
    parser.add_argument("--against", type=Path, nargs=2, metavar="DIR", help="stores of both (default: the last ones)")
    args = parser.parse_args()
    pairs = [opened(*paths) for paths in zip(args.train, args.validation, strict=True)]
    others = opened(*args.against) if args.against else pairs[-1]
    exact = scores(*(one.rows for one in others))
    lines: list[list[str]] = []
    for own in pairs:
        if [one.rows.ids for one in own] != [one.rows.ids for one in others]:
            raise BadInput(f"{own[0].path} and {others[0].path} hold different samples, or a different order.")
        lines += kept_by_types(own[0].rows, own[1].rows, exact)
    training, validation = (len(one.rows.ids) for one in others)
    print(f"{training} training and {validation} validation rows, top {TOP:.0%}, against {others[0].path}\n")
    headers = ["columns", "type", "bytes/row", "cosine to float32", "stored so", *(", ".join(way) for way in WAYS)]
    print(tabulate(lines, [*headers, "rank correlation"], tablefmt="pipe", disable_numparse=True))


def opened(train: Path, validation: Path) -> tuple[search.Store, search.Store]:
    """Open two stores that can be compared."""
    stores = search.open_store(train), search.open_store(validation)
    influence.check_alike(*stores)
    return stores


def kept_by_types(train: RowFile, validation: RowFile, exact: Scores) -> Iterator[list[str]]:
    """Yield a line for each type, with both stored so and with the training rows alone."""
    for name in row_types.CODECS:
        with written_as(name, train) as rows, written_as(name, validation) as queries:
            size = rows.codec.row_bytes
            start = [f"{train.shape[1]:,}", name, f"{size:,}", f"{similarity(rows, train):.4f}"]
            for label, against in (("both", queries), ("training alone", validation)):
                yield [*start, label, *kept(scores(rows, against), exact)]


if __name__ == "__main__":
    main()
