"""Ranks forked from a template leave what torchrun's ranks leave."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launches import CLEAN
from small_runs import words

pytestmark = pytest.mark.full
RUN_OF_ITS_OWN = ("events.out.tfevents",)  # names with a time and a process
SAME = ("loss_digest", "val_loss", "val_ppl", "bytes_compressed_total", "status", "identity")


def trained(folder: Path, data: Path, launcher: str) -> tuple[set[str], dict, bytes]:
    """The names of all files of a run, its record, and its weights."""
    command = [sys.executable, "-m", "gradwire", "launch", "--world_size", "2", "--launcher", launcher, "--", "train"]
    arguments = words(data, folder, profile=True, profile_steps=1, comm_compress="int8")
    done = subprocess.run([*command, *arguments], env=CLEAN, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    names = {name for name in names if not any(own in name for own in RUN_OF_ITS_OWN)}
    return (
        names,
        json.loads((folder / "record.json").read_text()),
        (folder / "final_model/model.safetensors").read_bytes(),
    )


def test_forked_ranks_write_the_files_of_torchrun(shards, tmp_path):
    (forked, own, weights), (started, other, same) = (
        trained(tmp_path / launcher, shards, launcher) for launcher in ("fork", "torchrun")
    )
    assert forked == started and len(forked) > 8
    assert own.keys() == other.keys()
    assert {name: own[name] for name in SAME} == {name: other[name] for name in SAME}
    assert weights == same
