"""Completion in a real bash, and scripts for the other shells."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradwire import cli, completion
from gradwire.compressors import available


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """A function that returns what bash offers for the words typed so far, the last one unfinished."""
    file = tmp_path_factory.mktemp("completion") / "gradwire.bash"
    file.write_text(completion.script("bash"))

    def offered(*words: str) -> list[str]:
        typed = " ".join(f"'{word}'" for word in words)
        lines = [
            f"source {file}",
            f"COMP_WORDS=(gradwire {typed}); COMP_CWORD={len(words)}",
            "$(complete -p gradwire | sed 's/.*-F \\([^ ]*\\).*/\\1/') gradwire",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        done = subprocess.run(
            ["bash", "--norc", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, cwd=file.parent
        )
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.split())

    return offered


def test_every_verb_is_offered(bash):
    assert set(bash("")) >= {name.split()[0] for name in cli.VERBS}
    assert bash("summ") == ["summarize"]


def test_verbs_of_two_words_are_offered_below_the_first(bash):
    assert set(bash("grads", "")) >= {name.split()[1] for name in cli.VERBS if name.startswith("grads ")}


def test_flags_and_their_values_are_offered(bash):
    assert bash("train", "--comm_con") == ["--comm_config_json"]
    assert bash("train", "--strategy", "fs") == ["fsdp1", "fsdp2"]
    assert bash("train", "--comm_compress", "t") == [name for name in available() if name.startswith("t")]


def test_files_are_offered_where_a_path_is_wanted(bash):
    assert bash("trace", "--run_dir", "/us") == ["/usr"]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_verb_prints_a_script_for_each_shell(capsys, shell):
    assert cli.main(["completion", shell]) == 0
    assert "--comm_config_json" in capsys.readouterr().out


def test_another_shell_is_refused(capsys):
    assert cli.main(["completion", "bahs"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bash" in error


def test_without_shtab_the_message_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install 'gradwire[completion]'" in capsys.readouterr().err
