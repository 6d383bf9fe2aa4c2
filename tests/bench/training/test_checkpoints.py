"""Checkpoints: whole or not at all, checked, kept in number; a signal's; and runs that go on from them.

Of `checkpoint.py`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
from diagonals import swept
from launches import CLEAN, wait_until
from small_runs import SMALL, losses, run, train, weights, words

from gradwire.base.errors import Stopped
from gradwire.base.files import sha256_file, write_json
from gradwire.bench.training.step import Stepper, preemption

FEEDBACK = json.dumps({"rounding": "stochastic", "error_feedback": True, "schedule": {"block": {"0": 128, "4": 64}}})
OPTIONS = {"comm_compress": "int8", "comm_config_json": FEEDBACK, "checkpoint_every": 2, "keep_checkpoints": 3}


def flip(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def copy_run(whole: Path, folder: Path) -> Path:
    """A run that was cut off after its checkpoints."""
    shutil.copytree(whole / "checkpoints", folder / "checkpoints")
    return folder


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> Path:
    """An unbroken run of one process with three checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, shards, keep_checkpoints=3) == 0
    return folder


DAMAGE = {  # by step
    7: lambda step: flip(step / "state0.pt"),
    6: lambda step: flip(step / "rank0.pt"),
    5: lambda step: os.truncate(step / "state0.pt", 1000),
    4: lambda step: (step / "rank0.pt").unlink(),
    3: lambda step: (step / "checkpoint.json").unlink(),
    2: lambda step: os.truncate(step / "checkpoint.json", 20),
}


def test_damaged_checkpoints_are_named_and_the_one_before_them_is_used(shards, tmp_path, capsys):
    every = {"checkpoint_every": 1, "keep_checkpoints": 7, "steps": 7}
    assert train(tmp_path / "whole", shards, **every) == 0
    folder = copy_run(tmp_path / "whole", tmp_path / "resumed")
    for step, damage in DAMAGE.items():
        damage(folder / f"checkpoints/step{step:08d}")
    assert train(folder, shards, "--resume", **every) == 0
    *skipped, resumed = [line for line in capsys.readouterr().err.splitlines() if "NOTE" in line]
    for step, note in zip(DAMAGE, skipped, strict=True):
        assert f"checkpoints/step{step:08d}" in note and "the checkpoint is damaged and is skipped" in note
    assert "resuming after step 1, from" in resumed
    assert weights(folder) == weights(tmp_path / "whole")
    assert names(folder) == [f"step{step:08d}" for step in range(1, 8)]


