"""`gradwire launch --elastic`: groups that are killed, by a cell or from outside, and the record of what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from data_samples import tokenize_words, values, write_corpus
from test_faults import flags, orphans

from gradwire.bench.launch.lighthouse import lighthouse

pytest.importorskip("torchft", reason="the extra elastic is not installed")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
GRADWIRE = (sys.executable, "-m", "gradwire")
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
H, ROUNDS = 3, 9
SLOW = [{"rank": number, "times": 10} for number in range(3)]  # a start takes seconds
CELL = {"method": "onebit", "comm_optimizer": "diloco", "H": H, "outer_lr": 1.0, "outer_momentum": 0.0}
TRAINING = {"model": "micro", "strategy": "naive", "batch_size": 2, "steps": H * ROUNDS, "warmup_steps": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    corpus = write_corpus(folder / "corpus.json", values(150))
    subprocess.run([*GRADWIRE, *tokenize_words(corpus, folder / "tokens", max_length=24)], check=True)
    return folder / "tokens/shards"


def training(shards: Path, output: Path, timeout: float = 60, **cell: object) -> list[str]:
    given = {"data_path": shards, "output_dir": output, "device": "cpu", "timeout": timeout, "eval_every": 0}
    return ["train", *flags({**given, **TRAINING, "comm_config_json": json.dumps({**CELL, **cell})})]


def start(bounds: str, *words: str) -> subprocess.Popen[str]:
    command = [*GRADWIRE, "launch", "--elastic", bounds, "--", *words]
    return subprocess.Popen(command, env=CLEAN, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    """What a launch that succeeds has said of its groups."""
    _, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    return "\n".join(line for line in stderr.splitlines() if line.startswith("gradwire launch:"))


def record_of(output: Path) -> dict:
    return json.loads((output / "record.json").read_text())


def test_a_killed_group_misses_rounds_and_returns(tmp_path, shards):
    faults = {"minimum": 2, "kill": [{"round": 2, "rank": 1}], "rejoin_after": 2, "slow": SLOW}
    said = finished(start("2:3", *training(shards, tmp_path / "run", faults=faults)))
    assert said.count("\n") == 0 and "group 1: was killed by SIGKILL" in said and "It starts again in 1 s." in said
    record = record_of(tmp_path / "run")
    everyone, without = [0, 1, 2], [0, 2]
    groups = [ended["groups"] for ended in record["rounds"]]
    missed = groups.count(without)  # more than it must if rounds are shorter than a start
    assert missed >= 2 and groups == [everyone] * 2 + [without] * missed + [everyone] * (ROUNDS - 2 - missed)
    assert groups[-1] == everyone
    assert [ended["step"] for ended in record["rounds"]] == [H * number + H - 1 for number in range(ROUNDS)]
    assert (record["restarts"], record["world_size"], record["val_ppl"] > 1) == (1, 3, True)
    assert 0 < record["goodput"] < 1 and 0 < record["stalled_s"] < record["training_s"]
    assert record["bytes_compressed_total"] == sum(ended["bytes"] for ended in record["rounds"])
    steps = pq.read_table(tmp_path / "run/steps.parquet").to_pydict()
    taken = {rank: [s for s, r in zip(steps["step"], steps["rank"], strict=True) if r == rank] for rank in everyone}
    assert taken[0] == taken[2] == [*range(H * ROUNDS)]
    assert taken[1] == [*range(2 * H + 1), *range((2 + missed) * H, H * ROUNDS)], "killed in the middle of a round"
    assert orphans(tmp_path) == []


def test_a_group_that_is_killed_from_outside_starts_again(tmp_path, shards):
    process = start("1:3", *training(shards, tmp_path / "run", faults={"slow": SLOW}))
    victim = None
    while victim is None:
        assert process.poll() is None, process.communicate()[1]
        victim = next((pid for pid in descendants(process.pid) if trains(pid, tmp_path / "run/groups")), None)
        time.sleep(0.1)
    os.kill(victim, signal.SIGKILL)
    assert finished(process).count("was killed by SIGKILL") == 1
    record = record_of(tmp_path / "run")
    assert record["restarts"] == 1
    assert record["rounds"][0]["groups"] == [0, 1, 2] and record["rounds"][-1]["step"] == H * ROUNDS - 1


def descendants(pid: int) -> list[int]:
    children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [process for child in map(int, children) for process in (child, *descendants(child))]


def trains(pid: int, folder: Path) -> bool:
    """Whether a process is a group, of those that have all ended a round."""
    try:
        named = Path(f"/proc/{pid}/comm").read_text().strip() == "rank0"
    except OSError:
        return False
    return named and [len(path.read_text().splitlines()) > H for path in folder.glob("*.jsonl")] == 3 * [True]


def test_too_few_groups_wait_with_a_message_and_end_in_time(tmp_path, shards):
    with lighthouse(2, 5.0) as (address, _):
        group = {"elastic": "2:2", "group_number": 1, "lighthouse": address, "quorum_timeout": 15, "timeout": 5}
        words = [*training(shards, tmp_path / "run"), *flags(group)]
        ended = subprocess.run([*GRADWIRE, *words], env=CLEAN, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 3
    assert "group 1 waits for a quorum of 2 groups or more." in ended.stderr
    assert "no quorum of 2 groups or more in 15 s" in ended.stderr.splitlines()[-1]


def test_all_groups_lost_end_the_run(tmp_path, shards):
    kills = [{"round": 1, "rank": number} for number in (0, 1)]
    process = start("1:2", *training(shards, tmp_path / "run", faults={"kill": kills}))
    _, stderr = process.communicate(timeout=900)
    assert process.returncode == 3
    assert "gradwire launch: too few groups are left (0, and the minimum is 1)" in stderr.splitlines()[-1]
    assert not (tmp_path / "run/record.json").exists()
