"""Narrow types and scaled losses: the same semantics under all five strategies."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from diagonals import chosen, diagonals
from test_frameworks import (
    STRATEGIES,
    batch_of,
    loss_of,
    model_of,
    reducer_of,
    whole_gradients,
)

from gradwire.comm.parallel import accumulation, clip_grad_norm, full_state_dict, wrap

REPLICAS_AND_FSDP2 = ("naive", "bucket", "ddp", "fsdp2")
SPARSE = {"error_feedback": True, "second": "float32", "algorithm": "exchange"}


def narrow_loss(model, rank, micro, dtype):
    """A loss computed with weights of the type, or with float32 ones under autocast."""
    if dtype == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of("odd", model, batch_of("odd", rank, micro)).float()
    return loss_of("odd", model, batch_of("odd", rank, micro).to(dtype))


def narrow_model(dtype):
    return model_of("odd").to(torch.float32 if dtype == "autocast" else dtype)


def narrow(rank, world, group, dtype, micros, method, options):
    """Two steps' gradients under each strategy, and first of a model on its own; what the residuals are."""
    models = {"alone": (narrow_model(dtype), None)}
    for strategy in STRATEGIES:
        reducer = reducer_of(group, method, {"density": 0.25} if method == "topk" else {}, **options)
        models[strategy] = (wrap(narrow_model(dtype), strategy, reducer, device="cpu"), reducer)
    steps, kept = {}, set()
    for name, (model, reducer) in models.items():
        steps[name] = []
        for number in range(2):
            model.zero_grad()
            for micro in range(micros):
                loss = partial(narrow_loss, model, rank, number + 2 * micro, dtype)
                if reducer is None:
                    (loss() / micros).backward()
                else:
                    with accumulation(model, last=micro == micros - 1):
                        (loss() / micros).backward()
            assert reducer is None or reducer.finish()
            steps[name].append(whole_gradients(model))
        if reducer is not None:
            residuals = reducer.codec.state_dict()["residuals"].values()
            kept |= {(kind, tensor.dtype) for state in residuals for kind, tensor in state.items()}
    return steps, kept


@pytest.mark.parametrize(
    ("dtype", "micros", "size"), diagonals([torch.bfloat16, torch.float16, "autocast"], [1, 3], [2, 3])
)
def test_means_are_float32_and_rounded_once(world, dtype, micros, size):
    """Each rank's own gradient, all micro-batches in it, is that of its framework: here as a model's on its own."""
    results = [steps for steps, _ in world(size).run(narrow, dtype, micros, "none", {"algorithm": "exchange"})]
    for number in range(2):
        local = [steps["alone"][number] for steps in results]
        for name, own in local[0].items():
            total = torch.zeros(own.shape)
            for gradients in local:  # in rank order, as the exchange adds
                total += gradients[name].float()
            mean = (total / size).to(own.dtype)
            for steps in results:
                for strategy in STRATEGIES:
                    found = steps[strategy][number][name]
                    assert found.dtype == mean.dtype and torch.equal(found, mean), (strategy, name)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_residuals_of_narrow_gradients_are_float32(world, size):
    results = world(size).run(narrow, torch.bfloat16, 2, "topk", SPARSE)
    for steps, kept in results:
        assert kept == {("residual.float32", torch.float32)}
        for strategy in REPLICAS_AND_FSDP2:
            for found, first in zip(steps[strategy], results[0][0]["naive"], strict=True):
                assert all(torch.equal(found[name], first[name]) for name in first), strategy


