"""`gradwire run` in a folder of one's own: mistakes in one line, what it shows, what it leaves, and how it ends.

Of `workflow/events.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
import yaml
from snakemakes import ROOT, STUB

from gradwire import cli
from gradwire.base.errors import BadInput, RunFault
from gradwire.bench.config import Run
from gradwire.bench.config.file import check, merged, read
from gradwire.bench.report.rows.record import jsonl, without_measurements
from gradwire.bench.report.rows.status import look
from gradwire.bench.workflow.run import Job, View, check_results, move_aside

GOOD = {
    "name": "mine",
    "model": "tiny",
    "dataset": {"max_mb": 0.1},
    "training": {"steps": 10, "warmup_steps": 1},
    "compressors": {"none": {}, "int8": {}},
    "grid": {"strategies": ["fsdp2"], "world_sizes": [2]},
}
RUN = "fsdp2/int8/ws2/none/seed0"

MISTAKES = {  # what is written instead, and what the answer says: the place, and the nearest name or what is allowed
    "compresors: {none: {}}": "unknown key 'compresors'. Did you mean 'compressors'",
    "trainning: {steps: 9}": "unknown key 'trainning'. Did you mean 'training'",
    "training: {stepz: 9}": "unknown key in training 'stepz'. Did you mean 'steps'",
    "training: {steps: ten}": 'training.steps must be an integer, got "ten"',
    "training: {steps: -1}": "training.steps must be greater than or equal to 1, got -1",
    "training: {steps: 9, profile: maybe}": 'training.profile must be true or false, got "maybe"',
    "training: {device: gpu}": "unknown value of training.device 'gpu'. Did you mean 'cpu'",
    "training: {steps: 4, warmup_steps: 4}": "no step of 4 is left to time after 4 warm-up",
    "model: tinny": "unknown model preset (or folder of a model) 'tinny'. Did you mean 'tiny'",
    "dataset: {max_length: 2}": "dataset.max_length must be greater than or equal to 3, got 2",
    "dataset: {source: pydoc}": "unknown source 'pydoc'. Did you mean 'pydocs'",
    "name: my run": "name must be made of letters, digits",
    "grid: {strategies: [dpp]}": "grid.0.strategies.0: unknown strategy 'dpp'. Did you mean 'ddp' or 'hsdp'",
    "grid: {strategies: ddp}": 'grid.0.strategies must be a list, such as [a, b], got "ddp"',
    "grid: {world_size: [2]}": "unknown key in grid.0 'world_size'. Did you mean 'world_sizes'",
    "grid: {links: [100mb]}": "grid.0.links.0 must be a rate such as 100mbit, or none",
    "grid: {compressors: [int9]}": "unknown compressor in the grid 'int9'. Did you mean 'int8'",
    "compressors: [none, int8]": "compressors must be a mapping, such as {}",
    "compressors: {int7: {}}": "unknown compressor 'int7'. Did you mean 'int8'",
    "compressors: {int8: {eror_feedback: true}}": "option of int8 'eror_feedback'. Did you mean 'error_feedback'",
    "compressors: {int8: {algorithm: natve}}": "unknown value of reduction.algorithm 'natve'. Did you mean 'native'",
    "compressors: {topk: {density: 10}}": "'density' is 10",
    "compressors: {Int8: {}}": "unknown compressor 'Int8'. Did you mean 'int8'",
    "compressors: {fast: {mehtod: int8}}": "compressor cell 'fast': unknown key 'mehtod'. Did you mean 'method'",
    "compressors: {int8: {comm_optimizer: diloco, h: 5}}": "'h'. Did you mean 'H'",
    "grid: {strategies: [DDP]}": "unknown strategy 'DDP'. Did you mean 'ddp'",
    "extend: base.yaml": "unknown key 'extend'. Did you mean 'extends'",
    "seeds: [0, 1]": "unknown key 'seeds': it belongs in `grid:`",
    "lr: 0.001": "unknown key 'lr': it belongs in `training:`",
    "training: {max_length: 64}": "unknown key in training 'max_length': it belongs in `dataset:`",
    "grid: {name: other}": "unknown key in grid.0 'name': it belongs at the top level",
    "dataset: {tokenizer: gpt22}": "dataset.tokenizer: there is no folder 'gpt22'",
    "model: {architecture: llamma}": "unknown architecture 'llamma'. Of ",
    "model: {architecture: llama, hidden_size: 255, num_attention_heads: 4}": "llama: The hidden size (255) ",
    "model: {architecture: gpt2, n_embd: 255, n_head: 4}": "must be divisible by num_heads",
}


ROW = re.compile(r"^\| `(.+?)` \| `+ ?(.+?) ?`+ \|$", re.MULTILINE)
SHOWN = dict(ROW.findall((ROOT / "docs/how-to/mistakes.md").read_text(encoding="utf-8")))
COMMANDS = [line for line in SHOWN if line.startswith("gradwire ")]


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_in_one_line(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = yaml.safe_load(line)
    left = {key: value for key, value in GOOD.items() if key not in wrong and key[:4] != line[:4]}
    Path("experiment.yaml").write_text(yaml.safe_dump(left) + line)
    assert cli.main(["run"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("gradwire run: experiment.yaml: ") and printed.count("\n") == 1
    assert MISTAKES[line] in printed
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]
    check_shown(line, printed)


def check_shown(line: str, printed: str) -> None:
    """Check that what the page of mistakes shows is printed: all of it, or what comes before the ``…``."""
    answer = printed.partition(": ")[2].rstrip("\n")
    shown, cut, _ = SHOWN.get(line, answer).partition("…")
    assert answer.startswith(shown) if cut else answer == shown


@pytest.mark.parametrize("line", COMMANDS)
def test_a_misspelt_flag_is_answered_as_the_page_shows(line, capsys):
    assert cli.main(line.split()[1:]) == 2
    check_shown(line, capsys.readouterr().err)


def test_the_page_shows_twenty_mistakes_and_no_other():
    assert len(SHOWN) >= 20 and len(COMMANDS) == 3 and SHOWN.keys() - COMMANDS <= MISTAKES.keys()


def test_a_missing_file_names_the_command_that_writes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run"]) == 2
    assert capsys.readouterr().err == "gradwire run: there is no file experiment.yaml: `gradwire init` writes one.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--profile", "slrm"], "Did you mean 'slurm'"), (["--cores", "0"], "--cores takes a number of cores")],
)
def test_a_bad_option_is_refused(options, said, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(GOOD))
    assert cli.main(["run", str(tmp_path / "mine.yaml"), *options]) == 2
    assert said in capsys.readouterr().err


def test_an_experiment_extends_another(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(GOOD))
    more = {"compressors": {"int4": {"method": "int8", "num_bits": 4}}, "training": {"steps": 31}}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"extends": "base.yaml", "name": "more", **more}))
    (tmp_path / "most.yaml").write_text("{extends: more.yaml, name: most, grid: {seeds: [0, 1]}}")
    made = check(read(tmp_path / "most.yaml"))
    assert (made.name, made.training.steps, made.training.warmup_steps) == ("most", 31, 1)
    assert {run.compressor for run in made.runs()} == {"none", "int8", "int4"} and len(made.runs()) == 6
    assert merged({"a": {"b": [1], "c": 2}}, {"a": {"b": [3]}}, "mine") == {"a": {"b": [3], "c": 2}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{extends: base.yaml}", "give it another name"),
        ("{extends: [base.yaml], name: b}", "takes the path of a file"),
        ("{extends: nowhere.yaml, name: b}", "mine.yaml: extends: there is no file .*nowhere.yaml"),
        ("{extends: nowhere.yaml}", "mine.yaml: extends: there is no file .*nowhere.yaml"),
        ("{extends: ''}", "takes the path of a file"),
        ("{extends: mine.yaml}", "extends this file itself"),
        ("{extends: mine.yaml, name: b}", "extends this file itself"),
        ("{extends: base.yaml, name: b, training: {}}", "mine.yaml: training: {} changes nothing"),
        ("- a", "expected a mapping"),
    ],
)
def test_a_file_that_extends_none_is_refused(text, said, tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / "mine.yaml")


WILDCARDS = {"strategy": "fsdp2", "compressor": "int8", "world_size": "2", "link": "none", "seed": "0", "islands": ""}
ENDINGS = ("diverged", "skipped", "failed")
STEP = "step 4/10, loss 6.500, 120 ms/step, ratio 3.90, 8 s left"


def test_a_view_counts_jobs_and_names_what_runs(tmp_path, capsys):
    view = View(tmp_path)
    wildcards = {"strategy": "fsdp2", "compressor": "int8", "world_size": "2", "link": "none", "seed": "0"}
    for event in (
        {"event": "run_info", "jobs": {"shards": 1, "train": 1, "trace": 1}},
        {"event": "job_info", "job": 1, "rule": "shards", "wildcards": {}},
        {"event": "job_finished", "job": 1},
        {"event": "job_info", "job": 2, "rule": "train", "wildcards": wildcards},
    ):
        view.take(event)
    run = tmp_path / "runs" / RUN
    run.mkdir(parents=True)
    (run / "progress.json").write_text(
        '{"step": 4, "steps": 10, "loss": 6.5, "step_ms": 120, "ratio": 3.9, "left_s": 8}'
    )
    assert view.line() == f"1/3 jobs | train {RUN}: {STEP}"
    failed = {"event": "job_error", "job": 2, "rule": "train", "output": [str(run / "record.json")], "log": ["a.log"]}
    view.take(failed)
    assert view.line() == "1/3 jobs"
    assert list(map(str, view.failures.values())) == [f"train {RUN}: see a.log"]
    started = {"event": "job_info", "job": 2, "rule": "train", "wildcards": wildcards}
    view.take(started)  # once more
    (run / "train.failed.json").write_text('{"exit_code": 2, "reason": "a bad option", "last_step": null}')
    view.take(failed)
    assert list(view.failures.values()) == [(Job("train", Run.of(wildcards | {"islands": ""})), "a bad option", 2)]
    view.take(started)
    view.take({"event": "job_finished", "job": 2})
    assert not view.failures
    assert capsys.readouterr().out == f"1/3 shards\nfailed: train {RUN}; its log: a.log\n2/3 train {RUN}: {STEP}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder with an experiment; jobs are stubs."""
    shutil.copy(STUB, tmp_path / "gradwire")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    Path("experiment.yaml").write_text(yaml.safe_dump(GOOD))
    return tmp_path


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradwire", "run", *options], capture_output=True, text=True, timeout=120
    )


