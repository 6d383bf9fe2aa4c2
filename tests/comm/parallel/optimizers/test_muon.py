"""Muon: steps of sharded matrices are those of whole ones bit for bit; products in float32 are those of bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gradwire.comm.collectives import build_islands
from gradwire.comm.collectives.meter import METER
from gradwire.comm.parallel import optimizers
from gradwire.comm.parallel.optimizers import muon

SHAPES = [(7, 3), (2, 5), (6, 6), (1, 4)]  # odd rows, fewer rows than ranks
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)


def stepped(model):
    """The whole parameters and momenta after some steps with gradients of known values."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = optimizers.build_inner("muon", model, groups, lr=0.02, betas=(0.9, 0.95))
    for step in range(STEPS):
        torch.manual_seed(step)
        for p in model.parameters():
            gradient = torch.randn(p.shape)
            sharded = isinstance(p, DTensor)
            if sharded:  # all ranks have the same gradient, and nothing is sent
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient
        optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"] for block in model.blocks for p in [block.weight]]
    return [whole(x.detach()) for x in (*model.parameters(), *momenta)]


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def sharded(rank, world, group, islands):
    mesh = build_islands(islands, "cpu").mesh if islands else init_device_mesh("cpu", (world,))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = METER.sent("momenta")
    return stepped(model), METER.sent("momenta") - before


@pytest.mark.parametrize(("size", "islands"), [(2, 0), (3, 0), (4, 2)])
def test_steps_are_those_of_whole_matrices_bit_for_bit(world, size, islands):
    expected = stepped(Net())
    shards = size // (islands or 1)
    sent = STEPS * (shards - 1) * sum(2 * -(-rows // shards) * columns for rows, columns in SHAPES)
    for found, counted in world(size).run(sharded, islands):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert counted == sent


def rounded(x):
    return x.bfloat16().double()


def iterated(matrix):
    """Newton and Schulz's iteration with products in float64, rounded to bf16 after each."""
    a, b, c = muon.COEFFICIENTS
    x = matrix.bfloat16()
    x = x.div(x.norm()).double()
    for _ in range(muon.ITERATIONS):
        gram = rounded(x @ x.T)
        quintic = rounded(b * gram + c * gram @ gram)
        x = rounded(a * x + quintic @ x)
    return x


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shape", [(30, 40), (41, 23)])
def test_either_type_of_products_gives_the_values_of_bf16(monkeypatch, native, shape):
    """Without the rounding of one product the deviation is 1 %."""
    monkeypatch.setattr(muon, "multiplies_bf16", lambda device: native)
    torch.manual_seed(7)
    matrix = torch.randn(shape) * 1e-3
    found, expected = muon.orthogonalized(matrix), iterated(matrix.T).T if shape[0] > shape[1] else iterated(matrix)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).norm() / expected.norm()) < 4e-3
