"""Optimizers that communicate, against torch's AdamW while they warm up and against their protocol in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.collectives import Exempt, Layout, Reducer
from gradwire.compressors import build
from gradwire.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.parallel import accumulation, clip_grad_norm, named_parameters, optimizers, wrap
from gradwire.parallel.verify import first_difference

REPLICAS = ("naive", "bucket", "ddp")
WARM = 3
RATES = (0.02, 0.05, 0.03, 0.04, 0.01, 0.03, 0.02, 0.05, 0.04, 0.03)
DECAY = 0.1
BETAS = (0.8, 0.9)
CLIP = 4.0

worlds = pytest.mark.parametrize("size", [2, 3])
every_strategy = pytest.mark.parametrize("strategy", REPLICAS)


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
    told = []
    for step in range(steps):
        set_rates(optimizer, step)
        backward(model, rank, step, micros)
        if fault == (rank, step):
            next(p for n, p in named_parameters(model) if n == "bias").grad[2] = float("nan")
        if communicates:
            norm, finite = optimizer.exchange(CLIP)
        else:
            finite = reducer.finish()
            norm = clip_grad_norm(model, CLIP)
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        told.append((whole(model), norm, finite, first_difference(model, optimizer)))
    return told, reducer.traffic


def simulated(world, steps, method, options, reducer_options, *, variance_floor=0.0, skipped=()):
    """1-bit Adam in one process: its warm-up by torch's AdamW, then the exchange with both residuals, by hand."""
    model = held()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0, betas=BETAS)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    layout = Layout.dim0([(name, tuple(p.shape)) for name, p in named.items()], world)
    compressor, exempt = build(method, **options), reducer_options.get("exempt", Exempt())
    keeps = reducer_options.get("error_feedback", True)
    residuals: dict = {}
    after, taken = [], 0

    def delivered(values, piece, key):
        """What the others decode of a piece."""
        codec = build("none") if exempt.covers(piece.name, piece.shape) else compressor
        given = values + residuals.get(key, 0) if keeps else values
        sent = codec.decode(codec.encode(given.reshape(piece.form)), piece.form).view(-1)
        residuals[key] = given - sent
        return sent

    for step in range(steps):
        set_rates(optimizer, step)
        own = [gradients_of(rank, step) for rank in range(world)]
        if step < WARM:
            for name, p in named.items():
                p.grad = sum(own[rank][name] for rank in range(world)) / world
            torch.nn.utils.clip_grad_norm_(named.values(), CLIP)
            optimizer.step()
            taken += 1
            after.append({name: p.detach().clone() for name, p in model.named_parameters()})
            continue
        squares = [sum(g.double().square().sum() for n, g in mine.items() if n in named) for mine in own]
        norm = float((sum(squares) / world).sqrt())
        scale = min(1.0, CLIP / norm)
        means = {name: torch.empty_like(p) for name, p in named.items()}
        for piece in layout.pieces:
            total = torch.zeros(piece.numel)
            for rank in range(world):
                start = optimizer.state[named[piece.name]]["exp_avg"]
                momentum = torch.lerp(start, own[rank][piece.name] * scale, 1 - BETAS[0])
                total += delivered(momentum.view(-1)[piece.source], piece, (rank, piece))
            means[piece.name].view(-1)[piece.source] = delivered(total / world, piece, ("owner", piece))
        if step not in skipped:
            taken += 1
            for group in optimizer.param_groups:
                for p in (p for p in group["params"] if p.requires_grad):
                    name = next(name for name, of in named.items() if of is p)
                    state = optimizer.state[p]
                    variance = state["exp_avg_sq"] / (1 - BETAS[1] ** WARM)
                    variance = variance.clamp_min(variance_floor * variance.mean())
                    state["exp_avg"] = means[name]
                    with torch.no_grad():
                        p -= group["lr"] * group["weight_decay"] * p
                        p -= group["lr"] / (1 - BETAS[0] ** taken) * means[name] / (variance.sqrt() + 1e-8)
        after.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return after


def assert_same(found, expected, rtol=0.0):
    assert found.keys() == expected.keys()
    for name in expected:
        if rtol:
            torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=rtol, msg=name)
        else:
            assert torch.equal(found[name], expected[name]), name


def cell(**more):
    return {"dense_steps": WARM, "error_feedback": True, "algorithm": "exchange", **more}


@worlds
@every_strategy
@pytest.mark.parametrize("name", optimizers.available())
def test_the_warm_up_is_adamw_bit_for_bit(world, size, strategy, name):
    given = (strategy, "onebit", cell(dense_steps=6), 6)
    found = world(size).run(trained, name, *given)
    expected = world(size).run(trained, "gradient", *given)
    exact = simulated(size, 3, "onebit", {}, {})
    for (mine, traffic), (theirs, reference) in zip(found, expected, strict=True):
        for step in range(6):
            assert_same(mine[step][0], theirs[step][0])
            assert mine[step][1] == theirs[step][1], "the norm before clipping"
        assert any(norm > CLIP for _, norm, _, _ in mine), "clipping had to do something"
        assert traffic["sent"] == reference["sent"] == traffic["raw"] and traffic["elements"] == reference["elements"]
        for step in range(3):
            assert_same(mine[step][0], exact[step], rtol=1e-5)


