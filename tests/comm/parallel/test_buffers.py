"""Running statistics of layers, which most strategies leave different on every rank: a warning says so."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import wrap


def normed(rank, world, group):
    """Warnings at `wrap`, and how far the running means of two ranks are apart after a step."""
    said = {}
    for strategy, average in (("naive", True), ("bucket", True), ("ddp", True), ("ddp", False), ("fsdp2", True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            model = wrap(model, strategy, Reducer("none", group), device="cpu", average=average)
        for _ in range(2):  # DDP sends statistics at the beginning of a pass
            model(torch.randn(6, 5, generator=torch.Generator().manual_seed(rank)) + rank).sum().backward()
        model(torch.ones(6, 5))
        mean = next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean"))
        means = [torch.empty_like(mean) for _ in range(world)]
        torch.distributed.all_gather(means, mean)
        said[strategy, average] = [str(note.message) for note in noted], float((means[0] - means[1]).abs().max())
    return said


def test_statistics_that_differ_between_ranks_are_named(world):
    for said in world(2).run(normed):
        for (strategy, average), (messages, difference) in said.items():
            differs = (strategy, average) != ("ddp", True)
            assert (difference > 0.01) == differs, strategy
            assert len(messages) == differs
            assert all(
                message.startswith("running statistics of 1 layer (1) are of each rank's samples")
                for message in messages
            )
