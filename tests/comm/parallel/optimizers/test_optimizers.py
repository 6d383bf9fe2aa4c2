"""Optimizers that communicate, against torch's AdamW while they warm up and against their protocol in one process.

Of `comm/communication.py`, `optimizers/adam.py`.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from diagonals import chosen, diagonals, swept
from torch import nn

from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.comm.collectives import Exempt, Layout, Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, clip_grad_norm, named_parameters, optimizers, wrap
from gradwire.comm.parallel.optimizers.adam import OneBitAdam
from gradwire.comm.parallel.optimizers.muon import Muon
from gradwire.comm.parallel.verify import first_difference

REPLICAS = ("naive", "bucket", "ddp")
WARM = 3
RATES = (0.02, 0.05, 0.03, 0.04, 0.01, 0.03, 0.02, 0.05, 0.04, 0.03, 0.01, 0.02, 0.04, 0.03)
DECAY = 0.1
BETAS = (0.8, 0.9)
CLIP = 4.0


class Held(nn.Module):
    """Parameters of odd shapes whose gradients are whatever a test wants; one is tied, one is frozen."""

    def __init__(self):
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, 2, 5))
        self.bias = nn.Parameter(torch.randn(7))
        self.rows = nn.Embedding(6, 4)
        self.inner = nn.ModuleDict({"wide": nn.Linear(9, 5), "narrow": nn.Linear(5, 1)})
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.rows.weight
        self.still = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, gradients):
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters() if p.requires_grad)


def held():
    torch.manual_seed(3)
    return Held()


def gradients_of(rank, step):
    """Each rank's own, of very different sizes; the last rows of the embedding get none before step 5."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 1)
    made = {}
    for i, (name, p) in enumerate(held().named_parameters()):
        made[name] = (torch.randn(p.shape, generator=generator) + 0.3) * 0.2 ** (i % 3)
    if step < 5:
        made["rows.weight"][4:] = 0
    return made


def groups_of(model):
    named = list(named_parameters(model))
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def whole(model):
    return {name: p.detach().clone() for name, p in named_parameters(model)}


