"""The peak of memory that `predict --memory` gives for another number of ranks, against what a model really holds."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
from test_frameworks import STRATEGIES
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from gradwire.bench.statistics.cost_model import STATES, peak_memory
from gradwire.comm.parallel import replica_bytes, wrap
from gradwire.lm.models import causal

VOCABULARY, LENGTH = 320, 24
SHARDED = ("fsdp1", "fsdp2")


def tiny():
    return causal.build("tiny", VOCABULARY, LENGTH, seed=0)


def ids(batch):
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def stored(tensors):
    """Bytes of the memory in which tensors lie, shared memory once; of a sharded one this rank's part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    blocks = {block.data_ptr(): block.nbytes() for block in (tensor.untyped_storage() for tensor in local)}
    return sum(blocks.values())


def states(model, optimizer):
    """Bytes of parameters, gradients and moments on this rank."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    return stored(parameters), stored(gradients), stored(moments)


def step(model, optimizer, x):
    """One optimizer step; gives `states` at its end, gradients included."""
    model(input_ids=x, labels=x, use_cache=False).loss.backward()
    optimizer.step()
    found = states(model, optimizer)
    optimizer.zero_grad()
    return found


def held(rank, world, group):
    found = {}
    for strategy in STRATEGIES:
        model = wrap(tiny(), strategy, device="cpu")
        found[strategy] = sum(step(model, torch.optim.AdamW(model.parameters()), ids(2)))
    return found


@pytest.mark.parametrize("size", [1, 3, pytest.param(2, marks=pytest.mark.sweep)])
def test_states_are_what_a_prediction_takes_them_for(world, size):
    whole = STATES * sum(parameter.numel() for parameter in tiny().parameters())
    for found in world(size).run(held):
        for strategy, measured in found.items():
            if size > 1 and strategy in SHARDED:  # rows are not divided: a rank may have one row more or less
                assert measured == pytest.approx(whole / size, rel=0.02), strategy
            else:
                assert measured == whole, strategy


def peak(rank, world, group, strategy, batch, options):
    """Bytes that a rank holds at most in a steady step: what stays between steps, and what torch allocates in one.

    The lowest of five steps: what gloo sent is let go some time after `wait`, which adds 0 to 25 % to a step's peak.
    """
    model = wrap(tiny(), strategy, device="cpu", **options).train()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):  # DDP rebuilds its buckets in the second
        step(model, optimizer, ids(batch))
    grown = []
    for _ in range(5):
        gc.collect()  # what earlier steps left in cycles
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            parameters, gradients, moments = step(model, optimizer, ids(batch))
        events = profiler.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        grown.append(max(itertools.accumulate(change for _, change in changes)))
    buckets = gradients if strategy in ("bucket", "ddp") else 0  # these stay; DDP's are as large as the gradients
    return parameters + moments + buckets + (replica_bytes(model) or 0) + min(grown)


def predicted_over_measured(world, strategy, batch, sizes, **options):
    """At the second size, from the peak at the first one; a rank with a row more than others counts."""
    one, other = (max(world(size).run(peak, strategy, batch, options)) for size in sizes)
    parameters = sum(parameter.numel() for parameter in tiny().parameters())
    return peak_memory(one, parameters if strategy in SHARDED else 0, *sizes) / other


def test_the_predicted_peak_is_near_the_measured_one(world):
    assert 0.8 < predicted_over_measured(world, "fsdp2", 1, (2, 3)) < 1.0


@pytest.mark.sweep
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_predicted_peak_is_near_the_measured_one(world, strategy, batch):
    """A prediction overstates the change: gradients are divided too, but not all of them are there at the peak."""
    for sizes, least, most in (((2, 3), 0.8, 1.02), ((2, 4), 0.8, 1.02), ((4, 2), 0.98, 1.2)):
        assert least < predicted_over_measured(world, strategy, batch, sizes) < most, sizes


@pytest.mark.sweep
def test_a_replica_stays_as_large_at_any_number_of_ranks(world):
    """So the prediction holds for a model with one, which is measured with it."""
    for sizes, least, most in (((2, 3), 0.8, 1.02), ((2, 4), 0.8, 1.02), ((4, 2), 0.98, 1.2)):
        assert least < predicted_over_measured(world, "fsdp2", 8, sizes, param_compress="int4-diff") < most, sizes
