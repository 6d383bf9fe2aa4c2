"""`comm_hook` on real ranks: equal to torch's own reduction and to `wrap`; ranks that differ are refused.

Of `parallel/checks.py`.
"""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import comm_hook
from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, hook, wrap

STEPS = 4


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5, bias=False), nn.LayerNorm(5))


def batch_of(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def trained(rank, world, group, kind: str, compressor: str, options: dict) -> list:
    """Parameters after some steps with accumulation under `no_sync`, and the bytes."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, state = install(model, kind, compressor, options)
    for step in range(STEPS):
        with wrapped.no_sync():
            wrapped(batch_of(rank, step, 1)).square().sum().backward()
        wrapped(batch_of(rank, step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    traffic = state.reducer.traffic if state else {}
    return [[p.detach().clone() for p in model.parameters()], traffic.get("sent"), traffic.get("raw")]


def install(model: nn.Module, kind: str, compressor: str, options: dict):
    """DDP with the pair, registered before or after the model is wrapped, or torch's own DDP."""
    pair = comm_hook(model, compressor, **options) if kind == "before" else None
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0001)  # several buckets
    if kind == "after":
        pair = comm_hook(wrapped, build(compressor), **options)
    if pair is not None:
        wrapped.register_comm_hook(*pair)
    return wrapped, pair and pair[0]


def same_by_wrap(rank, world, group, compressor: str, options: dict) -> list[torch.Tensor]:
    reducer = Reducer(build(compressor), **options)
    model = wrap(model_of(), "ddp", reducer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        with accumulation(model, last=False):
            model(batch_of(rank, step, 1)).square().sum().backward()
        with accumulation(model, last=True):
            model(batch_of(rank, step)).square().sum().backward()
        assert reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def equal(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_none_through_the_exchange_is_torchs_own_mean(world):
    ours = world(2).run(trained, "before", "none", {"algorithm": "exchange"})
    torchs = world(2).run(trained, "torch", "none", {})
    for (mine, _, _), (theirs, _, _) in zip(ours, torchs, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_the_pair_trains_as_wrap_does_on_every_rank(world, kind):
    options = {"error_feedback": True, "seed": 3}
    ours = world(3).run(trained, kind, "topk+int8", options)
    wrapped = world(3).run(same_by_wrap, "topk+int8", options)
    assert all(
        equal(mine, ours[0][0]) and equal(mine, theirs) for (mine, _, _), theirs in zip(ours, wrapped, strict=True)
    )
    assert 0 < ours[0][1] < ours[0][2] / 3, "fewer bytes"


def stepped(rank, world, group, registered: bool) -> list[str]:
    """The warnings of a step without gradients and two with, of a registered pair, or one dropped as by Lightning."""
    model = model_of()
    pair, wrapped = comm_hook(model, "int8"), DistributedDataParallel(model)
    if registered:
        wrapped.register_comm_hook(*pair)
    optimizers = [torch.optim.SGD(nn.Linear(2, 3).parameters()), torch.optim.SGD(model.parameters(), lr=0.1)]
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        optimizers[1].step()  # as of several models, of which this one is not trained yet
        for step in range(2):
            wrapped(batch_of(rank, step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    return [str(each.message) for each in noted]


def test_a_pair_that_nobody_has_registered_warns_once(world):
    assert world(2).run(stepped, True) == [[], []]
    for [note] in world(2).run(stepped, False):
        assert "on GPUs only: on a CPU, call trainer.strategy.model.register_comm_hook" in note


def with_nan(rank, world, group, options: dict) -> bool:
    model = model_of()
    wrapped, _ = install(model, "before", "int8", options)
    x = batch_of(rank, 0)
    x[0, 0] = float("nan") if rank == 1 else 1.0
    wrapped(x).square().sum().backward()
    return bool(torch.isfinite(next(model.parameters()).grad).all())


def test_a_nan_of_one_rank_reaches_the_gradients_of_all_as_with_torchs_hooks(world):
    assert world(2).run(with_nan, {}) == [False, False]


def differing(rank, world, group, kind: str) -> str:
    """The message of a rank whose script differs from rank 0's in one thing."""
    model = model_of() if kind != "model" or rank == 0 else nn.Linear(7, 5)
    other = rank == 1
    try:
        if kind == "hook":
            pair = comm_hook(model, "topk" if other else "int8")
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(*pair)
            wrapped(batch_of(rank, 0)).sum().backward()
        elif kind == "dtype":
            model[2] = model[2].to(torch.bfloat16) if other else model[2]
            wrap(model, "bucket")
        elif kind == "frozen":
            model[0].weight.requires_grad_(not other)
            wrap(model, "naive")
        elif kind == "strategy":
            wrap(model, "fsdp2" if other else "ddp")
        elif kind == "framework":
            wrap(model, "ddp", bucket_mb=0.5, static_graph=other)
        elif kind == "bucket":
            wrap(model, "bucket", Reducer("int8"), bucket_mb=2.5 if other else 0.25)
        elif kind == "reducer":
            wrap(model, "ddp", None if other else Reducer("int8"))
        else:
            wrap(model, "naive", Reducer("int8", error_feedback=kind == "option" and other))
    except BadInput as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("option", "error_feedback is False on rank 0 and True on rank 1"),
        ("model", r"parameters is 5 on rank 0 and 2 on rank 1"),
        ("hook", r"compressor is Int8\(.*\) on rank 0 and TopK\(.*\) on rank 1"),
        ("dtype", r"2\.weight \[5, 13\] float32 on rank 0 and 2\.weight \[5, 13\] bfloat16 on rank 1"),
        ("frozen", r"0\.weight \[13, 7\] float32 on rank 0 and 0\.weight \[13, 7\] float32 frozen on rank 1"),
        ("strategy", "strategy is ddp on rank 0 and fsdp2 on rank 1"),
        ("framework", "static_graph is False on rank 0 and True on rank 1"),
        ("bucket", r"bucket_mb is 0\.25 on rank 0 and 2\.5 on rank 1"),
        ("reducer", "reducer is Reducer on rank 0 and none on rank 1"),
    ],
)
def test_ranks_that_differ_are_refused_before_the_first_collective(world, kind, said):
    for message in world(2).run(differing, kind):
        assert re.search(said, message) and "build the same model and reducer on every rank" in message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"eror_feedback": True}, "unknown option of Reducer 'eror_feedback'. Did you mean 'error_feedback'"),
        ({"algorithm": "natve"}, "'natve'. Did you mean 'native'"),
        ({"algorithm": "native"}, "algorithm native needs a compressor that collectives can sum"),
        ({"dense_steps": -1}, "dense_steps is -1"),
    ],
)
def test_an_option_is_refused_where_it_is_given(options, said):
    with pytest.raises(BadInput, match=re.escape(said)):  # there is no process group
        comm_hook(model_of(), "topk", **options)


