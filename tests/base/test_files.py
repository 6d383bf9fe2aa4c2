"""Files appear whole or not at all, and what killed processes leave is removed; what living ones write is not."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.base import files
from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_folder, atomic_write, lock, remove_leftovers, write_text

WRITER = """
import sys
from pathlib import Path
from gradwire.base.files import atomic_folder, atomic_write
with atomic_write(Path(sys.argv[1])) as part, atomic_folder(Path(sys.argv[2])) as folder:
    part.write_text(sys.argv[3])
    (folder / "content").write_text(sys.argv[3])
    print("writing", flush=True)
    sys.stdin.read()
"""


def writing(*words: object) -> subprocess.Popen[bytes]:
    """A process that is in the midst of writing a file and a folder; it goes on when its input ends."""
    words = (sys.executable, "-c", WRITER, *map(str, words))
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    return process


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    file, folder = tmp_path / "rows[1].pt", tmp_path / "model"
    killed, living, other = (
        writing(file, folder, "killed"),
        writing(file, folder, "living"),
        writing(tmp_path / "rows[1].pt.more", tmp_path / "mode", "other"),
    )
    for process in (killed, other):
        process.kill()
        process.communicate()
    assert len(list(tmp_path.glob("*.part"))) == 6

    write_text(file, "mine")
    with atomic_folder(folder) as part:
        (part / "content").write_text("mine")
    assert file.read_text() == (folder / "content").read_text() == "mine"
    left = {path.name[: -len(".01234567.part")] for path in tmp_path.glob("*.part")}
    assert len(list(tmp_path.glob("*.part"))) == 4 and left == {file.name, "model", "rows[1].pt.more", "mode"}

    living.communicate()
    assert living.returncode == 0
    assert file.read_text() == (folder / "content").read_text() == "living"
    remove_leftovers(tmp_path / "rows[1].pt.more")
    remove_leftovers(tmp_path / "mode")
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "model"}


def test_processes_that_write_one_file_at_once_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def write(number: int) -> None:
        for _ in range(30):
            write_text(tmp_path / "collect.json", str(number) * 100)

    with ThreadPoolExecutor(4) as workers:
        list(workers.map(write, range(4)))
    assert (tmp_path / "collect.json").read_text() in {str(number) * 100 for number in range(4)}
    assert [path.name for path in tmp_path.iterdir()] == ["collect.json"]


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock")])
def test_a_part_that_is_taken_for_a_leftover_before_it_is_locked_is_made_again(tmp_path, monkeypatch, module, name):
    call, left = getattr(module, name), [tmp_path / "file"]

    def disturbed(*args, **options):
        if left:
            remove_leftovers(left.pop())
            assert not list(tmp_path.iterdir())
        return call(*args, **options)

    monkeypatch.setattr(module, name, disturbed)
    with atomic_write(tmp_path / "file") as part:
        assert not left
        remove_leftovers(tmp_path / "file")
        assert part.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "file", "old")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "file") as part:
        part.write_text("new")
        1 / 0  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_a_missing_file_is_not_called_invalid(tmp_path):
    for read in (files.read_json, files.read_object, files.read_yaml):
        with pytest.raises(BadInput, match=r"nothing\.json is missing\.$"):
            read(tmp_path / "nothing.json")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(BadInput, match=rf"{tmp_path} cannot be locked \(Operation not supported\): use a folder on"):
        lock(tmp_path / ".lock")
