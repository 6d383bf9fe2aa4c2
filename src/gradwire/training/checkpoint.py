"""Checkpoints that any strategy writes and reads: sharded model and optimizer, and each rank's own state.

``checkpoints/step<N>/`` appears whole, after every rank has written its part; the one before it is then removed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from gradwire import parallel
from gradwire.collectives.world import World
from gradwire.errors import BadInput


def newest(run_folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = sorted(path for path in (run_folder / "checkpoints").glob("step*") if path.suffix != ".part")
    return found[-1] if found else None


def save(
    run_folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, own: dict[str, Any], world: World
) -> None:
    """Write ``checkpoints/step<N>``: called by all ranks, with each rank's ``own`` state (tensors and plain data)."""
    target = run_folder / "checkpoints" / f"step{step:08d}"
    part = target.with_name(f"{target.name}.part")
    if world.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    dcp.save(parallel.checkpoint_state(model, optimizer), checkpoint_id=part)
    torch.save(own, part / f"rank{world.rank}.pt")
    dist.barrier()
    if world.rank == 0:
        part.replace(target)
        for older in target.parent.glob("step*"):
            if older != target:
                shutil.rmtree(older)


def load(
    checkpoint: Path, identity: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Any]:
    """Restore the model and the optimizer in place; returns this rank's own state.

    Raises:
        BadInput: If the checkpoint is another configuration's, or a rank's part is missing.
    """
    mine = checkpoint / f"rank{world.rank}.pt"
    if not mine.exists():
        raise BadInput(f"{checkpoint} has no part for rank {world.rank}; it was written by another world size.")
    own = torch.load(mine, weights_only=True, map_location=world.device)
    if own["identity"] != identity:
        raise BadInput(
            f"{checkpoint} belongs to a run of another configuration; repeat that run's arguments, choose another "
            "--output_dir, or start over without --resume."
        )
    state = parallel.checkpoint_state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)
    parallel.load_checkpoint_state(model, optimizer, state)
    return own
