"""Reductions during the backward pass: they overlap, and give the same bits as reductions that the pass waits for."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diagonals import swept
from late_encoding import late_encoding, only_when_waited_for
from test_frameworks import STOCHASTIC, STRATEGIES, batch_of, full_state_dict, loss_of, model_of, whole_gradients
from test_naive import Branches, Breaks, noise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.queue import CONNECTIONS
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, checkpoint_state, hook, load_checkpoint_state, wrap

METHODS = [("int8", STOCHASTIC), ("topk", {"density": 0.2}), ("powersgd", {"rank": 1}), ("onebit", {}), ("none", {})]
OVERLAPPING = [strategy for strategy in STRATEGIES if strategy != "naive"]


def trained(rank, world, group, strategy, name, method, options, reducer_options):
    """Weights, gradients and residuals of three steps: accumulated, skipped, then with a new model and reducer.

    With ``overlap`` on; off; and on until the resumption, off afterwards.
    """
    with late_encoding(rank):
        return [
            steps(rank, world, group, strategy, name, method, options, reducer_options, overlaps)
            for overlaps in OVERLAPS
        ]


OVERLAPS = [(True, True), (False, False), (True, False)]


def steps(rank, world, group, strategy, name, method, options, reducer_options, overlaps):
    def new(overlap):
        given = {"error_feedback": True, "seed": 2, "nonfinite": "skip", **reducer_options}
        reducer = Reducer(build(method, **options), group, overlap=overlap, **given)
        model = wrap(model_of(name), strategy, reducer, device="cpu")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), reducer

    def step(model, optimizer, reducer, number, micros=1, spoiled=False):
        optimizer.zero_grad()
        for micro in range(micros):
            with accumulation(model, last=micro == micros - 1):
                loss = loss_of(name, model, batch_of(name, rank, 10 * number + micro))
                (loss * (float("nan") if spoiled and rank == 0 else 1.0)).backward()
        found = whole_gradients(model)
        if reducer.finish():
            optimizer.step()
        return found

    whole = new(overlaps[0])
    found = [step(*whole, 0, micros=2), step(*whole, 1, spoiled=True)]
    model, optimizer, reducer = whole
    kept, weights = copy.deepcopy(reducer.state_dict()), copy.deepcopy(checkpoint_state(model, optimizer))
    model, optimizer, reducer = new(overlaps[1])
    load_checkpoint_state(model, optimizer, weights)
    reducer.load_state_dict(kept)
    found.append(step(model, optimizer, reducer, 2))
    return found, full_state_dict(model), reducer.codec.residual_norm, reducer.traffic.details["residuals_dropped"]


def assert_the_same(results):
    for (expected, weights, *numbers), *others in results:
        assert len({len(found) for found in expected}) == 1
        for found, other_weights, *other_numbers in others:
            assert numbers == other_numbers
            for mine, theirs in zip([*expected, weights], [*found, other_weights], strict=True):
                assert mine.keys() == theirs.keys()
                assert all(torch.allclose(mine[name], theirs[name], rtol=0, atol=0, equal_nan=True) for name in mine)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_overlapped_equals_synchronous(world, strategy):
    results = world(2).run(trained, strategy, "odd", "int8", STOCHASTIC, {})
    assert_the_same(results)
    assert all(norm > 0 for [(_, _, norm, _), *_] in results)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.parametrize("name", ["odd", "gpt2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overlapped_equals_synchronous_everywhere(world, size, strategy, name, method, options):
    for reducer_options in ({}, {"algorithm": "exchange", "dense_steps": 1}):
        assert_the_same(world(size).run(trained, strategy, name, method, options, reducer_options))


def in_flight(rank, world, group, strategy):
    """Gradients of a pass, and the reductions in flight when it was at the first layer, and when it had ended.

    It is the second pass: in the first one DDP has a single bucket.
    """
    flying = []
    reducer = Reducer(build("int8", **STOCHASTIC), group)
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    loss_of("odd", model, batch_of("odd", rank)).backward()
    model.zero_grad()
    [enter] = [module for name, module in model.named_modules() if name.endswith("enter")]
    enter.register_forward_hook(lambda *call: call[-1].register_hook(lambda _: flying.append(running(group))) and None)
    with only_when_waited_for():
        loss_of("odd", model, batch_of("odd", rank)).backward()
        flying.append(running(group))
    found = whole_gradients(model)
    assert reducer.finish()
    return flying, found, whole_gradients(model)


def running(group):
    """Reductions in flight over a group's ranks."""
    return len(CONNECTIONS[group].running)


