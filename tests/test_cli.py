"""The command line: commands, exit codes, and how a failure is reported.

Of `base/errors.py`, `base/failures.py`, `bench/command.py`, `bench/commands.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import Field
from torch.distributed import launch as torch_launch
from torch.distributed.run import config_from_args

from gradwire import __version__, cli
from gradwire.base.errors import BadInput, CheckFailed, GradwireError, RunFault, Stopped, listed
from gradwire.base.failures import RANK_FAILURES, reason, refuse_again
from gradwire.base.strict import Strict
from gradwire.bench.command import Command
from gradwire.bench.commands import Entry


class Options(Strict):
    size: int = Field(3, description="a number")


@pytest.fixture
def probe(monkeypatch, tmp_path):
    """Make the command `grads probe`, which does what it is given; its outputs go to the test's folder."""

    def make(main) -> Path:
        module = ModuleType("probe")
        module.Options = Options
        module.output_dir = lambda args: tmp_path
        module.main = main
        monkeypatch.setitem(sys.modules, "probe", module)
        monkeypatch.setitem(cli.COMMANDS, "grads probe", Entry("probe", "do what a test says"))
        return tmp_path / "grads_probe.failed.json"

    monkeypatch.delenv(RANK_FAILURES, raising=False)
    return make


def raising(error: BaseException):
    def main(options: Options) -> None:
        raise error

    return main


def test_usage_names_every_command_and_exit_code(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text and known.help in text for name, known in cli.COMMANDS.items())
    assert "75 stopped and resumable" in text
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"{__version__}\n")


MODEL = "--model_dir model --data_path shards"


@pytest.mark.parametrize("spelling", ["--local-rank", "--local_rank"])
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("train", "--data_path shards --output_dir run"),
        ("norms", f"{MODEL} --output_dir norms"),
        ("grads collect", f"{MODEL} --output_path rows --dim 64"),
    ],
)
def test_the_local_rank_that_torch_distributed_launch_passes_is_the_commands(name, flags, spelling):
    words = ["--nproc_per_node", "2", "-m", "gradwire", *name.split(), *flags.split()]
    *_, passed = config_from_args(torch_launch.parse_args(words))
    given = [word.replace("--local-rank=${local_rank}", f"{spelling}=1") for word in passed]
    command = Command(given[given.index("gradwire") + 1 :])
    assert given != passed and (command.name, command.arguments.local_rank) == (name, 1)


def test_an_unknown_command_gets_a_suggestion(capsys):
    assert cli.main(["trian", "--steps", "3"]) == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("gradwire: unknown command 'trian'. Did you mean 'train' or 'trace'?")
        and printed.count("\n") == 1
    )


def test_a_command_of_two_words_gets_its_arguments(probe):
    seen = []
    probe(lambda args: seen.append(args.size))
    assert cli.main(["grads", "probe", "--size", "7"]) == 0
    assert seen == [7]


@pytest.mark.parametrize("word", ["--vocab-size", "--vocab_size"])
@pytest.mark.parametrize("form", ["{} 300", "{}=300"])
def test_a_flag_may_have_dashes_or_underscores(word, form):
    words = f"tokenize --data-path a --output_dir b-c --no-tokenizer-only {form.format(word)}"
    command = Command(words.split())
    assert (command.arguments.vocab_size, command.arguments.output_dir) == (300, Path("b-c"))
    assert command.options == command.module.Options(data_path="a", output_dir="b-c", vocab_size=300)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("grads probe --siz 7", "gradwire grads probe: unknown argument '--siz'. Did you mean '--size'? See"),
        ("grads probe --size seven", "gradwire grads probe: argument --size: invalid int value: 'seven'. See"),
        ("grads probe seven", "gradwire grads probe: unknown argument 'seven'. See"),
        ("run --dry-runs", "gradwire run: unknown argument '--dry-runs'. Did you mean '--dry_run'"),
        ("run --core=2", "gradwire run: unknown argument '--core'. Did you mean '--cores'"),
        ("train --data_path a --output_dir b --stepz 3", "unknown argument '--stepz'. Did you mean '--steps'"),
        ("train --stepz 3", "gradwire train: unknown argument '--stepz'. Did you mean '--steps'"),
        ("train --steps 3", "gradwire train: the following arguments are required: --data_path, --output_dir. See"),
    ],
)
def test_bad_arguments_are_answered_in_one_line(probe, words, said, capsys):
    probe(lambda args: None)
    assert cli.main(words.split()) == 2
    printed = capsys.readouterr().err
    name = " ".join(words.split()[: 2 if words.startswith("grads") else 1])
    assert said in printed and printed.endswith(f"See `gradwire {name} --help`.\n")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("names", "text"),
    [("", ""), ("abc", "a, b, c"), ("abcd", "a, b, c and 1 more"), ("abcdef", "a, b, c and 3 more")],
)
def test_a_list_of_names_counts_those_that_it_leaves_out(names, text):
    assert listed([*names]) == text


