"""DES-LOC against its protocol in one process, bit for bit, and against AdamW where they meet."""

from __future__ import annotations

import pytest
import torch
from diagonals import diagonals
from test_local_updates import CLIP, LONE, ONEBIT, STEPS, Simulated, backward, set_rates, started, trainable, trained
from test_optimizers import REPLICAS, assert_same

from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell
from gradwire.comm.parallel import optimizers
from gradwire.comm.parallel.optimizers.desloc import multiple

KEYS = ("exp_avg", "exp_avg_sq")
CASES = [
    ("none", {"algorithm": "exchange"}, {"H": 2, "H_momentum": 3, "H_variance": 4, **LONE}),
    ("onebit", ONEBIT, {"H": 2, "H_momentum": 3, "H_variance": 5, **LONE}),
    ("onebit", {**ONEBIT, "algorithm": "gather"}, {"H": 3, "H_momentum": 1, "H_variance": 2, **LONE}),
    ("int8", {**ONEBIT, "method": {"num_bits": 4, "block": 64}}, {"H": 1, **LONE}),
    ("onebit", ONEBIT, {"H": 2, "H_momentum": 4, "H_variance": 4, "outer_lr": 0.7, "outer_momentum": 0.5}),
]


class Desynced(Simulated):
    """All ranks in one process, which average the moments of torch's AdamW too."""

    def __init__(self, world, method, cell, H, H_momentum=None, H_variance=None, **options):
        super().__init__(world, method, cell, H, **options)
        self.intervals = dict(zip(KEYS, (H_momentum or 3 * H, H_variance or 6 * H), strict=True))
        self.dense = 0  # bytes of moments, of all ranks

    def close_step(self, step):
        super().close_step(step)
        for key, interval in self.intervals.items():
            if (step + 1) % interval == 0:
                self.average(key)

    def average(self, key):
        for name in self.shapes:
            moments = [self.inner[rank][0].state[self.parameters(rank)[name]][key] for rank in range(self.world)]
            mean = sum(moments, torch.zeros(())) / self.world
            for moment in moments:
                moment.copy_(mean)
            copies = {"gather": self.world, "exchange": 2}[self.algorithm] * (self.world - 1)
            self.dense += 4 * mean.numel() * copies


def simulated(size, method, cell, options):
    run, found = Desynced(size, method, cell, **options), []
    for step in range(STEPS):
        norm = run.step(step, CLIP)
        found.append(([{n: p.detach().clone() for n, p in run.parameters(r).items()} for r in range(size)], norm))
    return found, run.protocol.sent + run.dense


@pytest.mark.parametrize(("case", "strategy", "size"), diagonals(CASES, REPLICAS, [2, 3]), ids=str)
def test_desloc_is_its_protocol_in_one_process(world, case, strategy, size):
    method, cell, options = case
    results = world(size).run(trained, "desloc", strategy, method, cell, options)
    expected, bytes_sent = simulated(size, method, cell, options)
    intervals = [options["H"], options.get("H_momentum", 3), options.get("H_variance", 6)]
    for rank, (found, _) in enumerate(results):
        for step, (parameters, norm, sent, difference, _) in enumerate(found):
            assert_same(trainable(parameters), expected[step][0][rank])
            assert norm == pytest.approx(expected[step][1], rel=1e-6)
            assert difference is None, "anchors are equal on all ranks"
            due = step + 1 == STEPS or any((step + 1) % interval == 0 for interval in intervals)
            assert (sent > (found[step - 1][2] if step else 0)) == due
    sent = sum(traffic["sent"] for _, traffic in results)
    assert [traffic["closed_form"] for _, traffic in results] == [sent] * size
    assert sent == bytes_sent
    numel = sum(p.numel() for p in expected[0][0][0].values())
    assert {traffic["elements"] for _, traffic in results} == {STEPS * numel}, "raw counts every step, and no moment"


def swapped(optimizer):
    optimizer.intervals = dict(zip(KEYS, reversed(optimizer.intervals.values()), strict=True))


def not_received(optimizer):
    optimizer.received.clear()


def twice(optimizer):
    for means in optimizer.received.values():
        for mean in means.values():
            mean.mul_(2)


@pytest.mark.parametrize("fault", [swapped, not_received, twice])
def test_the_simulation_sees_a_fault(world, fault):
    """The moments' intervals exchanged, their means dropped, and summed instead of averaged."""
    results = world(2).run(faulty, fault)
    expected, _ = simulated(2, *CASES[1])
    for rank, parameters in enumerate(results):
        assert not all(torch.equal(value, expected[-1][0][rank][name]) for name, value in parameters.items())


def faulty(rank, world, group, fault):
    method, cell, options = CASES[1]
    _, model, optimizer = started(group, "desloc", "ddp", method, cell, options)
    for step in range(STEPS):
        set_rates(optimizer, step)
        backward(model, rank, step)
        optimizer.communicate(CLIP)
        if fault is not swapped or step == 0:
            fault(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in optimizer.trained.items()}


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(world, step):
    """Step 2 averages a moment alone; step 3 the parameters and the other moment. What was sent is dropped."""
    cell, options = {**ONEBIT, "nonfinite": "skip"}, {"H": 2, "H_momentum": 3, "H_variance": 4, **LONE}
    for found, traffic in world(2).run(trained, "desloc", "ddp", "onebit", cell, options, CLIP, (1, step)):
        assert [taken for *_, taken in found] == [at != step for at in range(STEPS)]
        assert [difference for _, _, _, difference, _ in found] == [None] * STEPS
        assert traffic["nonfinite_steps"] == 1
        assert all(value.isfinite().all() for value in found[-1][0].values())


def test_defaults_and_schedules():
    """The moments' intervals are 3 and 6 times the parameters', also in a schedule."""
    assert (multiple(30, 3), multiple({0: 1, 100: 5}, 6)) == (90, {0: 6, 100: 30})
    cell = Cell.parse("desloc", {"comm_optimizer": "desloc", "method": "onebit"})
    assert cell.communication.module == "desloc" and cell.reduction.error_feedback
    assert "desloc" in optimizers.available()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "muon"}, "inner: an option of comm_optimizer gradient, diloco, sparseloco, muloco, not of desloc"),
        ({"streaming": {"fragments": 2}}, "streaming: an option of comm_optimizer diloco"),
        ({"H_momentum": 0}, "H_momentum"),
        ({"dense_steps": 3}, "comm_optimizer desloc has dense_rounds"),
    ],
)
def test_bad_input_is_one_message(options, message):
    with pytest.raises(BadInput, match=message):
        Cell.parse("mine", {"comm_optimizer": "desloc", "method": "onebit", **options})


def test_intervals_belong_to_desloc_alone():
    with pytest.raises(BadInput, match="H_variance: an option of comm_optimizer desloc, not of diloco"):
        Cell.parse("mine", {"comm_optimizer": "diloco", "method": "onebit", "H_variance": 9})
