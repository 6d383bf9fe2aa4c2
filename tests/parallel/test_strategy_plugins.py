"""A strategy of another package is found by its entry point: by `wrap`, and in an experiment's file."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import nn

from gradwire import plugins
from gradwire.collectives import Reducer
from gradwire.compressors import build
from gradwire.config import Grid
from gradwire.errors import BadInput
from gradwire.parallel import wrap
from gradwire.parallel.strategies.naive import Naive


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
