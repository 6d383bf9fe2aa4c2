"""Every strategy on real ranks, against one process with the whole batch in float64.

Of `strategies/ddp.py`, `strategies/fsdp1.py`, `strategies/fsdp2.py`.
"""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from diagonals import chosen, diagonals, swept
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from gradwire.base.errors import BadInput
from gradwire.comm import topology
from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import (
    accumulation,
    checkpoint_state,
    clip_grad_norm,
    full_state_dict,
    load_checkpoint_state,
    strategy_class,
    wrap,
)

STRATEGIES = tuple(name for name in topology.STRATEGIES.available() if name != "hsdp")  # two ranks make no islands
STOCHASTIC = {"rounding": "stochastic", "block": 16}
OTHERS = [name for name in STRATEGIES if name not in ("ddp", "fsdp2")]
sweep = pytest.mark.sweep

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Odd(nn.Module):
    """Shapes that no number of ranks divides, direct parameters next to those of its children, a 3-D one too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 2, 2))
        self.enter = nn.Linear(3, 7)
        self.norm = nn.LayerNorm(7)
        self.layers = nn.ModuleList([nn.Linear(7, 5), nn.Linear(5, 11), nn.Linear(11, 7)])
        self.narrow = nn.Linear(7, 1)
        self.two = nn.Linear(1, 2)

    def forward(self, x):
        x = self.norm(self.enter(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.two(self.narrow(x)) * self.scale.square().mean() + self.scale[0, 0]).square()


class Even(nn.Module):
    """Every dimension divides by 2: no padding anywhere."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square()


