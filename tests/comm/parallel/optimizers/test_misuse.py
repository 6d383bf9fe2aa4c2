"""Optimizers that communicate, called otherwise than they must be: refused, and torch's step hooks."""

from __future__ import annotations

import pytest
import torch
from test_local_updates import backward, held
from test_optimizer_state import OPTIMIZERS, fresh
from test_optimizers import groups_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import optimizers, wrap
from gradwire.comm.parallel.optimizers.muon import Muon


def message_of(call, *given, **options):
    with pytest.raises(BadInput) as refused:
        call(*given, **options)
    return str(refused.value)


def misused(rank, world, group):
    """The messages of every optimizer: of a model that averages, of wrong groups, and of its groups misused."""
    said = {}
    for case, (name, method, cell, options) in OPTIMIZERS.items():
        made = {key: value for key, value in cell.items() if key != "method"}
        for average in (True, False):
            reducer = Reducer(build(method, **cell.get("method", {})), group, **made)
            model = wrap(held(), "ddp", reducer, device="cpu", average=average)
            groups = groups_of(model)
            if not average:
                groups[0]["params"] = groups[0]["params"][1:]
            said[case, average] = message_of(optimizers.build, name, model, groups, reducer, lr=1.0, **options)
        groups = [{"params": [*model.parameters(), nn.Parameter(torch.ones(2))]}]
        said[case, "foreign"] = message_of(optimizers.build, name, model, groups, reducer, lr=1.0, **options)

        _, model, optimizer = fresh(group, case)
        said[case, "group"] = message_of(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(2))]})
        model.module.still.requires_grad_(True)
        said[case, "unfrozen"] = message_of(optimizer.step)
    return said


def test_every_optimizer_that_communicates_refuses_what_would_not_average(world):
    expected = {
        True: "averages over the ranks itself, and gradients of this model are averaged already",
        False: "1 parameter (cube) is in no parameter group",
        "foreign": "the parameter groups hold 1 parameters that the model does not have",
        "group": "cannot add parameters after it was built",
        "unfrozen": "1 parameter (still) is unfrozen or replaced after",
    }
    for said in world(2).run(misused):
        assert len(said) == len(OPTIMIZERS) * len(expected)
        for (case, what), message in said.items():
            assert expected[what] in message, (case, what)


def hooks_run(rank, world, group):
    """Calls of step hooks in four steps, by optimizer: its own, those of the inner one, and global ones."""
    counts = {}
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])  # torch wraps the step of AdamW's class from here on
    for case in OPTIMIZERS:
        _, model, optimizer = fresh(group, case)
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
        if hasattr(optimizer, "inner"):
            optimizer.inner.register_step_pre_hook(lambda *_, calls=calls: calls.append("inner pre"))
            optimizer.inner.register_step_post_hook(lambda *_, calls=calls: calls.append("inner post"))
        own = register_optimizer_step_pre_hook(
            lambda each, *_, calls=calls, mine=optimizer: calls.append("global") if each is mine else None
        )
        for step in range(4):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        own.remove()
        counts[case] = {what: calls.count(what) for what in calls}
    return counts


def test_step_hooks_run_once_in_a_step(world):
    for counts in world(2).run(hooks_run):
        for case, found in counts.items():
            inner = {"inner pre": 4, "inner post": 4} if OPTIMIZERS[case][0] not in ("demo", "onebit_adam") else {}
            assert found == {"pre": 4, "post": 4, "global": 4, **inner}, case


def test_muons_step_hooks_run_once():
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    model, calls = nn.ModuleList([nn.Linear(5, 3)]), []
    optimizer = Muon(model.parameters(), model, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        calls.append("closure")
        loss = model[0](torch.ones(2, 5)).sum()
        loss.backward()
        return loss

    weight = model[0].weight.detach().clone()
    assert optimizer.step(closure).requires_grad and not torch.equal(model[0].weight, weight)
    assert calls == ["pre", "closure", "post"]
