"""Blocks compiled before a strategy wraps the model: the same steps, parameters and bytes."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from diagonals import swept
from test_frameworks import STRATEGIES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import comm_hook
from gradwire.comm import parallel
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel.verify import replicated
from gradwire.lm.models import causal

VOCABULARY, LENGTH = 320, 24


def trained(rank, world, group, strategy, compiled):
    """Losses of three steps, the parameters' names and the bytes; int8 reduces the gradients.

    ``compiled`` is "blocks" or "whole" (in place: "itself") before `wrap`, "model" after it, or None.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1  # a pool's ranks may have no child processes
    model = causal.build("micro", VOCABULARY, LENGTH, seed=0).train()
    if compiled == "blocks":
        parallel.compile_blocks(model)
    elif compiled == "itself":
        model.compile()
    elif compiled == "whole":
        model = torch.compile(model)
    reducer = Reducer(build("int8"), group)
    model = parallel.wrap(model, strategy, reducer, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = torch.compile(model) if compiled == "model" else model
    losses = []
    for step in range(3):
        x = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = forward(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return losses, [name for name, _ in parallel.named_parameters(model)], reducer.traffic["sent"], frames


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", ["blocks", "whole", "itself", "model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_compiled_trains_as_the_model_itself_does(world, strategy, compiled):
    for plain, other in zip(
        world(2).run(trained, strategy, None), world(2).run(trained, strategy, compiled), strict=True
    ):
        assert other[0] == pytest.approx(plain[0], rel=1e-4)
        assert other[1:3] == plain[1:3]
        assert other[3] > 0 == plain[3], "nothing was compiled"


class Block(nn.Module):
    """A module that FSDP shards as one; its hooks stay outside of the compiled code."""

    def __init__(self, enter, leave):
        super().__init__()
        self.linear = nn.Linear(enter, leave)

    def forward(self, x):
        return self.linear(x).tanh()


class Compiled(nn.Module):
    """A model of which a part is compiled."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(5, 7), Block(7, 3)])
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).square().sum()


def hooked_names(rank, world, group, kind, compiled):
    """Names of residuals of a model that the user wrapped."""
    torch.manual_seed(7)
    model = torch.compile(Compiled(), backend="eager") if compiled else Compiled()
    model = DistributedDataParallel(model)
    if kind == "hook":
        parallel.hook(model, reducer := Reducer("int8", group, error_feedback=True))
    else:
        state, function = comm_hook(model, "int8", error_feedback=True)
        model.register_comm_hook(state, function)
        reducer = state.reducer
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).backward()
    return sorted(map(str, reducer.codec.state_dict()["residuals"]))


@pytest.mark.parametrize("kind", ["hook", "comm_hook"])
def test_a_users_own_ddp_of_a_compiled_model_gives_the_same_names(world, kind):
    plain, compiled = (world(2).run(hooked_names, kind, compiled) for compiled in (False, True))
    assert compiled == plain and any("layers.1.linear.weight" in name for name in plain[0])


def names(rank, world, group, strategy, compiled):
    """All names that a wrapped model and its reducer give to parameters: of residuals, states and checks."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    model = Compiled()
    if compiled:
        model.layers[1] = torch.compile(model.layers[1], backend="eager")
        model = torch.compile(model, backend="eager")
    reducer = Reducer("int8", group, error_feedback=True)
    model = parallel.wrap(model, strategy, reducer)
    torch._dynamo.utils.counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))).backward()
    assert reducer.finish()
    optimizer.step()
    state = parallel.checkpoint_state(model, optimizer)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == compiled
    return (
        sorted(map(str, reducer.codec.state_dict()["residuals"])),
        sorted(state["model"]),
        sorted(state["optimizer"]["state"]),
        sorted(parallel.full_state_dict(model)),
        sorted(name for name, _ in parallel.named_parameters(model)),
        sorted(name for name, _ in replicated(model, optimizer)),
    )


@pytest.mark.parametrize("strategy", ["bucket", "fsdp2", *swept("naive", "ddp", "fsdp1")])
def test_names_are_those_of_a_model_that_is_not_compiled(world, strategy):
    for plain, compiled in zip(world(2).run(names, strategy, False), world(2).run(names, strategy, True), strict=True):
        assert compiled == plain
        assert any("layers.1.linear.weight" in name for name in plain[0])
