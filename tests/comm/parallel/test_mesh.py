"""The mesh of a strategy has one dimension, dp, over the ranks of any process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradwire.comm.collectives import ops
from gradwire.comm.parallel.strategies.naive import Naive


def built(rank, world, group):
    """A mesh of all ranks and one of two of them: dimensions, this rank's place, and a sum over the group."""
    pair = dist.new_group([0, world - 1])
    groups = [None, pair] if rank in (0, world - 1) else [None]
    meshes = [Naive(group, torch.device("cpu")).mesh() for group in groups]
    return [
        (
            made.mesh_dim_names,
            made["dp"].get_local_rank(),
            made.size(),
            float(ops.all_reduce(torch.tensor(1.0 + rank), group=made.get_group("dp"))),
        )
        for made in meshes
    ]


def test_dp_is_the_process_group(world):
    first, second, third = world(3).run(built)
    assert first == [(("dp",), 0, 3, 6.0), (("dp",), 0, 2, 4.0)]
    assert second == [(("dp",), 1, 3, 6.0)]
    assert third == [(("dp",), 2, 3, 6.0), (("dp",), 1, 2, 4.0)]