def set_rates(optimizer, step):
    """The second group's rate is its own."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = RATES[step] * (1 + i)


def backward(model, rank, step, micros):
    for micro in range(micros):
        with accumulation(model, last=micro == micros - 1):
            (model(gradients_of(rank, step)) / micros).backward()


def trained(rank, world, group, name, strategy, method, cell, steps, options=None, fault=None, micros=1):
    """After each step: parameters, norm, whether it was taken, and what differs between the ranks."""
    reducer = Reducer(build(method, **cell.pop("method", {})), group, seed=4, **cell)
    communicates = name != "gradient"
    model = wrap(held(), strategy, reducer, device="cpu", average=not communicates)
    if communicates:
        optimizer = optimizers.build(name, model, groups_of(model), reducer, lr=1.0, betas=BETAS, **options or {})
    else:
        optimizer = torch.optim.AdamW(groups_of(model), lr=1.0, betas=BETAS)
    history = []
    for step in range(steps):
        set_rates(optimizer, step)
        backward(model, rank, step, micros)
        if fault == (rank, step):
            next(p for n, p in named_parameters(model) if n == "bias").grad[2] = float("nan")
        if communicates:
            norm, finite = optimizer.communicate(CLIP)
        else:
            finite = reducer.finish()
            norm = clip_grad_norm(model, CLIP)
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.append((whole(model), norm, finite, first_difference(model, optimizer)))
    return history, reducer.traffic


class Plan(NamedTuple):
    """The parts of each step of a simulation; the others synchronise momenta."""

    dense: tuple[int, ...] = tuple(range(WARM))  # steps that are AdamW's own
    skipped: tuple[int, ...] = ()  # steps whose gradient is not finite


ONEBIT_PLAN = Plan()


def simulated(world, steps, method, options, more, plan=ONEBIT_PLAN, frozen_from=WARM):
    """The parameters after each step, by the paper's formulas: float64, but for what is encoded."""
    shapes = {name: p.shape for name, p in held().named_parameters() if p.requires_grad}
    layout = Layout.dim0([(name, tuple(shape)) for name, shape in shapes.items()], world)
    compressor, exempt = build(method, **options), more.get("exempt", Exempt())
    first = {name: p.detach().double() for name, p in held().named_parameters() if p.requires_grad}
    x = first
    m = {name: torch.zeros_like(p) for name, p in first.items()}
    v = {name: torch.zeros_like(p) for name, p in first.items()}
    taken, updates, residuals, after = 0, 0, {}, []

    def sent(values, shard, key):
        """The values that the others decode of a shard."""
        codec = build("none") if exempt.covers(shard.name, shard.shape) else compressor
        given = values.float() + (residuals.get(key, 0) if more.get("error_feedback", True) else 0)
        decoded = codec.decode(codec.encode(given.reshape(shard.form)), shard.form).view(-1)
        residuals[key] = given - decoded
        return decoded

    def exchanged(tensors):
        """The mean, as all ranks decode it."""
        means = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
        for shard in layout.shards:
            parts = [
                sent(own[shard.name].view(-1)[shard.source], shard, (rank, shard)) for rank, own in enumerate(tensors)
            ]
            mean = torch.stack(parts).sum(dim=0) / world if world > 1 else parts[0]
            if more.get("algorithm") != "gather":
                mean = sent(mean, shard, ("owner", shard))
            means[shard.name].view(-1)[shard.source] = mean.double()
        return means

    for step in range(steps):
        rates = {name: RATES[step] * (1 if len(shape) >= 2 else 2) for name, shape in shapes.items()}
        decays = {name: 1 - rates[name] * DECAY * (len(shape) >= 2) for name, shape in shapes.items()}
        gs = [{name: gradients_of(rank, step)[name].double() for name in shapes} for rank in range(world)]
        if step in plan.dense:
            mean = {name: sum(g[name] for g in gs) / world for name in shapes}
            gs = [mean] * world
        norm = float(sum(g[name].square().sum() for g in gs for name in shapes) / world) ** 0.5
        scale = min(1.0, CLIP / norm)
        momenta = [{name: BETAS[0] * m[name] + (1 - BETAS[0]) * scale * g[name] for name in shapes} for g in gs]
        if step in plan.skipped:
            after.append(x)
            continue
        taken += 1
        if step in plan.dense:
            updates += 1
            v = {name: BETAS[1] * v[name] + (1 - BETAS[1]) * (scale * gs[0][name]) ** 2 for name in shapes}
        ways = {name: rates[name] / (1 - BETAS[0] ** taken) for name in shapes}
        hats = {name: v[name] / (1 - BETAS[1] ** updates) for name in shapes}
        bound = 1.0 if step >= frozen_from else math.inf  # (1 - beta1) / sqrt(1 - beta2) is less than 1
        m = momenta[0] if step in plan.dense else exchanged(momenta)
        steps_of = {name: (m[name] / (hats[name].sqrt() + 1e-8)).clamp(-bound, bound) for name in shapes}
        x = {name: decays[name] * x[name] - ways[name] * steps_of[name] for name in shapes}
        after.append(x)
    return after


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def assert_near(found, expected, tolerance=2e-5):
    for name in expected:
        torch.testing.assert_close(found[name].double(), expected[name], rtol=tolerance, atol=tolerance, msg=name)


def cell(**more):
    """Options of the reducer; ``method`` holds the compressor's."""
    return {"dense_steps": WARM, "error_feedback": True, "algorithm": "exchange", **more}


@pytest.mark.parametrize(("size", "strategy"), chosen([(2, "ddp"), (3, "bucket")], product([2, 3], REPLICAS)))
def test_the_warm_up_is_adamw_bit_for_bit(world, size, strategy):
    given = (strategy, "onebit", cell(dense_steps=6), 6)
    found = world(size).run(trained, "onebit_adam", *given)
    expected = world(size).run(trained, "gradient", *given)
    exact = simulated(size, 6, "none", {}, {}, Plan(dense=tuple(range(6))), frozen_from=6)
    for (mine, traffic), (theirs, reference) in zip(found, expected, strict=True):
        for step in range(6):
            assert_same(mine[step][0], theirs[step][0])
            assert mine[step][1] == theirs[step][1], "the norm before clipping"
            assert_near(mine[step][0], exact[step])
        assert any(norm > CLIP for _, norm, _, _ in mine), "clipping had to do something"
        assert traffic["sent"] == reference["sent"] == traffic["raw"] == traffic["exact"]
        assert traffic.details["elements"] == reference.details["elements"]


