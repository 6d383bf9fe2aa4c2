"""A run whose disk takes no more: one message, exit code 3, and no half-written file that a later step would read."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import words

from gradwire import cli
from gradwire.base.errors import RunFault
from gradwire.bench.training import monitor


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes; writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("size", "profile", "message"),
    [
        (
            200_000,
            True,
            "{run}/profiler/rank0.pt.trace.json.gz cannot be written: the profiler did not complete its own",
        ),
        (3000, False, "{run}/logs/tensorboard cannot be written: File too large."),
    ],
    ids=["trace", "tensorboard"],
)
def test_a_file_that_is_too_large_is_one_message(shards, tmp_path, capfd, size, profile, message):
    with largest_file(size):
        code = cli.main(["train", *words(shards, tmp_path / "run", profile=profile)])
    printed = capfd.readouterr()
    assert code == 3 and printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("gradwire train: " + message.format(run=tmp_path / "run"))
    failure = json.loads((tmp_path / "run" / "train.failed.json").read_text())
    assert failure["exit_code"] == 3 and failure["traceback"] == "", "it is no unexpected error"
    left = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file() and "tfevents" not in path.name}
    assert left == {"train.failed.json", ".lock"}


@pytest.mark.parametrize("written", [None, "", '{"traceEvents": [{"ph": "X"}, {"ph"'])
def test_a_trace_that_was_broken_off_is_not_kept(tmp_path, written, monkeypatch):
    class Recorder:
        def export_chrome_trace(self, path):
            if written is not None:
                Path(path).write_text(written)

    class Profile:
        def __init__(self, on_trace_ready, **_):
            self.save = on_trace_ready

        def __enter__(self):
            self.save(Recorder())

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(monitor, "profile", Profile)
    world = type("World", (), {"device": type("Device", (), {"type": "cpu"})})
    with (
        pytest.raises(RunFault, match="did not complete its own file"),
        monitor.profiling(range(3, 7), 0, tmp_path / "trace.gz", world),
    ):
        pass
    assert not [*tmp_path.iterdir()]
