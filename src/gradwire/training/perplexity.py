"""The verb ``perplexity``: token-weighted perplexity of a saved model over a split."""

from __future__ import annotations

import argparse
import math
from itertools import chain
from pathlib import Path

from gradwire.errors import BadInput
from gradwire.seat import DEVICES


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", required=True, help="a saved model, such as a run's final_model/")
    parser.add_argument("--data_path", required=True, help="a shards folder, or a corpus file (JSON array or .jsonl)")
    parser.add_argument("--split", choices=("val", "train", "all"), default="val", help="all: both splits")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per forward pass")
    parser.add_argument("--output", help="where to write (default: perplexity.json beside --model_dir)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda where there is a GPU, else cpu")
    parser.add_argument("--max_length", type=int, help="tokens per sample of a corpus file (default: the model's)")
    parser.add_argument("--cache_dir", type=Path, help="where a corpus file's shards go (default: the user's cache)")


def output(args: argparse.Namespace) -> Path:
    """The file to write."""
    return Path(args.output) if args.output else Path(args.model_dir).parent / "perplexity.json"


def beside(args: argparse.Namespace) -> Path:
    """The folder of the file to write."""
    return output(args).parent


def main(args: argparse.Namespace) -> None:
    """Print ``avg_loss`` (nats per target) and ``ppl``, and write them as JSON.

    Raises:
        BadInput: If the model or the data cannot be read.
    """
    from gradwire.collectives.world import process_group
    from gradwire.data.batches import eval_batches
    from gradwire.data.shards import Shards, check, splits
    from gradwire.files import write_json
    from gradwire.models import folder
    from gradwire.models.shards import shards_folder
    from gradwire.training.evaluate import evaluate

    if args.batch_size < 1:
        raise BadInput(f"--batch_size is {args.batch_size}; it must be at least 1.")
    model_dir = Path(args.model_dir)
    shards = shards_folder(args)
    check(shards)
    chosen = splits(shards) if args.split == "all" else (args.split,)
    batches = [eval_batches(Shards(shards, split), args.batch_size, 0, 1) for split in chosen]
    with process_group(device=args.device) as world:
        model = folder.load(model_dir).to(world.device)
        quality = evaluate(model, chain(*batches), world.device)
    print(f"avg_loss {quality.loss:.6f}  ppl {quality.ppl:.4f}  over {quality.n_targets} targets of {args.split}")
    finite = math.isfinite(quality.ppl)  # a diverged model's perplexity is null, which JSON can carry
    write_json(
        output(args),
        {
            "avg_loss": quality.loss if finite else None,
            "ppl": quality.ppl if finite else None,
            "n_targets": quality.n_targets,
            "split": args.split,
        },
    )
