"""Displays of a running run: a progress bar or lines, ``progress.json``, scalars and a profile of some steps.

Scalars are the columns of ``steps.parquet`` as train/…, bytes/… and time/…, for TensorBoard. The profile has one trace
per rank, for TensorBoard and Perfetto.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from gradwire.base.errors import RunFault
from gradwire.base.files import atomic_write, write_json, writing
from gradwire.bench.steps import PROGRESS, duration, progress_text
from gradwire.bench.training.settings import Settings
from gradwire.comm.collectives.world import World

LEVEL = 6  # of compression, as of the command gzip; Python's default of 9 takes four times as long for a tenth less
QUIET_LOG = "6"  # above every level of the profiler's own log, which goes to stderr


def trace_file(run_folder: Path, world: World) -> Path:
    """Path of this rank's trace."""
    return run_folder / "profiler" / f"rank{world.rank}.pt.trace.json.gz"


def recorder_options(activities: list[ProfilerActivity]) -> dict[str, Any]:
    """Options of torch's profiler for a trace that `bench.trace.trace` can read: the reducer's thread is recorded."""
    config = _ExperimentalConfig(profile_all_threads=True)
    return {"activities": activities, "record_shapes": True, "experimental_config": config}


@contextmanager
def profiling(steps: range, start: int, path: Path, world: World) -> Iterator[Callable[[], None]]:
    """Profile steps and write the trace to ``path``; yield what ends each optimizer step, from ``start`` on."""
    if len(steps) < 2:  # the profiler's warm-up step alone records nothing
        yield lambda: None
        return

    def save(recorder: profile) -> None:
        with atomic_write(path) as part, gzip.open(part, "wb", LEVEL) as compressed, TemporaryDirectory() as folder:
            plain = Path(folder) / "trace.json"
            recorder.export_chrome_trace(str(plain))
            if not _complete(plain):  # the profiler logs the reason, which is switched off, and raises nothing
                raise RunFault(
                    f"{path} cannot be written: the profiler did not complete its own file in {Path(folder).parent}. "
                    "That disk is full, or the limit on the size of a file too low: make room, set TMPDIR to another "
                    "disk, or train with --no-profile."
                )
            with plain.open("rb") as trace:
                shutil.copyfileobj(trace, compressed)

    if world.device.type == "cpu":  # on a GPU the log has what CUPTI cannot record
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET_LOG)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    timetable = schedule(skip_first=steps.start - start, wait=0, warmup=1, active=len(steps) - 1, repeat=1)
    with profile(schedule=timetable, on_trace_ready=save, **recorder_options(activities)) as recorder:
        yield recorder.step


def _complete(trace: Path) -> bool:
    """Whether a trace ends as a JSON object does; one that was broken off may be missing."""
    if not trace.is_file():
        return False
    with trace.open("rb") as stream:
        stream.seek(max(0, trace.stat().st_size - 100))
        return stream.read().rstrip().endswith(b"}")


WRITE_EVERY_S = 1.0  # seconds between writes of the file
PRINT_EVERY_S = 5.0  # seconds between lines where there is no terminal for a bar


@contextmanager
def progress(folder: Path, steps: int, start: int, world: World) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that takes each step's row; on ranks other than 0 it does nothing.

    On a terminal it shows a bar; where standard error is a pipe or a file, a line every ``PRINT_EVERY_S`` seconds.

    Args:
        folder: The run's folder.
        steps: Optimizer steps of the whole run.
        start: First step of this process.
        world: The process group and this rank's position in it.
    """
    if world.rank != 0:
        yield lambda row: None
        return
    raw = sent = 0
    began = written = printed = time.monotonic()

    def show(row: dict[str, Any]) -> None:
        nonlocal raw, sent, written, printed
        raw, sent = raw + row.get("bytes_raw", 0), sent + row.get("bytes_sent", 0)
        loss = row["loss"]
        bar.set_postfix(loss="-" if loss is None else f"{loss:.3f}", ms=f"{row['step_ms']:.0f}", refresh=False)
        bar.update()
        now, done = time.monotonic(), row["step"] + 1
        if now - written >= WRITE_EVERY_S:
            written = now
            left = (now - began) / (done - start) * (steps - done)
            state = {"step": done, "steps": steps, "loss": loss, "step_ms": row["step_ms"]}
            state |= {"ratio": raw / sent if sent else None, "left_s": left}
            write_json(folder / PROGRESS, state)
            if bar.disable and now - printed >= PRINT_EVERY_S:
                printed = now
                print(f"{progress_text(state)}, {duration(left)} left", file=sys.stderr, flush=True)

    try:
        with tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, disable=None) as bar:
            yield show
    finally:
        (folder / PROGRESS).unlink(missing_ok=True)


UNLOGGED = ("step", "rank", "warmup", "profiled")


def tag(column: str) -> str:
    """Return a column's name, which TensorBoard folds up to the slash."""
    if column.endswith(("_ms", "_s")):
        return f"time/{column}"
    return f"bytes/{column}" if column.startswith("bytes_") else f"train/{column}"


@contextmanager
def scalars(
    settings: Settings, rows: Sequence[dict[str, Any]], world: World
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that logs a row's numbers at the row's ``step``; on ranks other than 0 it does nothing.

    Args:
        settings: The run; its earlier event files are replaced.
        rows: Rows of the steps of earlier processes.
        world: The process group and this rank's position in it.

    Raises:
        RunFault: If the disk is full or broken.
    """
    if world.rank != 0:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = settings.output_dir / "logs" / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder):
        writer = SummaryWriter(log_dir=str(folder))

    def log(row: dict[str, Any]) -> None:
        with writing(folder):
            for name, value in row.items():
                if isinstance(value, (int, float)) and name not in UNLOGGED:
                    writer.add_scalar(tag(name), value, row["step"])

    with _silent_thread():
        try:
            for row in rows:
                log(row)
            yield log
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
