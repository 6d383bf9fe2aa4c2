"""naive and bucket, which keep replicas by hooks of their own, against DDP and against a float64 mean.

Of `strategies/naive.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from diagonals import diagonals, swept
from test_frameworks import (
    assert_near,
    batch_of,
    exact_gradients,
    loss_of,
    model_of,
    reducer_of,
    whole_gradients,
)
from torch import nn

from gradwire.base.errors import RunFault
from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import METER
from gradwire.comm.parallel import accumulation, checkpoint_state, full_state_dict, named_parameters, wrap
from gradwire.comm.parallel.buckets import FEWEST
from gradwire.comm.parallel.strategy import strategy_of

OURS = ("naive", "bucket")
ours = pytest.mark.parametrize("strategy", OURS)
sizes = pytest.mark.parametrize(("size", "strategy"), diagonals([1, 2, 3], OURS))


class Mixed(nn.Module):
    """A tied weight, a frozen one, three dtypes, a transposed parameter, and buffers of types that sum nowhere."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(50).bfloat16())
        self.wide = nn.Parameter(torch.randn(3).double())
        self.across = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("count", torch.randint(100, ()))

    def forward(self, x):
        y = self.tied(torch.tanh(self.inner(x))) * self.frozen
        others = (self.narrow.float().square().sum(), self.wide.float().square().sum(), self.across.square().sum())
        return (y.sum() + sum(others)) * x.sum()


class Branches(nn.Module):
    """Two layers of which either may be left out, or come first."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, *names):
        return sum(getattr(self, name)(x).square().sum() for name in names)


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def payload_calls():
    return sum(cost.calls for cost in METER.by_op("payload").values())


def steps_of(rank, strategy, group, micros, **options):
    """Gradients of two optimizer steps of SGD, accumulated over as many micro-batches as ``micros`` says."""
    model = wrap(model_of("gpt2"), strategy, device="cpu", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, count in enumerate(micros):
        for micro in range(count):
            with accumulation(model, last=micro == count - 1):
                (loss_of("gpt2", model, batch_of("gpt2", rank, 10 * step + micro)) / count).backward()
        found.append(whole_gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)  # the gradients of the third step are added to zeros
    return found


def against_ddp(rank, world, group, micros):
    return {strategy: steps_of(rank, strategy, group, micros) for strategy in ("ddp", *OURS)}


@pytest.mark.parametrize("size", [2, *swept(3)])
def test_gradients_equal_ddps(world, size):
    """The second step comes after DDP has rebuilt its buckets."""
    for found in world(size).run(against_ddp, (2, 3, 1)):
        for strategy in OURS:
            for mine, theirs in zip(found[strategy], found["ddp"], strict=True):
                for name in theirs:
                    if size == 3:  # gloo's order of summation depends on the place in the buffer
                        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-7)
                    else:
                        assert torch.equal(mine[name], theirs[name]), (strategy, name)


def mixed(rank, world, group, strategy, method):
    """Weights as they are after `wrap`, gradients of a step, and the gradients this rank would have had alone."""
    torch.manual_seed(rank)
    model = Mixed()
    wrapped = wrap(model, strategy, reducer_of(group, method), device="cpu")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    alone = Mixed()
    alone.load_state_dict(state)
    x = noise(2, 4, seed=7 + rank)
    alone(x).backward()
    wrapped(x).backward()
    assert list(checkpoint_state(wrapped, torch.optim.SGD(wrapped.parameters()))["model"]) == list(state)
    assert [name for name, _ in named_parameters(wrapped)] == [name for name, _ in model.named_parameters()]
    assert rank or full_state_dict(wrapped).keys() == state.keys()
    return state, *({name: p.grad for name, p in each.named_parameters()} for each in (wrapped, alone))


@sizes
@pytest.mark.parametrize("method", [None, "none"])
def test_ties_frozen_parameters_dtypes_and_different_initial_weights(world, size, strategy, method):
    results = world(size).run(mixed, strategy, method)
    torch.manual_seed(0)
    initial = Mixed().state_dict()
    for state, found, alone in results:
        assert all(torch.equal(state[name], initial[name]) for name in initial), "not rank 0's weights"
        assert found["frozen"] is None and "tied.weight" not in found
        for name in found.keys() - {"frozen"}:
            mean = torch.stack([each[name].double() for _, _, each in results]).mean(0)
            assert found[name].dtype == alone[name].dtype and float(mean.abs().min()) > 0
            if found[name].dtype == torch.bfloat16:
                assert torch.equal(found[name], mean.bfloat16()), "summed in bfloat16"
            torch.testing.assert_close(found[name], mean.to(found[name].dtype), rtol=1e-6, atol=1e-6)
            assert torch.equal(found[name], results[0][1][name]), "replicas differ"


def unused(rank, world, group, strategy):
    model = wrap(Branches(), strategy, device="cpu")
    x = noise(1, 3, seed=rank)
    messages = []
    for _ in range(2):
        try:
            model(x, "left").backward()
        except RunFault as error:
            messages.append(str(error))
    model.zero_grad()
    model(x, "left", "right").backward()
    return messages, whole_gradients(model)


@sizes
def test_an_unused_parameter_is_named_and_the_model_stays_usable(world, size, strategy):
    for messages, found in (results := world(size).run(unused, strategy)):
        assert len(messages) == 2 and messages[0] == messages[1]
        assert messages[0].startswith("2 of 4 parameters got no gradient")
        assert "averages: right.weight, right.bias." in messages[0]
        assert all(torch.equal(found[name], results[0][1][name]) for name in found)


def paused(rank, world, group, strategy):
    """Gradients after passes inside of nested and broken-off `no_sync`s; payload collectives of each phase."""
    model = wrap(model_of("odd"), strategy, device="cpu")
    way = strategy_of(model)
    calls = [payload_calls()]

    def backward(micro):
        loss_of("odd", model, batch_of("odd", rank, micro)).backward()
        calls.append(payload_calls())

    with way.no_sync():
        with way.no_sync():
            backward(0)
        backward(1)  # still inside of the outer one
    try:
        with way.no_sync():
            backward(2)
            raise KeyError("on the user's side")
    except KeyError:
        pass
    backward(3)
    return whole_gradients(model), [after - before for before, after in pairwise(calls)]


@sizes
def test_no_sync_nests_and_ends_with_an_exception(world, size, strategy):
    exact = exact_gradients("odd", range(size), micros=range(4))
    for found, calls in world(size).run(paused, strategy):
        assert_near(found, {name: 4 * gradient for name, gradient in exact.items()})
        assert calls == [0, 0, 0, len(exact) if strategy == "naive" else FEWEST]


class Breaks(torch.autograd.Function):
    """The identity, whose backward pass fails where ``broken`` says so."""

    @staticmethod
    def forward(context, x, broken):
        context.broken = broken
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if context.broken:
            raise KeyError("in the middle of the pass")
        return gradient, None


def broken_off(rank, world, group, strategy, options):
    """A backward pass that fails after the later layer's gradients; then a whole one."""
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    for layer in layers:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = wrap(layers, strategy, device="cpu", **options)
    x = noise(1, 3, seed=rank)
    for broken in (True, False):
        model.zero_grad()
        context = pytest.raises(KeyError) if broken else nullcontext()
        with context:
            layers[1](Breaks.apply(layers[0](x), broken)).sum().backward()
    return x, [layer.weight.grad for layer in layers]


