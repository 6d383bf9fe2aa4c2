"""The reducer's queue: order, faults, lifetime, and what a caller may change while a reduction is in flight.

Of `ops.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from weakref import ref

import pytest
import torch
from late_encoding import late_encoding, only_when_waited_for
from test_reducer import SHAPES, STOCHASTIC, buffer

from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.ops import wait_in_slices
from gradwire.comm.collectives.queue import CONNECTIONS, Connections, OverlappingQueue
from gradwire.comm.compressors import build

BUFFERS = 4
UNTIMED = ("encode_seconds", "decode_seconds", "extra_seconds", "by_op")


def several(rank, world, group, kind, options):
    """The means of a few buffers per step, begun one after another, and waited for in the other order."""
    layouts = [Layout.dim0([(f"{i}{name}", shape) for name, shape in SHAPES], world) for i in range(BUFFERS)]
    found = {}
    with late_encoding(rank):
        for overlap in (True, False):
            reducer = Reducer(build("int8", **STOCHASTIC), group, error_feedback=True, overlap=overlap, **options)
            means = []
            for step in range(3):
                begin = getattr(reducer, f"begin_{kind}")
                flats = [layout.pack(named(rank, step, i)) for i, layout in enumerate(layouts)]
                handles = [begin(flat, layout) for flat, layout in zip(flats, layouts, strict=True)]
                means += [handle.wait() for handle in reversed(handles)]
                assert reducer.finish()
            counts = reducer.traffic | reducer.traffic.details
            traffic = {name: count for name, count in counts.items() if name not in UNTIMED}
            found[overlap] = means, traffic, reducer.codec.residual_norm
    return found


def named(rank, step, i):
    generator = torch.Generator().manual_seed(100 * i + 10 * step + rank)
    return {f"{i}{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{"algorithm": "exchange"}, {"algorithm": "gather", "second": "float32"}])
def test_reductions_in_flight_equal_synchronous_ones(world, size, options):
    for kind in ("all_reduce", "reduce_scatter"):
        for found in world(size).run(several, kind, options):
            (means, *counts), (expected, *expected_counts) = found[True], found[False]
            assert all(torch.equal(mean, other) for mean, other in zip(means, expected, strict=True))
            assert counts == expected_counts and counts[0]["sent"] > 0


def changed_meanwhile(rank, world, group):
    """A loss scale, `keeping` and `plain` are those of the moment in which a reduction began."""
    layout = Layout.dim0(SHAPES, world)
    flats = [buffer(layout, rank, step) for step in range(3)]
    reducer = Reducer(build("threshold", threshold=0.5), group, algorithm="exchange")  # not of the scaled gradient
    with only_when_waited_for():
        with reducer.keeping() as kept:
            reducer.loss_scale = 4.0
            scaled = reducer.begin_all_reduce(flats[0] * 4, layout)
            reducer.loss_scale = 1.0
            plain = reducer.begin_all_reduce(flats[0], layout)
        unkept = reducer.begin_all_reduce(flats[1], layout)
        in_flight = not kept
        same = torch.equal(scaled.wait(), plain.wait() * 4)
        unkept.wait()
    same_kept = [torch.equal(one.mean, handle.wait()) for one, handle in zip(kept, (scaled, plain), strict=True)]
    int8 = Reducer(build("int8"), group, algorithm="exchange")
    with int8.plain():
        dense = int8.begin_all_reduce(flats[2], layout)
    coded = int8.begin_all_reduce(flats[2], layout)
    return in_flight and same and all(same_kept), dense.wait(), coded.wait()


def test_a_reduction_has_the_settings_of_its_beginning(world):
    layout = Layout.dim0(SHAPES, 2)
    exact = (buffer(layout, 0, 2) + buffer(layout, 1, 2)) / 2
    for as_begun, dense, coded in world(2).run(changed_meanwhile):
        assert as_begun
        assert torch.equal(dense, exact) and not torch.equal(coded, exact)


def crossing_a_step(rank, world, group):
    """A reduction that the first rank goes on with before the end of its step, and the second one after it."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, algorithm="exchange", dense_steps=1)
    with only_when_waited_for():
        handle = reducer.begin_all_reduce(buffer(layout, rank), layout)
        if rank == 0:
            CONNECTIONS[group].advance()
        reducer.finish(wait=False)
        return handle.wait()


def test_a_reduction_is_one_of_the_step_in_which_it_began(world):
    exact = sum(buffer(Layout.dim0(SHAPES, 2), rank) for rank in range(2)) / 2
    for mean in world(2).run(crossing_a_step):
        assert torch.equal(mean, exact)


