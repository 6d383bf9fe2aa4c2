"""Parameters that travel as quantized differences (``int4-diff``), against the protocol in one process, bit for bit.

The oracle is written from the formula alone: it has the exact weights before each step, a replica, and the compressor.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from test_frameworks import assert_near, batch_of, loss_of, model_of, whole_gradients
from test_param_compress import codec_of, weights_seen

from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.collectives.meter import METER
from gradwire.comm.compressors import build
from gradwire.comm.parallel import (
    accumulation,
    checkpoint_state,
    filled,
    full_state_dict,
    load_checkpoint_state,
    own_part,
    wrap,
)
from gradwire.comm.parallel.strategy import strategy_of
from gradwire.comm.parallel.verify import first_difference

OPTIMIZERS = {"adamw": (torch.optim.AdamW, 3e-2), "sgd": (torch.optim.SGD, 0.03)}


def wrapped(name, encoding, group, islands=1):
    """A model that is sharded over all ranks, or inside of islands."""
    if islands == 1:
        reducer, strategy = Reducer(build("none"), group), "fsdp2"
    else:
        reducer, strategy = IslandReducer(build("none"), build_islands(islands), algorithm="exchange"), "hsdp"
    return wrap(model_of(name), strategy, reducer, device="cpu", param_compress=encoding).train()


def optimizer_of(name, model):
    kind, lr = OPTIMIZERS[name]
    return kind(model.parameters(), lr=lr)


def missed(model):
    """One rank leaves out an update of its replicas, though it takes part in the exchange."""
    for replica in strategy_of(model).replicas.values():
        follow, values = replica.follow, replica.values

        def left_out(row, follow=follow, values=values):
            before = values.clone()
            follow(row)
            values.copy_(before)

        replica.follow = left_out


def trained(rank, world, group, name, encoding, optimizer, micros=1, steps=3, fault=False, islands=1):
    """Of each step: the exact weights before it, those computed with, the gradients, and the bytes of parameters."""
    model = wrapped(name, encoding, group, islands)
    chosen = optimizer_of(optimizer, model)
    found = []
    for step in range(steps):
        exact = copy.deepcopy(full_state_dict(model))
        if fault and step == 1 and rank == world - 1:
            missed(model)
        sent, seen = METER.sent("parameters"), []
        for micro in range(micros):
            with accumulation(model, last=micro == micros - 1) if micros > 1 else nullcontext():
                losses = []
                batch = batch_of(name, rank, 10 * step + micro)
                seen.append(weights_seen(model, lambda x=batch, y=losses: y.append(loss_of(name, model, x) / micros)))
                losses[0].backward()
        sent = METER.sent("parameters") - sent
        found.append({"exact": exact, "seen": seen, "sent": sent, "gradients": whole_gradients(model)})
        chosen.step()
        chosen.zero_grad()
        if step == 1 and not fault:
            with torch.no_grad():
                before = copy.deepcopy(full_state_dict(model))
                evaluated = weights_seen(model.eval(), lambda: loss_of(name, model, batch_of(name, rank)))
                assert rank or all(torch.equal(evaluated[key], before[key]) for key in evaluated), "exact weights"
            model.train()
    return found, first_difference(model, chosen), [r.values.nbytes for r in strategy_of(model).replicas.values()]


def check(results, world, name, micros=1, islands=1):
    """Every rank computes with the replica that the formula gives, and sends what the formula says.

    ``world`` ranks share the parameters, inside of each island.
    """
    steps = [found for found, *_ in results]
    codec = codec_of("int4-diff")
    replica = {key: value + 0.0 for key, value in steps[0][0]["exact"].items()}
    for step, first in enumerate(steps[0]):
        size = 0
        for key, kept in replica.items():
            parts = zip(first["exact"][key].chunk(world), kept.chunk(world), strict=True)
            differences = [(exact - own).reshape(-1) for exact, own in parts]
            sent = [codec.decode(codec.encode(part), part.numel()) for part in differences]
            replica[key] = kept + torch.cat(sent).view(kept.shape)
            size += sum((part.numel() + 1) // 2 + 4 * -(-part.numel() // 256) for part in differences)
        exact = gradients(name, replica, islands * world, step, micros)
        for rank, found in enumerate(steps):
            for seen in found[step]["seen"]:
                assert seen.keys() == replica.keys()
                for key in replica:
                    assert torch.equal(seen[key], replica[key]), (step, rank, key)
            assert_near(found[step]["gradients"], exact)
        assert sum(found[step]["sent"] for found in steps) == islands * (world - 1) * size, (
            "once in a step, and no more"
        )


def gradients(name, weights, world, step, micros):
    """Of the mean loss over ranks and micro-batches, in float64, at these weights."""
    model = model_of(name)
    model.load_state_dict(weights)
    model = model.double()
    for rank in range(world):
        for micro in range(micros):
            batch = batch_of(name, rank, 10 * step + micro)
            batch = batch.double() if batch.is_floating_point() else batch
            (loss_of(name, model, batch) / (world * micros)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("optimizer", "micros"), [("adamw", 1), ("sgd", 3)])
def test_ranks_compute_with_the_replica_of_the_formula(world, optimizer, micros):
    results = world(2).run(trained, "odd", "int4-diff", optimizer, micros)
    check(results, 2, "odd", micros)
    for _, difference, nbytes in results:
        assert difference is None
        padded = [2 * -(-p.shape[0] // 2) * p[0].numel() for p in model_of("odd").parameters()]
        assert sum(nbytes) == 4 * sum(padded)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["odd", "even"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("micros", [1, 2])
def test_every_replica_is_that_of_the_formula(world, size, name, optimizer, micros):
    check(world(size).run(trained, name, "int4-diff", optimizer, micros, 6), size, name, micros)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_inside_of_islands_too(world, optimizer, ranks):
    results = world(2 * ranks).run(trained, "odd", "int4-diff", optimizer, 2, 4, False, 2)
    check(results, ranks, "odd", 2, islands=2)
    assert [difference for _, difference, _ in results] == [None] * 2 * ranks


@pytest.mark.sweep
def test_a_replica_that_misses_a_step_is_named(world):
    results = world(2).run(trained, "odd", "int4-diff", "adamw", 1, 3, True)
    with pytest.raises(AssertionError):
        check(results, 2, "odd")
    for _, difference, _ in results:
        assert difference.startswith("the replica that begins with")


def error(results):
    """How far the weights of the last step are from the exact ones, relative to them."""
    last = results[0][0][-1]
    off = sum(float((last["seen"][0][key] - exact).square().sum()) for key, exact in last["exact"].items())
    return (off / sum(float(exact.square().sum()) for exact in last["exact"].values())) ** 0.5


@pytest.mark.sweep
def test_direct_codes_of_four_bits_are_much_further_from_the_weights(world):
    off = {encoding: error(world(2).run(trained, "odd", encoding, "adamw")) for encoding in ("int4", "int4-diff")}
    assert 0 < off["int4-diff"] < off["int4"] / 10


def resumed(rank, world, group):
    """Weights and replicas after six steps: unbroken, and from the state after three in a model of other weights."""

    def go_on(model, optimizer, steps):
        for step in steps:
            loss_of("odd", model, batch_of("odd", rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = wrapped("odd", "int4-diff", group)
    optimizer = optimizer_of("adamw", model)
    go_on(model, optimizer, range(3))
    saved = copy.deepcopy(own_part(checkpoint_state(model, optimizer)))
    go_on(model, optimizer, range(3, 6))
    other = wrapped("odd", "int4-diff", group)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    again = optimizer_of("adamw", other)
    loss_of("odd", other, batch_of("odd", rank, 7)).backward()
    again.zero_grad()
    load_checkpoint_state(other, again, filled(checkpoint_state(other, again), saved))
    go_on(other, again, range(3, 6))
    values = [[replica.values.clone() for replica in strategy_of(each).replicas.values()] for each in (model, other)]
    stored = [row.untyped_storage().nbytes() for row in saved["replicas"].values()]
    return full_state_dict(model), full_state_dict(other), *values, stored


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(world):
    for rank, (whole, again, replicas, restored, stored) in enumerate(world(2).run(resumed)):
        assert rank or (whole and all(torch.equal(whole[key], again[key]) for key in whole))
        assert all(torch.equal(one, other) for one, other in zip(replicas, restored, strict=True))
        assert stored == [values.nbytes // 2 for values in replicas], "each rank stores its own row"