@pytest.mark.parametrize("strategy", OVERLAPPING)
def test_the_backward_pass_goes_on_while_a_bucket_is_in_flight_and_waits_at_its_end(world, strategy):
    results = world(2).run(in_flight, strategy)
    for (meanwhile, at_the_end), found, after in results:
        assert meanwhile > 0 and at_the_end == 0
        for name, gradient in found.items():
            assert torch.equal(gradient, after[name]), "it changed after the backward pass"
            assert torch.equal(gradient, results[0][1][name])


def in_another_order(rank, world, group, overlap):
    """Gradients of a model whose parameters get ready in another order on rank 1, in buckets of one."""
    reducer = Reducer(build("int8", **STOCHASTIC), group, error_feedback=True, overlap=overlap)
    torch.manual_seed(5)
    model = wrap(Branches(), "bucket", reducer, device="cpu", bucket_mb=0)
    found = []
    with late_encoding(rank):
        for step in range(3):
            model.zero_grad()
            model(noise(1, 3, seed=10 * step + rank), *(("left", "right") if rank else ("right", "left"))).backward()
            reducer.finish()
            found.append(whole_gradients(model))
    return found


def test_ranks_whose_gradients_get_ready_in_different_orders(world):
    first, second = world(2).run(in_another_order, True)
    expected, _ = world(2).run(in_another_order, False)
    for mine, other, without in zip(first, second, expected, strict=True):
        assert all(torch.equal(mine[name], other[name]) and torch.equal(mine[name], without[name]) for name in mine)


class Unused(nn.Module):
    """Parameters that some passes do not use."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(6))

    def forward(self, x, skipped):
        for i, part in enumerate(self.parts):
            x = x if i == skipped else part(x).tanh()
        return x.square().mean()


def users_own(rank, world, group, options, accumulate, overlap):
    """Gradients of a user's own DDP, with parameters that single ranks or all of them leave unused."""
    torch.manual_seed(5)
    reducer = Reducer(build("int8", **STOCHASTIC), group, error_feedback=True, overlap=overlap)
    model = DistributedDataParallel(Unused(), bucket_cap_mb=1e-5, **options)
    hook(model, reducer)
    found = []
    with late_encoding(rank):
        for step, skipped in enumerate([None, rank, 5, None] if options.get("find_unused_parameters") else [None] * 4):
            model.zero_grad()
            for last in [False, True] if accumulate else [True]:
                with nullcontext() if last else model.no_sync():
                    model(noise(2, 3, seed=10 * step + rank + 5 * last), skipped).backward()
            reducer.finish()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize(
    ("option", "accumulate"),
    [
        ("find_unused_parameters", False),
        ("static_graph", False),
        ("gradient_as_bucket_view", False),
        ("gradient_as_bucket_view", True),  # DDP itself takes neither of the other options together with `no_sync`
    ],
)
def test_a_users_own_ddp(world, option, accumulate):
    options = {option: True}
    first, second = world(2).run(users_own, options, accumulate, True)
    expected, _ = world(2).run(users_own, options, accumulate, False)
    for mine, other, without in zip(first, second, expected, strict=True):
        assert mine.keys() == other.keys() == without.keys() and mine
        assert all(torch.equal(mine[name], other[name]) and torch.equal(mine[name], without[name]) for name in mine)


