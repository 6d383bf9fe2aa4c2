"""The command ``train``: one run of the experiment, from shards to ``record.json``."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.base.errors import BadInput
from gradwire.base.files import lock
from gradwire.base.parent_watch import GRACE
from gradwire.base.rank_env import rank_options, ranks_here
from gradwire.bench.training.settings import Options, check_run_folder, settings_of

if TYPE_CHECKING:
    from gradwire.bench.training.step import Preemption
    from gradwire.comm.collectives.world import World

PRELOAD = (
    "gradwire.bench.training.loop",
    "gradwire.bench.training.results",
    "gradwire.lm.data.tokenizer",
    "numba",
    "pandas",
    "pyarrow.parquet",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
)
"""Modules that each rank imports and that are slow to import."""


def output_dir(options: Options) -> Path:
    """The run's folder."""
    return options.output_dir


def preflight(options: Options) -> None:
    """Check the arguments, the devices, the data and the run folder before any rank starts.

    A corpus file is tokenized here, so that the ranks find its shards.

    Raises:
        BadInput: If any of them is invalid.
    """
    from gradwire.bench.training.objective import guarantee
    from gradwire.comm.collectives import world
    from gradwire.lm.data import batches, shards
    from gradwire.lm.models import causal

    check_one_process(options, options.world_size or 1)
    settings = settings_of(options)
    world_size = options.simulated_ranks or options.world_size or 1
    settings = settings.shared_out(world_size, None)
    training = settings.training
    processes = 1 if options.simulated_ranks else ranks_here(world_size)
    world.choose(training.backend, training.device, processes, world.detect_gpus())
    folder = shards_folder(options, rank=0)
    shards.check(folder)
    split = shards.Shards(folder, "train")
    settings = settings.over(len(split), world_size)
    training = settings.training
    causal.check(settings.model, split.meta["vocab_size"], split.meta["max_length"])
    batches.check_enough(split, training.batch_size, world_size)
    if training.private:
        guarantee(training, settings.cell, len(split), world_size)
    check_run_folder(settings.output_dir, settings.identity(world_size, split.digest))


def shards_folder(options: Options, rank: int) -> Path:
    """The shards of ``--data_path``; rank 0 tokenizes a corpus file."""
    from gradwire.lm.data.tokenize import shards_of

    return shards_of(
        options.data_path,
        tokenizer=options.tokenizer,
        max_length=options.max_length,
        vocab_size=options.vocab_size,
        chat_format=options.chat_format,
        skip_invalid=options.skip_invalid,
        cache_dir=options.cache_dir,
        rank=rank,
    )


def main(options: Options) -> None:
    """Train one run and write ``record.json``, ``steps.parquet``, ``final_model/`` and the other files of the run."""
    if "RANK" not in os.environ:
        preflight(options)

    from gradwire.bench.training.step import preemption
    from gradwire.comm.collectives.world import process_group, simulated_world

    group = rank_options(options)
    # No other run writes there. The ranks of a killed launcher have GRACE seconds to save a checkpoint and exit.
    alone = nullcontext() if group["here"].rank else lock(options.output_dir / ".lock", patience_s=GRACE)
    with alone, process_group(**group) as world, preemption() as asked:
        check_one_process(options, world.world_size)
        if options.simulated_ranks is None:
            take_part(options, world, asked)
        else:
            simulated_world(options.simulated_ranks, world.device, lambda rank: take_part(options, rank, asked))


def check_one_process(options: Options, processes: int) -> None:
    """Check that simulated ranks are not asked of several processes.

    Raises:
        BadInput: If they are.
    """
    if options.simulated_ranks is not None and processes > 1:
        raise BadInput(
            f"--simulated_ranks {options.simulated_ranks} take turns in one process, and there are {processes}: omit "
            f"it, or --world_size."
        )


def take_part(options: Options, world: World, asked: Preemption) -> None:
    """Do what one rank does."""
    from gradwire.bench.training import results
    from gradwire.bench.training.loop import train
    from gradwire.bench.training.measure import link_name
    from gradwire.lm.data.batches import check_enough
    from gradwire.lm.data.shards import Shards

    settings = settings_of(options).shared_out(world.world_size, link_name())
    folder = shards_folder(options, world.rank)
    splits = Shards(folder, "train"), Shards(folder, "val")
    check_enough(splits[0], settings.training.batch_size, world.world_size)  # torchrun's ranks have had no preflight
    settings = settings.over(len(splits[0]), world.world_size)
    identity = settings.identity(world.world_size, splits[0].digest)
    check_run_folder(settings.output_dir, identity)
    model, optimizer, outcome = train(settings, splits, world, identity, asked)
    record = results.write(settings, identity, splits, world, model, optimizer, outcome)
    if record is not None:
        print(results.summary(record))
