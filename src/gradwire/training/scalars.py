"""TensorBoard scalars of a running run: the columns of ``steps.parquet`` as train/…, bytes/… and time/…."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.collectives.world import World

UNLOGGED = ("step", "rank", "warmup", "profiled")


def tag(column: str) -> str:
    """Return a column's name in TensorBoard, which folds tags up to the slash."""
    if column.endswith(("_ms", "_s")):
        return f"time/{column}"
    return f"bytes/{column}" if column.startswith("bytes_") else f"train/{column}"


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
                if isinstance(value, (int, float)) and name not in UNLOGGED:
                    writer.add_scalar(tag(name), value, row["step"])

        for row in rows:
            log(row)
        yield log