ONEBIT = [
    ("none", {}, {}),
    ("onebit", {"block": 16}, {}),
    ("onebit", {"block": 16}, {"error_feedback": False}),
    ("signsgd", {}, {"exempt": Exempt(max_ndim=1)}),
    ("topk", {"density": 0.3}, {"algorithm": "gather"}),
]


@pytest.mark.parametrize(("case", "strategy", "size"), diagonals(ONEBIT, REPLICAS, [2, 3]), ids=str)
def test_onebit_adam_is_its_protocol_in_one_process(world, case, strategy, size):
    method, options, more = case
    results = world(size).run(trained, "onebit_adam", strategy, method, cell(method=options, **more), 10)
    expected = simulated(size, 10, method, options, more)
    for history, traffic in results:
        assert [difference for *_, difference in history] == [None] * 10, "replicas are bit-equal after every step"
        for step in range(10):
            assert_near(history[step][0], expected[step])
            assert_same(history[step][0], results[0][0][step][0])
        assert traffic["raw"] > 0 and (traffic["sent"] < traffic["raw"]) == (method != "none")
    assert [traffic.details["closed_form"] for _, traffic in results] == [traffic["sent"] for _, traffic in results]


def test_a_single_rank_takes_adams_step_with_the_variance_frozen(world):
    [(history, traffic)] = world(1).run(trained, "onebit_adam", "naive", "onebit", cell(), 8)
    expected = simulated(1, 8, "none", {}, {})
    for step in range(8):
        assert_near(history[step][0], expected[step])
    assert traffic["raw"] == traffic["sent"] == 0


@pytest.mark.parametrize("strategy", ["ddp", *swept("naive", "bucket")])
def test_accumulated_gradients_are_sent_once(world, strategy):
    given = ("onebit_adam", strategy, "onebit", cell(), 6)
    once = world(2).run(trained, *given)
    thrice = world(2).run(trained, *given, None, None, 4)  # quarters of a gradient add up exactly
    for (mine, traffic), (theirs, reference) in zip(once, thrice, strict=True):
        assert_same(mine[-1][0], theirs[-1][0])
        assert traffic["sent"] == reference["sent"] and traffic.details["elements"] == reference.details["elements"]


@pytest.mark.parametrize(("size", "step"), diagonals([2, 3], [1, 4]))
def test_a_skipped_step_leaves_parameters_and_momentum(world, size, step):
    results = world(size).run(trained, "onebit_adam", "ddp", "none", cell(nonfinite="skip"), 7, None, (size - 1, step))
    for history, traffic in results:
        assert [finite for _, _, finite, _ in history] == [at != step for at in range(7)]
        assert_same(history[step][0], history[step - 1][0])
        assert all(value.isfinite().all() for value in history[-1][0].values())
        assert history[-1][3] is None and traffic.details["nonfinite_steps"] == 1
        if step == 4:
            exact = simulated(size, 7, "none", {}, {}, Plan(skipped=(4,)))
            assert_near(history[-1][0], exact[-1])
    assert not torch.equal(results[0][0][step + 1][0]["bias"], results[0][0][step][0]["bias"])


def diverging(rank, world, group, policy):
    try:
        history, _ = trained(
            rank, world, group, "onebit_adam", "naive", "onebit", cell(nonfinite=policy), 6, None, (0, 4)
        )
    except NonFiniteGradient as error:
        return error.step
    return [finite for _, _, finite, _ in history], bool(history[-1][0]["bias"].isfinite().all())


def test_other_policies_raise_on_all_ranks_or_propagate(world):
    assert world(2).run(diverging, "raise") == [4, 4]
    assert world(2).run(diverging, "propagate") == [([True] * 6, False)] * 2