def test_dropout_goes_on_as_if_unbroken(shards, tmp_path):
    model = {"architecture": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "embd_pdrop": 0.3}
    assert train(tmp_path / "whole", shards, model=json.dumps(model)) == 0
    folder = copy_run(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(folder / "checkpoints/step00000006")
    assert train(folder, shards, "--resume", model=json.dumps(model)) == 0
    assert weights(folder) == weights(tmp_path / "whole")


def test_when_all_are_damaged_the_run_starts_over(shards, whole, tmp_path, capsys):
    folder = copy_run(whole, tmp_path)
    for step in (folder / "checkpoints").iterdir():
        flip(step / "state0.pt")
    assert train(folder, shards, "--resume", keep_checkpoints=3) == 0
    printed = capsys.readouterr().err
    assert printed.count("the checkpoint is damaged") == 3
    assert "has no valid checkpoint to resume from: starting at step 0" in printed
    assert weights(folder) == weights(whole)


def test_a_checkpoint_that_was_not_finished_is_not_one(shards, whole, tmp_path, capsys):
    folder = copy_run(whole, tmp_path)
    (folder / "checkpoints/step00000006").rename(folder / "checkpoints/step00000006.part")
    (folder / "checkpoints/step00000006.part/rank0.pt").unlink()
    (folder / "checkpoints/step00000005.part").mkdir()  # of a run that saved at other steps
    assert train(folder, shards, "--resume") == 0
    assert "is damaged" not in capsys.readouterr().err
    assert weights(folder) == weights(whole)
    assert names(folder) == ["step00000004", "step00000006"], "two are kept by default, and no part"


def test_a_checkpoint_of_another_configuration_or_source_is_refused_or_left_behind(
    shards,
    whole,
    tmp_path,
    capsys,
    monkeypatch,
):
    folder = copy_run(whole, tmp_path)
    assert train(folder, shards, "--resume", lr=0.5) == 2
    assert "belongs to a run of another configuration" in capsys.readouterr().err
    assert len(names(folder)) == 3
    assert train(folder, shards, "--resume", "--restart", lr=0.5) == 0
    assert "another configuration: starting over" in capsys.readouterr().err
    assert train(tmp_path / "plain", shards, lr=0.5) == 0
    assert weights(folder) == weights(tmp_path / "plain") != weights(whole)

    folder = copy_run(whole, tmp_path / "source")
    monkeypatch.setattr("gradwire.bench.training.settings.Settings.source", lambda self: "edited")
    assert train(folder, shards, "--resume") == 2
    assert "has another source" in capsys.readouterr().err
    assert train(folder, shards, "--resume", "--restart") == 0
    assert "another source: starting over" in capsys.readouterr().err


def test_without_resume_a_run_starts_over(shards, whole, tmp_path):
    folder = copy_run(whole, tmp_path)
    assert train(folder, shards, checkpoint_every=4) == 0
    assert names(folder) == ["step00000004"]
    assert weights(folder) == weights(whole), "how often a run is saved is not part of its identity"


def test_a_pickle_in_a_checkpoint_is_not_executed(shards, whole, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    folder = copy_run(whole, tmp_path / "run")
    for step in (folder / "checkpoints").iterdir():
        for name in ("state0.pt", "rank0.pt"):
            torch.save({"step": Evil()}, step / name)
        manifest = json.loads((step / "checkpoint.json").read_text())
        manifest["sha256"] = {name: sha256_file(step / name) for name in manifest["sha256"]}
        write_json(step / "checkpoint.json", manifest)
    assert train(folder, shards, "--resume") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Evil()))  # the trap would have worked
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", *swept("naive", "bucket", "fsdp1")],
)
def test_residuals_generators_and_schedules_resume_in_every_strategy(world, shards, tmp_path, strategy):
    options = {**OPTIONS, "strategy": strategy} | ({"param_compress": "int4-diff"} if strategy == "fsdp2" else {})
    unbroken = world(2).run(run, words(shards, tmp_path / "whole", **options))
    folder = copy_run(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(folder / "checkpoints/step00000006")
    flip(folder / "checkpoints/step00000004/rank1.pt")  # rank 0 must hear of it
    resumed = world(2).run(run, words(shards, folder, "--resume", **options))
    for (before, _), (after, _) in zip(unbroken, resumed, strict=True):
        assert losses(after) == losses(before)
        assert [row["bytes_sent"] for row in after] == [row["bytes_sent"] for row in before]
        assert [row["residual_norm"] for row in after] == [row["residual_norm"] for row in before]
    for field in ("bytes_raw_total", "bytes_compressed_total", "bytes_closed_form_total", "val_loss", "loss_digest"):
        assert resumed[0][1][field] == unbroken[0][1][field]
    assert weights(folder) == weights(tmp_path / "whole")
    steps = pq.read_table(folder / "steps.parquet").to_pydict()
    assert sorted(zip(steps["step"], steps["rank"], strict=True)) == [(s, r) for s in range(6) for r in range(2)]


def launch(folder: Path, data: Path, *flags: str, launcher: str = "spawn", **changes) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gradwire", "launch", "--world_size", "2", "--launcher", launcher]
    arguments = words(data, folder, "--resume", *flags, **changes)
    return subprocess.Popen([*command, "--", "train", *arguments], env=CLEAN, stderr=subprocess.PIPE, text=True)


def children(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ranks_of(process: int, launcher: str) -> list[int]:
    """The ranks of a launcher; the process that forks them comes between."""
    return children(children(process)[0] if launcher == "fork" else process)


LONG = {"steps": 12, "eval_every": 0}


@pytest.fixture(scope="module")
def unbroken(world, shards, tmp_path_factory) -> tuple[list[float], bytes]:
    """The losses and the weights of two ranks that nobody stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    rows = world(2).run(run, words(shards, folder, **LONG))[0][0]
    return losses(rows), weights(folder)


def interrupted(rank: int, world_size: int, group: object, arguments: list[str]) -> str:
    """Train with a SIGTERM to the second rank in its fifth step; return why it stopped."""
    taken = Stepper.take

    def take(stepper, step):
        if (rank, step) == (1, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(stepper, step)

    with mock.patch.object(Stepper, "take", take), preemption() as asked, pytest.raises(Stopped) as stopped:
        run(rank, world_size, group, arguments, asked)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return str(stopped.value)


def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_as_if_unbroken(world, shards, unbroken, tmp_path):
    reasons = world(2).run(interrupted, words(shards, tmp_path, **LONG))
    assert reasons == ["stopped by a signal after step 5, with a checkpoint; continue with --resume."] * 2
    assert names(tmp_path) == ["step00000005"] and not (tmp_path / "record.json").exists()
    resumed = world(2).run(run, words(shards, tmp_path, "--resume", **LONG))
    assert (losses(resumed[0][0]), weights(tmp_path)) == unbroken


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("launcher", "target"),
    [("fork", "rank"), ("fork", "launcher"), ("spawn", "rank"), ("spawn", "launcher"), ("torchrun", "launcher")],
)
def test_sigterm_saves_and_exits_75_and_the_run_goes_on_as_if_unbroken(
    world,
    shards,
    unbroken,
    tmp_path,
    launcher,
    target,
):
    """Two ranks, in the middle of training; a scheduler signals the launcher, or one rank only."""
    folder = tmp_path / "run"
    running = launch(folder, shards, launcher=launcher, checkpoint_every=2, **LONG)
    wait_until((folder / "checkpoints/step00000002").exists)
    os.kill(running.pid if target == "launcher" else ranks_of(running.pid, launcher)[1], signal.SIGTERM)
    _, printed = running.communicate(timeout=60)
    assert running.returncode == 75, printed
    lines = [line for line in printed.splitlines() if "preparing kernels" not in line]  # said if it takes long
    begun, stopped = lines
    assert "no valid checkpoint to resume from: starting at step 0" in begun
    assert "with a checkpoint; continue with --resume." in stopped
    failure = json.loads((folder / "train.failed.json").read_text())
    assert failure["exit_code"] == 75
    assert failure["last_step"] == int(names(folder)[-1].removeprefix("step")) < 12
    assert not (folder / "record.json").exists()

    resumed = world(2).run(run, words(shards, folder, "--resume", **LONG))
    assert (losses(resumed[0][0]), weights(folder)) == unbroken


def test_a_signal_while_results_are_written_does_not_break_them_off(shards, tmp_path, monkeypatch):
    """Training is over by then: nothing would be left to resume, and a part of a file would stay."""
    write_table, parts = pq.write_table, []

    def interrupted(table, path):
        path.write_bytes(b"half a file")
        signal.raise_signal(signal.SIGTERM)
        parts.append(path)
        write_table(table, path)

    def ended(number, frame):  # as the signal's default action, but not of this whole process
        raise SystemExit(-number)

    monkeypatch.setattr(pq, "write_table", interrupted)
    before = signal.signal(signal.SIGTERM, ended)
    try:
        assert train(tmp_path, shards) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(parts) == 1 and not list(tmp_path.glob("*.part"))
    assert (tmp_path / "record.json").exists()
    assert pq.read_table(tmp_path / "steps.parquet").num_rows == SMALL["steps"]


def test_a_run_stopped_after_its_profiled_steps_keeps_its_trace(shards, tmp_path):
    """Snakemake deletes the traces of a failed job, so a checkpoint carries them."""
    options = {"profile": True, "profile_steps": 1}
    assert train(tmp_path, shards, **options) == 0
    trace = tmp_path / "profiler/rank0.pt.trace.json.gz"
    before = trace.read_bytes()
    shutil.rmtree(tmp_path / "profiler")
    assert train(tmp_path, shards, "--resume", **options) == 0
    assert trace.read_bytes() == before
