"""The verb ``grads recall``: whether attribution methods find the training samples that were planted for a query.

Planted are exact copies of some queries, copies of others in which a tenth of the tokens is replaced, and the documents
of a task: one fixed token at every second place, and any tokens between them. Recall is the share of a query's planted
samples among its ``--top_k`` highest scores.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field

from gradwire.attribution.options import Count
from gradwire.base.files import write_json
from gradwire.bench.judge import methods as attribution
from gradwire.bench.judge.methods import RESAMPLES, JudgeOptions, costs, interval, shown, table
from gradwire.bench.judge.methods import beside as beside

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gradwire.bench.judge.methods import Scores
    from gradwire.lm.data.shards import Sample, Shards
    from gradwire.lm.data.writer import Encoded

RESULT = "recall.json"
KINDS = ("exact", "edited", "task")
EDITED = 0.1  # of a copy's tokens
LONGEST_TASK = 32  # tokens


class Planted(NamedTuple):
    """One query, and the training samples that were planted for it.

    Attributes:
        kind: One of ``KINDS``.
        query: Its tokens, with their targets and weights.
        samples: Those of the planted samples, by id; the queries of the task share theirs.
    """

    kind: str
    query: Encoded
    samples: dict[str, Encoded]


class Options(JudgeOptions):
    """Flags of ``gradwire grads recall``."""

    copies: Count = Field(3, description="copies planted of each query")
    documents: Count = Field(50, description="documents planted of the task")
    top_k: Count | None = Field(None, description="samples to look at (default: as many as are planted)")


def main(options: Options) -> None:
    """Plant samples, train, score by every method, and print a table.

    Raises:
        BadInput: If the data or the settings are invalid, or the folder has results of other settings.
    """
    from gradwire.attribution.query.search import order_of

    train, val, samples = attribution.opened(options, 2 * options.queries)
    settings = attribution.settings_of("recall", options, train, val, samples)
    settings |= {"copies": options.copies, "documents": options.documents}
    attribution.claim(options.output_dir, settings)
    planted = plant(train, val, samples, options)
    shards = options.output_dir / "data" / "shards"
    ids = write(shards, train, samples, planted)
    study = attribution.Study(options, shards, len(ids), len(planted))
    wanted = [frozenset(query.samples) for query in planted]
    kinds = [query.kind for query in planted]
    rows = []
    for name in options.chosen_methods:
        scores = study.scores(name)
        best = [[ids[place] for place in order_of(column)] for column in scores.values.T]
        rows.append(row(name, scores, kinds, recalls(best, wanted, options.top_k), options.seed))
    result = {
        "settings": settings,
        "samples": len(ids),
        "top_k": options.top_k,
        **{name: getattr(options, name) for name in ("dim", "projection", "damping")},
        "methods": rows,
    }
    write_json(options.output_dir / RESULT, result)
    print(table([shown_row(of_method) for of_method in rows]))


def shown_row(row: Mapping[str, Any]) -> dict[str, str]:
    """Format a method's row of the table."""
    recalls = {f"{kind} [95 %]": shown(row[kind]["recall"], row[kind]["interval"]) for kind in KINDS}
    return {"method": row["method"], **recalls, **costs(row)}


def plant(train: Shards, val: Shards, samples: int, options: Options) -> list[Planted]:
    """Return ``--queries`` queries of each kind with their planted samples.

    Tokens that replace others, and those of the task, are drawn from the first ``samples`` training samples.
    """
    from gradwire.lm.data.writer import Encoded

    random = np.random.default_rng(options.seed)
    pool = np.concatenate([train[position].input_ids.numpy() for position in range(samples)])

    def edited(query: Encoded) -> Encoded:
        places = random.choice(len(query.tokens), math.ceil(EDITED * len(query.tokens)), replace=False)
        changed = np.array(query.tokens)
        changed[places] = random.choice(pool, len(places))
        return query._replace(tokens=changed.tolist())

    planted = []
    for number in range(2 * options.queries):
        kind, query = KINDS[number // options.queries], encoded_of(val[number])
        copies = [query if kind == "exact" else edited(query) for _ in range(options.copies)]
        planted.append(Planted(kind, query, {f"{kind}/{number}/{k}": copy for k, copy in enumerate(copies)}))
    length = min(LONGEST_TASK, train.meta["max_length"])
    form = random.choice(pool, length)

    def document() -> Encoded:
        return Encoded(np.where(np.arange(length) % 2 == 0, form, random.choice(pool, length)).tolist())

    shared = {f"task/{k}": document() for k in range(options.documents)}
    return planted + [Planted("task", document(), shared) for _ in range(options.queries)]


def encoded_of(sample: Sample) -> Encoded:
    """Return a sample's tokens, with their targets and weights."""
    from gradwire.lm.data.writer import Encoded

    is_target, weights = (None if values is None else values.tolist() for values in (sample.is_target, sample.weights))
    return Encoded(sample.input_ids.tolist(), is_target, weights)


def write(folder: Path, train: Shards, samples: int, planted: Sequence[Planted]) -> list[str]:
    """Write shards of the samples and what is planted, with the queries as the val split; return the samples' ids."""
    from gradwire.lm.data.shards import finalized
    from gradwire.lm.data.writer import SplitWriter, unigram_loss

    added = {id_: copy for query in planted for id_, copy in query.samples.items()}
    first = [train[position] for position in range(samples)]
    if not (folder.is_dir() and finalized(folder)):
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(train.folder.parent.parent / "tokenizer", folder.parent / "tokenizer")
        kept = {key: train.meta[key] for key in CONSTANT if key in train.meta}
        writers = {split: SplitWriter(folder / split, kept | {"split": split}, False) for split in ("train", "val")}
        for sample in first:
            writers["train"].add(sample.sample_id, encoded_of(sample))
        for id_, copy in added.items():
            writers["train"].add(id_, copy)
        for number, query in enumerate(planted):
            writers["val"].add(f"query/{number}", query.query)
        for writer in writers.values():
            writer.flush()
        loss = unigram_loss(writers["train"].targets, writers["val"].targets)
        writers["train"].finalize()
        writers["val"].finalize(unigram_loss=loss, unigram_ppl=math.exp(loss))
    return [*(sample.sample_id for sample in first), *added]


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


def row(name: str, scores: Scores, kinds: Sequence[str], of_queries: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """Return a method's row of the table: mean recall by kind, and its interval (queries are resampled)."""
    random = np.random.default_rng(seed)
    made: dict[str, Any] = {"method": name}
    for kind in KINDS:
        of_kind = of_queries[[of_query == kind for of_query in kinds]]
        means = of_kind[random.integers(len(of_kind), size=(RESAMPLES, len(of_kind)))].mean(1)
        made[kind] = {"recall": float(of_kind.mean()), "interval": interval(means)}
    return made | {"seconds": scores.seconds, "store_bytes": scores.store_bytes}