def tiny_gpt2():
    config = GPT2Config(vocab_size=37, n_positions=8, n_embd=6, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


MODELS = {"odd": Odd, "even": Even, "gpt2": tiny_gpt2}


def model_of(name):
    torch.manual_seed(5)
    return MODELS[name]()


def batch_of(name, rank, micro=0):
    """A batch that only this rank and micro-batch has."""
    generator = torch.Generator().manual_seed(100 * micro + rank)
    if name == "gpt2":
        return torch.randint(0, 37, (2, 8), generator=generator)
    return torch.randn(4, 6 if name == "even" else 3, generator=generator)


def loss_of(name, model, batch):
    return model(input_ids=batch, labels=batch).loss if name == "gpt2" else model(batch).mean()


@cache
def exact_gradients(name, ranks, micros=(0,)):
    """Gradients of the mean loss over ranks and micro-batches: float64, one process."""
    model = model_of(name).double()
    for rank in ranks:
        for micro in micros:
            batch = batch_of(name, rank, micro)
            loss = loss_of(name, model, batch.double() if batch.is_floating_point() else batch)
            (loss / (len(ranks) * len(micros))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_gradients(model):
    """A wrapped model's gradients, whole, by the unwrapped model's names."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return {name.replace("_fsdp_wrapped_module.", ""): gradient for name, gradient in found.items()}
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    grads = {name: parameter.grad for name, parameter in inner.named_parameters()}
    grads = {name: gradient for name, gradient in grads.items() if gradient is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in grads.items()}


def reducer_of(group, method, options=None, **reducer_options):
    return None if method is None else Reducer(build(method, **options or {}), group, **reducer_options)


def gradients(rank, world, group, name, strategies, method, options, micros):
    """For each strategy: the gradients of one optimizer step, and the reducer's traffic."""
    results = []
    for strategy in strategies:
        reducer = reducer_of(group, method, options)
        model = wrap(model_of(name), strategy, reducer, device="cpu")
        for micro in range(micros):
            with accumulation(model, last=micro == micros - 1):
                (loss_of(name, model, batch_of(name, rank, micro)) / micros).backward()
        finite = reducer is None or reducer.finish()
        results.append((whole_gradients(model), reducer and reducer.traffic, finite))
    return results


def run(world, size, name, strategies=STRATEGIES, method="none", options=None, micros=1):
    """`gradients` on all ranks, as ``{strategy: [(gradients, traffic) of each rank]}``."""
    results = world(size).run(gradients, name, strategies, method, options, micros)
    assert all(finite is True for result in results for _, _, finite in result)
    return {strategy: [result[i][:2] for result in results] for i, strategy in enumerate(strategies)}


def assert_near(found, exact):
    assert found.keys() == exact.keys()
    top = max(gradient.abs().max() for gradient in exact.values())
    for name, gradient in exact.items():
        assert (found[name].double() - gradient).abs().max() <= 2e-6 * top, name


@pytest.mark.parametrize(("size", "name"), [*diagonals([2, 3], ["odd", "gpt2"]), pytest.param(4, "odd", marks=sweep)])
def test_gradients_equal_the_big_batch(world, size, name):
    """By the frameworks' collectives, and by the exchange: the same bits under every strategy, and no padding sent."""
    exact = exact_gradients(name, range(size))
    numel = sum(gradient.numel() for gradient in exact.values())
    alone, exchanged = (run(world, size, name, method=method) for method in (None, "none"))
    reference = exchanged["ddp"][0][0]
    for strategy in STRATEGIES:
        for found, _ in (*alone[strategy], *exchanged[strategy]):
            assert_near(found, exact)
        assert all(torch.equal(found[key], reference[key]) for found, _ in exchanged[strategy] for key in reference)
        raw, sent = (sum(traffic[key] for _, traffic in exchanged[strategy]) for key in ("raw", "sent"))
        assert raw == sent == raw_bytes(strategy_class(strategy).kind, numel, size)


@pytest.mark.parametrize(("strategy", "size", "method"), diagonals(STRATEGIES, [2, 3], ["none", None]))
def test_accumulated_gradients_are_averaged_once(world, size, strategy, method):
    ranks = run(world, size, "odd", [strategy], method, micros=3)[strategy]
    exact = exact_gradients("odd", range(size), micros=range(3))
    for found, traffic in ranks:
        assert_near(found, exact)
        assert method is None or traffic.details["elements"] == sum(gradient.numel() for gradient in exact.values())


@every_strategy
def test_one_rank_needs_no_reduction(world, strategy):
    [(found, traffic)] = run(world, 1, "odd", [strategy], "int8")[strategy]
    assert_near(found, exact_gradients("odd", (0,)))
    assert not any((traffic | traffic.details).values())


@contextmanager
def small_first_bucket():
    """DDP makes more than one bucket of a small model, and others after the first step."""
    before, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 512
    try:
        yield
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = before


def clipped(rank, world, group, strategy, method):
    reducer = reducer_of(group, method)
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    loss_of("odd", model, batch_of("odd", rank)).backward()
    before = whole_gradients(model)
    loose = clip_grad_norm(model, 1e9)
    unchanged = whole_gradients(model)
    norm = clip_grad_norm(model, 0.25)
    return before, unchanged, loose, norm, whole_gradients(model)


@pytest.mark.parametrize(
    ("size", "strategy"), chosen([(3, "bucket"), (2, "fsdp1"), (2, "fsdp2")], product([2, 3], STRATEGIES))
)
def test_clipping_uses_the_norm_over_the_whole_model(world, size, strategy):
    results = world(size).run(clipped, strategy, "none")
    exact = exact_gradients("odd", range(size))
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in exact.values()))
    assert expected > 0.25
    for before, unchanged, loose, norm, after in results:
        assert norm == loose == results[0][3]
        assert norm == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(before[name], unchanged[name]) for name in before)
        for name, gradient in before.items():
            torch.testing.assert_close(after[name], gradient * (0.25 / norm))