@worlds
@every_strategy
@pytest.mark.parametrize(
    ("method", "options", "more"),
    [
        ("none", {}, {}),
        ("onebit", {"block": 16}, {}),
        ("onebit", {"block": 16}, {"error_feedback": False}),
        ("signsgd", {}, {"exempt": Exempt(max_ndim=1)}),
        ("topk", {"density": 0.3}, {}),
    ],
    ids=str,
)
def test_onebit_adam_is_its_protocol_in_one_process(world, size, strategy, method, options, more):
    floor = {"variance_floor": 0.05}
    results = world(size).run(trained, "onebit_adam", strategy, method, cell(method=options, **more), 10, floor)
    expected = simulated(size, 10, method, options, more, **floor)
    for told, traffic in results:
        assert [difference for *_, difference in told] == [None] * 10, "replicas are bit-equal after every step"
        for step in range(10):
            assert_same(told[step][0], expected[step], rtol=2e-5)
            assert_same(told[step][0], results[0][0][step][0])
        assert traffic["raw"] > 0 and (traffic["sent"] < traffic["raw"]) == (method != "none")
    totals = [sum(traffic[key] for _, traffic in results) for key in ("sent", "closed_form")]
    assert totals[0] * size == totals[1]


def test_a_single_rank_takes_adams_step_with_the_variance_frozen(world):
    [(told, traffic)] = world(1).run(trained, "onebit_adam", "naive", "onebit", cell(), 8, {"variance_floor": 0.05})
    expected = simulated(1, 8, "none", {}, {}, variance_floor=0.05)
    for step in range(8):
        assert_same(told[step][0], expected[step], rtol=2e-5)
    assert traffic["raw"] == traffic["sent"] == 0


@every_strategy
def test_accumulated_gradients_are_sent_once(world, strategy):
    given = ("onebit_adam", strategy, "onebit", cell(), 6, {"variance_floor": 0.05})
    once = world(2).run(trained, *given)
    thrice = world(2).run(trained, *given, None, 4)  # quarters of a gradient add up exactly
    for (mine, traffic), (theirs, reference) in zip(once, thrice, strict=True):
        assert_same(mine[-1][0], theirs[-1][0])
        assert traffic["sent"] == reference["sent"] and traffic["elements"] == reference["elements"]


@worlds
@pytest.mark.parametrize("step", [1, 4])
def test_a_skipped_step_leaves_parameters_and_momentum(world, size, step):
    rest = {"variance_floor": 0.05}
    results = world(size).run(trained, "onebit_adam", "ddp", "none", cell(nonfinite="skip"), 7, rest, (size - 1, step))
    for told, traffic in results:
        assert [finite for _, _, finite, _ in told] == [at != step for at in range(7)]
        assert_same(told[step][0], told[step - 1][0])
        assert all(value.isfinite().all() for value in told[-1][0].values())
        assert told[-1][3] is None and traffic["nonfinite_steps"] == 1
        if step == 4:
            assert_same(told[-1][0], simulated(size, 7, "none", {}, {}, skipped=(4,), **rest)[-1], rtol=2e-5)
    assert not torch.equal(results[0][0][step + 1][0]["bias"], results[0][0][step][0]["bias"])


def diverging(rank, world, group, policy):
    try:
        told, _ = trained(rank, world, group, "onebit_adam", "naive", "onebit", cell(nonfinite=policy), 6, None, (0, 4))
    except NonFiniteGradient as error:
        return error.step
    return [finite for _, _, finite, _ in told], bool(told[-1][0]["bias"].isfinite().all())


def test_other_policies_raise_on_all_ranks_or_propagate(world):
    assert world(2).run(diverging, "raise") == [4, 4]
    assert world(2).run(diverging, "propagate") == [([True] * 6, False)] * 2


def test_a_row_that_the_warm_up_never_met_takes_no_huge_step(world):
    """Without a floor its first gradient, at step 5, is divided by nothing but eps."""
    for floor, huge in ((0.0, True), (0.05, False)):
        [(told, _)] = world(1).run(trained, "onebit_adam", "naive", "none", cell(), 6, {"variance_floor": floor})
        moved = (told[5][0]["rows.weight"] - told[4][0]["rows.weight"])[4:].abs().max()
        assert (moved > 1e3) == huge


def test_tied_and_frozen_parameters(world):
    told, _ = world(2).run(trained, "onebit_adam", "ddp", "onebit", cell(), 5, {"variance_floor": 0.05})[0]
    assert torch.equal(told[-1][0]["still"], held().still)
    assert "head.weight" not in told[-1][0], "a tied parameter has one name"


def refused(rank, world, group, name, strategy, dense_steps, options):
    reducer = Reducer(build("onebit"), group, dense_steps=dense_steps)
    try:
        model = wrap(held(), strategy, reducer, device="cpu", average=False)
        optimizers.build(name, model, groups_of(model), reducer, **options)
    except BadInput as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "strategy", "dense_steps", "options", "told"),
    [
        ("onebit_adam", "fsdp2", 3, {}, "strategy fsdp2 shards gradients"),
        ("onebit_adam", "fsdp1", 3, {}, "strategy fsdp1 shards gradients"),
        ("onebit_adam", "ddp", 0, {}, "dense_steps, the number of these steps, must be at least 1"),
        ("onebit_adam", "ddp", 3, {"variance_floor": -0.1}, "variance_floor is -0.1"),
        ("one_bit_adam", "ddp", 3, {}, "Did you mean 'onebit_adam'"),
    ],
)
def test_bad_input_is_one_message(world, name, strategy, dense_steps, options, told):
    [message] = world(1).run(refused, name, strategy, dense_steps, options)
    assert told in message


def without_a_gradient(rank, world, group):
    reducer = Reducer(build("onebit"), group, dense_steps=1)
    model = wrap(held(), "ddp", reducer, device="cpu", average=False)
    optimizer = optimizers.build("onebit_adam", model, groups_of(model), reducer)
    model.module.bias.sum().backward()
    try:
        optimizer.exchange(1.0)
    except RunFault as error:
        return str(error)


def test_a_parameter_without_a_gradient_is_named(world):
    for message in world(2).run(without_a_gradient):
        assert message.startswith("6 of 7 parameters got no gradient: cube, rows.weight")
