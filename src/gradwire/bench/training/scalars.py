"""Scalars of a running run: the columns of ``steps.parquet`` as train/…, bytes/… and time/….

They go to TensorBoard, and to Weights & Biases if ``--log wandb`` asks for it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.files import writing
from gradwire.bench.training.settings import Settings
from gradwire.comm.collectives.world import World

UNLOGGED = ("step", "rank", "warmup", "profiled")

Write = Callable[[Mapping[str, float], int], None]


def tag(column: str) -> str:
    """Return a column's name, which TensorBoard and Weights & Biases fold up to the slash."""
    if column.endswith(("_ms", "_s")):
        return f"time/{column}"
    return f"bytes/{column}" if column.startswith("bytes_") else f"train/{column}"


@contextmanager
def scalars(
    settings: Settings, rows: Sequence[dict[str, Any]], world: World
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that logs a row's numbers at the row's ``step``; on ranks other than 0 it does nothing.

    Args:
        settings: The run; what it has logged before is replaced.
        rows: Rows of the steps of earlier processes.
        world: The process group and this rank's position in it.
    """
    if world.rank != 0:
        yield lambda row: None
        return
    wanted = [_tensorboard, _wandb] if settings.training.log == "wandb" else [_tensorboard]
    with ExitStack() as stack:
        writers = [stack.enter_context(writer(settings)) for writer in wanted]

        def log(row: dict[str, Any]) -> None:
            numbers = {
                tag(name): value
                for name, value in row.items()
                if isinstance(value, (int, float)) and name not in UNLOGGED
            }
            for write in writers:
                write(numbers, row["step"])

        for row in rows:
            log(row)
        yield log


@contextmanager
def _tensorboard(settings: Settings) -> Iterator[Write]:
    """Write event files.

    Raises:
        RunFault: If the disk is full or broken.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = settings.output_dir / "logs" / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        writer = SummaryWriter(log_dir=str(folder))

    def write(numbers: Mapping[str, float], step: int) -> None:
        with writing(folder):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

    with _silent_thread():
        try:
            yield write
        finally:
            with writing(folder):
                writer.close()


@contextmanager
def _silent_thread() -> Iterator[None]:
    """Print no traceback of a disk's errors in the writer's thread: its next call raises the same error."""
    usual = threading.excepthook
    threading.excepthook = lambda args: None if issubclass(args.exc_type, OSError) else usual(args)
    try:
        yield
    finally:
        threading.excepthook = usual


@contextmanager
def _wandb(settings: Settings) -> Iterator[Write]:
    """Write a run of Weights & Biases, whose own variables, such as ``WANDB_MODE``, apply.

    Raises:
        BadInput: If it cannot start a run, for want of a key or of a network.
    """
    import wandb

    folder = settings.output_dir / "logs"
    shutil.rmtree(folder / "wandb", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    project = os.environ.get("WANDB_PROJECT", "gradwire")
    given = {"strategy": settings.strategy, "model": settings.model, "seed": settings.seed}
    options = {"cell": settings.cell.flat(), "training": settings.training.model_dump(mode="json")}
    quiet = wandb.Settings(console="off", x_disable_stats=True)
    try:
        made = wandb.init(
            project=project, name=str(settings.output_dir), dir=folder, config=given | options, settings=quiet
        )
    except wandb.errors.Error as error:
        raise BadInput(f"--log wandb: {error} Set WANDB_MODE=offline to log without an account.") from None
    with made as run:
        yield lambda numbers, step: run.log(dict(numbers), step=step)
