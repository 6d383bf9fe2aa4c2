"""Runs of `train` whose ranks take turns in one process: those of gloo processes, without times."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from diagonals import swept
from small_runs import run, train, weights, words

from gradwire.bench.launch.links import LINK
from gradwire.bench.training import step

LOCAL = {"method": "onebit", "comm_optimizer": "diloco", "H": 2, "outer_lr": 0.9, "outer_momentum": 0.5}
CELLS = {
    "local": {**LOCAL, "inner": "muon", "embeddings": {"method": "int8", "num_bits": 4, "block": 16}},
    "momenta": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 2},
    "framework": {"method": "none"},
}
TIMES = ("_ms", "_s")


def cell(name: str) -> dict[str, object]:
    """Flags of a run in which an all-gathered evaluation, clipping and a checkpoint happen too."""
    return {"comm_config_json": json.dumps(CELLS[name]), "strategy": "ddp", "checkpoint_every": 4, "eval_every": 3}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("local", 2), ("momenta", 2), *swept(("framework", 2), ("local", 4))],
)
def test_a_simulated_run_is_that_of_processes(world, shards, tmp_path, name, ranks):
    here, there = tmp_path / "simulated", tmp_path / "processes"
    _, expected = world(ranks).run(run, words(shards, there, **cell(name)))[0]
    assert train(here, shards, "--simulated_ranks", str(ranks), **cell(name)) == 0
    record = json.loads((here / "record.json").read_text())
    assert weights(here) == weights(there)
    rows, expected_rows = (pq.read_table(folder / "steps.parquet").to_pylist() for folder in (here, there))
    for row, other in zip(rows, expected_rows, strict=True):
        timed = {column for column in row if column.endswith(TIMES)}
        assert {row[column] for column in timed} == {None}
        assert {c: row[c] for c in row if c not in timed} == {c: other[c] for c in row if c not in timed}
    differing = {key for key in record if record[key] != expected[key]} - {"environment", "run_name"}
    assert (record["world"], expected["world"]) == ("simulated", "processes")
    assert {key for key in differing if "time" not in key and record[key] is not None} == {
        *("backend", "world", "measured_steps")
    }
    assert {record[key] for key in differing if "time" in key} <= {None}
    assert record["mem_peak_alloc_gb"] is None
    assert len([*(here / "environment").iterdir()]) == ranks


def test_a_simulated_run_resumes_inside_a_round_and_as_processes(world, shards, tmp_path):
    whole, ranks = tmp_path / "whole", 2
    options = cell("local") | {"checkpoint_every": 3, "keep_checkpoints": 2}  # a round ends after steps 2, 4, 6
    assert train(whole, shards, "--simulated_ranks", str(ranks), **options) == 0
    for name in ("turns", "processes"):
        folder = tmp_path / name
        shutil.copytree(whole / "checkpoints/step00000003", folder / "checkpoints/step00000003")
        if name == "turns":
            assert train(folder, shards, "--simulated_ranks", str(ranks), "--resume", **options) == 0
        else:
            world(ranks).run(run, words(shards, folder, "--resume", **options))
        assert weights(folder) == weights(whole), name


def test_a_signal_stops_all_ranks_with_a_checkpoint(shards, tmp_path, monkeypatch):
    whole, folder, options = tmp_path / "whole", tmp_path / "stopped", cell("local") | {"checkpoint_every": 0}
    assert train(whole, shards, "--simulated_ranks", "2", **options) == 0
    taken = step.Stepper.take

    def take(stepper, number):
        if (stepper.world.rank, number) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        return taken(stepper, number)

    monkeypatch.setattr(step.Stepper, "take", take)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert train(folder, shards, "--simulated_ranks", "2", **options) == 75
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (folder / "record.json").exists()
    monkeypatch.undo()
    assert train(folder, shards, "--simulated_ranks", "2", "--resume", **options) == 0
    assert weights(folder) == weights(whole)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--strategy", "fsdp2"), "simulated ranks hold a whole model each, and strategy fsdp2 shards it: use naive"),
        (("--world_size", "2"), "--simulated_ranks 2 take turns in one process, and there are 2: omit it, or"),
        (("--verify_sync", "2"), "--verify_sync waits for ranks with a process each"),
        (("--global_batch_size", "7"), "global_batch_size 7 cannot be divided evenly among 2 ranks"),
    ],
)
def test_what_a_simulation_cannot_do_is_one_line(shards, tmp_path, capsys, flags, message):
    folder: Path = tmp_path / "run"
    assert train(folder, shards, "--simulated_ranks", "2", "--strategy", "ddp", *flags) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.strip().splitlines()) == 1
    assert not (folder / "record.json").exists()


def test_a_simulation_on_a_link_is_refused(shards, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(LINK, "20mbit")  # as `launch --link` does
    assert train(tmp_path / "run", shards, "--simulated_ranks", "2", "--strategy", "ddp") == 2
    assert "a link of 20mbit is between processes" in capsys.readouterr().err
    assert not (tmp_path / "run" / "record.json").exists()
