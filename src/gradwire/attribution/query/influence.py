"""The command ``grads influence``: rank training samples by gradient similarity to validation samples.

The score of a training sample for a validation sample is Σ_c w_c · s(train_c, validation_c) over checkpoints c, with
normalised learning rates w_c. s is the inner product or cosine of the projected gradients, with ``--curvature`` under
the inverse second moment of the checkpoint's training rows (Pruthi et al., 2020, "TracIn"). The score of a training
sample is the mean over the validation samples, their maximum, or the maximum over subtasks of the mean within each
(Xia et al., 2024, "LESS", section 4.2).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from gradwire.attribution.options import Count, CurvatureOptions, Metric
from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_write, check_sums, read_object, write_json
from gradwire.base.flags import POSITIVE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gradwire.attribution.query.gradient_store import GradientStore

MATRIX, TOP = "matrix.npy", "top.jsonl"
LEARNING_RATE = "learning_rate"


class Options(CurvatureOptions):
    """Flags of ``gradwire grads influence``."""

    train: tuple[Path, ...] = Field(description="one merged store (dim<N>/) per checkpoint")
    validation: tuple[Path, ...] = Field(description="as many, in the same order")
    weights: tuple[str, ...] | None = Field(
        None,
        description=f"learning rate of each checkpoint (default: equal); {LEARNING_RATE}: as the models in models/ "
        "state it",
    )
    metric: Metric = Field("cosine", description="similarity of two gradients")
    over: Literal["mean", "max", "subtask"] = Field(
        "mean",
        description="reduction over validation samples; subtask: the maximum over subtasks of the mean within each, as "
        "in LESS",
    )
    subtasks: Path | None = Field(
        None,
        description="JSON object of the validation documents' subtasks by id (default: an id up to its last slash)",
    )
    matrix: bool = Field(False, description=f"also write the score of each pair: {MATRIX}")
    top_k: Count = Field(100, description="number of samples to select")
    corpus: Path | None = Field(
        None, description="corpus file; adds the selected samples' documents, and passes exact duplicates over"
    )
    output_dir: Path = Field(description="folder for scores.parquet, top.jsonl, influence.json")

    @model_validator(mode="after")
    def _check_subtasks(self) -> Self:
        if self.subtasks is not None and self.over != "subtask":
            raise ValueError(f"--subtasks {self.subtasks} is given without --over subtask: add it")
        return self


def output_dir(options: Options) -> Path:
    """Return the folder of the outputs."""
    return options.output_dir


def main(options: Options) -> None:
    """Score every training sample and select the best; of those with the same content, the first.

    Raises:
        BadInput: If the stores are incompatible, or a sample's document is not in the corpus.
    """
    import numpy as np

    from gradwire.attribution.query.search import grouped, order_of

    pairs, weights = opened(options)
    train, validation = pairs[0]
    ids, asked = train.ids, validation.ids
    names, groups = grouped(options.over, validation.sample_ids, options.subtasks)
    of_groups = scored(options, pairs, weights, names, groups)
    scores = of_groups.max(1)
    best, repeated = train.without_repeats(order_of(scores), options.top_k, options.corpus)
    write_scores(options.output_dir / "scores.parquet", ids, names, of_groups)
    write_top(options, train, best, scores, [names[column] for column in of_groups.argmax(1)] if names else None)
    write_json(
        options.output_dir / "influence.json",
        {
            "train": [str(path) for path in options.train],
            "validation": [str(path) for path in options.validation],
            "weights": weights,
            "metric": options.metric,
            "over": options.over,
            "subtasks": dict(zip(names, np.bincount(groups).tolist(), strict=True)) if names else None,
            "columns": asked if options.matrix else None,
            "curvature": options.curvature,
            "damping": options.chosen_damping,
            "samples": len(ids),
            "top_k": len(best),
            "repeated": repeated,
        },
    )
    note = f"; {repeated} exact duplicates are passed over" if repeated else ""
    print(f"{len(best)} of {len(ids)} samples selected in {options.output_dir / TOP}; the best is {ids[best[0]]}{note}")


def opened(options: Options) -> tuple[list[tuple[GradientStore, GradientStore]], list[float]]:
    """Open the stores of each checkpoint, and return its weight.

    Raises:
        BadInput: If the stores are incompatible, or their numbers differ.
    """
    from gradwire.attribution.query.gradient_store import GradientStore

    stated = options.weights == (LEARNING_RATE,)
    weights = normalised_weights(None if stated else options.weights, len(options.train), len(options.validation))
    pairs = [
        (GradientStore(train), GradientStore(validation))
        for train, validation in zip(options.train, options.validation, strict=True)
    ]
    for train, validation in pairs:
        train.check_alike(validation)
        for store, first in zip((train, validation), pairs[0], strict=True):
            store.check()
            if (store.ids, store.manifest.data_digest) != (first.ids, first.manifest.data_digest):
                raise BadInput(f"{store.path} and {first.path} hold different samples, or a different order.")
    if stated:
        rates = [learning_rate(train) for train, _ in pairs]
        weights = normalised_weights(rates, len(rates), len(rates))
    return pairs, weights


def scored(
    options: Options,
    pairs: Sequence[tuple[GradientStore, GradientStore]],
    weights: Sequence[float],
    names: Sequence[str],
    groups: NDArray[np.int64],
) -> NDArray[np.float64]:
    """Return the scores [n, subtasks], or [n, 1] without subtasks, and write the matrix of pairs if it is asked for."""
    import numpy as np

    from gradwire.attribution.query.gradient_store import weighted
    from gradwire.attribution.query.search import groups_of
    from gradwire.attribution.store.row_file import npy_writer

    ids, asked = (store.ids for store in pairs[0])
    parts = []
    with ExitStack() as stack:
        if options.matrix:
            matrix = stack.enter_context(npy_writer(options.output_dir / MATRIX, (len(ids), len(asked))))
        columns = groups_of("max", len(asked)) if options.matrix else groups
        for block in weighted(pairs, weights, columns, options.metric, options.chosen_damping):
            if options.matrix:
                matrix.append(block)
            means = means_of(block, groups) if options.matrix and options.over != "max" else block
            parts.append(means if names else means.max(1, keepdims=True))
    if not options.matrix:
        (options.output_dir / MATRIX).unlink(missing_ok=True)
    return np.concatenate(parts)


def write_top(
    options: Options,
    train: GradientStore,
    best: Sequence[int],
    scores: NDArray[np.float64],
    subtasks: Sequence[str] | None,
) -> None:
    """Write a line per selected sample, best first, with its document if there is a corpus."""
    from gradwire.attribution.query.documents import documents_of
    from gradwire.lm.data.document import content

    samples = [train.sample_ids[position] for position in best]
    documents = documents_of(samples, options.corpus) if options.corpus else {}
    with atomic_write(options.output_dir / TOP) as part, part.open("w", encoding="utf-8") as stream:
        for rank, (position, sample) in enumerate(zip(best, samples, strict=True), 1):
            line = {"rank": rank, "sample_id": train.ids[position], "score": float(scores[position])}
            line |= {"subtask": subtasks[position]} if subtasks else {}
            line |= content(documents[sample]) if documents else {}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def write_scores(file: Path, ids: Sequence[str], names: Sequence[str], of_groups: NDArray[np.float64]) -> None:
    """Write the score of every training sample, with that for each subtask and the name of the highest.

    Args:
        file: The Parquet file.
        ids: The training samples' ids.
        names: The subtasks, if there are any.
        of_groups: The scores, [n, subtasks], or [n, 1] without subtasks.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, object] = {"sample_id": ids, "score": of_groups.max(1)}
    if names:
        columns["subtask"] = [names[column] for column in of_groups.argmax(1)]
        columns |= {f"subtask:{name}": of_groups[:, column] for column, name in enumerate(names)}
    with atomic_write(file) as path:
        pq.write_table(pa.table(columns), path)


