"""Counts of the meter, on the CPU and on a GPU: there with a stand-in for the events, and with real ones."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch

from gradwire.comm.collectives.meter import CPU, Meter

GPU = torch.device("cuda")  # a name: nothing is put there


class Clock:
    """A GPU's time line; its events are recorded in the order of the work, and read only when they were waited for."""

    def __init__(self):
        self.now = 0.0
        self.made = []

    def event(self):
        self.made.append(Event(self))
        return self.made[-1]


class Event:
    """As `torch.cuda.Event` with timing."""

    def __init__(self, clock):
        self.clock = clock
        self.at = None
        self.waited = False

    def record(self):
        self.at = self.clock.now

    def synchronize(self):
        assert self.at is not None
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return end.at - self.at  # milliseconds


@pytest.fixture
def meters(monkeypatch):
    """A meter, its parent, and the GPU's clock."""
    clock = Clock()
    monkeypatch.setattr(Meter, "event", clock.event)
    parent = Meter()
    return Meter(parent), parent, clock


def work(meter, clock, ms, op="all_to_all", sent=10, device=GPU, **options):
    with meter.span(op, "payload", sent, device=device, **options):
        clock.now += ms


def costs(meter):
    return {op: (cost.bytes, cost.calls, pytest.approx(cost.seconds)) for op, cost in meter.by_op("payload").items()}


def test_gpu_work_is_timed_by_events_when_measuring_ends(meters):
    meter, parent, clock = meters
    with meter.measuring():
        work(meter, clock, 3)
        clock.now += 100
        work(meter, clock, 4)
        work(meter, clock, 7, op="all_reduce", sent=0, calls=0)
        assert costs(meter) == {"all_to_all": (20, 2, 0), "all_reduce": (0, 0, 0)}, "nothing was waited for yet"
        assert not any(event.waited for event in clock.made)
    assert costs(meter) == costs(parent) == {"all_to_all": (20, 2, 0.007), "all_reduce": (0, 0, 0.007)}
    with meter.measuring():
        work(meter, clock, 5)
    assert costs(meter)["all_to_all"] == (30, 3, 0.012)


def test_without_measuring_gpu_work_is_counted_and_no_event_recorded(meters):
    meter, parent, clock = meters
    work(meter, clock, 3)
    assert costs(meter) == costs(parent) == {"all_to_all": (10, 1, 0)}
    assert clock.made == []


def test_a_parent_measures_its_childrens_work_and_not_the_other_way_round(meters):
    meter, parent, clock = meters
    with parent.measuring():
        work(meter, clock, 3)
    assert costs(meter) == costs(parent) == {"all_to_all": (10, 1, 0.003)}
    with meter.measuring():
        work(parent, clock, 3)
    assert costs(parent) == {"all_to_all": (20, 2, 0.003)}


def test_work_that_fails_is_not_counted_and_the_rest_is(meters):
    meter, _, clock = meters
    with pytest.raises(RuntimeError, match="broken"), meter.measuring():
        work(meter, clock, 3)
        with meter.span("all_to_all", "payload", 10, device=GPU):
            raise RuntimeError("broken")
    assert costs(meter) == {"all_to_all": (10, 1, 0.003)}


def test_cpu_work_is_timed_by_the_host_always(meters):
    meter, _, clock = meters
    with meter.measuring(), meter.span("encode", "codec", device=CPU):
        time.sleep(0.02)
    assert 0.02 <= meter.totals["encode", "codec"].seconds < 1
    assert clock.made == []


def test_what_opening_and_closing_a_range_takes_is_no_time_of_the_work(meters, monkeypatch):
    """As where the machine takes the core away: the profiler's range is then longer than the meter's time."""
    meter, parent, _ = meters

    @contextmanager
    def slow_range(name):
        time.sleep(0.01)
        yield
        time.sleep(0.02)

    monkeypatch.setattr("gradwire.comm.collectives.meter.record_function", slow_range)
    with meter.span("encode", "codec", device=CPU):
        pass
    assert meter.around < 0.01, "no range is opened where no profiler runs"
    monkeypatch.setattr("torch.autograd.profiler._is_profiler_enabled", True)
    for _ in range(2):
        with meter.span("encode", "codec", device=CPU):
            pass
    assert parent.around == meter.around >= 0.06
    assert meter.totals["encode", "codec"].seconds < 0.06 <= meter.totals["encode", "codec"].around


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_events_of_a_gpu():
    meter = Meter()
    x = torch.randn(4096, 4096, device="cuda")
    x = x @ x.T * 1e-4  # the first product also starts a library
    torch.cuda.synchronize()
    with meter.measuring():
        issued = time.perf_counter()
        with meter.span("encode", "codec", device=x.device):
            for _ in range(100):
                x = x @ x.T * 1e-4
        issued = time.perf_counter() - issued
        assert meter.totals["encode", "codec"].seconds == 0
    cost = meter.totals["encode", "codec"]
    assert cost.calls == 1 and cost.seconds > 0.002, "137 GFLOP each"
    assert cost.seconds > issued, "the work goes on when all of it was issued"