def test_an_experiment_runs_in_an_empty_folder(folder):
    done = run("--cores", "2")
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert lines[0] == " 1/11 download" and lines[10] == "11/11 report"
    assert f"train {RUN}" in done.stdout and lines[-1] == "page: results/mine/report.html"
    assert len(lines) <= 11 + 24  # and one screen
    assert "localrule summarize" in (folder / "results/mine/logs/snakemake.log").read_text()


def test_it_does_not_end_well_where_a_run_has_no_result(tmp_path):
    rows = [without_measurements(Run.of(WILDCARDS), status, "its record is of another run") for status in ENDINGS]
    (tmp_path / "results.jsonl").write_text(jsonl(rows[:2]))
    check_results(tmp_path)
    (tmp_path / "results.jsonl").write_text(jsonl(rows))
    with pytest.raises(RunFault, match=f"1 run has no result: {RUN}: its record is of another run"):
        check_results(tmp_path)


def test_what_cannot_be_read_is_moved_aside(tmp_path, capsys):
    run = tmp_path / "runs" / RUN
    run.mkdir(parents=True)
    (run / "record.json").write_text("\0" * 9)
    (run / "profile.json").write_text('{"schema_version": 0}')
    assert look(tmp_path)[Run.of(WILDCARDS)].name == "failed"
    move_aside(tmp_path)
    assert sorted(path.name for path in run.iterdir()) == ["profile.json", "record.json.unusable"]
    assert "record.json is not valid JSON" in capsys.readouterr().out


