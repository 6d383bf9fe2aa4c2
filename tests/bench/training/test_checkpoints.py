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
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from test_training import SMALL, losses, run, shards, words  # noqa: F401  a fixture

from gradwire import cli
from gradwire.base.files import sha256_file, write_json
from gradwire.bench.launch.ranks import THREADS

FEEDBACK = json.dumps({"rounding": "stochastic", "error_feedback": True, "schedule": {"block": {"0": 128, "4": 64}}})
OPTIONS = {"comm_compress": "int8", "comm_config_json": FEEDBACK, "checkpoint_every": 2, "keep_checkpoints": 3}
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", *THREADS)}


def flip(path: Path) -> None:
    """Change one byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def weights(folder: Path) -> bytes:
    return (folder / "final_model/model.safetensors").read_bytes()


def train(folder: Path, data: Path, *more: str, **changes) -> int:
    """`gradwire train` as a single process, this one."""
    return cli.main(["train", *words(data, folder, *more, **{"checkpoint_every": 2, "eval_every": 0, **changes})])


def copy_run(whole: Path, folder: Path) -> Path:
    """A run that was cut off after its checkpoints."""
    shutil.copytree(whole / "checkpoints", folder / "checkpoints")
    return folder


@pytest.fixture(scope="module")
def whole(shards, tmp_path_factory) -> Path:  # noqa: F811
    """An unbroken run of one process with three checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, shards, keep_checkpoints=3) == 0
    return folder


DAMAGE = {
    "a byte of the model": lambda step: flip(step / "state0.pt"),
    "a byte of a rank's own": lambda step: flip(step / "rank0.pt"),
    "a file cut short": lambda step: os.truncate(step / "state0.pt", 1000),
    "a file lost": lambda step: (step / "rank0.pt").unlink(),
    "no manifest": lambda step: (step / "checkpoint.json").unlink(),
    "half a manifest": lambda step: os.truncate(step / "checkpoint.json", 20),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(damage, shards, whole, tmp_path, capsys):  # noqa: F811
    folder = copy_run(whole, tmp_path)
    newest = folder / "checkpoints/step00000006"
    DAMAGE[damage](newest)
    assert train(folder, shards, "--resume", keep_checkpoints=3) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "NOTE" in line]
    assert len(notes) == 2
    assert str(newest) in notes[0]
    assert "resuming after step 4, from" in notes[1]
    assert "the checkpoint is damaged and is skipped" in notes[0]
    assert weights(folder) == weights(whole)
    assert names(folder) == ["step00000002", "step00000004", "step00000006"]


def test_dropout_goes_on_as_if_unbroken(shards, tmp_path):  # noqa: F811
    model = {"architecture": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "embd_pdrop": 0.3}
    assert train(tmp_path / "whole", shards, model=json.dumps(model)) == 0
    folder = copy_run(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(folder / "checkpoints/step00000006")
    assert train(folder, shards, "--resume", model=json.dumps(model)) == 0
    assert weights(folder) == weights(tmp_path / "whole")


def test_when_all_are_damaged_the_run_starts_over(shards, whole, tmp_path, capsys):  # noqa: F811
    folder = copy_run(whole, tmp_path)
    for step in (folder / "checkpoints").iterdir():
        flip(step / "state0.pt")
    assert train(folder, shards, "--resume", keep_checkpoints=3) == 0
    printed = capsys.readouterr().err
    assert printed.count("the checkpoint is damaged") == 3
    assert "has no valid checkpoint to resume from: starting at step 0" in printed
    assert weights(folder) == weights(whole)


def test_a_checkpoint_that_was_not_finished_is_not_one(shards, whole, tmp_path, capsys):  # noqa: F811
    folder = copy_run(whole, tmp_path)
    (folder / "checkpoints/step00000006").rename(folder / "checkpoints/step00000006.part")
    (folder / "checkpoints/step00000006.part/rank0.pt").unlink()
    (folder / "checkpoints/step00000005.part").mkdir()  # of a run that saved at other steps
    assert train(folder, shards, "--resume") == 0
    assert "is damaged" not in capsys.readouterr().err
    assert weights(folder) == weights(whole)
    assert names(folder) == ["step00000004", "step00000006"], "two are kept by default, and no part"


def test_a_checkpoint_of_another_configuration_or_source_is_refused_or_left_behind(
    shards,  # noqa: F811
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


def test_without_resume_a_run_starts_over(shards, whole, tmp_path):  # noqa: F811
    folder = copy_run(whole, tmp_path)
    assert train(folder, shards, checkpoint_every=4) == 0
    assert names(folder) == ["step00000004"]
    assert weights(folder) == weights(whole), "how often a run is saved is not part of its identity"


def test_a_pickle_in_a_checkpoint_is_not_executed(shards, whole, tmp_path, capsys):  # noqa: F811
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
    ["ddp", "fsdp1", "fsdp2", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("naive", "bucket"))],
)
def test_residuals_generators_and_schedules_resume_in_every_strategy(world, shards, tmp_path, strategy):  # noqa: F811
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


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


LONG = {"steps": 16, "eval_every": 0}


@pytest.fixture(scope="module")
def unbroken(world, shards, tmp_path_factory) -> tuple[list[float], bytes]:  # noqa: F811
    """The losses and the weights of two ranks that nobody stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    rows = world(2).run(run, words(shards, folder, **LONG))[0][0]
    return losses(rows), weights(folder)


@pytest.mark.parametrize(
    ("launcher", "target"),
    [
        ("fork", "rank"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (("fork", "launcher"), ("spawn", "rank"), ("spawn", "launcher"), ("torchrun", "launcher"))
        ),
    ],
)
def test_sigterm_saves_and_exits_75_and_the_run_goes_on_as_if_unbroken(
    world,
    shards,  # noqa: F811
    unbroken,
    tmp_path,
    launcher,
    target,
):
    """Two ranks, in the middle of training; a scheduler signals the launcher, or one rank only."""
    folder = tmp_path / "run"
    running = launch(folder, shards, launcher=launcher, checkpoint_every=2, **LONG)
    wait_for(folder / "checkpoints/step00000002", running)
    os.kill(running.pid if target == "launcher" else ranks_of(running.pid, launcher)[1], signal.SIGTERM)
    _, printed = running.communicate(timeout=60)
    assert running.returncode == 75, printed
    begun, stopped = printed.splitlines()
    assert "no valid checkpoint to resume from: starting at step 0" in begun
    assert "with a checkpoint; continue with --resume." in stopped
    failure = json.loads((folder / "train.failed.json").read_text())
    assert failure["exit_code"] == 75
    assert failure["last_step"] == int(names(folder)[-1].removeprefix("step")) < 16
    assert not (folder / "record.json").exists()

    resumed = world(2).run(run, words(shards, folder, "--resume", **LONG))
    assert (losses(resumed[0][0]), weights(folder)) == unbroken


def test_a_signal_while_results_are_written_does_not_break_them_off(shards, tmp_path, monkeypatch):  # noqa: F811
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


def test_a_run_stopped_after_its_profiled_steps_keeps_its_trace(shards, tmp_path):  # noqa: F811
    """Snakemake deletes the traces of a failed job, so a checkpoint carries them."""
    options = {"profile": True, "profile_steps": 1}
    assert train(tmp_path, shards, **options) == 0
    trace = tmp_path / "profiler/rank0.pt.trace.json.gz"
    before = trace.read_bytes()
    shutil.rmtree(tmp_path / "profiler")
    assert train(tmp_path, shards, "--resume", **options) == 0
    assert trace.read_bytes() == before
