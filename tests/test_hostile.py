"""Numbers, paths and variables that no run can use: exit code 2, one message, nothing left behind.

Of `base/flags.py`, `base/strict.py`.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire import cli
from gradwire.base import flags
from gradwire.base.errors import BadInput
from gradwire.base.failures import RANK_FAILURES
from gradwire.base.flags import Number
from gradwire.base.rank_env import LOCAL_WORLD_SIZE, rank_options, ranks_here
from gradwire.base.strict import checked
from gradwire.bench import config
from gradwire.bench.command import parser_of
from gradwire.bench.launch import leases
from gradwire.comm.communication import Communication
from gradwire.comm.compressors import registry
from gradwire.comm.reduction import ReducerOptions
from gradwire.lm.models import causal

INTEGERS = ["-1", str(2**80)]  # what no flag takes, whatever it counts
FLOATS = ["nan", "inf", "-inf", "-1"]
WRITTEN = {"output", "output_dir", "output_path", "json", "tables"}  # what such flags are called


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", LOCAL_WORLD_SIZE, RANK_FAILURES):
        monkeypatch.delenv(name, raising=False)


def actions(command: str) -> list[argparse.Action]:
    parser = parser_of(command)
    return [action for action in parser._actions if action.dest not in ("help", "attempt", "debug")]


EVERY = [(command, action) for command in cli.COMMANDS for action in actions(command)]
NUMBERS = [(command, action) for command, action in EVERY if isinstance(action.type, Number)]


def named(case: tuple[str, argparse.Action]) -> str:
    return f"{case[0]} {case[1].dest}".replace(" ", "-")


def required(command: str, folder: Path, *but: str) -> list[str]:
    """The flags without which a command does not start; what they name does not exist."""
    words = ["--prompt", "x"] if command == "grads query" and "data_path" not in but else []  # one of three
    for action in actions(command):
        if action.option_strings and action.required and action.dest not in but:
            words += [
                f"--{action.dest}",
                "3" if isinstance(action.type, Number) else str(folder / "given" / action.dest),
            ]
    return words


def positional(command: str, folder: Path) -> list[str]:
    given = {"launch": ["--", "compressors"], "compare": [str(folder), str(folder)], "completion": ["bash"]}
    return given.get(command, [])


def left(folder: Path) -> set[str]:
    """The contents of a folder, apart from the failure files of commands, which are meant to be there."""
    return {str(path) for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".failed.json")}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command, which must be one line under exit code 2."""
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and len(printed.err) < 600, printed
    return printed.err


def test_every_number_of_every_command_has_bounds():
    of_training = set(config.Training.model_fields)  # pydantic looks at these
    open_ended = [
        named((command, action))
        for command, action in EVERY
        if action.type in (int, float) and not (command == "train" and action.dest in of_training)
    ]
    assert open_ended == []
    assert len(NUMBERS) > 50


@pytest.mark.parametrize("case", NUMBERS, ids=named)
def test_a_number_out_of_bounds_is_named(case, tmp_path, capsys):
    command, action = case
    for word in INTEGERS if action.type.kind is int else FLOATS:
        words = [*command.split(), *required(command, tmp_path, action.dest), f"--{action.dest}={word}"]
        printed = refused([*words, *positional(command, tmp_path)], capsys)
        assert printed.startswith(
            f"gradwire {command}: --{action.dest} is {float(word)}" if "n" in word else "gradwire "
        )
        assert f"--{action.dest} is " in printed and "it must be " in printed
    assert left(tmp_path) == set()


def fields(model: Any) -> Iterator[dict[str, Any]]:
    """Every part of a JSON schema."""
    if isinstance(model, dict):
        yield model
        model = list(model.values())
    for part in model if isinstance(model, list) else ():
        yield from fields(part)


