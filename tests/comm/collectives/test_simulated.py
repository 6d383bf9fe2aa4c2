"""Simulated ranks give what as many gloo processes give, bit for bit, and end together."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.simulated import SIMULATED, simulate, simulated
from gradwire.comm.parallel import optimizers, wrap
from gradwire.comm.parallel.optimizers.diloco import DiLoCo
from gradwire.comm.parallel.verify import data, digest

SIZES = (1, 2, 7, 1001)
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LONG = 2**20 + 3  # gloo sends it in more messages


def collectives(rank, world, group):
    """The results of every collective, on tensors of the rank's own, and the bytes that were counted."""
    draws, meter, results = torch.Generator().manual_seed(100 + rank), Meter(), {}
    for dtype in TYPES:
        for size in SIZES:
            x = (100 * torch.randn(size, generator=draws)).to(dtype)
            for op in ("sum", "max", "min"):
                results[op, size, dtype] = ops.all_reduce(x.clone(), op, meter=meter)
            results["gathered", size, dtype] = ops.all_gather(x, meter=meter)
            results["sent", size, dtype] = ops.broadcast(x.clone(), world - 1, meter=meter)
    results["long"] = digest(data(ops.all_reduce(torch.randn(LONG, generator=draws), meter=meter)))
    for size in (*SIZES, 2**16):
        x = torch.randn(world, size, generator=draws, dtype=torch.float64)
        results["row", size] = ops.begin_reduce_scatter(x, meter=meter).wait()
        sizes = [[size + 3 * source + 5 * target for target in range(world)] for source in range(world)]
        parts, coming = sizes[rank], [row[rank] for row in sizes]
        content = torch.randint(256, (sum(parts),), generator=draws, dtype=torch.uint8)
        results["exchanged", size] = ops.begin_all_to_all(content, parts, coming, meter=meter).wait()
    pending = [ops.begin_all_reduce(torch.full((3,), rank + i / 10), meter=meter) for i in (1, 2)]
    results |= {("pending", i): pending[i].wait() for i in (1, 0)}
    results["objects"] = ops.gather_objects({"rank": rank, "text": "x" * rank}, meter=meter)
    costs = {key: (cost.bytes, cost.calls) for key, cost in meter.totals.items()}
    return results, costs, (dist.get_rank(), dist.get_world_size(), simulated(group))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_are_gloos(world, size):
    expected = world(size).run(collectives)
    threads = threading.active_count()
    for rank, (results, costs, (own, ranks, turns)) in enumerate(simulate(size, lambda r: collectives(r, size, None))):
        wanted, wanted_costs, _ = expected[rank]
        assert (own, ranks, turns) == (rank, size, True)
        assert costs == wanted_costs
        for key, result in results.items():
            same = torch.equal(result, wanted[key]) if isinstance(result, torch.Tensor) else result == wanted[key]
            assert same, (rank, key)
    assert not dist.is_initialized()
    assert threading.active_count() == threads


class Words(nn.Module):
    """An embedding, a block and a head, with dropout, which draws from torch's default generator."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 6))])
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


CELLS = {  # method, options of the reducer, optimizer: None averages gradients
    "framework": (None, {}, None),
    "onebit": ("onebit", {"error_feedback": True}, None),
    "overlap": ("onebit", {"error_feedback": True, "overlap": True}, None),
    "qsgd": ("qsgd", {"algorithm": "gather"}, None),
    "powersgd": ("powersgd", {"error_feedback": True}, None),
    "diloco": ("onebit", {"error_feedback": True}, {"inner": "muon"}),
}


def trained(rank, world, group, strategy, cell):
    """The weights, losses and norms of a short training; every rank has its own samples and draws its own dropout."""
    method, options, local = CELLS[cell]
    torch.manual_seed(5)
    model = Words()
    torch.manual_seed(50 + rank)
    reducer = None if method is None else Reducer(method, seed=3, **options)
    model = wrap(model, strategy, reducer, average=local is None)
    if local is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        inner = optimizers.build_inner(local["inner"], model, model.parameters(), lr=0.01)
        optimizer = DiLoCo(inner, model, reducer=reducer, sync_every=2, outer={"lr": 0.8})
    draws, seen = torch.Generator().manual_seed(70 + rank), []
    for _ in range(5):
        tokens = torch.randint(11, (3, 8), generator=draws)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        total = loss.detach().view(1).clone()
        if local is not None:
            seen.append(optimizer.communicate(1.0, total)[0])
        elif reducer is not None:
            assert reducer.finish(total)
        else:
            ops.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(total.item())
    return [p.detach().clone() for p in model.parameters()], seen


WAYS = [
    pytest.param(strategy, cell, marks=[pytest.mark.sweep] * ((number + place) % 2))
    for number, strategy in enumerate(("ddp", "naive"))
    for place, cell in enumerate(CELLS)
]


@pytest.mark.parametrize(("strategy", "cell"), WAYS)
def test_a_training_is_that_of_gloo(world, strategy, cell):
    size = 3 if strategy == "naive" else 2
    expected = world(size).run(trained, strategy, cell)
    for rank, (weights, seen) in enumerate(simulate(size, lambda rank: trained(rank, size, None, strategy, cell))):
        assert seen == expected[rank][1]
        assert all(torch.equal(a, b) for a, b in zip(weights, expected[rank][0], strict=True))


def test_the_process_keeps_its_group_and_its_random_state():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(1)
        simulate(2, lambda rank: torch.rand(3 + rank))
        assert dist.get_backend() == "gloo"
        assert dist.get_world_size() == 1
        after = torch.rand(1)
        torch.manual_seed(1)
        assert torch.equal(after, torch.rand(1))
        assert simulate(2, lambda rank: dist.get_backend()) == [SIMULATED] * 2
    finally:
        dist.destroy_process_group()


def failing(rank):
    ops.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("of rank 1")
    try:
        ops.all_reduce(torch.ones(1))
    finally:
        ended.append(rank)


def early(rank):
    if rank != 1:
        ops.all_reduce(torch.ones(1))


def out_of_step(rank):
    ops.all_reduce(torch.ones(1)) if rank else ops.all_gather(torch.ones(1))


ended: list[int] = []


def test_a_rank_that_fails_ends_the_others():
    ended.clear()
    with pytest.raises(ValueError, match="of rank 1"):
        simulate(3, failing)
    assert sorted(ended) == [0, 2]
    with pytest.raises(RunFault, match=r"ranks have ended \(1\), and others wait for them in all_reduce"):
        simulate(3, early)
    with pytest.raises(RunFault, match="out of step: in one collective they call all_gather and all_reduce"):
        simulate(3, out_of_step)
    assert simulate(2, lambda rank: rank) == [0, 1], "nothing is left of them"
