"""Files of a run: ``models/`` of some steps; ``steps.parquet``, ``environment/``, ``final_model/`` and
``record.json``.

The record is written last, so its presence means that all other files are complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from gradwire.base.files import write_json
from gradwire.bench import steps
from gradwire.bench.config import SCHEMA_VERSION, Run
from gradwire.bench.training import totals
from gradwire.bench.training.build import Outcome, Parts
from gradwire.bench.training.environment import environment, same_machine
from gradwire.bench.training.measure import Row, link_name
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.comm.parallel import optimizers
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

MODELS = "models"  # folder of the models of some steps


def write(
    settings: Settings,
    identity: str,
    splits: tuple[Shards, Shards],
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outcome: Outcome,
) -> Row | None:
    """Gather the ranks' measurements and write the run's files; a collective operation.

    Returns:
        The record on rank 0, which writes the shared files; None on other ranks.
    """
    folder = settings.output_dir
    here = environment(world)
    write_json(folder / "environment" / f"rank{world.rank}.json", here)
    (folder / "profiler").mkdir(parents=True, exist_ok=True)
    rows = untimed(outcome.rows) if world.simulated else outcome.rows
    mine = {"rows": rows, "environment": here, "memory": memory(model, optimizer, outcome, world)}
    ranks = ops.gather_objects(mine)
    run = run_of(settings, world)
    save_model(folder / "final_model", splits[0], model, optimizer, outcome, {"run": run.path, "identity": identity})
    if world.rank != 0:
        return None
    steps.write(folder / "steps.parquet", [row for rank in ranks for row in rank["rows"]])
    record = {
        "schema_version": SCHEMA_VERSION,
        "run_name": run.path,
        "identity": identity,
        **described(settings, run, splits, world, model, outcome),
        "environment": here | {"same_machine": same_machine([rank["environment"] for rank in ranks])},
        **measured(settings, run, world, outcome, ranks),
    }
    write_json(folder / "record.json", record)
    return record


def untimed(rows: Sequence[Row]) -> list[Row]:
    """Rows without times, of a rank that shares its process."""
    return [{name: None if name.endswith(("_ms", "_s")) else value for name, value in row.items()} for row in rows]


def memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome, world: World
) -> dict[str, float | None]:
    """The record's fields of memory, of this rank alone; a process that ranks share has no peak of one."""
    allocated, reserved = (None, None) if world.simulated else outcome.memory.gb()
    parts = {
        "mem_residual_gb": outcome.residual_bytes,
        "mem_replica_gb": parallel.replica_bytes(model),
        "mem_outer_gb": optimizer.outer_bytes if isinstance(optimizer, optimizers.Communicating) else None,
    }
    peaks = {"mem_peak_alloc_gb": allocated, "mem_peak_reserved_gb": reserved}
    return peaks | {name: None if size is None else size / 1e9 for name, size in parts.items()}


def run_of(settings: Settings, world: World) -> Run:
    """The run's place in an experiment."""
    return Run(settings.strategy, settings.cell.label, world.world_size, link_name(), settings.seed, settings.islands)


def save_model(
    folder: Path, split: Shards, model: nn.Module, optimizer: torch.optim.Optimizer, outcome: Outcome, origin: Row
) -> None:
    """Write a model folder with Adam's moments, on rank 0; a collective operation.

    Args:
        folder: The folder to write.
        split: A split of the data; the tokenizer is next to its shards.
        model: The wrapped model.
        optimizer: Its optimizer.
        outcome: Has the model's configuration.
        origin: Entries of ``gradwire.json``.
    """
    state, moments = parallel.full_state_dict(model), parallel.full_optimizer_state(model, optimizer)
    if state:  # that of rank 0
        tokenizer = split.folder.parent.parent / "tokenizer"
        causal.save(state, outcome.config, tokenizer, folder, origin, moments, outcome.adapter)


