"""The state of runs, read from their folders; and what a training writes while it goes on.

Of `rows/status.py`, `bench/steps.py`, `training/monitor.py`.
"""

import json
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from gradwire import cli
from gradwire.bench.config import Run
from gradwire.bench.report.rows.status import look, overview, remaining
from gradwire.bench.steps import PROGRESS, duration
from gradwire.bench.training import monitor

HERE = {"excluded": None, "quality_from": None, "shared": True}


@pytest.fixture
def results(tmp_path):
    """An experiment of six runs, each in another state."""
    asked = [Run("fsdp2", "int8", 2, "none", seed) for seed in range(6)]
    listed = [{**run._asdict(), **HERE} for run in asked]
    listed[5]["excluded"] = "no link here"
    (tmp_path / "expected.json").write_text(json.dumps(listed))
    os.utime(tmp_path / "expected.json", (time.time() - 100, time.time() - 100))
    states = {
        0: ("record.json", {"status": "ok", "val_ppl": 250.125, "reason": None}),
        1: ("record.json", {"status": "diverged", "val_ppl": None, "reason": "the loss is nan"}),
        2: ("train.failed.json", {"reason": "rank 1: was killed", "exit_code": 3, "last_step": 7}),
        3: (PROGRESS, {"step": 7, "steps": 60, "loss": 5.25, "step_ms": 120.4, "ratio": 3.9, "left_s": 95.0}),
    }
    for seed, (name, content) in states.items():
        folder = tmp_path / "runs" / asked[seed].path
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(content))
    return tmp_path


def test_every_run_has_a_state_and_a_reason(results, capsys):
    assert cli.main(["status", "--results_dir", str(results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["running", "failed", "diverged", "done", "waiting", "skipped"]
    running, failed, diverged, done, _, skipped = lines[:-1]
    assert running.endswith("step 7/60, loss 5.250, 120 ms/step, ratio 3.90, 2 min left")
    assert failed.endswith("train, exit 3: rank 1: was killed")
    assert (
        diverged.endswith("the loss is nan") and done.endswith("perplexity 250.12") and skipped.endswith("no link here")
    )
    assert lines[-1].startswith("6 runs: 1 running, 1 failed, 1 diverged, 1 done, 1 waiting, 1 skipped; about")
    assert cli.main(["status", "--results_dir", str(results), "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_silent_run_has_stopped_and_the_pace_shows_what_is_left(results):
    states = look(results, now=time.time() + 600)
    assert [state.name for state in states.values()].count("stopped") == 1
    assert "nothing heard for 10 min" in overview(states, results)
    states = look(results)
    assert remaining(states, results) == pytest.approx(200, abs=5), "one record in 100 s, two runs to come"
    assert (duration(12.4), duration(185), duration(3900)) == ("12 s", "3 min", "1 h 05 min")


def test_bad_input_is_one_message(results, tmp_path, capsys):
    assert cli.main(["status", "--results_dir", str(tmp_path / "nowhere")]) == 2
    assert "holds no experiment" in capsys.readouterr().err
    assert cli.main(["status", "--results_dir", str(results), "--watch", "0"]) == 2
    assert "--watch is 0.0; it must be at least 0.001" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_watching_goes_on_until_all_runs_ended_and_renews_itself_on_a_terminal(results, terminal):
    ours, theirs = pty.openpty() if terminal else os.pipe()
    words = ["status", "--results_dir", str(results), "--watch", "0.2", "--quiet"]
    with subprocess.Popen([sys.executable, "-m", "gradwire", *words], stdout=theirs) as watching:
        os.close(theirs)
        first = os.read(ours, 10_000).decode()
        for seed in (3, 4):
            folder = results / "runs" / Run("fsdp2", "int8", 2, "none", seed).path
            folder.mkdir(exist_ok=True, parents=True)
            (folder / "record.json").write_text('{"status": "ok", "val_ppl": 2.5, "reason": null}')
        rest = b""
        with suppress(OSError):  # how a terminal says that the other side is gone
            while read := os.read(ours, 10_000):
                rest += read
    os.close(ours)
    assert watching.returncode == 0
    assert "1 running" in first and first.startswith("\033[H") == terminal
    assert rest.decode().split()[-8:] == ["1", "failed,", "1", "diverged,", "3", "done,", "1", "skipped"]
    assert ("\033" in rest.decode()) == terminal


def test_progress_is_written_and_printed_while_a_run_goes_on_and_gone_afterwards(tmp_path, monkeypatch, capsys):
    from gradwire.bench.report.rows import status

    monkeypatch.setattr(monitor, "WRITE_EVERY_S", 0.0)
    place = type("World", (), {"rank": 0})()
    for every, printed in ((0.0, [5, 6]), (monitor.PRINT_EVERY_S, [])):
        monkeypatch.setattr(monitor, "PRINT_EVERY_S", every)
        with monitor.progress(tmp_path, 10, 4, place) as tell:
            for step in (4, 5):
                tell({"step": step, "loss": 3.5, "step_ms": 10.0, "bytes_raw": 400, "bytes_sent": 100})
            found = json.loads((tmp_path / PROGRESS).read_text())
            assert (found["step"], found["steps"], found["loss"], found["ratio"]) == (6, 10, 3.5, 4.0)
            assert status.state(tmp_path, time.time()).name == "running"
        assert not (tmp_path / PROGRESS).exists()
        assert status.state(tmp_path, time.time()).name == "waiting"
        lines = [f"step {done}/10, loss 3.500, 10 ms/step, ratio 4.00, 0 s left\n" for done in printed]
        assert capsys.readouterr().err == "".join(lines)


def test_states_are_json_too(results, capsys):
    assert cli.main(["status", "--results_dir", str(results), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in runs].count("running") == 1 and runs[0]["compressor"] == "int8"
