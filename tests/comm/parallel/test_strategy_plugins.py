"""A strategy of another package is found by its entry point: by `wrap`, in an experiment's file, and by `train`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import EntryPoint

import links_rows
import pytest
import torch
from small_runs import run, words
from torch import nn

from gradwire.base import plugins
from gradwire.base.errors import BadInput
from gradwire.bench.config import Grid
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import wrap
from gradwire.comm.parallel.strategies.naive import Naive


class Mirror(Naive):
    """A strategy of another package."""

    name = "mirror"


@contextmanager
def installed(value: str, name: str = "mirror"):
    """Pretend that an installed package has this entry point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "entry_points", lambda group: (EntryPoint(name, value, group),))
        yield


def gradients(rank, world, group, strategy):
    torch.manual_seed(1)
    with installed("test_strategy_plugins:Mirror"):
        reducer = Reducer(build("none"), group, algorithm="exchange")
        model = wrap(nn.Linear(5, 3), strategy, reducer)
        model(torch.full((2, 5), 1.0 + rank)).square().sum().backward()
        assert reducer.finish()
    return model.weight.grad, reducer.traffic["sent"]


def test_wrap_finds_it(world):
    for (mine, sent), (expected, _) in zip(
        world(2).run(gradients, "mirror"), world(2).run(gradients, "naive"), strict=True
    ):
        assert sent > 0
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


MODULE = """
from gradwire.comm.parallel.strategies.fsdp2 import FSDP2

class Shards(FSDP2):
    name = "shards"
"""


@pytest.mark.sweep
def test_train_and_its_record_know_one_that_shards(world, shards, tmp_path):
    """Of a package that is installed, so that the ranks find it by themselves; its bytes are those of fsdp2."""
    metadata = tmp_path / "site" / "sharding-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sharding\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[gradwire.strategies]\nshards = sharding:Shards\n")
    (tmp_path / "site" / "sharding.py").write_text(MODULE)
    places = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    changes = {"steps": 2, "eval_every": 0, "comm_compress": "int8"}
    train = ["train", *words(shards, tmp_path / "theirs", strategy="shards", **changes)]
    launch = [sys.executable, "-m", "gradwire", "launch", "--world_size", "2", "--", *train]
    done = subprocess.run(launch, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places}, timeout=120)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "theirs" / "record.json").read_text())
    _, built_in = world(2).run(run, words(shards, tmp_path / "ours", strategy="fsdp2", **changes))[0]
    assert record["strategy"] == "shards" and record["bytes_parameters_raw_total"] > 0
    same = ("loss_digest", "val_ppl", "bytes_compressed_total", "bytes_closed_form_total", "bytes_parameters_raw_total")
    assert [record[name] for name in same] == [built_in[name] for name in same]
    for strategy in ("fsdp2", "ddp"):
        row = links_rows.row(strategy, "none", "none").model_copy(update={"strategy": "shards"})
        assert row.sharded == (strategy == "fsdp2")


def test_an_experiment_names_it():
    with installed("test_strategy_plugins:Mirror"):
        assert Grid(strategies=["mirror"], world_sizes=[2], seeds=[0]).strategies == ("mirror",)
    with (
        pytest.raises(ValueError, match=r"unknown strategy 'mirr0r'.*Available"),
        installed("test_strategy_plugins:Mirror"),
    ):
        Grid(strategies=["mirr0r"], world_sizes=[2], seeds=[0])


@pytest.mark.parametrize(
    ("value", "name", "message"),
    [
        ("test_strategy_plugins:installed", "mirror", "holds no Strategy class whose name is 'mirror'"),
        ("test_strategy_plugins:Nothing", "mirror", "the strategy mirror .* cannot be loaded"),
        ("test_strategy_plugins:Mirror", "ddp", "takes the built-in strategy's name 'ddp'"),
    ],
)
def test_a_wrong_entry_point_is_one_message(value, name, message):
    with installed(value, name), pytest.raises(BadInput, match=message):
        wrap(nn.Linear(5, 3), name)
