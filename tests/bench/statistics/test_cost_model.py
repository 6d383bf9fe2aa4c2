"""What a rank sends against simulated messages, and where two steps cross."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradwire.bench.report.tables.described import crossover_text, interval_text
from gradwire.bench.statistics.cost_model import GRID, NO_ISLANDS, Flow, Islands, Leg, Place, crossover, legs
from gradwire.comm.closed_forms import total_bytes

SIZE = 1260.0


def flat(op, world, **flow):
    """The one leg of a flow without islands: of a buffer of `SIZE` bytes, or of what an all-gather delivers."""
    (leg,) = legs(
        Flow(op, total_bytes(op, SIZE, world) / world, **flow), Place(world, 1e6, 0.1, NO_ISLANDS), False, True
    )
    return leg


@pytest.mark.parametrize("world", [2, 3, 12])
def test_a_ring_sends_a_part_to_its_neighbour_in_every_lap(world):
    """Messages moved one by one: W - 1 of a W-th each, and for an all-reduce twice."""
    for op, laps in (("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)):
        sent = [SIZE / world for _ in range(laps * (world - 1))]
        assert flat(op, world) == Leg(pytest.approx(sum(sent)), len(sent))
    parts = [SIZE / world for _ in range(world - 1)]
    assert flat("all_to_all", world, halves=2) == Leg(pytest.approx(sum(parts)), 2 * len(parts))


def carried(messages, ranks):
    """Bytes that leave each island, and bytes that each rank sends inside its own, from (from, to, bytes)."""
    between, inside = {}, {}
    for sender, to, size in messages:
        left = sender // ranks != to // ranks
        key, of = (sender // ranks, between) if left else (sender, inside)
        of[key] = of.get(key, 0) + size
    return set(between.values()), set(inside.values())


@pytest.mark.parametrize(("islands", "ranks"), [(2, 2), (2, 3), (4, 5)])
def test_what_islands_send_is_that_of_simulated_messages(islands, ranks):
    """Every message of a float32 all-reduce, flat and of shards, and of an exchange's two all-to-alls."""
    world = islands * ranks
    place, everyone = Place(world, 1e6, 0.1, Islands(islands)), range(world)
    laps = [(r, (r + 1) % world, SIZE / world) for r in everyone for _ in range(2 * (world - 1))]
    (cable,), _ = carried(laps, ranks)
    (ring,) = legs(Flow("all_reduce", total_bytes("all_reduce", SIZE, world) / world), place, False, True)
    assert ring == Leg(pytest.approx(cable), 2 * (world - 1), "ring")

    across = [(r, (r + ranks) % world, SIZE / world) for r in everyone for _ in range(2 * (islands - 1))]
    (cable,), _ = carried(across, ranks)
    shard = Flow("all_reduce", total_bytes("all_reduce", SIZE / ranks, islands) / islands)
    assert legs(shard, place, True, True) == [Leg(pytest.approx(cable / ranks), 2 * (islands - 1), sharing=ranks)]

    around = [(r, r // ranks * ranks + (r + 1) % ranks, SIZE / ranks) for r in everyone for _ in range(ranks - 1)]
    _, (own,) = carried(around, ranks)
    scattered = Flow("reduce_scatter", total_bytes("reduce_scatter", SIZE, ranks) / ranks, inside=True)
    assert legs(scattered, place, True, True) == [Leg(pytest.approx(own), ranks - 1, "inside")]

    parts = [(r, to, 2 * SIZE / world) for r in everyone for to in everyone if r != to]
    (cable,), (own,) = carried(parts, ranks)
    exchange = Flow("all_to_all", 2 * total_bytes("all_to_all", SIZE, world) / world, halves=2)
    near, far = legs(exchange, place, False, True)
    assert near == Leg(pytest.approx(own), 2 * (ranks - 1), "inside")
    assert far == Leg(pytest.approx(cable / ranks), 2 * (world - ranks), sharing=ranks)
    at_once = [leg.messages for leg in legs(exchange, place, False, False)]
    assert at_once == [math.ceil(2 * peers / (world - 1)) for peers in (ranks - 1, world - ranks)]


def test_always_and_never():
    flat = np.ones_like(GRID)
    assert crossover(flat, 2 * flat) == math.inf
    assert crossover(2 * flat, flat) == 0
    assert crossover(flat, flat) == 0
    assert crossover(np.log10(GRID), 8 * flat) == pytest.approx(1e8)
    assert [crossover_text(of) for of in (0, math.inf, 2.5e9)] == ["never", "always", "2.5gbit"]
    assert interval_text(0, 0) == "never"
    assert interval_text(1e9, math.inf) == "[1gbit, always]"