def in_between(rank, world, group):
    """Collectives of the caller's in between; one rank goes on with its reductions at once, and the others late."""
    layout, total = Layout.dim0(SHAPES, world), torch.tensor([1.0 + rank])
    reducer = Reducer(build("none"), group, algorithm="exchange")
    flats = [buffer(layout, rank, step) for step in range(3)]
    with only_when_waited_for():
        handles = [reducer.begin_all_reduce(flat, layout) for flat in flats]
        connections = CONNECTIONS[group]
        sent = until(lambda: all(pending.complete for one in connections.running for pending in one.pending))
        if rank == 0:
            connections.advance()
        more = reducer.begin_all_reduce(flats[0], layout)
        torch.distributed.all_reduce(total)
        return sent, [handle.wait() for handle in (*handles, more)], total.item()


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_the_caller_and_of_other_reductions_may_come_at_any_time(world, size):
    layout = Layout.dim0(SHAPES, size)
    exact = [sum(buffer(layout, rank, step) for rank in range(size)) / size for step in (0, 1, 2, 0)]
    for sent, means, total in world(size).run(in_between):
        assert sent, "the first collectives of all reductions run while nobody waits"
        assert all(map(torch.equal, means, exact)) and total == sum(range(1, size + 1))


def in_two_queues(rank, world, group):
    """Means of two reducers; each rank goes on with them and waits for them in another order."""
    layout = Layout.dim0(SHAPES, world)
    reducers = [Reducer(build("none"), group, algorithm="exchange") for _ in range(2)]
    with only_when_waited_for():
        handles = [reducer.begin_all_reduce(buffer(layout, rank, i), layout) for i, reducer in enumerate(reducers)]
        order = (0, 1) if rank == 0 else (1, 0)
        means = {i: handles[i].wait() for i in order}
    return [means[0], means[1]]


def test_reducers_of_a_group_go_on_in_one_order(world):
    layout = Layout.dim0(SHAPES, 3)
    exact = [sum(buffer(layout, rank, i) for rank in range(3)) / 3 for i in range(2)]
    for means in world(3).run(in_two_queues):
        assert all(map(torch.equal, means, exact))


def unwaited(rank, world, group):
    """The message of `finish` about a reduction that nobody waited for, with a value on rank 0 that is not finite."""
    layout, flat = Layout.dim0(SHAPES, world), buffer(Layout.dim0(SHAPES, world), rank)
    flat[-1] = flat[0] = float("nan") if rank == 0 else 1.0
    reducer = Reducer(build("int8"), group, algorithm="exchange", nonfinite="skip", dense_steps=1)
    with late_encoding(rank, 0.02):
        reducer.begin_all_reduce(flat, layout)
        first = reducer.finish()
        coded = reducer.begin_all_reduce(buffer(layout, rank), layout)
        return first, reducer.finish(), reducer.traffic["sent"], coded.wait()


def test_the_end_of_a_step_waits_for_its_reductions(world):
    (*first, mean), (*second, other) = world(2).run(unwaited)
    assert first[:2] == second[:2] == [False, True]
    assert torch.equal(mean, other)
    exact = sum(buffer(Layout.dim0(SHAPES, 2), rank) for rank in range(2)) / 2
    assert 0 < (mean - exact).abs().max() < 0.1, "the second step was encoded"


def failing(rank, world, group):
    """The messages of every call after an encoding failed on all ranks, and the number of finished steps."""
    layout = Layout.dim0(SHAPES, world)
    reducer = Reducer(build("int8"), group, algorithm="exchange")
    reducer.all_reduce(buffer(layout, rank), layout)
    encode = Codec.encode

    def broken(self, *args):
        raise ZeroDivisionError("no such luck")

    with only_when_waited_for():  # or it might end in this call
        early = reducer.begin_all_reduce(buffer(layout, rank), layout)
    Codec.encode = broken
    try:
        handle = reducer.begin_all_reduce(buffer(layout, rank), layout)
        calls = [handle.wait, early.wait, lambda: reducer.begin_all_reduce(buffer(layout, rank), layout)]
        messages, step = [message(call) for call in (*calls, reducer.finish, reducer.synchronize)], reducer.step
    finally:
        Codec.encode = encode
    other = Reducer(reducer.compressor, group)  # through the same connections
    means = [each.all_reduce(buffer(layout, rank), layout) for each in (other, Reducer(other.compressor, group))]
    return messages, step, torch.equal(*means)


def message(call):
    try:
        call()
    except ZeroDivisionError as error:
        return str(error)


def test_a_fault_reaches_every_caller_of_its_reducer_and_no_other(world):
    assert world(2).run(failing) == [(["no such luck"] * 5, 0, True)] * 2


