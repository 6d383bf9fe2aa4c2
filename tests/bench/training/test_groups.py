"""Groups that may be lost: what their files say of a run, and the flags that are refused before any of them starts."""

from __future__ import annotations

import json
import socket
import sys

import pytest
from data_samples import tokenize_words, values, write_corpus

from gradwire import cli
from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell
from gradwire.bench.launch import elastic
from gradwire.bench.training.faults import GroupFaults
from gradwire.bench.training.group import Group, covered, history, parts
from gradwire.bench.training.settings import Options, settings_of

LOCAL = {"method": "onebit", "comm_optimizer": "diloco", "H": 4}


def step(number: int, began: float, ms: float, optimizer_ms: float, ended: dict | None = None) -> dict:
    return {"step": number, "began": began, "step_ms": ms, "optimizer_ms": optimizer_ms, "round": ended}


def ended(number: int, groups: list[int], sent: int, attempts: int = 1, seconds: float = 0.5) -> dict:
    return {"step": number, "groups": groups, "attempts": attempts, "seconds": seconds, "sent": sent, "dropped": 0}


def test_the_history_of_a_run_counts_what_a_mean_has_and_nothing_else():
    """Rounds of one step. Group 1 trains twice in vain: it is lost in the second round, and misses the third's mean."""
    lines = {
        (0, 0): [
            step(0, 100.0, 3000, 1000, ended(0, [0, 1], 7)),
            step(1, 103.0, 7000, 5000, ended(1, [0], 11, attempts=2, seconds=4.5)),
            step(2, 110.0, 3000, 1000, ended(2, [0], 0)),
        ],
        (1, 0): [step(0, 100.5, 2500, 500, ended(0, [0, 1], 5)), step(1, 103.25, 1000, 250)],
        (1, 1): [step(2, 110.5, 3000, 500, ended(2, [], 3, attempts=3))],
    }
    made = history(lines, 2)
    assert [tuple(made["rounds"][index].values()) for index in range(3)] == [
        (0, [0, 1], 1, 0.5, 12),
        (1, [0], 2, 4.5, 11),
        (2, [0], 3, 0.5, 3),
    ]
    assert (made["restarts"], made["training_s"]) == (1, 13.5)
    # trained by anybody: 100 to 102.5, 103 to 105, 110 to 113
    assert made["stalled_s"] == pytest.approx(13.5 - 2.5 - 2.0 - 3.0)
    assert made["goodput"] == pytest.approx((2.0 + 2.0 + 2.0 + 2.0) / (2 * 13.5))


def test_on_a_gpu_without_phases_a_round_takes_what_its_average_took():
    lines = {(0, 0): [step(0, 5.0, 3000, 0.0, ended(0, [0], 7, seconds=1.25)) | {"optimizer_ms": None}]}
    assert history(lines, 1)["goodput"] == pytest.approx(1.75 / 3)


def test_spans_that_overlap_count_once():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.5), (1.5, 2.0)]) == 4.5


def test_rows_of_all_starts_are_a_groups_and_a_cut_line_is_none(tmp_path):
    group = object.__new__(Group)
    object.__setattr__(group, "run_folder", tmp_path)
    (tmp_path / "groups").mkdir()
    (tmp_path / "environment").mkdir()
    written = {"0.0": [0, 1], "1.0": [0], "1.1": [1], "10.0": [1]}
    for name, steps in written.items():
        rows = "".join(json.dumps({"step": number, "rank": int(name.split(".")[0])}) + "\n" for number in steps)
        (tmp_path / f"groups/{name}.jsonl").write_text(rows + '{"step": 9, "ra' * (name == "1.0"))
    for number in (0, 1, 10):
        (tmp_path / f"environment/rank{number}.json").write_text(json.dumps({"node": number}))
    lines = group.lines()
    assert {key: [row["step"] for row in rows] for key, rows in lines.items()} == {
        (0, 0): [0, 1],
        (1, 0): [0],
        (1, 1): [1],
        (10, 0): [1],
    }
    mine = {"rows": [{"step": 1, "rank": 1, "val_loss": 2.5}], "memory": {}}
    ranks = parts(lines, mine, tmp_path)
    assert [[row["step"] for row in rank["rows"]] for rank in ranks] == [[0, 1], [0, 1], [1]]
    assert [rank["environment"]["node"] for rank in ranks] == [0, 1, 10]
    assert ranks[1]["rows"][-1]["val_loss"] == 2.5


def faults_of(number: int, start: int, faults: dict, tmp_path, steps: int = 40) -> GroupFaults:
    cell = json.dumps({**LOCAL, "faults": faults})
    flags = {"data_path": tmp_path, "output_dir": tmp_path, "comm_config_json": cell, "steps": steps}
    settings = settings_of(Options(**flags, strategy="naive", elastic="1:3"))
    group = object.__new__(Group)
    for name, value in {"rank": number, "start": start, "run_folder": tmp_path}.items():
        object.__setattr__(group, name, value)
    return GroupFaults(settings, group)


@pytest.fixture
def installed(monkeypatch):
    """As if torchft were."""
    monkeypatch.setattr(elastic, "find_spec", lambda name: name)


def test_a_group_is_killed_in_the_middle_of_its_rounds_once_each(tmp_path, installed, monkeypatch):
    killed = []
    monkeypatch.setattr("os.kill", lambda *_: killed.append(step))
    kills = [{"round": 5, "rank": 1}, {"round": 2, "rank": 1}, {"round": 3, "rank": 2}]
    for number, start, expected in [(1, 0, [10, 22]), (1, 1, [22]), (1, 2, []), (2, 0, [14]), (0, 0, [])]:
        killed.clear()
        faults = faults_of(number, start, {"kill": kills}, tmp_path)
        for step in range(40):
            faults.kill(step)
        assert killed == expected


