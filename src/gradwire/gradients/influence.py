"""The verb ``grads influence``: which training samples point where the validation samples do, over checkpoints.

Score of a training sample: Σ_c w_c · s(train_c, validation_c), c the checkpoints, w their learning rates over the sum
of them, s the inner product or cosine of the projected gradients, and its mean or maximum over the validation samples
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
    from gradwire.gradients.row_file import BoundRows

CHUNK_BYTES = 1 << 26  # of training rows in memory at once
SAME = ("model_digest", "lora", "dim", "projection", "seed", "fingerprints", "loss")  # of training and validation
SAME_STEP = ("adam_variant", "optimizer_digest")  # where both are Adam's


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument(
        "--train", type=Path, nargs="+", required=True, metavar="DIR", help="a merged store (dim<N>/) per checkpoint"
    )
    parser.add_argument(
        "--validation", type=Path, nargs="+", required=True, metavar="DIR", help="as many, of the same checkpoints"
    )
    parser.add_argument(
        "--weights", type=POSITIVE, nargs="+", metavar="W", help="the checkpoints' learning rates (default: all equal)"
    )
    parser.add_argument("--metric", choices=("cosine", "dot"), default="cosine", help="of two gradients")
    parser.add_argument("--over", choices=("mean", "max"), default="mean", help="of a sample's scores, over validation")
    parser.add_argument("--top_k", type=COUNT, default=100, help="samples to select")
    parser.add_argument("--corpus", type=Path, help="the corpus file to take the selected samples' documents from")
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="gets scores.parquet, top.jsonl, influence.json"
    )


def beside(args: argparse.Namespace) -> Path:
    """The folder of the outputs."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Score every training sample, and select the best.

    Raises:
        BadInput: If the stores do not belong together, or a selected sample's document is not in the corpus.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    weights = normalised_weights(args.weights, len(args.train), len(args.validation))
    pairs = [(open_store(one), open_store(other)) for one, other in zip(args.train, args.validation, strict=True)]
    for train, validation in pairs:
        check_alike(train, validation)
        if (train.rows.ids, train.manifest.data_digest) != (pairs[0][0].rows.ids, pairs[0][0].manifest.data_digest):
            raise BadInput(f"{train.path} and {pairs[0][0].path} hold other samples, or in another order.")
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
    print(f"{len(best)} of {len(ids)} samples in {args.output_dir / 'top.jsonl'}; the best: {best[0][0]}")


class Store(NamedTuple):
    """A merged store."""

    path: Path
    rows: BoundRows
    manifest: Manifest


def normalised_weights(given: Sequence[float] | None, train: int, validation: int) -> list[float]:
    """The checkpoints' weights, of sum 1.

    Raises:
        BadInput: If there are not as many of each.
    """
    weights = list(given) if given else [1.0] * train
    if not train == validation == len(weights):
        raise BadInput(
            f"--train names {train} stores, --validation {validation} and --weights {len(weights)}: "
            "give one of each for every checkpoint, in one order."
        )
    return [weight / sum(weights) for weight in weights]


def open_store(path: Path) -> Store:
    """Open a ``dim<N>/`` folder.

    Raises:
        BadInput: If it is no merged store, or its files are not those of its manifest.
    """
    from gradwire.gradients import manifest, store
    from gradwire.gradients.row_file import BoundRows

    names = store.all_names(path)
    if not (path / manifest.FILE).is_file() or not names.exist():
        raise BadInput(f"{path} is no merged store: run `gradwire grads aggregate`, and name its dim<N> folder.")
    made = manifest.read(path)
    if wrong := manifest.differing(path, made):
        raise BadInput(f"{wrong[0]}; run `gradwire grads aggregate` again.")
    return Store(path, BoundRows(names, made.dim, made), made)


def check_alike(train: Store, validation: Store) -> None:
    """See that inner products of two stores mean something.

    Raises:
        BadInput: If they were projected otherwise, or come from another model.
    """
    both_adam = train.manifest.grad_type == validation.manifest.grad_type == "adam"
    for field in (*SAME, *(SAME_STEP if both_adam else ())):
        if getattr(train.manifest, field) != getattr(validation.manifest, field):
            raise BadInput(f"{train.path} and {validation.path} differ in {field}: their gradients cannot be compared.")


def scored(train: BoundRows, validation: BoundRows, metric: str, over: str) -> NDArray[np.float64]:
    """Each training row's score: float64 [n]. Zero rows score 0."""
    import numpy as np

    def chunks(rows: BoundRows) -> Iterator[NDArray[np.float64]]:
        for chunk in rows.chunks(max(1, CHUNK_BYTES // (4 * rows.shape[1]))):
            wide = chunk.astype(np.float64)
            norms = np.linalg.norm(wide, axis=1, keepdims=True)
            yield wide / np.where(norms == 0, 1, norms) if metric == "cosine" else wide

    if over == "mean":  # of inner products: the inner product with the mean
        mean = sum(chunk.sum(0) for chunk in chunks(validation)) / validation.shape[0]
        return np.concatenate([chunk @ mean for chunk in chunks(train)])
    against = np.concatenate(list(chunks(validation)))
    return np.concatenate([(chunk @ against.T).max(1) for chunk in chunks(train)])


def documents_of(ids: Sequence[str], corpus: Path) -> dict[str, dict[str, str]]:
    """Title and text of the documents that samples were cut from, by sample id; the corpus is read once, streaming.

    Raises:
        BadInput: If one is not there.
    """
    from gradwire.data import corpus as corpora
    from gradwire.gradients.metadata import document

    wanted = {id_: id_ for id_ in ids} | {document(id_): document(id_) for id_ in ids}
    found = {one.id: {"title": one.title, "text": one.body} for one in corpora.documents(corpus) if one.id in wanted}
    missing = [id_ for id_ in ids if id_ not in found and document(id_) not in found]
    if missing:
        raise BadInput(f"{corpus} has no document of sample {missing[0]!r} ({len(missing)} such samples).")
    return {id_: found.get(id_) or found[document(id_)] for id_ in ids}