def broken_off(rank, world, group):
    """Gradients of a pass after one in which an exception came between two buckets, one of them in flight."""
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    reducer = Reducer(build("none"), group, algorithm="exchange")
    model = wrap(layers, "bucket", reducer, device="cpu", bucket_mb=0)
    with late_encoding(rank):
        for broken in (True, False):
            model.zero_grad()
            with pytest.raises(KeyError) if broken else nullcontext():
                layers[1](Breaks.apply(layers[0](noise(1, 3, seed=rank + 10 * broken)), broken)).sum().backward()
    assert reducer.finish()
    return whole_gradients(model)


def test_a_broken_off_pass_leaves_nothing_in_the_queue(world):
    results = world(2).run(broken_off)
    torch.manual_seed(5)
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layers(torch.cat([noise(1, 3, seed=rank) for rank in range(2)])).sum(1).mean().backward()
    for found in results:
        for name, parameter in layers.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


class Fails(RuntimeError):
    """An error of the test's own."""


def failing(rank, world, group, strategy, static):
    """The error of ``backward`` when an encoding fails in the queue on every rank, after the first reduction."""
    reducer = Reducer(build("int8", **STOCHASTIC), group)
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    if static:
        model._set_static_graph()
    encode, calls = Codec.encode, []

    def broken(self, *args):
        calls.append(1)
        if len(calls) > 3:
            raise Fails("a bad encoding")
        return encode(self, *args)

    Codec.encode = broken
    try:
        loss_of("odd", model, batch_of("odd", rank)).backward()
    except Fails as error:
        return str(error)
    finally:
        Codec.encode = encode
    return None


@pytest.mark.parametrize(
    "strategy",
    [
        *("bucket", "ddp, static graph", "fsdp2"),
        *swept("naive", "ddp", "fsdp1"),
    ],
)
def test_a_fault_in_the_queue_ends_the_backward_pass_with_its_own_message(world, strategy):
    name, _, static = strategy.partition(", ")
    assert world(2).run(failing, name, bool(static)) == ["a bad encoding"] * 2


def accumulated_shards(rank, world, group, strategy, overlap):
    """Two passes that both reduce, so that FSDP adds the second shard to the first; and a hook that reads a shard."""
    reducer = Reducer(build("int8", **STOCHASTIC), group, error_feedback=True, overlap=overlap)
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    seen = []
    for parameter in model.parameters() if strategy == "fsdp2" else ():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    with late_encoding(rank):
        for micro in range(2):
            loss_of("odd", model, batch_of("odd", rank, micro)).backward()
    return whole_gradients(model), seen


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_shards_that_fsdp_reads_at_once_are_complete(world, strategy):
    results = world(2).run(accumulated_shards, strategy, True)
    for (found, seen), (expected, expected_seen) in zip(
        results, world(2).run(accumulated_shards, strategy, False), strict=True
    ):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert len(seen) == len(expected_seen) and all(map(torch.equal, seen, expected_seen))


def left_over(rank, world, group, strategy):
    """Whether dropped models and reducers are freed; threads and groups after the first and after three more."""

    def step():
        reducer = Reducer(build("int8"), group, error_feedback=True)
        model = wrap(model_of("odd"), strategy, reducer, device="cpu")
        loss_of("odd", model, batch_of("odd", rank, 0)).backward()
        reducer.finish()
        return weakref.ref(reducer), weakref.ref(model)

    def kept():
        gc.collect()
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        return names.count("pt_gloo_runloop\n"), threading.active_count(), len(dist.distributed_c10d._world.pg_map)

    step()
    before = None
    while before != (before := kept()):  # threads of earlier tests may be about to end
        time.sleep(0.05)
    references = [reference for _ in range(3) for reference in step()]
    deadline = time.monotonic() + 20  # the queue's thread may hold its last task for a moment
    while (kept() != before or any(reference() for reference in references)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [reference() is None for reference in references], before, kept()


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp2", *swept("naive", "bucket", "fsdp1")],
)
def test_a_dropped_model_leaves_no_reducer_thread_or_group(world, strategy):
    for freed, before, after in world(2).run(left_over, strategy):
        assert all(freed)
        assert after == before
