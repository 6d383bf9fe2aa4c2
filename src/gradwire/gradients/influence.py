"""The verb ``grads influence``: rank training samples by gradient similarity to validation samples.

The score of a training sample is Σ_c w_c · s(train_c, validation_c) over checkpoints c, with normalised learning rates
w_c. s is the inner product or cosine of the projected gradients, by its mean or maximum over the validation samples
(Pruthi et al., 2020, "TracIn"; Xia et al., 2024, "LESS", section 4).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gradwire.errors import BadInput
from gradwire.files import whole, write_json
from gradwire.flags import COUNT, POSITIVE, output_folder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gradwire.gradients.manifest import Manifest
    from gradwire.gradients.row_file import BoundRows, RowFile

CHUNK_BYTES = 1 << 26  # of rows in memory at once
SAME = ("model_digest", "lora", "dim", "projection", "seed", "fingerprints", "loss")  # of training and validation
SAME_STEP = ("adam_variant", "optimizer_digest")  # if both are of type adam


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument(
        "--train", type=Path, nargs="+", required=True, metavar="DIR", help="one merged store (dim<N>/) per checkpoint"
    )
    parser.add_argument(
        "--validation", type=Path, nargs="+", required=True, metavar="DIR", help="as many, in the same order"
    )
    parser.add_argument(
        "--weights", type=POSITIVE, nargs="+", metavar="W", help="learning rate of each checkpoint (default: equal)"
    )
    parser.add_argument("--metric", choices=("cosine", "dot"), default="cosine", help="similarity of two gradients")
    parser.add_argument("--over", choices=("mean", "max"), default="mean", help="reduction over validation samples")
    parser.add_argument("--top_k", type=COUNT, default=100, help="number of samples to select")
    parser.add_argument("--corpus", type=Path, help="corpus file; adds the selected samples' documents")
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder for scores.parquet, top.jsonl, influence.json"
    )


def beside(args: argparse.Namespace) -> Path:
    """Return the folder of the outputs."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Score every training sample and select the best.

    Raises:
        BadInput: If the stores are incompatible, or a selected sample's document is not in the corpus.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    weights = normalised_weights(args.weights, len(args.train), len(args.validation))
    pairs = [(open_store(one), open_store(other)) for one, other in zip(args.train, args.validation, strict=True)]
    for train, validation in pairs:
        check_alike(train, validation)
        if (train.rows.ids, train.manifest.data_digest) != (pairs[0][0].rows.ids, pairs[0][0].manifest.data_digest):
            raise BadInput(f"{train.path} and {pairs[0][0].path} hold different samples, or a different order.")
    ids = pairs[0][0].rows.ids
    scores = np.zeros(len(ids))
    for weight, (train, validation) in zip(weights, pairs, strict=True):
        scores += weight * scored(train.rows, validation.rows, args.metric, args.over)
    order = np.argsort(-scores, kind="stable")
    best = [(ids[at], float(scores[at])) for at in order[: args.top_k]]
    documents = documents_of([id_ for id_, _ in best], args.corpus) if args.corpus else {}
    with whole(args.output_dir / "scores.parquet") as part:
        pq.write_table(pa.table({"sample_id": ids, "score": scores}), part)
    with whole(args.output_dir / "top.jsonl") as part, part.open("w", encoding="utf-8") as stream:
        for rank, (id_, score) in enumerate(best, 1):
            line = {"rank": rank, "sample_id": id_, "score": score, **documents.get(id_, {})}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    write_json(
        args.output_dir / "influence.json",
        {
            "train": [str(path) for path in args.train],
            "validation": [str(path) for path in args.validation],
            "weights": weights,
            "metric": args.metric,
            "over": args.over,
            "samples": len(ids),
            "top_k": len(best),
        },
    )
    print(f"{len(best)} of {len(ids)} samples selected in {args.output_dir / 'top.jsonl'}; the best is {best[0][0]}")


class Store(NamedTuple):
    """A merged store."""

    path: Path
    rows: BoundRows
    manifest: Manifest


def normalised_weights(given: Sequence[float] | None, train: int, validation: int) -> list[float]:
    """Return the checkpoints' weights, scaled to sum to 1.

    Raises:
        BadInput: If the numbers of stores and weights differ.
    """
    weights = list(given) if given else [1.0] * train
    if not train == validation == len(weights):
        raise BadInput(
            f"--train names {train} stores, --validation {validation} and --weights {len(weights)}: "
            "give one of each per checkpoint, in the same order."
        )
    return [weight / sum(weights) for weight in weights]


def open_store(path: Path) -> Store:
    """Open a ``dim<N>/`` folder.

    Raises:
        BadInput: If it is not a merged store, or its files do not match its manifest.
    """
    from gradwire.gradients import manifest, store
    from gradwire.gradients.row_file import BoundRows

    names = store.all_names(path)
    if not (path / manifest.FILE).is_file() or not names.exist():
        raise BadInput(f"{path} is not a merged store: run `gradwire grads aggregate` and pass its dim<N> folder.")
    made = manifest.read(path)
    if wrong := manifest.differing(path, made):
        raise BadInput(f"{wrong[0]}; run `gradwire grads aggregate` again.")
    return Store(path, BoundRows(names, made.dim, made), made)


def check_alike(train: Store, validation: Store) -> None:
    """Check that the rows of two stores can be compared.

    Raises:
        BadInput: If their projections or models differ.
    """
    both_adam = train.manifest.grad_type == validation.manifest.grad_type == "adam"
    for field in (*SAME, *(SAME_STEP if both_adam else ())):
        if getattr(train.manifest, field) != getattr(validation.manifest, field):
            raise BadInput(f"{train.path} and {validation.path} differ in {field}: their gradients cannot be compared.")


def scored(train: RowFile, validation: RowFile, metric: str, over: str) -> NDArray[np.float64]:
    """Score each training row: float64 [n]; zero rows score 0."""
    import numpy as np

    def chunks(rows: RowFile) -> Iterator[NDArray[np.float64]]:
        for chunk in rows.chunks(max(1, CHUNK_BYTES // (4 * rows.shape[1]))):
            wide = chunk.astype(np.float64)
            norms = np.linalg.norm(wide, axis=1, keepdims=True)
            yield wide / np.where(norms == 0, 1, norms) if metric == "cosine" else wide

    if over == "mean":  # the mean of inner products is the inner product with the mean
        mean = sum(chunk.sum(0) for chunk in chunks(validation)) / validation.shape[0]
        return np.concatenate([chunk @ mean for chunk in chunks(train)])
    against = np.concatenate(list(chunks(validation)))
    return np.concatenate([(chunk @ against.T).max(1) for chunk in chunks(train)])


def documents_of(ids: Sequence[str], corpus: Path) -> dict[str, dict[str, str]]:
    """Return title and text of the samples' documents, by sample id, in one streaming read of the corpus.

    Raises:
        BadInput: If a document is missing.
    """
    from gradwire.data import corpus as corpora
    from gradwire.gradients.metadata import document

    wanted = {id_: id_ for id_ in ids} | {document(id_): document(id_) for id_ in ids}
    found = {one.id: {"title": one.title, "text": one.body} for one in corpora.documents(corpus) if one.id in wanted}
    missing = [id_ for id_ in ids if id_ not in found and document(id_) not in found]
    if missing:
        raise BadInput(f"{corpus} has no document of sample {missing[0]!r} ({len(missing)} such samples).")
    return {id_: found.get(id_) or found[document(id_)] for id_ in ids}
