"""Small runs of ``gradwire train``: on ranks of the session's pool, or as a single process, the test's own."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gradwire import cli
from gradwire.bench.command import Command
from gradwire.bench.training import loop, results
from gradwire.bench.training import settings as run_settings
from gradwire.bench.training.step import Preemption
from gradwire.comm.collectives.world import World
from gradwire.lm.data.shards import Shards

SMALL = {
    "model": "micro",
    "batch_size": 2,
    "steps": 6,
    "warmup_steps": 1,
    "eval_every": 3,
    "profile": False,
    "device": "cpu",
}


def words(shards: Path, folder: Path, *more: str, **changes) -> list[str]:
    """The arguments of ``gradwire train`` for a small run."""
    flags = {"data_path": shards, "output_dir": folder, **SMALL, **changes}
    switch = [] if flags.pop("profile") else ["--no-profile"]
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + switch + list(more)


def parsed(arguments: list[str]) -> run_settings.Options:
    return Command(["train", *arguments]).options


def run(
    rank: int, world_size: int, group: object, arguments: list[str], asked: Preemption | None = None
) -> tuple[list[dict], dict | None]:
    """One rank of ``gradwire train``, inside the test's process group; rank 0 returns the record too."""
    args = parsed(arguments)
    settings = run_settings.settings_of(args)
    world = World(rank, rank, world_size, "gloo", torch.device("cpu"))
    splits = Shards(args.data_path, "train"), Shards(args.data_path, "val")
    identity = settings.identity(world_size, splits[0].digest)
    model, optimizer, outcome = loop.train(settings, splits, world, identity, asked or Preemption())
    results.write(settings, identity, splits, world, model, optimizer, outcome)
    path = settings.output_dir / "record.json"
    return outcome.rows, json.loads(path.read_text()) if rank == 0 else None


def train(folder: Path, data: Path, *more: str, **changes) -> int:
    """`gradwire train` as a single process, this one."""
    return cli.main(["train", *words(data, folder, *more, **{"checkpoint_every": 2, "eval_every": 0, **changes})])


def losses(rows: list[dict]) -> list[float]:
    return [row["loss"] for row in rows]


def weights(folder: Path) -> bytes:
    return (folder / "final_model/model.safetensors").read_bytes()