def test_a_group_that_returns_waits_for_the_last_round_that_it_misses(tmp_path, installed, monkeypatch):
    waits = []
    (tmp_path / "groups").mkdir()

    def sleep(_: float) -> None:
        waits.append(len(waits))
        (tmp_path / "groups/0.0.jsonl").write_text("".join(json.dumps({"step": number}) + "\n" for number in waits))

    monkeypatch.setattr("time.sleep", sleep)
    faults = {"kill": [{"round": 2, "rank": 1}], "rejoin_after": 3}
    faults_of(1, 1, faults, tmp_path).wait_to_return()
    assert len(waits) == 16, "rounds 2, 3 and 4 are missed, and the last one begins after 16 steps"
    for number, start in [(1, 0), (1, 2), (0, 1)]:  # not killed yet, killed by something else, another group
        faults_of(number, start, faults, tmp_path).wait_to_return()
    assert len(waits) == 16


def test_a_kill_in_a_round_that_the_run_does_not_have_is_refused(tmp_path, installed):
    with pytest.raises(BadInput, match="the 8 steps of the run do not reach round 2"):
        faults_of(1, 0, {"kill": [{"round": 2, "rank": 1}]}, tmp_path, steps=8)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


LAUNCH = ["launch", "--elastic"]
REFUSED = {
    "no maximum": ([*LAUNCH, "2", "--"], "--elastic 2: give MIN:MAX, the fewest groups that train and all groups"),
    "upside down": ([*LAUNCH, "4:2", "--"], "--elastic 4:2: give MIN:MAX"),
    "none": ([*LAUNCH, "0:2", "--"], "--elastic 0:2: give MIN:MAX"),
    "neither": (["launch", "--"], "launch needs --world_size N, the number of ranks."),
    "several ranks": ([*LAUNCH, "1:2", "--world_size", "2", "--"], "groups of one rank each: omit --world_size 2."),
    "link": ([*LAUNCH, "1:2", "--link", "100mbit", "--"], "without --link: omit it."),
    "launcher": ([*LAUNCH, "1:2", "--launcher", "spawn", "--"], "without --launcher: omit it."),
}
FLAGS = {
    "checkpoints": (
        ["--checkpoint_every", "5"],
        "--checkpoint_every needs ranks that all stay; omit it, or --elastic.",
    ),
    "simulated": (["--simulated_ranks", "2"], "--simulated_ranks needs ranks that all stay"),
    "gradients": (
        ["--comm_config_json", "{}"],
        "meet at the end of a round of comm_optimizer diloco, sparseloco, muloco",
    ),
    "streaming": (
        ["--comm_config_json", json.dumps({**LOCAL, "streaming": {"fragments": 2}})],
        "without streaming and embeddings, and this cell has none.",
    ),
    "no number": ([], "--elastic needs --group_number and --lighthouse"),
    "number": (["--group_number", "2", "--lighthouse", "http://127.0.0.1:1"], "--elastic 1:2 has groups 0 to 1."),
    "no lighthouse": (["--group_number", "1", "--lighthouse", "LIGHTHOUSE"], "nobody answers there"),
    "no address": (["--group_number", "1", "--lighthouse", "node0:x"], "--lighthouse node0:x: nobody answers there"),
}


def train(tmp_path, *flags: str) -> list[str]:
    words = ["train", "--data_path", str(tmp_path / "tokens/shards"), "--output_dir", str(tmp_path / "run")]
    cell = ["--comm_config_json", json.dumps(LOCAL), "--steps", "9", "--device", "cpu", "--strategy", "naive"]
    return [*words, *cell, "--model", "micro", "--batch_size", "2", *flags]


@pytest.mark.parametrize("case", REFUSED)
def test_a_launch_of_groups_that_cannot_be_is_one_message(case, tmp_path, capsys, installed):
    words, message = REFUSED[case]
    assert cli.main([*words, *train(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/groups").exists()


@pytest.mark.parametrize("case", FLAGS)
def test_a_group_that_cannot_be_is_one_message(case, tmp_path, capsys, installed):
    corpus = write_corpus(tmp_path / "corpus.json", values(60))
    assert cli.main(tokenize_words(corpus, tmp_path / "tokens")) == 0
    capsys.readouterr()
    flags, message = FLAGS[case]
    flags = [flag.replace("LIGHTHOUSE", f"http://127.0.0.1:{free_port()}") for flag in flags]
    assert cli.main([*train(tmp_path), "--elastic", "1:2", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/groups").exists()


@pytest.mark.skipif("torchft" in sys.modules, reason="torchft is installed")
def test_a_launch_of_groups_names_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(elastic, "find_spec", lambda name: None)
    assert cli.main([*LAUNCH, "1:2", "--", *train(tmp_path)]) == 2
    assert "--elastic needs torchft: pip install 'gradwire[elastic]'." in capsys.readouterr().err


def test_a_cell_with_faults_gives_back_its_mapping_and_needs_groups(tmp_path, capsys):
    faults = {"kill": [{"round": 7, "rank": 2}], "rejoin_after": 3}
    cell = Cell.parse("lost", {**LOCAL, "faults": faults})
    assert cell.flat()["faults"] == faults and Cell.parse("lost", cell.flat()) == cell
    words = train(tmp_path, "--comm_config_json", json.dumps(cell.flat()))
    assert cli.main(words) == 2
    assert "has faults, of groups that `gradwire launch --elastic` starts" in capsys.readouterr().err