@pytest.mark.parametrize("name", ["configuration", "cell", *registry.COMPRESSORS.built_in()])
def test_every_integer_of_the_configuration_has_bounds(name):
    schemas = {
        "configuration": [config.json_schema()],
        "cell": [ReducerOptions.model_json_schema(), Communication.model_json_schema()],
    }
    for part in fields(schemas.get(name) or [registry.option_schema(name)]):
        if part.get("type") == "integer" and "enum" not in part:
            assert ("maximum" in part or "exclusiveMaximum" in part) and "minimum" in part, part


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_fraction_of_the_configuration_is_finite(value):
    floats = [
        (kind, key)
        for kind in (config.Dataset, config.Training, *map(registry.method_class, registry.COMPRESSORS.built_in()))
        for key, field in kind.model_fields.items()
        if field.annotation in (float, float | None)
    ]
    assert len(floats) >= 14
    for kind, key in floats:
        with pytest.raises(BadInput, match=key):
            checked(kind, {key: value}, "")


TRAIN = {
    "--timeout 1e9": "--timeout is 1000000000.0; it must be at most 1e+06",
    f"--seed {2**63}": f"--seed is {2**63}; it must be at most {2**63 - 1}",
    "--lr inf": "lr must be a finite number, got Infinity",
    "--weight_decay inf": "weight_decay must be a finite number, got Infinity",
    "--label " + "x" * 5000: "have at most 100 characters",
    f'--comm_compress int8 --comm_config_json {{"block":{2**62}}}': "int8 option 'block'",
    f'--comm_compress onebit --comm_config_json {{"block":{2**80}}}': "onebit option 'block'",
    '--comm_compress topk --comm_config_json {"density":NaN}': "topk option 'density' is nan",
    '--comm_compress sketch --comm_config_json {"width":Infinity}': "sketch option 'width' is inf",
    f'--comm_compress int8 --comm_config_json {{"dense_steps":{2**63}}}': "dense_steps must be less than",
}  # fmt: skip
TOKENIZE = {
    f"--shard_size {10**8}": f"max_length 128 times shard_size {10**8} is {128 * 10**8} tokens per shard",
    f"--max_length {2**20} --shard_size {2**12}": f"is {2**32} tokens per shard; it must be at most {2**30}",
}
OTHERS = {
    "launch --world_size 2 --link inter-100mbit -- compressors": "Did you mean 'between-100mbit', of each island?",
    "launch --world_size 2 --link inside-fast -- compressors": "invalid rate 'fast'",
    "launch --world_size 2 --link 0.0000001bit -- compressors": "invalid rate '0.0000001bit'",
    f"launch --world_size 2 --link {'9' * 80}bit -- compressors": "invalid rate '9999",
    f"predict --world_size 4 --bandwidth {'0' * 80}1gbit": "invalid rate '0000",
    f"init --name {'x' * 5000}": "have at most 100 characters",
}
CASES = [
    *((f"train --data_path nowhere --output_dir OUT/run {flags}", expected) for flags, expected in TRAIN.items()),
    *((f"tokenize --data_path nowhere --output_dir OUT/run {flags}", expected) for flags, expected in TOKENIZE.items()),
    *((command.replace("download", "download --output OUT/c.json"), expected) for command, expected in OTHERS.items()),
]


