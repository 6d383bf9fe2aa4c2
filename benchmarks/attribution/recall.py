"""Whether attribution methods find the training samples that were planted for a query.

Planted are exact copies of some queries, copies of others in which a tenth of the tokens is replaced, and the documents
of a task: one fixed token at every second place, and any tokens between them. Recall is the share of a query's planted
samples among its ``--top_k`` highest scores.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from study import RESAMPLES, Scores, Study, entry, interval, methods_of, opened, parser_of, shown, write

from gradwire.attribution.query.search import order_of
from gradwire.lm.data.shards import Sample, Shards, finalized
from gradwire.lm.data.writer import Encoded, SplitWriter, unigram_loss

KINDS = ("exact", "edited", "task")
EDITED = 0.1  # of a copy's tokens
LONGEST_TASK = 32  # tokens


class Planted(NamedTuple):
    """A query of a kind, and the training samples that were planted for it, by id; those of the task share theirs."""

    kind: str
    query: Encoded
    samples: dict[str, Encoded]


def plant(train: Shards, val: Shards, samples: int, given: argparse.Namespace) -> list[Planted]:
    """Return ``--queries`` queries of each kind with their planted samples.

    Tokens that replace others, and those of the task, are drawn from the first ``samples`` training samples.
    """
    random = np.random.default_rng(given.seed)
    pool = np.concatenate([train[position].input_ids.numpy() for position in range(samples)])

    def edited(query: Encoded) -> Encoded:
        places = random.choice(len(query.tokens), math.ceil(EDITED * len(query.tokens)), replace=False)
        changed = np.array(query.tokens)
        changed[places] = random.choice(pool, len(places))
        return query._replace(tokens=changed.tolist())

    planted = []
    for number in range(2 * given.queries):
        kind, query = KINDS[number // given.queries], encoded(val[number])
        copies = [query if kind == "exact" else edited(query) for _ in range(given.copies)]
        planted.append(Planted(kind, query, {f"{kind}/{number}/{k}": copy for k, copy in enumerate(copies)}))
    length = min(LONGEST_TASK, train.meta["max_length"])
    form = random.choice(pool, length)

    def document() -> Encoded:
        return Encoded(np.where(np.arange(length) % 2 == 0, form, random.choice(pool, length)).tolist())

    shared = {f"task/{k}": document() for k in range(given.documents)}
    return planted + [Planted("task", document(), shared) for _ in range(given.queries)]


def encoded(sample: Sample) -> Encoded:
    """Return a sample's tokens and their targets."""
    return Encoded(sample.input_ids.tolist(), None if sample.is_target is None else sample.is_target.numpy())


def write_shards(folder: Path, train: Shards, samples: int, planted: Sequence[Planted]) -> list[str]:
    """Write shards of the samples and what is planted, with the queries as the val split; return the samples' ids."""
    kept = [(sample.sample_id, encoded(sample)) for sample in (train[position] for position in range(samples))]
    splits = {
        "train": kept + list({id_: copy for query in planted for id_, copy in query.samples.items()}.items()),
        "val": [(f"query/{number}", query.query) for number, query in enumerate(planted)],
    }
    if not (folder.is_dir() and finalized(folder)):
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(train.folder.parent.parent / "tokenizer", folder.parent / "tokenizer")
        meta = {key: train.meta[key] for key in CONSTANT if key in train.meta}
        writers = {split: SplitWriter(folder / split, meta | {"split": split}, False) for split in splits}
        for split, writer in writers.items():
            for id_, sample in splits[split]:
                writer.add(id_, sample)
            writer.flush()
        loss = unigram_loss(writers["train"].targets, writers["val"].targets)
        writers["train"].finalize()
        writers["val"].finalize(unigram_loss=loss, unigram_ppl=math.exp(loss))
    return [id_ for id_, _ in splits["train"]]


CONSTANT = (
    *("format_version", "max_length", "shard_size", "val_fraction", "dataset", "dataset_digest"),
    *("tokenizer_digest", "source", "vocab_size", "eos_id", "pad_id", "chat_format", "chats"),
)  # of the metadata of a split


def recalls(best: Sequence[Sequence[str]], wanted: Sequence[frozenset[str]], top_k: int | None) -> NDArray[np.float64]:
    """Return each query's share of planted ids among its first ``top_k`` (None: as many as are planted).

    Args:
        best: The ids of all samples by descending score, for each query.
        wanted: The planted ids of each query.
        top_k: Number of ids to look at.
    """
    pairs = zip(best, wanted, strict=True)
    return np.array([len(ids & set(order[: top_k or len(ids)])) / len(ids) for order, ids in pairs])


def judged(
    name: str, scores: Scores, kinds: Sequence[str], of_queries: NDArray[np.float64], seed: int
) -> dict[str, Any]:
    """Return a method's row of the table: mean recall by kind, and its interval (queries are resampled)."""
    random = np.random.default_rng(seed)
    row: dict[str, Any] = {"method": name}
    for kind in KINDS:
        of_kind = of_queries[[of_query == kind for of_query in kinds]]
        means = of_kind[random.integers(len(of_kind), size=(RESAMPLES, len(of_kind)))].mean(1)
        row[kind] = {"recall": float(of_kind.mean()), "interval": interval(means)}
    return row | {"seconds": scores.seconds, "store_bytes": scores.store_bytes}


def main() -> None:
    """Plant samples, train, score by every method, and print a table."""
    parser = parser_of(__doc__)
    parser.add_argument("--copies", type=int, default=3, help="copies planted of each query")
    parser.add_argument("--documents", type=int, default=50, help="documents planted of the task")
    parser.add_argument("--top_k", type=int, help="samples to look at (default: as many as are planted)")
    given = parser.parse_args()
    train, val, samples = opened(given, 2 * given.queries)
    planted = plant(train, val, samples, given)
    shards = given.output_dir / "data" / "shards"
    ids = write_shards(shards, train, samples, planted)
    study = Study(given, shards, len(ids), len(planted))
    wanted, kinds = [frozenset(query.samples) for query in planted], [query.kind for query in planted]
    rows = []
    for name in methods_of(given):
        scores = study.scores(name)
        best = [[ids[place] for place in order_of(column)] for column in scores.values.T]
        rows.append(judged(name, scores, kinds, recalls(best, wanted, given.top_k), given.seed))
    cells = [{f"{kind} [95 %]": shown(*row[kind].values()) for kind in KINDS} for row in rows]
    write(given, "recall.json", {"samples": len(ids), "methods": rows}, cells)


if __name__ == "__main__":
    entry(main)