def test_a_source_with_nothing_in_it_is_refused_before_snakemake_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for path, said in {"texts": "no folder that holds any", "texts/**/*.gz": "no glob that matches a file"}.items():
        dataset = {"source": "text", "data_path": path}
        Path("experiment.yaml").write_text(yaml.safe_dump({**GOOD, "dataset": dataset}))
        assert cli.main(["run"]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("gradwire run: data_path: ") and said in printed and printed.count("\n") == 1
        assert {path.name for path in tmp_path.iterdir()} == {"texts", "experiment.yaml"}


def saved(folder):
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"body": ["one", "two"]}).save_to_disk(folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "write", "said"),
    [
        (
            "text",
            lambda folder: (folder / "a.txt").write_bytes(bytes(range(256))),
            "given/a.txt cannot be read as text in utf-8",
        ),
        ("datasets", saved, "given, split train has no column text; it has body"),
    ],
    ids=["binary file", "no such column"],
)
def test_a_source_that_cannot_be_read_is_answered_with_its_reason(source, write, said, folder):
    stub = (folder / "gradwire").read_text()
    (folder / "gradwire").write_text(stub.replace("download*)", f'download*) exec {sys.executable} -m gradwire "$@";'))
    (folder / "given").mkdir()
    write(folder / "given")
    Path("experiment.yaml").write_text(yaml.safe_dump({**GOOD, "dataset": {"source": source, "data_path": "given"}}))
    done = run("--cores", "2")
    assert done.returncode == 2 and done.stderr.startswith(f"gradwire run: download: {said}"), done
    assert done.stdout == "failed: download; its log: results/mine/logs/download.log\n"


