"""The verb ``train``: one run of the experiment, from shards to ``record.json``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from gradwire.base.flags import NATURAL, RANKS, SEED, output_folder
from gradwire.base.model_flags import add_flags
from gradwire.base.rank_env import add_rank_env_arguments, rank_options, ranks_here
from gradwire.bench.config import Training
from gradwire.comm.communication import CommOptimizer
from gradwire.comm.compressors.parameter_encoding import ParamCompress
from gradwire.comm.topology import STRATEGIES
from gradwire.lm.data.defaults import LENGTH, MAX_LENGTH, VOCAB_SIZE, VOCABULARY
from gradwire.lm.models import presets

PRELOAD = (
    "gradwire.bench.training.loop",
    "gradwire.bench.training.results",
    "numba",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
)
"""Modules that each rank imports and that are slow to import."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags; the fields of ``config.Training`` define theirs."""
    parser.add_argument(
        "--data_path", type=Path, required=True, help="a shards folder, or a corpus file (JSON or .jsonl)"
    )
    parser.add_argument("--output_dir", type=output_folder, required=True, help="the run's folder")
    parser.add_argument("--model", default="tiny", help=f"{presets.MEANING}; or options as JSON: architecture, ...")
    parser.add_argument("--strategy", choices=STRATEGIES.available(), default="fsdp2", help="data-parallel strategy")
    parser.add_argument(
        "--islands",
        type=RANKS,
        default=1,
        metavar="N",
        help="islands of ranks, for strategy hsdp or a link between them",
    )
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
        help="what is averaged: gradients, or an optimizer's momenta (default: the cell's, else gradient)",
    )
    parser.add_argument(
        "--param_compress",
        choices=get_args(ParamCompress),
        help="compression of fsdp2's parameter all-gathers (default: the cell's, else none)",
    )
    parser.add_argument("--label", help="the cell's name in tables (default: the compressor's name)")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the model, the data order and the compressor")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest valid checkpoint in --output_dir, if any"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="with --resume: start over if the checkpoint has another configuration or source",
    )
    parser.add_argument(
        "--verify_sync",
        type=NATURAL,
        default=0,
        metavar="K",
        help="every K steps, report ranks that are missing or whose parameters differ; 0: never",
    )
    corpus = parser.add_argument_group("corpus", "how to tokenize a corpus file; shards are already tokenized")
    corpus.add_argument("--tokenizer", default="bpe", metavar="{bpe,DIR}", help="train one, or load a folder's")
    corpus.add_argument("--vocab_size", type=VOCABULARY, default=VOCAB_SIZE, help="vocabulary size of bpe")
    corpus.add_argument(
        "--max_length", type=LENGTH, help=f"maximum tokens per sample (default: the shards', else {MAX_LENGTH})"
    )
    corpus.add_argument("--cache_dir", type=Path, help="folder for the shards (default: the user's cache)")
    add_flags(parser, Training)
    add_rank_env_arguments(parser)


def beside(args: argparse.Namespace) -> Path:
    """The run's folder."""
    return Path(args.output_dir)


def preflight(args: argparse.Namespace) -> None:
    """Check the arguments, the devices, the data and the run folder before any rank starts.

    A corpus file is tokenized here, so that the ranks find its shards.

    Raises:
        BadInput: If any of them is invalid.
    """
    from gradwire.bench.training import privacy
    from gradwire.bench.training import settings as run_settings
    from gradwire.comm.collectives import world
    from gradwire.lm.data import shards
    from gradwire.lm.models import causal

    world_size = args.world_size or 1
    settings = run_settings.from_arguments(args).shared_out(world_size, None)
    training = settings.training
    world.choose(training.backend, training.device, ranks_here(world_size), world.detect_gpus())
    folder = shards_folder(args, rank=0)
    shards.check(folder)
    split = shards.Shards(folder, "train")
    causal.check(settings.model, split.meta["vocab_size"], split.meta["max_length"])
    run_settings.check_enough_data(len(split), training.batch_size, world_size)
    if training.private:
        privacy.guarantee(training, settings.cell, len(split), world_size)
    run_settings.check_run_folder(settings.output_dir, settings.identity(world_size, split.digest))


def shards_folder(args: argparse.Namespace, rank: int) -> Path:
    """The shards of ``--data_path``; rank 0 tokenizes a corpus file."""
    from gradwire.lm.data.tokenization import shards_of

    return shards_of(
        Path(args.data_path),
        tokenizer=args.tokenizer,
        max_length=args.max_length,
        vocab_size=args.vocab_size,
        cache_dir=args.cache_dir,
        rank=rank,
    )


def main(args: argparse.Namespace) -> None:
    """Train one run and write ``record.json``, ``steps.parquet``, ``final_model/`` and the other files of the run."""
    if "RANK" not in os.environ:
        preflight(args)

    from gradwire.bench.training import results
    from gradwire.bench.training import settings as run_settings
    from gradwire.bench.training.loop import train
    from gradwire.bench.training.measure import link_name
    from gradwire.bench.training.step import preemption
    from gradwire.comm.collectives.world import process_group
    from gradwire.lm.data.shards import Shards

    settings = run_settings.from_arguments(args)
    with process_group(**rank_options(args)) as world:
        settings = settings.shared_out(world.world_size, link_name())
        folder = shards_folder(args, world.rank)
        splits = Shards(folder, "train"), Shards(folder, "val")
        run_settings.check_enough_data(len(splits[0]), settings.training.batch_size, world.world_size)
        identity = settings.identity(world.world_size, splits[0].digest)
        with preemption() as asked:  # a signal after the last step does not interrupt writing
            model, optimizer, outcome = train(settings, splits, world, identity, asked)
            record = results.write(settings, identity, splits, world, model, optimizer, outcome)
    if record is not None:
        print(results.summary(record))
