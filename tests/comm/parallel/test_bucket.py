"""Buckets: how parameters are shared out to them, and that the result does not depend on it.

With a compressor, `test_protocols.py` says the same.

Of `buckets.py`, `strategies/bucket.py`.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_frameworks import (
    assert_near,
    batch_of,
    exact_gradients,
    loss_of,
    model_of,
    whole_gradients,
)
from test_naive import noise
from torch import nn

from gradwire.comm.collectives import ops
from gradwire.comm.parallel import wrap
from gradwire.comm.parallel.buckets import FEWEST, MB, plan
from gradwire.comm.parallel.strategy import strategy_of

ONE_EACH = {"bucket_mb": 0}
CUTS = (ONE_EACH, {"bucket_mb": 1e-4}, {"bucket_mb": 4e-4}, {})
DTYPES = {"f": torch.float32, "b": torch.bfloat16}


@given(st.lists(st.tuples(st.sampled_from("fb"), st.integers(1, 300)), max_size=20), st.integers(0, 1600))
def test_the_plan(kinds, size):
    parameters = {
        f"p{i}": nn.Parameter(torch.empty(numel, dtype=DTYPES[kind])) for i, (kind, numel) in enumerate(kinds)
    }
    buckets = plan(parameters, size / MB)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(parameters), "each in one bucket"
    order = list(reversed(parameters))
    places = [[order.index(name) for name in bucket] for bucket in buckets]
    assert all(place == sorted(place) for place in places)
    assert [place[-1] for place in places] == sorted(place[-1] for place in places)
    for bucket in buckets:
        sizes = [ops.nbytes(parameter) for parameter in bucket.values()]
        assert len({parameter.dtype for parameter in bucket.values()}) == 1
        assert len(sizes) == 1 or sum(sizes[:-1]) < size, "it took more after it was full"
    for letter, kind in DTYPES.items():
        mine = [sum(map(ops.nbytes, b.values())) for b in buckets if next(iter(b.values())).dtype == kind]
        numbers = sum(letter == other for other, _ in kinds)
        assert len(mine) >= min(FEWEST, numbers), "a small model has some too"
        if len(mine) > FEWEST:
            assert all(filled >= size for filled in mine[FEWEST:-1]), "only the last may be short"


def test_buckets_of_equal_parts_and_of_a_given_size():
    parameters = {f"p{i}": nn.Parameter(torch.empty(MB // 8)) for i in range(9)}  # half a MiB each

    def sizes(*bucket_mb):
        return [list(bucket) for bucket in plan(parameters, *bucket_mb)]

    assert sizes() == [["p8", "p7", "p6"], ["p5", "p4"], ["p3", "p2"], ["p1", "p0"]]
    assert sizes(1) == [["p8", "p7"], ["p6", "p5"], ["p4", "p3"], ["p2", "p1"], ["p0"]]
    parameters["p0"] = nn.Parameter(torch.empty(MB))  # an embedding, whose gradient comes last
    assert sizes() == [["p8", "p7", "p6", "p5"], ["p4", "p3", "p2"], ["p1"], ["p0"]]


def cut(rank, world, group):
    """The gradients of two steps under each cut, and the buckets."""
    found = []
    for sizes in CUTS:
        model = wrap(model_of("gpt2"), "bucket", device="cpu", **sizes)
        gradients = []
        for micro in range(2):
            model.zero_grad(set_to_none=micro == 0)
            loss_of("gpt2", model, batch_of("gpt2", rank, micro)).backward()
            gradients.append(whole_gradients(model))
        found.append((gradients, strategy_of(model).table()))
    return found


@pytest.mark.parametrize("size", [1, 3, pytest.param(2, marks=pytest.mark.sweep)])
def test_any_cut_averages(world, size):
    for found in world(size).run(cut):
        numbers = [len(table) for _, table in found]
        assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) == len(CUTS) and numbers[-1] == FEWEST
        assert numbers[0] == len(exact_gradients("gpt2", range(size)))
        for gradients, table in found:
            assert sum(bucket["numel"] for bucket in table) == sum(g.numel() for g in gradients[0].values())
            assert all(bucket["bytes"] == 4 * bucket["numel"] for bucket in table)
            assert [name for bucket in table for name in bucket["names"]] == list(gradients[0])[::-1]
            for micro, mine in enumerate(gradients):
                assert_near(mine, exact_gradients("gpt2", range(size), (micro,)))


def overlapped(rank, world, group):
    """The buckets that travel while each gradient is computed, last layer first."""
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    model = wrap(layers, "bucket", device="cpu", **ONE_EACH)
    way = strategy_of(model)
    traveling = []
    for layer in layers:
        layer.weight.register_hook(lambda _: traveling.append([b.pending is not None for b in way.buckets]))
    model(noise(2, 4, seed=rank)).sum().backward()
    return traveling, [bucket.pending for bucket in way.buckets]


def test_buckets_travel_while_the_backward_pass_goes_on(world):
    for traveling, left in world(2).run(overlapped):
        assert traveling == [[False, False, False], [True, False, False], [True, True, False]]
        assert left == [None, None, None]


def views(rank, world, group):
    """Whether gradients lie in their buckets: after a step from None, after one onto zeros, and inside `no_sync`."""
    model = wrap(model_of("gpt2"), "bucket", device="cpu", bucket_mb=1e-3)
    way = strategy_of(model)

    def inside():
        return all(
            parameter.grad is view and view.untyped_storage().data_ptr() == bucket.buffer.untyped_storage().data_ptr()
            for bucket in way.buckets
            for view, parameter in zip(bucket.views.values(), bucket.parameters.values(), strict=True)
        )

    answers = []
    for to_none in (True, False):
        model.zero_grad(set_to_none=to_none)
        loss_of("gpt2", model, batch_of("gpt2", rank)).backward()
        answers.append(inside())
    model.zero_grad()
    with way.no_sync():
        loss_of("gpt2", model, batch_of("gpt2", rank)).backward()
    return [*answers, inside()]


def test_gradients_are_views_of_their_buckets(world):
    assert world(2).run(views) == [[True, True, True]] * 2
