"""Scalars that go to Weights & Biases, read back from the file that its client writes without a network."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_training
from test_training import losses, shards, words  # noqa: F401 - `shards` is a fixture

from gradwire import cli

BLOCK = 32768  # the file is a log of LevelDB's form, after a header of 7 bytes
WHOLE_OR_LAST = (1, 4)


def run(rank: int, world_size: int, group: object, arguments: list[str]):
    """One rank of ``gradwire train`` without a network."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("WANDB_MODE", "offline")
        return test_training.run(rank, world_size, group, arguments)


def history(folder: Path) -> list[dict[str, float]]:
    """The logged values of each step, of the only run in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("offline-run-*/*.wandb")
    data, at, record, found = file.read_bytes(), 7, b"", []
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in WHOLE_OR_LAST:
            parsed, record = Record.FromString(record), b""
            if parsed.HasField("history"):
                items = parsed.history.item
                found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return found


@pytest.mark.full
def test_wandb_holds_every_step_once_also_after_a_resumption(world, shards, tmp_path):  # noqa: F811
    pytest.importorskip("wandb", reason="--log wandb needs `pip install wandb`")
    options = {"log": "wandb", "checkpoint_every": 4, "comm_compress": "int8"}
    rows, record = world(2).run(run, words(shards, tmp_path, **options))[0]
    (tmp_path / "record.json").unlink()
    world(2).run(run, words(shards, tmp_path, "--resume", **options))
    logged = history(tmp_path / "logs" / "wandb")
    assert [step["_step"] for step in logged] == list(range(6))
    assert [step["train/loss"] for step in logged] == pytest.approx(losses(rows))
    assert [step["_step"] for step in logged if "train/val_loss" in step] == [2, 5]
    assert logged[-1]["train/val_loss"] == pytest.approx(record["val_loss"])
    assert all({"time/step_ms", "bytes/bytes_sent", "train/lr"} < step.keys() for step in logged)
    assert (tmp_path / "logs" / "tensorboard").is_dir()


@pytest.mark.skipif(find_spec("wandb") is not None, reason="wandb is installed")
def test_without_wandb_the_extra_is_named(shards, tmp_path, capsys):  # noqa: F811
    assert cli.main(["train", *words(shards, tmp_path / "run", log="wandb")]) == 2
    assert "pip install 'gradwire[wandb]'" in capsys.readouterr().err
