"""The verb ``train``: one cell of the experiment, from shards to ``record.json``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from gradwire.config import CommOptimizer, ParamCompress, Strategy, Training, add_flags
from gradwire.defaults import MAX_LENGTH, VOCAB_SIZE
from gradwire.flags import LENGTH, NATURAL, SEED, VOCABULARY, output_folder
from gradwire.seat import add_seat_arguments, rank_options, ranks_here

PRELOAD = (
    "gradwire.training.loop",
    "gradwire.training.results",
    "numba",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
)
"""What each rank imports and takes long."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags; those of ``config.Training`` come from its fields."""
    parser.add_argument(
        "--data_path", type=Path, required=True, help="a shards folder, or a corpus file (JSON or .jsonl)"
    )
    parser.add_argument("--output_dir", type=output_folder, required=True, help="the run's folder")
    parser.add_argument("--model", default="tiny", help="a preset (tiny, 62m) or a saved model's folder")
    parser.add_argument("--strategy", choices=get_args(Strategy), default="fsdp2", help="data-parallel strategy")
    parser.add_argument("--comm_compress", metavar="NAME", help="gradient compressor (default: the cell's, else none)")
    parser.add_argument(
        "--comm_config_json",
        metavar="JSON",
        default="{}",
        help="the compressor's and the reducer's options, a JSON object",
    )
    parser.add_argument(
        "--comm_optimizer",
        choices=get_args(CommOptimizer),
        help="what travels: gradients, or an optimizer's momenta (default: the cell's, else gradient)",
    )
    parser.add_argument(
        "--param_compress",
        choices=get_args(ParamCompress),
        help="how fsdp2 sends parameters to the ranks that compute with them (default: the cell's, else none)",
    )
    parser.add_argument("--label", help="the cell's name in tables (default: the compressor's)")
    parser.add_argument("--seed", type=SEED, default=0, help="of the model, the data order and the compressor")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint of --output_dir, if there is one"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --resume: if that is another configuration's or was written by other source, start over",
    )
    parser.add_argument(
        "--verify_sync",
        type=NATURAL,
        default=0,
        metavar="K",
        help="every K steps, name a rank that is missing or whose parameters differ; 0: never",
    )
    corpus = parser.add_argument_group("corpus", "how a corpus file is tokenized; shards have been already")
    corpus.add_argument("--tokenizer", default="bpe", metavar="{bpe,DIR}", help="train one, or take a folder's")
    corpus.add_argument("--vocab_size", type=VOCABULARY, default=VOCAB_SIZE, help="tokens that bpe is to have")
    corpus.add_argument(
        "--max_length", type=LENGTH, help=f"tokens per sample at most (default: the shards', else {MAX_LENGTH})"
    )
    corpus.add_argument("--cache_dir", type=Path, help="where the shards go (default: the user's cache)")
    add_flags(parser, Training)
    add_seat_arguments(parser)


def beside(args: argparse.Namespace) -> Path:
    """The run's folder."""
    return Path(args.output_dir)


def preflight(args: argparse.Namespace) -> None:
    """Check the arguments, the devices, the data and the run folder before any rank starts.

    A corpus file is tokenized here, so that the ranks find its shards.

    Raises:
        BadInput: With what is wrong, where, and what to do.
    """
    from gradwire.collectives import world
    from gradwire.data import shards
    from gradwire.training import privacy
    from gradwire.training import settings as run_settings

    world_size = args.world_size or 1
    settings = run_settings.from_arguments(args).shared_out(world_size)
    training = settings.training
    world.choose(training.backend, training.device, ranks_here(world_size), world.detect_gpus())
    folder = shards_folder(args, rank=0)
    shards.check(folder)
    split = shards.Shards(folder, "train")
    run_settings.check_enough_data(len(split), training.batch_size, world_size)
    if training.private:
        privacy.guarantee(training, settings.cell, len(split), world_size)
    run_settings.check_run_folder(settings.output_dir, settings.identity(world_size, split.digest))


def shards_folder(args: argparse.Namespace, rank: int) -> Path:
    """The shards of ``--data_path``; rank 0 makes those of a corpus file."""
    from gradwire.data.cache import shards_of

    return shards_of(
        Path(args.data_path),
        tokenizer=args.tokenizer,
        max_length=args.max_length,
        vocab_size=args.vocab_size,
        cache_dir=args.cache_dir,
        rank=rank,
    )


def main(args: argparse.Namespace) -> None:
    """Train, and write ``record.json``, ``steps.parquet``, ``final_model/`` and what belongs to them."""
    if "RANK" not in os.environ:
        preflight(args)

    from gradwire.collectives.world import process_group
    from gradwire.data.shards import Shards
    from gradwire.training import results
    from gradwire.training import settings as run_settings
    from gradwire.training.loop import train
    from gradwire.training.preemption import preemption

    settings = run_settings.from_arguments(args)
    with process_group(**rank_options(args)) as world:
        settings = settings.shared_out(world.world_size)
        folder = shards_folder(args, world.rank)
        splits = Shards(folder, "train"), Shards(folder, "val")
        run_settings.check_enough_data(len(splits[0]), settings.training.batch_size, world.world_size)
        identity = settings.identity(world.world_size, splits[0].digest)
        with preemption() as asked:  # a signal after the last step does not break off the writing
            model, optimizer, outcome = train(settings, splits, world, identity, asked)
            record = results.write(settings, identity, splits, world, model, optimizer, outcome)
    if record is not None:
        print(results.told(record))
