"""Profile a few optimizer steps with torch.profiler: one trace per rank, for TensorBoard and Perfetto."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from gradwire.base.errors import RunFault
from gradwire.base.files import whole
from gradwire.bench.config import Training
from gradwire.comm.collectives.world import World

QUIET = "6"  # above every level of the profiler's own log, which goes to stderr


def profiled_range(training: Training, start: int) -> range:
    """The profiled steps, after the run's warm-up; ``start`` is the first step of this process."""
    first = max(training.warmup_steps, start)
    return range(first, min(first + training.profiled_steps, training.steps))


def trace_file(run_folder: Path, world: World) -> Path:
    """Path of this rank's trace."""
    return run_folder / "profiler" / f"rank{world.rank}.pt.trace.json.gz"


class Profiler:
    """Records the steps of `profiled_range`; call `step` after every optimizer step."""

    def __init__(self, recorder: profile | None) -> None:
        self._recorder = recorder

    def step(self) -> None:
        """Mark the end of an optimizer step."""
        if self._recorder is not None:
            self._recorder.step()


def recorder_options(activities: list[ProfilerActivity]) -> dict[str, Any]:
    """Options of torch's profiler for a trace that `bench.trace.trace` can read: the reducer's thread is recorded."""
    config = _ExperimentalConfig(profile_all_threads=True)
    return {"activities": activities, "record_shapes": True, "experimental_config": config}


@contextmanager
def profiling(training: Training, start: int, path: Path, world: World) -> Iterator[Profiler]:
    """Profile the steps of `profiled_range` and write the trace to ``path``."""
    steps = profiled_range(training, start)
    if len(steps) < 2:  # the profiler's warm-up step alone records nothing
        yield Profiler(None)
        return

    def save(recorder: profile) -> None:
        with whole(path) as part, gzip.open(part, "wb") as compressed, TemporaryDirectory() as folder:
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

    if world.device.type == "cpu":  # on a GPU it says what CUPTI cannot record
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    timetable = schedule(skip_first=steps.start - start, wait=0, warmup=1, active=len(steps) - 1, repeat=1)
    with profile(schedule=timetable, on_trace_ready=save, **recorder_options(activities)) as recorder:
        yield Profiler(recorder)


def _complete(trace: Path) -> bool:
    """Whether a trace ends as a JSON object does; one that was broken off may be missing."""
    if not trace.is_file():
        return False
    with trace.open("rb") as stream:
        stream.seek(max(0, trace.stat().st_size - 100))
        return stream.read().rstrip().endswith(b"}")