def scaled(rank, world, group, strategy, method, options, init_scale, overflow):
    """A training loop with loss scaling, as a user writes it: final weights, what the reducer keeps, and the scales.

    Args:
        init_scale: The scaler's, which doubles it after every step; None: there is no scaler.
        overflow: A step in which the last rank's gradient is infinite.
    """
    reducer = reducer_of(group, method, options[0], nonfinite="skip", **options[1])
    model = wrap(model_of("odd"), strategy, reducer, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, growth_interval=1, enabled=bool(init_scale))
    scales, kept = [], []
    for number in range(4):
        optimizer.zero_grad()
        reducer.loss_scale = scaler.get_scale()
        for micro in range(2):
            with accumulation(model, last=micro == 1):
                loss = loss_of("odd", model, batch_of("odd", rank, 2 * number + micro))
                factor = math.inf if number == overflow and rank == world - 1 else 0.5
                scaler.scale(loss * factor).backward()
        if reducer.finish():
            scaler.unscale_(optimizer)
            clip_grad_norm(model, 0.5)
            scaler.step(optimizer)
            scaler.update()
        elif scaler.is_enabled():
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        scales.append(reducer.loss_scale)
        kept.append(
            {key: {k: v.clone() for k, v in e.items()} for key, e in reducer.codec.state_dict()["residuals"].items()}
        )
    return full_state_dict(model), kept, scales, reducer.traffic


EF = {"error_feedback": True}
METHODS = {
    "int8": ("int8", ({"block": 16, "rounding": "stochastic"}, EF)),
    "topk": ("topk", ({"density": 0.2}, {**EF, "residual_dtype": "int8"})),
    "absolute": ("threshold", ({"threshold": 0.02, "scale": "absolute"}, {**EF, "residual_dtype": "bf16"})),
    "powersgd": ("powersgd", ({"rank": 1}, EF)),
    "gradiveq": ("gradiveq", ({"slice": 8, "components": 2, "window": 2}, EF)),
}


SIZES = [(2, "int8"), (3, "topk"), (3, "absolute"), (2, "powersgd"), (3, "gradiveq")]


@pytest.mark.parametrize(
    ("case", "strategy"),
    chosen([(SIZES[0], "fsdp2"), (SIZES[2], "ddp"), (SIZES[3], "fsdp1")], product(SIZES, STRATEGIES)),
)
def test_a_scaled_loss_changes_no_bit(world, case, strategy):
    """Also where it changes between steps, with what a method keeps, and around a step that is skipped."""
    size, method = case
    name, options = METHODS[method]
    plain = world(size).run(scaled, strategy, name, options, None, 1)
    with_scaler = world(size).run(scaled, strategy, name, options, 2.0**16, 1)
    for (weights, kept, scales, traffic), (others, others_kept, others_scales, others_traffic) in zip(
        plain, with_scaler, strict=True
    ):
        assert scales == [1.0] * 4
        assert others_scales == [2.0**16, 2.0**17, 2.0**16, 2.0**17]
        assert all(torch.equal(others[key], weight) for key, weight in weights.items())
        for step, others_step in zip(kept, others_kept, strict=True):
            assert step.keys() == others_step.keys() != set()
            for key in step:
                assert all(torch.equal(others_step[key][part], value) for part, value in step[key].items()), key
        assert traffic["sent"] == others_traffic["sent"] and traffic.details["nonfinite_steps"] == 1


@pytest.mark.parametrize(("size", "strategy"), chosen([(3, "naive"), (2, "fsdp2")], product([2, 3], STRATEGIES)))
def test_a_skipped_step_loses_the_residuals_of_the_rank_that_overflowed_only(world, size, strategy):
    options = ({"density": 0.2}, {**EF, "second": "float32", "algorithm": "exchange"})
    results = world(size).run(scaled, strategy, "topk", options, 2.0**16, 3)
    for rank, (_, kept, _, traffic) in enumerate(results):
        last = [residual for state in kept[-1].values() for residual in state.values()]
        assert all(residual.isfinite().all() for residual in last)
        lost = rank == size - 1
        assert traffic.details["residuals_dropped"] == lost * len(last)
        assert sum(float(residual.abs().sum()) for residual in last) == 0 if lost else any(r.any() for r in last)
