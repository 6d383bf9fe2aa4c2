"""The verb ``grads factors``: the curvature that ``grads collect --grad_type ekfac`` takes gradients under."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from gradwire.attribution.options import SampleLoss
from gradwire.attribution.query import curvature
from gradwire.base.flags import COUNT, NOT_NEGATIVE, output_folder
from gradwire.base.rank_env import DEVICES
from gradwire.lm.data.defaults import LENGTH, Split
from gradwire.lm.models.shards import samples_of

if TYPE_CHECKING:
    from gradwire.lm.data.batches import Batch

BATCH_SIZE = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="a saved model, such as a run's final_model/")
    parser.add_argument(
        "--data_path", type=Path, required=True, help="the training samples: a folder, or a corpus file"
    )
    parser.add_argument("--output_dir", type=output_folder, required=True, help="folder for the factors")
    parser.add_argument("--split", choices=get_args(Split), help="split of a shards folder (default: train)")
    parser.add_argument("--max_samples", type=COUNT, help="use only the first N samples (default: all)")
    parser.add_argument("--loss", choices=get_args(SampleLoss), default="mean", help="as for grads collect")
    parser.add_argument(
        "--damping",
        type=NOT_NEGATIVE,
        default=curvature.DAMPING,
        metavar="L",
        help="added to a parameter's curvature, in units of its mean",
    )
    parser.add_argument("--batch_size", type=COUNT, default=BATCH_SIZE, help="samples per forward pass")
    parser.add_argument("--max_length", type=LENGTH, help="tokens per sample of a corpus file (default: the model's)")
    parser.add_argument("--cache_dir", type=Path, help="folder for a corpus file's shards (default: the user cache)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")


def beside(args: argparse.Namespace) -> Path:
    """Return the folder of the factors."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Compute and write the factors.

    Raises:
        BadInput: If the model or the data are invalid, or do not match.
    """
    import torch

    from gradwire.attribution.collect import ekfac, rows
    from gradwire.attribution.store import provenance
    from gradwire.comm.collectives import world
    from gradwire.lm.data.batches import collate
    from gradwire.lm.data.shards import check
    from gradwire.lm.models import folder, saved

    provenance.check_dense(args.model_dir)
    shards = samples_of(args)
    check(shards.folder.parent)
    count = len(shards) if args.max_samples is None else min(args.max_samples, len(shards))
    device = torch.device(world.choose("auto", args.device, 1, world.detect_gpus()).device_type)
    model = folder.load_finite(args.model_dir).to(device)
    method = rows.resolved("auto", model)

    def batches() -> Iterator[Batch]:
        for start in range(0, count, args.batch_size):
            part = [shards[at] for at in range(start, min(start + args.batch_size, count))]
            yield collate(part, shards.meta["pad_id"], len(part)).to(device)

    found = ekfac.factored(
        model, batches, lambda batch: rows.METHODS[method](model, batch, args.loss), args.loss, device
    )
    made_of = {
        "model_digest": saved.digest(args.model_dir),
        "data_digest": shards.digest,
        "samples": count,
        "loss": args.loss,
    }
    ekfac.save(found, args.damping, args.output_dir, made_of)
    print(f"factors of {shards.describe(count)} in {args.output_dir / ekfac.FILE}")
