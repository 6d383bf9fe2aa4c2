"""Stores of a small model, and copies of them that a test changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from world import World as Ranks

from gradwire import cli
from gradwire.attribution.collect import collect
from gradwire.attribution.store.samples import units
from gradwire.base.files import sha256_file
from gradwire.base.strict import checked
from gradwire.comm.collectives.world import World


def collected(model: Path, data: Path, run: Path, dim: int, *words: object) -> Path:
    """Collect and aggregate gradients; return the merged store."""
    flags = ["--model_dir", model, "--data_path", data, "--output_path", run, "--dim", dim, *words]
    assert cli.main(["grads", "collect", *map(str, flags)]) == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(dim)]) == 0
    return run / f"dim{dim}"


def collected_by(ranks: Ranks, run: Path, **options: Any) -> Path:
    """Collect gradients on ranks of the pool, which spares the start of processes; return the collection folder."""
    ranks.run(_share, {"output_path": run, "device": "cpu", **options})
    return run


def _share(rank: int, ranks: int, group: object, given: dict[str, Any]) -> None:
    options = checked(collect.Options, given, "grads collect")
    intended = collect.intention(options, units(options.samples(rank), options.rows), ranks)
    collect.collect(options, intended, World(rank, rank, ranks, "gloo", torch.device("cpu")))


def copied(path: Path, to: Path) -> Path:
    """Copy a store; return the copy."""
    shutil.copytree(path, to)
    return to


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON object."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def sign(path: Path) -> None:
    """Write the checksums of a store's files, as they are, into its manifest."""
    names = json.loads((path / "manifest.json").read_text())["sha256"]
    edit(path / "manifest.json", sha256={name: sha256_file(path / name) for name in names})