def means_of(block: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the means [n, groups] of the columns [n, m] in each group."""
    import numpy as np

    share = np.zeros((len(groups), groups.max() + 1))
    share[np.arange(len(groups)), groups] = 1 / np.bincount(groups)[groups]
    return block @ share


def learning_rate(train: GradientStore) -> float:
    """Return the learning rate that the model of a store was kept with, from its ``gradwire.json``.

    Raises:
        BadInput: If the model has moved or states none.
    """
    from gradwire.lm.models import saved

    file = Path(train.manifest.lora_dir or train.manifest.model_dir) / saved.METADATA
    check_sums(file.parent, (file.name,))
    rate = read_object(file).get(LEARNING_RATE) if file.is_file() else None
    if not isinstance(rate, float) or not rate > 0:
        raise BadInput(
            f"{file}, of the model of {train.path}, gives no {LEARNING_RATE} (`train --keep_model_every` writes it): "
            "give --weights as numbers."
        )
    return rate


def normalised_weights(given: Sequence[float | str] | None, train: int, validation: int) -> list[float]:
    """Return the checkpoints' weights, scaled to sum to 1.

    Raises:
        BadInput: If the numbers of stores and weights differ.
    """
    if given and LEARNING_RATE in given:
        raise BadInput(f"--weights: {LEARNING_RATE} applies to all checkpoints; give nothing else with it.")
    try:
        weights = [float(weight) for weight in given] if given else [1.0] * train
    except ValueError:
        raise BadInput(
            f"--weights {' '.join(map(str, given or ()))}: give numbers, or {LEARNING_RATE} alone."
        ) from None
    for weight in weights:
        POSITIVE.check("--weights", weight)
    if not train == validation == len(weights):
        raise BadInput(
            f"--train names {train} stores, --validation {validation} and --weights {len(weights)}: "
            "give one of each per checkpoint, in the same order."
        )
    return [weight / sum(weights) for weight in weights]