def test_no_element_moves_further_than_adam_would(world):
    """Rows that the warm-up never met have no variance: without a bound their first gradient is divided by eps."""
    [(history, _)] = world(1).run(trained, "onebit_adam", "naive", "none", cell(), 7)
    for step in (5, 6):
        rate = RATES[step] / (1 - BETAS[0] ** (step + 1))
        kept = (1 - RATES[step] * DECAY) * history[step - 1][0]["rows.weight"]
        moved = (history[step][0]["rows.weight"] - kept)[4:].abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=0)


def test_tied_and_frozen_parameters(world):
    history, _ = world(2).run(trained, "onebit_adam", "ddp", "onebit", cell(), 5)[0]
    assert torch.equal(history[-1][0]["still"], held().still)
    assert "head.weight" not in history[-1][0], "a tied parameter has one name"


def refused(rank, world, group, name, strategy, dense_steps, options):
    reducer = Reducer(build("onebit"), group, dense_steps=dense_steps)
    try:
        model = wrap(held(), strategy, reducer, device="cpu", average=False)
        optimizers.build(name, model, groups_of(model), reducer, **options)
    except BadInput as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "strategy", "dense_steps", "options", "expected"),
    [
        ("onebit_adam", "fsdp2", 3, {}, "strategy fsdp2 shards gradients"),
        ("onebit_adam", "fsdp1", 3, {}, "strategy fsdp1 shards gradients"),
        ("onebit_adam", "ddp", 0, {}, "after dense_steps steps; dense_steps must be at least 1"),
        ("onebit_adam", "ddp", 3, {"max_norm": 0}, "OneBitAdam: max_norm must be greater than 0, got 0"),
        ("one_bit_adam", "ddp", 3, {}, "Did you mean 'onebit_adam'"),
    ],
)
def test_bad_input_is_one_message(world, name, strategy, dense_steps, options, expected):
    [message] = world(1).run(refused, name, strategy, dense_steps, options)
    assert expected in message


NUMBERS = {"lr": 0.25, "betas": [0.5, 0.75], "eps": 0.0625, "weight_decay": 0.125}


def taken_as(rank, world, group, kind):
    """What two optimizers take of numbers of a type."""
    given = {name: [*map(kind, value)] if name == "betas" else kind(value) for name, value in NUMBERS.items()}
    model = nn.Sequential(nn.ModuleList([nn.Linear(3, 5)]))
    onebit = OneBitAdam(model.parameters(), model, dense_steps=1, **given)
    muon = Muon(model.parameters(), model, **given)
    return [{name: group[name] for name in NUMBERS} for group in (*onebit.param_groups, *muon.param_groups)]


def test_numbers_may_be_of_another_library(world):
    [taken] = world(1).run(taken_as, np.float32)
    assert taken == [{**NUMBERS, "betas": tuple(NUMBERS["betas"])}] * 3
    assert {type(beta) for rates in taken for beta in rates["betas"]} == {float}, "torch refuses others"


def without_a_gradient(rank, world, group):
    reducer = Reducer(build("onebit"), group, dense_steps=1)
    model = wrap(held(), "ddp", reducer, device="cpu", average=False)
    optimizer = optimizers.build("onebit_adam", model, groups_of(model), reducer)
    model.module.bias.sum().backward()
    try:
        optimizer.communicate(1.0)
    except RunFault as error:
        return str(error)


def test_a_parameter_without_a_gradient_is_named(world):
    for message in world(2).run(without_a_gradient):
        assert message.startswith("6 of 7 parameters got no gradient: cube, rows.weight")


def own_gradients(rank, world, group, strategy):
    """This rank's gradients of two backward passes in a plain loop, without `accumulation`."""
    model = wrap(held(), strategy, Reducer(build("onebit"), group), device="cpu", average=False)
    for step in range(2):
        model(gradients_of(rank, step)).backward()
    return {name: p.grad.clone() for name, p in named_parameters(model) if p.grad is not None}


@pytest.mark.parametrize("strategy", REPLICAS)
def test_a_model_that_is_not_to_average_never_does(world, strategy):
    for rank, found in enumerate(world(2).run(own_gradients, strategy)):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients_of(rank, 0)[name] + gradients_of(rank, 1)[name])