def kept_model(settings: Settings, identity: str, split: Shards, world: World, parts: Parts, outcome: Outcome) -> None:
    """Write the model after the last step of ``outcome`` into ``models/step-<N>``; a collective operation.

    Its ``gradwire.json`` has the step and the mean learning rate of the steps since the model before: the weight of
    this checkpoint in TracIn and LESS.
    """
    step, every = outcome.step, settings.training.keep_model_every
    rates = [row["lr"] for row in outcome.rows[-every:]]
    origin = {"run": run_of(settings, world).path, "identity": identity, "step": step, "learning_rate": fmean(rates)}
    folder = settings.output_dir / MODELS / f"step-{step:06d}"
    save_model(folder, split, parts.model, parts.optimizer, outcome, origin)


def described(
    settings: Settings, run: Run, splits: tuple[Shards, Shards], world: World, model: nn.Module, outcome: Outcome
) -> Row:
    """The record's fields on the run's settings, data and status."""
    training, split = splits[0].meta, splits[1].meta
    return {
        "compressor": run.compressor,
        "strategy": run.strategy,
        "backend": world.backend,
        "world": "simulated" if world.simulated else "processes",
        "link": run.link,
        "device": world.device.type,
        "status": "diverged" if outcome.diverged else "ok",
        "reason": outcome.diverged,
        "world_size": run.world_size,
        "islands": run.islands,
        "model": settings.model,
        "architecture": outcome.config.model_type,
        "parameters": outcome.numel,
        "dataset": training["dataset"],
        "max_length": training["max_length"],
        "precision": settings.training.precision,
        "gradient_dtype": gradient_dtype(model),
        "evaluation_precision": "fp32",
        "batch_size": settings.training.batch_size,
        "compress_method": settings.cell.method,
        "compress_config": settings.cell.flat(),
        "optimizer": settings.cell.communication.optimizer,
        "lr": settings.training.lr,
        "steps": settings.training.steps,
        "seed": run.seed,
        "unigram_ppl": split["unigram_ppl"],
        "moved_from": outcome.moved_from,
    }


def measured(settings: Settings, run: Run, world: World, outcome: Outcome, ranks: Sequence[Row]) -> Row:
    """The record's measurements; ``ranks`` has each rank's rows and memory."""
    rows = [row for rank in ranks for row in rank["rows"]]
    largest = {
        name: None if gb is None else max(rank["memory"][name] for rank in ranks)
        for name, gb in ranks[0]["memory"].items()
    }
    return {
        **totals.times(rows),
        **totals.traffic(settings, world, outcome, rows),
        **(parameters := totals.parameter_traffic(settings, outcome, rows)),
        **totals.link_classes(settings, outcome, rows, parameters),
        **totals.interface_traffic(run, rows),
        **totals.codec(settings, rows),
        **totals.compression_error(outcome),
        **totals.quality(outcome),
        **largest,
        "algorithm": outcome.algorithm,
        "nonfinite_steps": sum(row["nonfinite"] for row in outcome.rows),
        "clipped_steps": sum(row["clipped"] for row in outcome.rows),
        **totals.private(settings, outcome),
    }


def gradient_dtype(model: nn.Module) -> str:
    """The type of the gradients that are reduced, that of their parameters, such as ``float32``."""
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters() if parameter.requires_grad}
    return ", ".join(sorted(types))


def summary(record: Row) -> str:
    """Summarize a record in one line."""
    if record["status"] == "diverged":
        return f"{record['run_name']}: diverged ({record['reason']})"
    ratio = "nothing sent" if record["compression_ratio"] is None else f"ratio {record['compression_ratio']:.3f}"
    quality = "not evaluated" if record["val_ppl"] is None else f"val ppl {record['val_ppl']:.2f}"
    step = "no step timed" if record["step_time_ms_mean"] is None else f"{record['step_time_ms_mean']:.1f} ms/step"
    return f"{record['run_name']}: {quality}, {ratio}, {step}"