def trained(rank, world, group, name, strategy, count):
    """The whole parameters after a few steps, under the framework's own reduction."""
    model = wrap(model_of(name), strategy, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro in range(count):
        optimizer.zero_grad()
        loss_of(name, model, batch_of(name, rank, micro)).backward()
        optimizer.step()
    return full_state_dict(model)


@pytest.mark.parametrize(("case", "strategy"), diagonals([(3, "odd"), (1, "gpt2"), (3, "gpt2")], STRATEGIES))
def test_the_full_state_has_the_unwrapped_models_names(world, case, strategy):
    size, name = case
    first, *others = world(size).run(trained, name, strategy, 1)
    assert others == [{}] * (size - 1)
    model = model_of(name)
    exact = exact_gradients(name, range(size))
    for parameter, gradient in exact.items():
        model.get_parameter(parameter).data.sub_(0.1 * gradient.float())
    assert first.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-6)


def resumed(rank, world, group, strategy, folder, method, options):
    """Parameters after three steps, and after everything is new but for a checkpoint that two of them left."""

    def new():
        reducer = reducer_of(group, method, options, seed=2, error_feedback=True)
        with small_first_bucket():
            model = wrap(model_of("gpt2"), strategy, reducer, device="cpu")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), reducer

    def train(model, optimizer, reducer, some):
        for micro in some:
            optimizer.zero_grad()
            loss_of("gpt2", model, batch_of("gpt2", rank, micro)).backward()
            reducer.finish()
            clip_grad_norm(model, 1.0)
            optimizer.step()

    whole = new()
    train(*whole, range(2))
    dcp.save(checkpoint_state(*whole[:2]), checkpoint_id=folder)
    kept = copy.deepcopy(whole[2].state_dict())
    train(*whole, [2])

    model, optimizer, reducer = new()
    state = checkpoint_state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_checkpoint_state(model, optimizer, state)
    reducer.load_state_dict(kept)
    train(model, optimizer, reducer, [2])
    return full_state_dict(whole[0]), full_state_dict(model)


RESUMED = [(1, "int8", STOCHASTIC), (2, "int8", STOCHASTIC), (3, "int8", STOCHASTIC), (3, "powersgd", {})]


@pytest.mark.parametrize(
    ("case", "strategy"),
    chosen([(RESUMED[2], "ddp"), (RESUMED[3], "fsdp1"), (RESUMED[1], "fsdp2")], product(RESUMED, STRATEGIES)),
)
def test_a_resumed_run_equals_an_unbroken_one(world, case, strategy, tmp_path):
    size, method, options = case
    folder = str(tmp_path / "checkpoint")
    unbroken, broken = world(size).run(resumed, strategy, folder, method, options)[0]
    assert unbroken.keys() == broken.keys()
    for name in unbroken:
        assert torch.equal(unbroken[name], broken[name]), name


def met_by_one(rank, world, group, strategy):
    """A NaN loss on the last rank in the first of two steps."""
    reducer = reducer_of(group, "int8", nonfinite="skip")
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    answers = []
    for micro in range(2):
        model.zero_grad()
        loss = loss_of("odd", model, batch_of("odd", rank, micro))
        (loss * (math.nan if micro == 0 and rank == world - 1 else 1.0)).backward()
        answers.append(reducer.finish())
    return answers


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", *swept(*OTHERS)])
def test_a_nan_on_one_rank_is_skipped_on_all(world, strategy):
    assert world(3).run(met_by_one, strategy) == [[False, True]] * 3


def unknown_strategy(rank, world, group):
    wrap(Even(), "fsdp3", device="cpu")


def foreign_model(rank, world, group):
    clip_grad_norm(Even(), 1.0)


def test_bad_input_is_reported(world):
    assert topology.STRATEGIES.available() == sorted([*STRATEGIES, "hsdp"])
    with pytest.raises(BadInput, match=r"unknown strategy 'fsdp3'\. Did you mean 'fsdp"):
        world(1).run(unknown_strategy)
    with pytest.raises(BadInput, match=r"Even was not returned by gradwire\.comm\.parallel\.wrap"):
        world(1).run(foreign_model)