def prepared_twice(rank, world, group, strategy: str) -> list[str]:
    """Messages of all ways to attach a second reducer to a model that averages its own gradients."""
    model = wrap(model_of(), strategy, Reducer("int8"))
    again = (
        lambda: wrap(model, strategy, Reducer("int8")),
        lambda: wrap(nn.Sequential(model), "ddp", Reducer("int8")),
        lambda: comm_hook(model, "int8"),
        lambda: comm_hook(DistributedDataParallel(model), "int8"),
        lambda: hook(DistributedDataParallel(model), Reducer("int8")),
    )
    return [message_of(attempt) for attempt in again]


def message_of(attempt) -> str:
    with pytest.raises(BadInput) as error:
        attempt()
    return str(error.value)


@pytest.mark.parametrize("strategy", ["naive", "bucket"])
def test_a_model_that_averages_its_own_gradients_is_refused(world, strategy):
    for messages in world(2).run(prepared_twice, strategy):
        assert all(f"by gradwire.comm.parallel.wrap with strategy {strategy}" in message for message in messages)


def without_reducer(rank, world, group) -> list[str]:
    wrapped = DistributedDataParallel(model_of())
    return [
        message_of(lambda: wrap(model_of(), "ddp", "int8")),
        message_of(lambda: wrap(model_of(), "naive", build("topk"))),
        message_of(lambda: hook(wrapped, "int8")),
        message_of(lambda: hook(wrapped, None)),
    ]


def test_a_compressor_in_place_of_a_reducer_is_refused(world):
    for text, object_, hooked, nothing in world(1).run(without_reducer):
        assert text == hooked and text.startswith("invalid reducer 'int8': build one, such as")
        assert object_.startswith("invalid reducer TopK(") and nothing.startswith("invalid reducer None")
