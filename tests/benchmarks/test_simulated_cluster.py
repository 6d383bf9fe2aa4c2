"""The simulated cluster against computations by hand."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from gradwire.bench.codecs.rates import Rate, Rates
from gradwire.bench.config import Cell
from gradwire.bench.statistics.cost_model import Islands, Place
from gradwire.bench.statistics.description import Constants, Description

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))
cluster = importlib.import_module("simulated_cluster")
Collective, Machines, Part, Work = cluster.Collective, cluster.Machines, cluster.Part, cluster.Work

RATE, LATE = 1e6, 0.013  # bits per second, seconds
FACTORS = {"all_reduce": 1.3, "all_gather": 1.4, "all_to_all": 1.5, "reduce_scatter": 2.1}
FIXED = Constants(7e-3, 3e-7, FACTORS, hidden=0.9, codecs=1.7)
CODECS = Rates("a device", "cpu", [("int8", {}, Rate(2e-7, 3e-7)), ("none", {}, Rate(0.0, 0.0))])
NUMEL, COMPUTE = 30 * 7, 0.11


def seconds(cell, strategy="ddp", world=2, islands=None):
    """A simulated step of one tensor."""
    place = Place(world, RATE, LATE, islands or Islands())
    described = Description({(30, 7): 1}, 0, COMPUTE, strategy, place, CODECS)
    return cluster.seconds_per_step(cluster.work_of(described, Cell.parse("cell", cell), FIXED))


def sending(op, nbytes, messages, link=RATE):
    """Seconds of a collective under the law, and its startup."""
    return FIXED.startup + nbytes * math.hypot(FIXED.host, 8 * FACTORS[op] / link) + messages * LATE


def test_a_pair_with_one_bucket_is_a_sum():
    float32 = COMPUTE + sending("all_reduce", 4 * NUMEL, 2)
    assert seconds({"method": "none"}) == pytest.approx(float32, rel=1e-12)
    rows = 2 * (15 * 7 + 4)  # a byte per element, and a scale per shard; both halves send one of two rows
    int8 = COMPUTE + 1.7 * NUMEL * (1.5 * 2e-7 + 2 * 3e-7) + sending("all_to_all", rows, 2)
    assert seconds({"method": "int8", "algorithm": "exchange"}) == pytest.approx(int8, rel=1e-12)


def test_rings_of_sharded_ranks_and_a_tree():
    ring = 5 * 4 * NUMEL / 6
    gathers = sending("all_gather", 2 * ring, 2 * 5)
    sharded = COMPUTE + gathers + sending("reduce_scatter", ring, 5)
    assert seconds({"method": "none"}, "fsdp2", world=6) == pytest.approx(sharded, rel=1e-12)
    tree = COMPUTE + sending("all_reduce", 2 * 32 * 4 * NUMEL / 33, 2 * 6)
    assert seconds({"method": "none"}, world=33) == pytest.approx(tree, rel=1e-12)


def test_a_round_sends_once_and_islands_share_a_cable():
    rounds = {"method": "int8", "algorithm": "exchange", "comm_optimizer": "diloco", "H": 5, "error_feedback": False}
    every = seconds({"method": "int8", "algorithm": "exchange"})
    assert seconds(rounds) == pytest.approx(COMPUTE + (every - COMPUTE) / 5, rel=1e-12)
    inside = {"method": "none"}, "hsdp", 6, Islands(2, 5e6, LATE)
    ring = 2 * 4 * NUMEL / 3
    within = sending("all_gather", 2 * ring, 4, 5e6) + sending("reduce_scatter", ring, 2, 5e6)
    between = sending("all_reduce", 4 * NUMEL / 3, 2, RATE / 3)
    assert seconds(*inside) == pytest.approx(COMPUTE + within + between, rel=1e-12)
    local = seconds({"method": "none", "comm_optimizer": "diloco", "H": 8, "algorithm": "exchange"}, *inside[1:])
    once = sending("all_to_all", 4 * NUMEL / 3, 2, RATE / 3)
    assert local == pytest.approx(COMPUTE + within + once / 8, rel=1e-12), "inside in every step"


PARTS = (Part(0.25, 1), Part(0.75, 2))


def test_buckets_queue_behind_the_backward_pass():
    """Passes end at 3, 4.5 and 9 s. The first bucket is sent from 5.5 on, encoded, and the second follows it."""
    link = Collective("between", 40.0, 2.0)
    work = Work(PARTS, compute=9.0, encode=4.0, decode=8.0, reduces=[link])
    first = 3 + 0.25 * 6 + 1 + (10 + 2)
    assert cluster.seconds_per_step(work) == pytest.approx(first + (30 + 4) + 6, rel=1e-12)
    fast = work._replace(reduces=[link._replace(sending=0.4, waiting=0.0)])
    assert cluster.seconds_per_step(fast) == pytest.approx(9 + 4 + 8 + 0.3, rel=1e-12), "the first is hidden"


def test_parameters_come_while_others_are_used():
    gather = Collective("inside", 4.0, 0.0)
    work = Work(PARTS, compute=9.0, encode=0.0, decode=0.0, reduces=[Collective("between", 0.0, 0.0)])
    both = work._replace(gathers=([gather], [gather]))
    forward = 3 + max(0.75 * 3, 1) + 0.25 * 3
    backward = 1 + max(0.25 * 6, 3) + 0.75 * 6
    assert cluster.seconds_per_step(both) == pytest.approx(forward + backward, rel=1e-12)


def test_a_fragment_is_waited_for_after_its_delay():
    work = Work(PARTS, 9.0, 0.5, 1.0, [Collective("between", 20.0, 1.5)], interval=4, delay=2)
    assert cluster.seconds_per_step(work) == pytest.approx((4 * 9 + 0.5 + (21.5 - 18) + 1) / 4, rel=1e-12)
    quick = work._replace(reduces=[Collective("between", 17.0, 0.5)])
    assert cluster.seconds_per_step(quick) == pytest.approx((4 * 9 + 0.5 + 1) / 4, rel=1e-12)
    halves = work._replace(reduces=[Collective("between", 4.0, 0.0), Collective("between", 3.0, 0.0)])
    assert cluster.seconds_per_step(halves) == pytest.approx((4 * 9 + 0.5 + 1) / 4, rel=1e-12), "decoded in between"


@pytest.mark.parametrize(("steps", "within"), [(1, 0.004), (7, 0.004)])
def test_the_slowest_of_many_machines_is_that_of_samples(steps, within):
    draws = np.random.default_rng(3).lognormal(0, 0.2, (3000, 37, steps)).mean(2).max(1)
    for quantile in (0.25, 0.5, 0.9):
        assert cluster.slowest(quantile, 37, steps, 0.2) == pytest.approx(np.quantile(draws, quantile), rel=within)
    assert cluster.slowest(0.9, 37, steps, 0.0) == 1


def machines(lives, away=0.5, **more):
    """Three machines whose rounds take 2 s, and a third of 3 s for each that is there otherwise."""
    return Machines(3, lives.get, lambda number: 2.0, away, **more)


def test_a_lost_machine_costs_the_round_that_it_interrupts():
    undisturbed, lost = machines({}), machines({1: [4.5]})
    assert undisturbed.in_rounds(6) == 12
    assert lost.in_rounds(6) == 12
    assert (undisturbed.means, lost.means) == ([3] * 6, [3, 3, 2, 3, 3, 3])
    away = machines({1: [4.5]}, away=4.0)
    away.in_rounds(6)
    assert away.means == [3, 3, 2, 2, 2, 3]


def test_others_wait_until_they_notice_and_for_a_state():
    lost = machines({1: [4.5], 2: [4.75]}, away=0.1, state=0.7, detect=1.5)
    assert lost.in_rounds(4) == pytest.approx(4.75 + 1.5 + 2 + 0.7, rel=1e-12)
    assert lost.means == [3, 3, 1, 3]
    shared = Machines(4, {3: [6.0]}.get, lambda number: float(number), math.inf)
    assert shared.in_rounds(4) == pytest.approx(4 + 2 + 0.5 * 3 + 3 + 3, rel=1e-12), "fewer are faster"


def test_without_rounds_all_return_to_the_checkpoint():
    """Checkpoints are done at 2.1, 4.2, and, after the loss at 5 s, from 5.8 on."""
    lost = machines({1: [5.0]}, away=0.5, state=0.3)
    assert lost.from_checkpoints(10.05, 0.1) == 4 * 2.0
