"""The reducer's queue: order, faults, lifetime, and what a caller may change while a reduction is in flight."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from weakref import ref

import pytest
import torch
from late_encoding import late_encoding
from test_reducer import SHAPES, STOCHASTIC, buffer

from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.queue import ThreadQueue, Worker
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
            traffic = {name: count for name, count in reducer.traffic.items() if name not in UNTIMED}
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
    with held_encoding() as free:
        with reducer.keeping() as kept:
            reducer.loss_scale = 4.0
            scaled = reducer.begin_all_reduce(flats[0] * 4, layout)
            reducer.loss_scale = 1.0
            plain = reducer.begin_all_reduce(flats[0], layout)
        unkept = reducer.begin_all_reduce(flats[1], layout)
        in_flight = not kept
        free.set()
        same = torch.equal(scaled.wait(), plain.wait() * 4)
        unkept.wait()
    same_kept = [torch.equal(one.mean, handle.wait()) for one, handle in zip(kept, (scaled, plain), strict=True)]
    int8 = Reducer(build("int8"), group, algorithm="exchange")
    with int8.plain():
        dense = int8.begin_all_reduce(flats[2], layout)
    coded = int8.begin_all_reduce(flats[2], layout)
    return in_flight and same and all(same_kept), dense.wait(), coded.wait()


@contextmanager
def held_encoding():
    """Hold every encoding back until the event is set."""
    encode, free = Codec.encode, threading.Event()
    Codec.encode = lambda self, *args: (free.wait(20), encode(self, *args))[1]
    try:
        yield free
    finally:
        Codec.encode = encode


def test_a_reduction_has_the_settings_of_its_beginning(world):
    layout = Layout.dim0(SHAPES, 2)
    exact = (buffer(layout, 0, 2) + buffer(layout, 1, 2)) / 2
    for as_begun, dense, coded in world(2).run(changed_meanwhile):
        assert as_begun
        assert torch.equal(dense, exact) and not torch.equal(coded, exact)


def in_between(rank, world, group):
    """A collective of the caller's that comes before the reduction's on rank 0, and after them on rank 1."""
    layout, total = Layout.dim0(SHAPES, world), torch.tensor([1.0 + rank])
    reducer = Reducer(build("none"), group, algorithm="exchange")
    with held_encoding() as free:
        handle = reducer.begin_all_reduce(buffer(layout, rank), layout)
        if rank == 0:
            torch.distributed.all_reduce(total)
        free.set()
        if rank == 1:
            time.sleep(0.5)
            torch.distributed.all_reduce(total)
        return handle.wait(), total.item()


def test_collectives_of_the_caller_may_come_at_any_time(world):
    exact = sum(buffer(Layout.dim0(SHAPES, 2), rank) for rank in range(2)) / 2
    for mean, total in world(2).run(in_between):
        assert torch.equal(mean, exact) and total == 3


def unwaited(rank, world, group):
    """What `finish` says of a reduction that nobody waited for, with a value on rank 0 that is not finite."""
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
    encode, free = Codec.encode, threading.Event()

    def broken(self, *args):
        free.wait(20)
        raise ZeroDivisionError("no such luck")

    Codec.encode = broken
    try:
        handles = [reducer.begin_all_reduce(buffer(layout, rank), layout) for _ in range(3)]
        free.set()
        calls = [*(handle.wait for handle in handles), lambda: reducer.all_reduce(buffer(layout, rank), layout)]
        messages, step = [message(call) for call in (*calls, reducer.finish, reducer.synchronize)], reducer.step
    finally:
        Codec.encode = encode
    other = Reducer(reducer.compressor, group)  # in the same thread, which has not ended
    means = [each.all_reduce(buffer(layout, rank), layout) for each in (other, Reducer(other.compressor, group))]
    return messages, step, torch.equal(*means)


def message(call):
    try:
        call()
    except ZeroDivisionError as error:
        return str(error)


def test_a_fault_in_the_thread_reaches_every_caller_of_its_reducer_and_no_other(world):
    assert world(2).run(failing) == [(["no such luck"] * 6, 0, True)] * 2


def alone_with_a_fault(queue, error):
    def fail():
        raise error

    return queue.begin(fail, torch.zeros(1))


def test_after_a_fault_nothing_runs_and_everything_raises_it():
    queue, ran, error = ThreadQueue(Worker()), [], KeyError("a bad wire")
    first = queue.begin(lambda: torch.ones(1), torch.zeros(1))
    assert first.wait() == 1
    lost = alone_with_a_fault(queue, error)
    called = []
    lost.if_failed(called.append)
    behind = Later(queue, ran)
    for handle in (lost, *behind.handles):
        with pytest.raises(KeyError, match="a bad wire") as caught:
            handle.wait()
        assert caught.value is error
    for _ in range(2):
        with pytest.raises(KeyError, match="a bad wire"):
            queue.synchronize()
    assert not ran and called == [error]


class Later:
    """Reductions behind a fault; `begin` itself may raise it already."""

    def __init__(self, queue, ran):
        self.handles = []
        for _ in range(2):
            try:
                self.handles.append(queue.begin(lambda: (ran.append(1), torch.ones(1))[1], torch.zeros(1)))
            except KeyError:
                return


def test_the_thread_computes_with_one_thread_and_the_process_with_its_own():
    torch.set_num_threads(3)
    try:
        queue, later = ThreadQueue(Worker()), []
        assert queue.begin(lambda: torch.tensor(torch.get_num_threads()), torch.zeros(1)).wait() == 1
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 3 and later == [3]
    finally:
        torch.set_num_threads(1)


def test_the_thread_ends_with_its_queue_and_keeps_no_buffer():
    before = reducer_threads()
    queue = ThreadQueue(Worker())
    [thread] = reducer_threads() - before
    assert not queue.begin(lambda: torch.tensor(torch.is_grad_enabled()), torch.zeros(1)).wait()
    flat = torch.zeros(3)
    alive = ref(flat)
    handle = queue.begin(partial(torch.clone, flat), flat)
    handle.wait()
    queue.synchronize()
    del handle, flat
    assert until(lambda: alive() is None)
    assert thread.is_alive() and thread.daemon
    del queue
    thread.join(20)
    assert not thread.is_alive()


def until(true):
    """Wait until something is true."""
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def reducer_threads():
    return {thread for thread in threading.enumerate() if thread.name == "gradwire-reducer"}


def shared(rank, world, group):
    """Two reducers of one group at once: whether their means are right, and how many threads they start."""
    layout, others = Layout.dim0(SHAPES, world), reducer_threads()
    compressors = build("int8"), build("onebit")
    first, second = [Reducer(each, group) for each in compressors]
    alone, other = [Reducer(each, group, overlap=False) for each in compressors]
    flat = buffer(layout, rank)
    begun = [reducer.begin_all_reduce(flat, layout) for reducer in (first, second, second, first)]
    means = [handle.wait() for handle in begun]
    expected = [reducer.all_reduce(flat, layout) for reducer in (alone, other, other, alone)]
    return all(map(torch.equal, means, expected)), len(reducer_threads() - others)


def threads_left(rank, world, group, at_most):
    """Whether at most so many threads are left."""
    gc.collect()
    return until(lambda: len(reducer_threads()) <= at_most)


def count_threads(rank, world, group):
    gc.collect()
    time.sleep(0.1)  # a thread whose queue is gone ends soon
    return len(reducer_threads())


def test_reducers_of_a_group_share_a_thread_that_ends_with_the_group(world):
    before = max(world(2).run(count_threads))  # those of earlier tests, in the same processes
    assert world(2).run(shared) == [(True, 1)] * 2
    assert world(2).run(threads_left, before) == [True, True]  # in the same processes, and another group


def without_overlap(rank, world, group):
    layout, others = Layout.dim0(SHAPES, world), reducer_threads()
    Reducer(build("int8"), group, overlap=False).all_reduce(buffer(layout, rank), layout)
    Reducer(build("int8"), group).state_dict()
    return len(reducer_threads() - others)


def test_no_thread_starts_without_need(world):
    assert world(2).run(without_overlap) == [0, 0]


@pytest.mark.parametrize(
    "way", ["reducer", *(pytest.param(way, marks=pytest.mark.sweep) for way in ("hook", "comm_hook"))]
)
def test_a_rank_that_is_interrupted_in_mid_reduction_ends_at_once_and_does_not_crash(way):
    command = [sys.executable, str(Path(__file__).with_name("interrupted_rank.py")), way]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seconds = time.time() - float(ended.stdout)
    assert ended.stderr.rstrip().endswith("KeyboardInterrupt"), "the user's own traceback, and nothing after it"
    assert ended.returncode in (1, -signal.SIGINT) and seconds < 3  # autograd turns the exception's identity into 1