def unconnected(monkeypatch):
    """A queue for tasks without collectives."""
    monkeypatch.setattr("gradwire.comm.collectives.queue.copied", lambda ranks: ranks)
    return OverlappingQueue(Connections(torch.Generator()))  # anything that has a weak reference


def task(call):
    """A task without collectives."""
    return call()
    yield


def raising(error):
    raise error


def test_after_a_fault_nothing_runs_and_everything_raises_it(monkeypatch):
    queue, ran, error = unconnected(monkeypatch), [], KeyError("a bad wire")
    assert queue.begin(task(lambda: torch.ones(1)), torch.zeros(1)).wait() == 1
    lost = queue.begin(task(partial(raising, error)), torch.zeros(1))
    called = []
    lost.if_failed(called.append)
    with pytest.raises(KeyError, match="a bad wire"):
        queue.begin(task(lambda: (ran.append(1), torch.ones(1))[1]), torch.zeros(1))
    for call in (lost.wait, queue.synchronize, queue.synchronize):
        with pytest.raises(KeyError, match="a bad wire") as caught:
            call()
        assert caught.value is error
    assert not ran and called == [error] and not queue.connections.running


def test_an_interrupt_is_raised_where_it_comes_and_ends_the_queue(monkeypatch):
    queue = unconnected(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        queue.begin(task(partial(raising, KeyboardInterrupt())), torch.zeros(1))
    with pytest.raises(KeyboardInterrupt):
        queue.begin(task(lambda: torch.ones(1)), torch.zeros(1))


def test_a_task_has_no_gradient_and_its_buffer_is_not_kept(monkeypatch):
    queue, flat = unconnected(monkeypatch), torch.zeros(3, requires_grad=True)
    assert not queue.begin(task(lambda: torch.tensor(torch.is_grad_enabled())), flat).wait()
    alive = ref(flat)
    handle = queue.begin(task(partial(torch.clone, flat)), flat)
    mean = handle.wait()
    del flat
    gc.collect()
    assert alive() is None and not mean.requires_grad


class Slow:
    """A collective that ends right after the first slice of a wait, and then fails if it has an error."""

    def __init__(self, error=None):
        self.error, self.waits = error, 0

    def is_completed(self):
        return self.waits > 0

    def wait(self, timeout):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise self.error


def test_a_collective_may_end_right_after_a_slice_of_its_wait():
    slow = Slow()
    wait_in_slices(slow)
    assert slow.waits == 2
    with pytest.raises(RuntimeError, match="Connection closed"):
        wait_in_slices(Slow(RuntimeError("Connection closed by peer")))


def until(true):
    """Wait until something is true."""
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def shared(rank, world, group):
    """Two reducers of one group at once: whether their means are right, and the connections that they made."""
    layout, compressors = Layout.dim0(SHAPES, world), [build("int8"), build("onebit")]
    group, flat = torch.distributed.new_group(), buffer(layout, rank)
    alone, other = [Reducer(each, group, overlap=False) for each in compressors]
    expected = [reducer.all_reduce(flat, layout) for reducer in (alone, other, other, alone)]
    Reducer(build("int8"), group).state_dict()
    made = [CONNECTIONS.get(group)]
    first, second = [Reducer(each, group) for each in compressors]
    for reducers in ((first, first), (first, second, second, first)):
        begun = [reducer.begin_all_reduce(flat, layout) for reducer in reducers]
        means = [handle.wait() for handle in begun]
        made.append(CONNECTIONS.get(group))
    return all(map(torch.equal, means, expected)), made[0] is None, made[1] is made[2]


def test_reducers_of_a_group_share_connections_and_open_none_without_need(world):
    assert world(2).run(shared) == [(True, True, True)] * 2


@pytest.mark.parametrize(
    "way", ["reducer", *(pytest.param(way, marks=pytest.mark.sweep) for way in ("hook", "comm_hook"))]
)
def test_a_rank_that_is_interrupted_in_mid_reduction_ends_at_once_and_does_not_crash(way):
    command = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "interrupted_rank.py"), way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seconds = time.time() - float(ended.stdout)
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt"), "the user's own traceback, and nothing after it"
    assert ended.returncode in (1, -signal.SIGINT) and seconds < 3  # autograd turns the exception's identity into 1


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads have no policies here")
def test_a_process_ends_only_when_no_thread_of_gloo_is_late():
    program = [sys.executable, str(Path(__file__).parents[2] / "helpers" / "late_threads.py")]
    uncompiled = {**os.environ, "NUMBA_DISABLE_JIT": "1"}  # a slow compilation prints a line
    # Other tests slow threads that yield.
    ended = subprocess.run(program, capture_output=True, text=True, timeout=240, env=uncompiled)
    assert (ended.stdout, ended.stderr) == (3 * "0 0\n", "")
