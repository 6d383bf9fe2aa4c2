"""States of reducers in torch's distributed checkpoints, of other ranks, and of models with other names.

Of `parallel/model.py`.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from gradwire import comm_hook
from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Exempt, IslandReducer, Reducer, build_islands
from gradwire.comm.parallel import hook, named_parameters, wrap
from gradwire.comm.parallel.model import local


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def hooked(model=None, compressor="topk", **options):
    model = DistributedDataParallel(net() if model is None else model)
    reducer = Reducer(compressor, error_feedback=True, **options)
    hook(model, reducer)
    return model, reducer, torch.optim.SGD(model.parameters(), lr=0.1)


def islands():
    inside = build_islands(2)
    options = {"error_feedback": True, "algorithm": "exchange"}
    reducer = IslandReducer("topk", inside, inside=Reducer("onebit", inside.inside, **options), **options)
    model = wrap(net(), "hsdp", reducer, device="cpu")
    return model, reducer, torch.optim.SGD(model.parameters(), lr=0.1)


def by_ddp_hook():
    model = DistributedDataParallel(net())
    state, function = comm_hook(model, "topk", error_feedback=True)
    model.register_comm_hook(state, function)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1)


def descend(model, reducing, optimizer, rank, steps):
    for step in steps:
        inputs = torch.randn(5, 9, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        if isinstance(reducing, Reducer):
            assert reducing.finish()
        optimizer.step()
    return [local(p).clone() for _, p in named_parameters(model)]


MADE = {"hook": hooked, "comm_hook": by_ddp_hook, "islands": islands}


def distributed(rank, world, group, way, folder):
    """Parameters after six steps: of an unbroken run, and with a checkpoint after three, written meanwhile."""
    model, reducing, optimizer = MADE[way]()
    assert isinstance(reducing, Stateful)
    descend(model, reducing, optimizer, rank, range(3))
    ranks = torch.distributed.new_group()  # the saving thread's
    saving = dcp.async_save({"model": model, "reducer": reducing}, checkpoint_id=folder, process_group=ranks)
    unbroken = descend(model, reducing, optimizer, rank, range(3, 6))
    saving.result()
    model, reducing, optimizer = MADE[way]()
    dcp.load({"model": model, "reducer": reducing}, checkpoint_id=folder)
    return unbroken, descend(model, reducing, optimizer, rank, range(3, 6))


@pytest.mark.parametrize(("way", "size"), [("hook", 2), ("comm_hook", 3), ("islands", 4)])
def test_a_distributed_checkpoint_holds_a_reducer(world, way, size, tmp_path):
    for unbroken, resumed in world(size).run(distributed, way, tmp_path):
        for expected, parameter in zip(unbroken, resumed, strict=True):
            assert torch.equal(parameter, expected)


def saved(rank, world, group, folder):
    model, reducer, optimizer = hooked()
    descend(model, reducer, optimizer, rank, range(3))
    dcp.save({"reducer": reducer}, checkpoint_id=folder)


def loaded(rank, world, group, folder, planner):
    _, reducer, _ = hooked()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        dcp.load({"reducer": reducer}, checkpoint_id=folder, planner=planner and planner(allow_partial_load=True))
    notes = [str(note.message) for note in noted if "residuals" in str(note.message)]
    return reducer.step, len(reducer.codec.state_dict()["residuals"]), notes


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_distributed_checkpoint_of_other_ranks_leaves_the_step(world, before, after, tmp_path):
    """With more ranks dcp lacks the entries of the new ones, and must be allowed to."""
    world(before).run(saved, tmp_path)
    answers = world(after).run(loaded, tmp_path, DefaultLoadPlanner if after > before else None)
    for rank, (step, residuals, notes) in enumerate(answers):
        assert (step, residuals) == (3, 0)
        of = before if rank < before else "fewer than 3"
        assert [note.split(":")[0] for note in notes] == [
            f"the reducer's state is of {of} ranks and this run has {after}"
        ]


def rewrapped(rank, world, group, strategy):
    """A step after one with activation checkpointing, whose state goes on without it; and one that never had it."""
    ended = []
    for inserted in (True, False):
        made = []
        for again in (False, True):
            model = net()
            if inserted and not again:
                model = nn.Sequential(*map(checkpoint_wrapper, model))
            reducer = Reducer("topk", group, error_feedback=True)
            model = wrap(model, strategy, reducer, device="cpu")
            made.append((model, reducer, torch.optim.SGD(model.parameters(), lr=0.0)))
        descend(*made[0], rank, range(1))
        made[1][1].load_state_dict(copy.deepcopy(made[0][1].state_dict()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            descend(*made[1], rank, range(1, 4))
        names = {name for name, *_ in made[1][1].codec.state_dict()["residuals"]}
        ended.append((names, [local(p.grad).clone() for p in made[1][0].parameters()]))
    return ended


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_residuals_go_on_without_activation_checkpointing(world, strategy):
    for (names, gradients), (expected_names, expected) in world(2).run(rewrapped, strategy):
        assert names == expected_names == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert all(map(torch.equal, gradients, expected))


def renamed(rank, world, group, compressor):
    """The message about residuals and states of a model with other names, and of other shapes."""
    compressor = {"method": compressor, "rank": 1} if compressor == "powersgd" else compressor
    options = {"exempt": Exempt(max_ndim=1)}
    model, reducer, optimizer = hooked(compressor=compressor, **options)
    descend(model, reducer, optimizer, rank, range(2))
    state = copy.deepcopy(reducer.state_dict())
    notes = []
    for module in (nn.ModuleDict({"first": net()[0]}), nn.Sequential(nn.Linear(9, 5))):
        model, reducer, optimizer = hooked(Chain(module), compressor=compressor, **options)
        reducer.load_state_dict(copy.deepcopy(state))
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            try:
                descend(model, reducer, optimizer, rank, range(5))
            except BadInput as error:
                notes.append(str(error))
        notes.append([str(note.message) for note in noted])
    return notes


class Chain(nn.Module):
    """The modules of a container, one after the other, under the container's names."""

    def __init__(self, held):
        super().__init__()
        for name, module in held.named_children():
            self.add_module(name, module)

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


@pytest.mark.parametrize("compressor", ["topk", "powersgd"])
def test_restored_state_of_unknown_parameters_is_named_once(world, compressor):
    names = {"topk": "4 parameters that are not reduced (0.bias, 0.weight, 2.bias and 1 more)"}
    expected = names.get(compressor, "2 parameters that are not reduced (0.weight, 2.weight)")
    for unknown, *other_shape in world(2).run(renamed, compressor):
        assert len(unknown) == 1
        assert f"residuals, generators or compressor states of {expected}: they are not used" in unknown[0]
        assert "residuals of 0.weight differ from this model's in 1 name or shape:" in other_shape[0]
