"""The verb ``perplexity``: token-weighted perplexity of a saved model over a split."""

from __future__ import annotations

import argparse
import math
from itertools import chain
from pathlib import Path

from gradwire.base.flags import COUNT, output_file
from gradwire.base.rank_env import DEVICES
from gradwire.lm.data.defaults import LENGTH


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="a saved model, such as a run's final_model/")
    parser.add_argument(
        "--data_path", type=Path, required=True, help="a shards folder, or a corpus file (JSON or .jsonl)"
    )
    parser.add_argument("--split", choices=("val", "train", "all"), default="val", help="all: both splits")
    parser.add_argument("--batch_size", type=COUNT, default=32, help="samples per forward pass")
    parser.add_argument(
        "--output", type=output_file, help="file to write (default: perplexity.json beside --model_dir)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: cuda if there is a GPU, else cpu")
    parser.add_argument("--max_length", type=LENGTH, help="tokens per sample of a corpus file (default: the model's)")
    parser.add_argument("--cache_dir", type=Path, help="folder for a corpus file's shards (default: the user's cache)")


def output(args: argparse.Namespace) -> Path:
    """The file to write."""
    return args.output or args.model_dir.parent / "perplexity.json"


def beside(args: argparse.Namespace) -> Path:
    """The folder of the file to write."""
    return output(args).parent


def main(args: argparse.Namespace) -> None:
    """Print ``avg_loss`` (nats per target) and ``ppl``, and write them as JSON: null if the model's run diverged.

    Raises:
        BadInput: If the model or the data cannot be read, or the perplexity of another model is not finite.
    """
    from gradwire.base.errors import BadInput
    from gradwire.base.failures import diverged
    from gradwire.base.files import write_json
    from gradwire.bench.training.evaluate import evaluate
    from gradwire.comm.collectives.world import process_group
    from gradwire.lm.data.batches import eval_batches
    from gradwire.lm.data.shards import Shards, check, splits
    from gradwire.lm.models import folder
    from gradwire.lm.models.shards import shards_folder

    shards = shards_folder(args)
    check(shards)
    chosen = splits(shards) if args.split == "all" else (args.split,)
    opened = [Shards(shards, split) for split in chosen]
    batches = [eval_batches(split, min(args.batch_size, len(split)), 0, 1) for split in opened]
    with process_group(device=args.device) as world:
        model = folder.load(args.model_dir).to(world.device)
        quality = evaluate(model, chain(*batches), world.device)
    finite = math.isfinite(quality.ppl)
    if not finite and not diverged(args.model_dir.parent):
        wrong = folder.not_finite(model)
        raise BadInput(
            f"the loss of the model in {args.model_dir} is {quality.loss:g}, so it has no perplexity: "
            + (f"{wrong} is not finite" if wrong else "its weights are finite, and its logits overflow float32")
            + f". Training diverged, or the file is damaged; {output(args)} is not written."
        )
    print(f"avg_loss {quality.loss:.6f}  ppl {quality.ppl:.4f}  over {quality.n_targets} targets of {args.split}")
    if not finite:
        print(f"{output(args)}: the run diverged; its perplexity is null")  # JSON has no infinity
    write_json(
        output(args),
        {
            "avg_loss": quality.loss if finite else None,
            "ppl": quality.ppl if finite else None,
            "n_targets": quality.n_targets,
            "split": args.split,
        },
    )