@pytest.mark.parametrize(
    ("error", "code"),
    [(CheckFailed("row 3 is not its id's.", step=None), 1), (RunFault("disk full.", step=9), 3), (Stopped("bye."), 75)],
)
def test_our_own_errors_are_one_line_and_a_file(probe, capsys, error: GradwireError, code):
    file = probe(raising(error))
    assert cli.main(["grads", "probe"]) == code
    assert capsys.readouterr().err == f"gradwire grads probe: {error}\n"
    written = json.loads(file.read_text())
    assert (written["verb"], written["reason"], written["exit_code"], written["last_step"], written["rank"]) == (
        *("grads probe", str(error), code, error.step),
        None,
    )


def test_an_unexpected_error_says_so_and_its_file_keeps_the_traceback(probe, capsys):
    file = probe(raising(KeyError("colour")))
    assert cli.main(["grads", "probe"]) == 3
    printed = capsys.readouterr().err
    assert printed.startswith("gradwire grads probe: KeyError: 'colour'\n") and "--debug" in printed
    assert "Traceback" not in printed
    kept = json.loads(file.read_text())
    assert kept["reason"] == "KeyError: 'colour'" and kept["traceback"].count("Traceback") == 1


@pytest.mark.parametrize("error", [KeyError("colour"), BadInput("no such colour.")])
def test_debug_shows_where_any_failure_happened(probe, capsys, error):
    probe(raising(error))
    assert cli.main(["grads", "probe", "--debug"]) == getattr(error, "exit_code", 3)
    printed = capsys.readouterr().err
    assert printed.count("Traceback") == 1 and printed.endswith(f"gradwire grads probe: {reason(error)}\n")


def test_an_interrupt_is_one_line(probe, capsys):
    probe(raising(KeyboardInterrupt()))
    assert cli.main(["grads", "probe"]) == 3
    assert capsys.readouterr().err == "gradwire grads probe: KeyboardInterrupt\n"


def test_success_removes_the_failure_file_and_another_code_does_not(probe):
    file = probe(raising(RunFault("disk full.")))
    cli.main(["grads", "probe"])
    probe(lambda args: 1)
    assert cli.main(["grads", "probe"]) == 1 and file.exists()
    probe(lambda args: None)
    assert cli.main(["grads", "probe"]) == 0 and not file.exists()


def test_a_rank_leaves_its_message_to_the_launcher(probe, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(RANK_FAILURES, str(tmp_path / "ranks"))
    monkeypatch.setenv("RANK", "4")
    file = probe(raising(RunFault("disk full.", step=9)))
    assert cli.main(["grads", "probe"]) == 3
    assert capsys.readouterr().err == "" and not file.exists()
    written = json.loads((tmp_path / "ranks" / "rank4.json").read_text())
    assert (written["rank"], written["reason"], written["last_step"], written["traceback"]) == (4, "disk full.", 9, "")


def test_only_bad_input_is_refused_again(tmp_path):
    refuse_again(tmp_path, "train")
    (tmp_path / "train.failed.json").write_text('{"exit_code": 3, "reason": "a disk was full"}')
    refuse_again(tmp_path, "train")
    (tmp_path / "train.failed.json").write_text('{"exit_code": 2, "reason": "a bad option"}')
    with pytest.raises(GradwireError, match="a bad option"):
        refuse_again(tmp_path, "train")


def test_bad_input_is_not_tried_again_by_any_command(probe, capsys):
    failure = probe(raising(BadInput("no such thing.")))
    assert cli.main(["grads", "probe"]) == 2
    probe(lambda args: None)
    assert cli.main(["grads", "probe", "--attempt", "2"]) == 2
    assert capsys.readouterr().err == 2 * "gradwire grads probe: no such thing.\n"
    assert cli.main(["grads", "probe"]) == 0 and not failure.exists()


def test_a_fault_is_tried_again(probe):
    probe(raising(RunFault("the disk was full.")))
    assert cli.main(["grads", "probe"]) == 3
    probe(lambda args: None)
    assert cli.main(["grads", "probe", "--attempt", "2"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["download", "--source", "pydoc", "--output", "x.json"], "unknown --source 'pydoc'. Did you mean 'pydocs'?"),
        (["train", "--strategy", "fsdp22"], "unknown --strategy 'fsdp22'. Did you mean 'fsdp2'"),
    ],
)
def test_an_unknown_choice_is_one_message_with_the_nearest_name(words, message, capsys):
    assert cli.main(words) == 2
    printed = capsys.readouterr().err
    assert message in printed and "Available: " in printed and len(printed.splitlines()) == 1