@pytest.mark.parametrize(("strategy", "options"), [("naive", {}), ("bucket", {"bucket_mb": 0})])
def test_a_broken_off_pass_leaves_nothing_behind(world, strategy, options):
    results = world(2).run(broken_off, strategy, options)
    mean = torch.cat([x for x, _ in results]).mean(0)
    for _, gradients in results:
        for gradient in gradients:
            torch.testing.assert_close(gradient, mean.expand(3, 3))


def counted(rank, world, group, strategy):
    before, sent = payload_calls(), METER.sent("payload")
    model = wrap(model_of("gpt2"), strategy, device="cpu")
    loss_of("gpt2", model, batch_of("gpt2", rank)).backward()
    return payload_calls() - before, METER.sent("payload") - sent


@ours
def test_collectives_and_bytes_of_a_step(world, strategy):
    parameters = list(model_of("gpt2").parameters())
    results = world(3).run(counted, strategy)
    assert {calls for calls, _ in results} == {len(parameters) if strategy == "naive" else FEWEST}
    assert sum(sent for _, sent in results) == raw_bytes("all_reduce", sum(p.numel() for p in parameters), 3)


def nothing_trained(rank, world, group, strategy):
    model = wrap(nn.Linear(2, 2).requires_grad_(False), strategy, device="cpu")
    x = torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    return model.weight.grad, x.grad is not None


@ours
def test_a_model_without_trained_parameters(world, strategy):
    assert world(2).run(nothing_trained, strategy) == [(None, True)] * 2


def checkpointed(rank, world, group, strategy):
    model = model_of("gpt2")
    model.gradient_checkpointing_enable()
    model.train()
    model = wrap(model, strategy, device="cpu")
    loss_of("gpt2", model, batch_of("gpt2", rank)).backward()
    return whole_gradients(model)


@ours
def test_activation_checkpointing(world, strategy):
    for found in world(2).run(checkpointed, strategy):
        assert_near(found, exact_gradients("gpt2", range(2)))
