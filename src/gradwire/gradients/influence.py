"""The verb ``grads influence``: rank training samples by gradient similarity to validation samples.

The score of a training sample is Σ_c w_c · s(train_c, validation_c) over checkpoints c, with normalised learning rates
w_c. s is the inner product or cosine of the projected gradients, by its mean or maximum over the validation samples,
with ``--curvature`` under the inverse second moment of the checkpoint's training rows
(Pruthi et al., 2020, "TracIn"; Xia et al., 2024, "LESS", section 4).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import BadInput
from gradwire.files import whole, write_json
from gradwire.flags import COUNT, POSITIVE, output_folder
from gradwire.gradients import curvature

if TYPE_CHECKING:
    from gradwire.gradients.search import Store

SAME = ("model_digest", "lora", "dim", "projection", "seed", "fingerprints", "loss")  # of training and validation
SAME_STEP = ("adam_variant", "optimizer_digest")  # if both are of type adam, or both of ekfac


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
    curvature.arguments(parser)
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

    from gradwire.gradients.row_file import RowFile
    from gradwire.gradients.search import open_store, order_of, scored, target
    from gradwire.gradients.texts import documents_of

    damping = curvature.damping_of(args)
    weights = normalised_weights(args.weights, len(args.train), len(args.validation))
    pairs = [(open_store(one), open_store(other)) for one, other in zip(args.train, args.validation, strict=True)]
    for train, validation in pairs:
        check_alike(train, validation)
        if (train.rows.ids, train.manifest.data_digest) != (pairs[0][0].rows.ids, pairs[0][0].manifest.data_digest):
            raise BadInput(f"{train.path} and {pairs[0][0].path} hold different samples, or a different order.")
    ids = pairs[0][0].rows.ids
    scores = np.zeros(len(ids))
    for weight, (train, validation) in zip(weights, pairs, strict=True):
        solve = curvature.solver(RowFile(train.rows.names.rows), damping)
        against = target(validation.rows, args.metric, args.over, solve)
        scores += weight * scored(train.rows, against, args.metric, solve)
    best = [(ids[at], float(scores[at])) for at in order_of(scores)[: args.top_k]]
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
            "curvature": args.curvature,
            "damping": damping,
            "samples": len(ids),
            "top_k": len(best),
        },
    )
    print(f"{len(best)} of {len(ids)} samples selected in {args.output_dir / 'top.jsonl'}; the best is {best[0][0]}")


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


def check_alike(train: Store, validation: Store) -> None:
    """Check that the rows of two stores can be compared.

    Raises:
        BadInput: If their projections or models differ.
    """
    kind = train.manifest.grad_type
    stepped = kind == validation.manifest.grad_type and kind in ("adam", "ekfac")
    for field in (*SAME, *(SAME_STEP if stepped else ())):
        if getattr(train.manifest, field) != getattr(validation.manifest, field):
            raise BadInput(f"{train.path} and {validation.path} differ in {field}: their gradients cannot be compared.")
