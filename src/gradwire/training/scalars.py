"""TensorBoard scalars of a running run, named after the columns of ``steps.parquet``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.collectives.world import World


@contextmanager
def tensorboard(
    folder: Path, rows: Sequence[dict[str, Any]], world: World
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that logs a row's numbers at the row's ``step``; on ranks other than 0 it does nothing.

    Args:
        folder: Folder for the event files; an existing one is replaced.
        rows: Rows of the steps of earlier processes.
        world: The process group and this rank's position in it.
    """
    if world.rank != 0:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(log_dir=str(folder)) as writer:

        def log(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name not in ("step", "rank"):
                    writer.add_scalar(name, value, row["step"])

        for row in rows:
            log(row)
        yield log
