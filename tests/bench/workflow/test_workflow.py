"""The DAG on a copy of the checkout: a cell that fails, and what each change re-runs.

Jobs are stubs that write what their rules declare; one experiment with real ones is part of `make test-full`.

Of `workflow/dry_run.py`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator

import pytest
from jobs import job_table
from snakemake_interface_logger_plugins.common import LogEvent
from snakemakes import SMALL, Checkout

from gradwire.bench.config import Run
from gradwire.bench.launch.links import probe
from gradwire.bench.workflow.dry_run import ShortDryRun, trainings

TOO_LARGE = 4000  # ranks: more than the corpus has samples, so that this run fails before any rank starts

BROKEN = {**SMALL, "grid": [*SMALL["grid"], {"compressors": ["none"], "world_sizes": [TOO_LARGE]}]}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Iterator[Checkout]:
    copy = Checkout(tmp_path_factory.mktemp("checkout"))
    yield copy
    copy.snakemakes.close()


@pytest.mark.parametrize("timing", [True, False])
def test_runs_of_a_timing_experiment_have_the_machine_for_themselves(timing, checkout):
    grid = [{"strategies": ["fsdp2"], "world_sizes": [1]}]
    checkout.configure({**SMALL, "timing": timing, "grid": grid, "gradients": None})
    printed = checkout.snakemake("-n", "-p").stdout
    assert printed.count(" train ") >= 2
    assert (printed.count("--alone"), printed.count("threads: 2")) == ((2, 2) if timing else (0, 0))


def test_simulated_ranks_have_one_process_and_no_trace(checkout):
    grid = [{"strategies": ["ddp"], "world_sizes": [8], "simulated": True}]
    checkout.configure({**SMALL, "grid": grid, "gradients": None, "training": {"profile": True}})
    printed = checkout.snakemake("-n", "-p", "--config", "ranks_per_node=1").stdout
    trainings = [line for line in printed.splitlines() if " train " in line]
    assert trainings
    assert all("--world_size 1 " in line and "--simulated_ranks 8 " in line for line in trainings)
    assert "gradwire trace" not in printed
    assert "mpi=srun" not in printed


def test_every_command_knows_its_attempt(checkout):
    checkout.configure(SMALL)
    shown = checkout.snakemake("-n", "-p")
    commands = [line for line in shown.stdout.splitlines() if "Shell command" in line]
    assert len(commands) > 8
    assert [
        line
        for line in commands
        if "gradwire" in line and "--attempt 1" not in line and not re.search("gradwire (summarize|report) ", line)
    ] == []


def test_nodes_follow_from_the_ranks_that_a_node_takes(checkout):
    checkout.configure(SMALL)
    shown = checkout.snakemake("-n", "-p", "--config", "ranks_per_node=1")
    printed = shown.stdout
    assert "nodes=2, mpi=srun, tasks=2, tasks_per_gpu=0, cpus_per_task=1" in printed
    assert "--nodes 2 --world_size 2" in printed
    shown = checkout.snakemake("-n", "-p", "--config", "ranks_per_node=2")
    assert "mpi=srun" not in shown.stdout
    refused = checkout.snakemake("-n", "--config", "ranks_per_node=0")
    assert refused.returncode and "invalid ranks_per_node 0: set a positive integer" in refused.stdout


@pytest.mark.full
def test_the_default_experiment_lists_its_jobs(checkout, tmp_path):
    shown = checkout.snakemakes("-n", "--cores", "2", "--directory", str(tmp_path), "--configfile", "config.yaml")
    counts = job_table(shown.stdout)
    on_links = 0 if probe().reason else 8  # for times only
    of_cells = {"train": 28 + on_links, "trace": 28 + on_links, "perplexity": 28}
    of_gradients = dict.fromkeys(("grads_collect", "grads_aggregate", "grads_validate", "grads_query"), 1)
    once = dict.fromkeys(("all", "download", "tokenizer", "shards", "summarize", "report"), 1)
    assert counts == of_cells | of_gradients | once
    lines = shown.stdout.splitlines()
    assert len(lines) <= 40 and "rule train:" not in lines and lines.count("Job stats:") == 1
    both = "bf16-native, int8, local-adamw, local-muon, muon, none, onebit_adam"
    assert f"    ddp, W = 2, seeds 0, 1, 2: {both}" in lines and "    fsdp2, W = 1, seed 0: none" in lines


def test_trainings_of_a_dry_run_share_a_line_where_their_seeds_are_the_same():
    runs = [Run("ddp", label, 10, "none", seed) for label in ("none", "int8") for seed in (10, 9)]
    runs += [Run("ddp", "int8", 10, "none", 11), Run("ddp", "fp16", 10, "none", 10), Run("ddp", "fp16", 10, "none", 9)]
    runs += [Run("ddp", "none", 10, "10mbit", 3, islands=5), Run("ddp", "none", 9, "none", 3)]
    assert trainings(runs).splitlines() == [
        "    ddp, W = 9, seed 3: none",
        "    ddp, W = 10, seeds 9, 10: fp16, none",
        "    ddp, W = 10, seeds 9, 10, 11: int8",
        "    ddp, W = 10, 5 islands, 10mbit, seed 3: none",
    ]
    many = [Run("ddp", f"a-label-of-{n}-letters", 2, "none", 0) for n in range(10, 30)]
    assert max(map(len, trainings(many).splitlines())) <= 104 and trainings(many).count("a-label-of-") == 20


def test_a_dry_run_leaves_out_jobs_alone():
    """Errors and warnings stay, whatever event they come with."""
    wildcards = {"strategy": "ddp", "compressor": "int8", "world_size": "3", "link": "none", "seed": "1", "islands": ""}
    dry_run = ShortDryRun()

    def printed(message, event=None, **more):
        record = logging.LogRecord("snakemake", logging.INFO, "", 0, message, (), None)
        vars(record).update(event=event and LogEvent(event), **more)
        return [record.getMessage()] if dry_run.filter(record) else []

    assert printed("Job stats:\ntrain 1", "run_info") == ["Job stats:\ntrain 1"]
    for rule, of_rule in ("train", wildcards), ("all", {}):
        assert printed("a job", "job_info", rule_name=rule, wildcards=of_rule) == []
    for event in (None, *(event for event in LogEvent if event not in ("run_info", "job_info"))):
        assert printed("an error", event) == ["an error"], event
    assert printed("Job stats:\ntrain 1", "run_info") == ["Trainings:\n    ddp, W = 3, seed 1: int8\n"]
    reasons = printed("Reasons:\n    (check individual jobs above for details)\n    forced:\n        train")
    assert reasons == ["Reasons:\n    forced:\n        train"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_real_experiment_runs_and_fails_in_one_cell(checkout):
    checkout.configure({**BROKEN, "name": "real"})
    done = checkout.snakemake()
    assert done.returncode != 0
    results = checkout.folder / "results/real"
    rows = {(row["compressor"], row["world_size"]): row for row in checkout.results("real")}
    assert {key: row["status"] for key, row in rows.items()} == {
        ("none", 2): "ok",
        ("int8", 2): "ok",
        ("none", TOO_LARGE): "failed",
    }, done.stdout
    reason = rows["none", TOO_LARGE]["reason"]
    assert f"{TOO_LARGE} ranks" in reason
    assert rows["none", TOO_LARGE]["val_ppl"] is None
    assert reason in " ".join((results / "summary.md").read_text().split())
    page = (results / "report.html").read_text()
    assert "fsdp2/none/ws4000/none/seed0" in page
    assert f"{TOO_LARGE} ranks" in page
    assert rows["none", 2]["compression_ratio"] == 1.0
    assert rows["int8", 2]["bytes_compressed_total"] == rows["int8", 2]["bytes_closed_form_total"]
    assert rows["int8", 2]["comm_time_ms_total"] > 0
    gradients = results / "gradients/fsdp2/none/ws2/none/seed0"
    assert json.loads((gradients / "validation.json").read_text())["passed"]
    answer = json.loads((gradients / "dim16/query.json").read_text())
    assert answer["prompt"] == SMALL["gradients"]["query"] and len(answer["top"]) == 9
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}
    checkout.configure({**SMALL, "name": "real"})
    assert checkout.snakemake().returncode == 0
    assert checkout.jobs() == {}


def test_only_what_a_change_touches_is_run_again(checkout):
    # A run that fails leaves the other runs' results, and the table.
    checkout.configure(BROKEN)
    done = checkout.run()
    assert done.returncode != 0
    results = checkout.folder / "results/small"
    assert sorted(str(record.relative_to(results / "runs")) for record in results.rglob("record.json")) == [
        "fsdp2/int8/ws2/none/seed0/record.json",
        "fsdp2/none/ws2/none/seed0/record.json",
    ]
    assert (results / "summary.md").exists() and (results / "report.html").exists()

    # The next call reruns that cell and what waits for it, alone.
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}

    # Without it nothing is left but the table; then nothing at all.
    checkout.configure(SMALL)
    assert checkout.jobs() == {"summarize": 1, "report": 1, "all": 1}
    assert checkout.run().returncode == 0
    assert checkout.jobs() == {}

    # A lost record brings back its own chain and nothing of another's.
    record = checkout.folder / "results/small/runs/fsdp2/int8/ws2/none/seed0/record.json"
    kept = record.read_bytes()
    times = record.stat().st_atime_ns, record.stat().st_mtime_ns
    record.unlink()
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}
    record.write_bytes(kept)
    os.utime(record, ns=times)
    assert checkout.jobs() == {}

    # A new seed adds its own jobs only.
    checkout.configure({**SMALL, "grid": [{**SMALL["grid"][0], "seeds": [0, 1]}]})
    assert checkout.jobs() == {
        **dict.fromkeys(("train", "trace", "perplexity"), 2),
        **dict.fromkeys(("grads_collect", "grads_aggregate", "grads_validate", "grads_query"), 1),
        "summarize": 1,
        "report": 1,
        "all": 1,
    }
    checkout.configure(SMALL)

    # A new compressor adds its own cells; one that is taken away leaves the others as they are.
    checkout.configure({**SMALL, "compressors": {**SMALL["compressors"], "fp16": {}}})
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}
    checkout.configure({**SMALL, "compressors": {"none": {}}})
    assert checkout.jobs() == {"summarize": 1, "report": 1, "all": 1}

    # Another option of a compressor is for its own cell.
    checkout.configure({**SMALL, "compressors": {"none": {}, "int8": {"block": 64}}})
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}

    # Another way to train is for all cells, and for no data.
    checkout.configure({**SMALL, "training": {**SMALL["training"], "lr": 0.01}})
    changed = checkout.jobs()
    assert changed["train"] == 2 and not {"download", "tokenizer", "shards"} & changed.keys()
    checkout.configure(SMALL)

    # An edit re-runs what depends on it: the report trains nothing, a method retrains its own cells.
    checkout.edit("src/gradwire/bench/report/tables/table.py")
    assert checkout.jobs() == {"summarize": 1, "report": 1, "all": 1}
    checkout.edit("src/gradwire/comm/compressors/methods/int8.py")
    assert checkout.jobs() == {"train": 1, "trace": 1, "perplexity": 1, "summarize": 1, "report": 1, "all": 1}
    checkout.edit("src/gradwire/bench/training/loop.py")
    assert checkout.jobs()["train"] == 2
    assert "shards" not in checkout.jobs()


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (
            0,
            [],
            "device is cuda and there is no GPU here: `nvidia-smi` shows those of a machine. Run this on one with 2,",
        ),
        (4, ["--resources", "gpu=1"], "runs of 2 ranks need a GPU each and there are 1: "),
        (4, [], None),
    ],
)
def test_an_experiment_that_needs_more_gpus_than_there_are_ends_before_its_data(gpus, options, said, checkout):
    """A machine has as many GPUs as its `nvidia-smi` lists; jobs are stubs, and none uses a GPU."""
    lines = "".join(f"echo '{number}, GPU-{number}'\n" for number in range(gpus))
    (checkout.folder / "nvidia-smi").write_text(f"#!/bin/sh\n{lines}")
    (checkout.folder / "nvidia-smi").chmod(0o755)
    training = {**SMALL["training"], "device": "cuda"}
    grid = {"strategies": ["fsdp2"], "world_sizes": [1, 2], "compressors": ["none"]}
    checkout.configure({**SMALL, "name": "gpus", "training": training, "grid": [grid], "gradients": None})
    done = checkout.run(*options)
    results = checkout.folder / "results/gpus"
    if said is None:
        assert done.returncode == 0 and len([*results.rglob("record.json")]) == 2
        assert "gpu=2" in done.stdout
        shutil.rmtree(results)
    else:
        assert done.returncode == 2 and done.stdout.count(said) == 1 and not results.exists()
        assert "`world_sizes: [1]`" in done.stdout or gpus == 0
    (checkout.folder / "nvidia-smi").unlink()
    checkout.configure(SMALL)


def test_every_job_that_may_use_a_gpu_says_so(checkout):
    checkout.configure({**SMALL, "name": "gpus", "training": {**SMALL["training"], "device": "cuda"}})
    printed = checkout.snakemake("-n", "-p", "--resources", "gpu=2").stdout
    checkout.configure(SMALL)
    jobs = [job for job in re.split(r"\n\n+", printed) if "resources: " in job and "Shell command" in job]
    used = {re.search(r"rule (\w+):", job)[1]: job for job in jobs if re.search("--device (cuda|auto)", job)}
    assert {"train", "perplexity", "grads_collect", "grads_validate"} <= {*used}
    assert [name for name, job in used.items() if "gpu=" not in job or "--gpus " not in job] == []
    loading = "perplexity|grads validate|grads collect|grads query|train|norms"
    assert [job for job in jobs if re.search(f"-- ({loading}) ", job) and "--device " not in job] == []


def test_runs_on_links_are_left_out_where_there_can_be_none(checkout, tmp_path):
    checkout.configure({**SMALL, "grid": [{**SMALL["grid"][0], "links": ["none", "100mbit"]}]})
    here = {"none", "100mbit"} if probe().options is not None else {"none"}
    assert checkout.jobs()["train"] == 2 * len(here)
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    assert checkout.jobs(PATH=f"{tmp_path}:{os.environ['PATH']}")["train"] == 2
    checkout.configure(SMALL)


def test_a_bad_configuration_is_refused_when_it_is_read(checkout):
    checkout.configure({**SMALL, "compressors": {"int7": {}}})
    done = checkout.snakemake("-n")
    assert done.returncode != 0
    assert "unknown compressor 'int7'" in done.stdout and "Did you mean 'int8'" in done.stdout
    checkout.configure(SMALL)
