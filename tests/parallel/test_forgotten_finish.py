"""A forgotten ``reducer.finish()`` warns once, and no other way to train does."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from gradwire import Reducer, accumulation, wrap


def warned(rank, world, group, strategy: str, way: str) -> int:
    """The number of warnings about `finish` in four optimizer steps of two micro-batches each."""
    torch.manual_seed(3)
    reducer = Reducer("int8")
    model = wrap(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)), strategy, reducer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            for micro in range(2):
                with accumulation(model, last=micro == 1 or way == "reduce each"):
                    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + 3 * micro + rank))
                    model(x).square().sum().backward()
            if way != "forgotten":
                reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)  # an evaluation
    return sum("reducer.finish()" in str(each.message) for each in caught)


@pytest.mark.parametrize("strategy", ["naive", "bucket", "ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize(("way", "count"), [("forgotten", 1), ("finished", 0)])
def test_a_forgotten_finish_warns_once(world, strategy, way, count):
    assert world(2).run(warned, strategy, way) == [count, count]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_reducing_every_micro_batch_is_no_forgotten_finish(world, strategy):
    assert world(2).run(warned, strategy, "reduce each") == [0, 0]