@pytest.mark.parametrize(("command", "expected"), CASES, ids=[command[:60] for command, _ in CASES])
def test_a_number_that_no_run_can_use(command, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(command.replace("OUT", str(tmp_path)).split(), capsys)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x", "x" * 300])
@pytest.mark.parametrize("command", ["tokenize", "train", "grads collect"])
def test_an_output_folder_that_cannot_be_written(command, place, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    flag = "--output_path" if command == "grads collect" else "--output_dir"
    words = [*command.split(), *required(command, tmp_path, flag.removeprefix("--")), flag, str(tmp_path / place)]
    refused(words, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


FILES = {
    "download": "download --source pydocs --output",
    "init": "init --output",
    "perplexity": "perplexity --model_dir m --data_path d --output",
    "trace": "trace --run_dir . --output",
    "bench": "bench compressors --json",
}


@pytest.mark.parametrize("place", ["file/below", "/proc/x", ".", "/dev/null", "x" * 300])
@pytest.mark.parametrize("command", FILES)
def test_an_output_file_that_cannot_be_written(command, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    words = [*FILES[command].split(), place]
    assert f"{words[-2]}: " in refused(words, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("command", ["grads validate --output_dir", "grads aggregate --dim 3 --base_path"])
def test_a_run_folder_that_is_a_file(command, tmp_path, capsys):
    (tmp_path / "file").write_text("kept")
    assert "file is not a gradient collection: " in refused([*command.split(), str(tmp_path / "file")], capsys)
    assert (tmp_path / "file").read_text() == "kept"


def test_an_empty_path_is_no_output(capsys):
    assert "the path is empty" in refused(["train", "--data_path", "x", "--output_dir", ""], capsys)


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_a_cache_that_cannot_be_written(by, tmp_path, monkeypatch, capsys):
    (tmp_path / "corpus.json").write_text('[{"id": "a", "text": "b"}]')
    words = ["train", "--data_path", f"{tmp_path}/corpus.json", "--output_dir", f"{tmp_path}/run"]
    if by == "flag":
        words += ["--cache_dir", f"{tmp_path}/corpus.json"]
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/corpus.json")
    assert "--cache_dir" in refused(words, capsys)
    assert left(tmp_path) == {f"{tmp_path}/corpus.json"}


def test_launch_looks_at_the_outputs_and_numbers_of_its_command(tmp_path, capsys):
    launch = ["launch", "--world_size", "2", "--", "train", "--data_path", "nowhere", "--output_dir"]
    assert "/proc/x cannot be written" in refused([*launch, "/proc/x"], capsys)
    assert "--seed is -1" in refused([*launch, str(tmp_path), "--seed", "-1"], capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["train.failed.json"]


def test_a_check_leaves_nothing_but_the_folder_and_its_lock(tmp_path):
    assert cli.main(["tokenize", "--data_path", "nowhere", "--output_dir", f"{tmp_path}/a/b"]) == 2
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == {"tokenize.failed.json", ".lock"}


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(({name: value}, f"{name} in the environment is {value!r}; it must be an integer") for name, value in (
            ("RANK", "x"), ("RANK", ""), ("RANK", "1.0"), ("LOCAL_RANK", "one"), ("WORLD_SIZE", "2 3"),
            ("MASTER_PORT", "http"),
        )),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment is 0; it must be at least 1"),
        ({"RANK": "-1"}, "RANK in the environment is -1; it must be at least 0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT in the environment is 65536; it must be at most 65535"),
        ({"WORLD_SIZE": str(2**80)}, "it must be at most 65536"),
        ({"RANK": "3"}, "RANK is 3 and WORLD_SIZE is 3 in the environment; RANK must be less than WORLD_SIZE"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK is 5 and WORLD_SIZE is 2 in the environment"),
    ],
)  # fmt: skip
def test_an_environment_that_is_no_ranks(change, expected, tmp_path, monkeypatch, capsys):
    for name, value in (TORCHRUN | change).items():
        monkeypatch.setenv(name, value)
    given = {"world_size": None, "rank": None, "local_rank": None, "master_addr": None, "master_port": None}
    with pytest.raises(BadInput) as refusal:
        rank_options(argparse.Namespace(**given, backend="auto", device="cpu", timeout=60.0))
    assert expected in str(refusal.value)
    words = ["train", "--data_path", "nowhere", "--output_dir", str(tmp_path / "run"), "--device", "cpu"]
    assert expected in refused(words, capsys)  # at once: nobody waits for ranks that never come


@pytest.mark.parametrize("value", ["many", "0", "-2", str(2**80)])
def test_a_number_of_local_ranks_that_is_none(value, monkeypatch):
    monkeypatch.setenv(LOCAL_WORLD_SIZE, value)
    with pytest.raises(BadInput, match=f"{LOCAL_WORLD_SIZE} in the environment is '?{value}'?; it must be"):
        ranks_here(2)


def test_a_rank_without_a_number_reports_its_failure_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(RANK_FAILURES, str(tmp_path))
    monkeypatch.setenv("RANK", "x")
    printed = refused(["train", "--data_path", "nowhere", "--output_dir", str(tmp_path / "run")], capsys)
    assert "RANK" in printed and not list(tmp_path.glob("rank*.json"))


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/x"])
def test_a_folder_of_locks_that_cannot_be_written(place, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv(leases.FOLDER, str(tmp_path / place))
    printed = refused(["launch", "--world_size", "2", "--launcher", "spawn", "--", "compressors"], capsys)
    assert printed.startswith(f"gradwire launch: {leases.FOLDER}: ") and "cannot be written" in printed
    assert (tmp_path / "file").read_text() == "kept"


INPUTS = [
    (command, action)
    for command, action in EVERY
    if action.type is flags.path and action.option_strings and action.dest not in WRITTEN
]


@pytest.mark.parametrize("case", INPUTS, ids=named)
def test_an_input_that_cannot_be(case, tmp_path, capsys):
    command, action = case
    (tmp_path / "file").write_text("kept")
    for path in (f"{tmp_path}/{'x' * 300}", f"{tmp_path}/file/below", "/proc/x/y"):
        words = [*command.split(), *required(command, tmp_path, action.dest), f"--{action.dest}={path}"]
        printed = refused([*words, *positional(command, tmp_path)], capsys)
        assert "x" * 300 not in path or printed.startswith(f"gradwire {command}: --{action.dest}: ")


@pytest.fixture
def special(tmp_path):
    """A pipe without a writer, a socket and devices, and the word for each; opening or reading them may never end."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        yield {f"{tmp_path}/pipe": "pipe", f"{tmp_path}/socket": "socket", "/dev/zero": "device", "/dev/null": "device"}


@pytest.mark.parametrize("case", INPUTS, ids=named)
def test_an_input_that_never_ends(case, special, tmp_path, capsys):
    command, action = case
    for path, kind in special.items():
        words = [*command.split(), *required(command, tmp_path, action.dest), f"--{action.dest}={path}"]
        printed = refused([*words, *positional(command, tmp_path)], capsys)
        assert printed == (
            f"gradwire {command}: --{action.dest}: {path} is a {kind}, not a regular file: give a file on a disk.\n"
        )


def test_a_configuration_that_never_ends(special, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path, kind in special.items():
        (tmp_path / "mine.yaml").write_text(f"extends: {path}\nname: mine\n")
        for file in (path, "mine.yaml"):
            assert f"{path} is a {kind}, not a regular file" in refused(["run", file, "--dry_run"], capsys)
    with (tmp_path / "base.yaml").open("wb") as stream:
        stream.truncate(1 << 40)  # a TiB of zeros, and no block of the disk
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nname: mine\n")
    for words in (["run", "base.yaml"], ["run", "mine.yaml"], ["grads", "run", "--config_path", "base.yaml"]):
        words += ["--output_dir", "run"] if words[0] == "grads" else ["--dry_run"]
        assert "base.yaml has 1,099,511,627,776 bytes; at most 16,777,216 are read" in refused(words, capsys)


def test_a_model_and_a_corpus_whose_names_are_too_long():
    with pytest.raises(BadInput, match=r"--model: x+ cannot be read: File name too long"):
        causal.build("x" * 300, 258, 8, seed=1)
    with pytest.raises(BadInput, match=r"dataset: data_path: .* cannot be read: File name too long"):
        checked(config.Dataset, {"source": "json", "data_path": "x" * 300}, "dataset")