@pytest.mark.full
def test_a_failed_job_is_named_and_the_others_are_done(folder):
    listed = "11 jobs: 1 download, 1 tokenizer, 1 shards, 2 train, 2 perplexity, 2 trace, 1 summarize, 1 report\n"
    assert run("-n").stdout == run("experiment.yaml", "--", "-n").stdout == listed
    assert not (folder / "results").exists()
    Path("experiment.yaml").write_text(yaml.safe_dump({**GOOD, "grid": [GOOD["grid"], {"world_sizes": [4000]}]}))
    done = run()
    assert done.returncode == 3
    assert "failed: train fsdp2/int8/ws4000/none/seed0; its log: results/mine/logs/train/" in done.stdout
    assert (folder / "results/mine/runs" / RUN / "record.json").exists()
    assert re.match(r"gradwire run: .* Log: results/mine/logs/snakemake\.log\. The same command", done.stderr)
    Path("experiment.yaml").write_text(yaml.safe_dump(GOOD))
    assert run().returncode == 0
    assert run().stdout.startswith("nothing to do: every job is done\n")
    record = folder / "results/mine/runs" / RUN / "record.json"
    record.write_text('{"schema_version": 1,')
    done = run()
    assert done.returncode == 0 and "train" in done.stdout
    moved = f"moved to results/mine/runs/{RUN}/record.json.unusable: results/mine/runs/{RUN}/record.json is not valid"
    assert done.stdout.startswith(moved)
    assert record.read_text() == '{"schema_version": 0}\n'


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "inherited"),
    [(signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)],
    ids=["terminal", "scheduler", "background"],
)
def test_a_signal_stops_snakemake_and_its_jobs(folder, number, inherited):
    """A terminal's Ctrl-C reaches the whole group; a scheduler's SIGTERM this process only.

    A script's background jobs ignore Ctrl-C, and so do their children.
    """
    stub = (folder / "gradwire").read_text()
    (folder / "gradwire").write_text(stub.replace("download*)", "download*) touch begun; sleep 61;"))
    command = [sys.executable, "-m", "gradwire", "run"]
    with subprocess.Popen(
        command,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
    ) as process:
        while not (folder / "begun").exists():
            time.sleep(0.1)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(60) == 75
        assert "stopped; the same command goes on" in process.stderr.read()
    (folder / "gradwire").write_text(stub)
    assert run().returncode == 0


@pytest.mark.full
def test_an_experiment_on_gpus_ends_at_once_where_there_are_none(folder, monkeypatch):
    (folder / "nvidia-smi").write_text("#!/bin/sh\n")  # lists none
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("experiment.yaml").write_text(yaml.safe_dump({**GOOD, "training": {**GOOD["training"], "device": "cuda"}}))
    done = run("--cores", "2")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith("gradwire run: training.device is cuda and there is no GPU here: ")
    dry = run("--dry_run")
    assert dry.returncode == 0 and not Path("results/data").exists()
    assert dry.stdout.endswith(" 1 report\ntrainings:\n    fsdp2, W = 2, seed 0: int8, none\n")


@pytest.mark.full
def test_verbose_shows_snakemakes_own_output(folder):
    done = run("--verbose", "experiment.yaml", "--", "--until", "tokenizer")
    assert done.returncode == 0 and "rule tokenizer:" in done.stderr
    assert not (folder / "results/mine/report.html").exists()
