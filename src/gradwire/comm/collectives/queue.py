"""The queue of a reducer: reductions begin in the order of the calls, and the caller goes on while gloo or NCCL sends.

On the CPU a reduction encodes at once and begins its first collective, in connections that nothing else uses: one that
the caller starts in between, such as FSDP's all-gather of parameters, cannot take its place. What comes after that
collective, such as decoding, runs in later calls of the caller. With NCCL reductions are launched on a separate stream,
and nothing waits on the host.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import get_native_id
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.collectives.meter import METER
from gradwire.comm.collectives.ops import Group, Pending, copied
from gradwire.comm.collectives.simulated import simulated

T = TypeVar("T")
Request: TypeAlias = Callable[..., Pending]  # begins a collective of the ranks that ``group`` names
Task: TypeAlias = Generator[list[Request], list[Tensor], T]  # yields collectives to run at once, and gets their results

ABORTED = timedelta(seconds=2)  # in which a collective ends whose connections were closed
LATE = 1.0  # seconds that the process waits at its end for threads that run


def run(task: Task[T], group: Group) -> T:
    """Run a task to its end; return what it returns."""
    results: list[Tensor] | None = None
    while True:
        try:
            requests = next(task) if results is None else task.send(results)
        except StopIteration as end:
            returned: T = end.value
            return returned
        results = [pending.wait() for pending in [request(group=group) for request in requests]]


class Handle:
    """A reduction that has run, or was launched before an event of its CUDA stream."""

    def __init__(self, mean: Tensor, ready: torch.cuda.Event | None = None) -> None:
        self._mean = mean
        self._ready = ready

    def wait(self) -> Tensor:
        """Return the mean, which the current stream may use.

        Raises:
            Exception: That of the reduction, or of one that began before it.
        """
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._mean.device)
            stream.wait_event(self._ready)
            self._mean.record_stream(stream)
        return self._mean

    def if_failed(self, call: Callable[[BaseException], object]) -> None:
        """Call a function with the error if the reduction fails or has failed."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Wait: a copy has the mean."""
        return Handle, (self.wait(),)


class ReductionQueue:
    """Runs a task when it begins, to its end; subclasses do not wait, and keep the order of `begin`.

    Args:
        group: The ranks; None is the default group.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group

    def begin(self, task: Task[Tensor], flat: Tensor) -> Handle:
        """Run a task after all earlier ones.

        Args:
            task: Reads ``flat``, and returns the mean.
            flat: The input; not to be changed before the task has finished.

        Raises:
            Exception: That of an earlier task in the meantime; without overlap that of this one.
        """
        return Handle(run(task, self.group))

    def go_on(self) -> None:
        """Go on with tasks whose collectives are complete, without waiting."""

    def synchronize(self) -> None:
        """Wait for all tasks: on the host, or with the current CUDA stream.

        Raises:
            Exception: That of a task.
        """


class StreamQueue(ReductionQueue):
    """Launches tasks on a separate CUDA stream."""

    def __init__(self, group: Group, device: torch.device) -> None:
        super().__init__(group)
        self._stream = torch.cuda.Stream(device)

    def begin(self, task: Task[Tensor], flat: Tensor) -> Handle:
        """Launch the task after the work of the current stream, which made ``flat``."""
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        flat.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return Handle(run(task, self.group), self._stream.record_event())

    def synchronize(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class Running(Handle):
    """A task that has begun in an `OverlappingQueue`.

    Attributes:
        queue: The queue.
        pending: The collectives that it waits for.
    """

    def __init__(self, queue: OverlappingQueue, task: Task[Tensor]) -> None:
        self.queue = queue
        self.pending: list[Pending] = []
        self._task: Task[Tensor] | None = task
        self._error: BaseException | None = None
        self._if_failed: list[Callable[[BaseException], object]] = []

    @property
    def ended(self) -> bool:
        """Whether the task has finished or failed."""
        return self._task is None

    def wait(self) -> Tensor:
        """Run the task, and those before it, to the end."""
        while not self.ended:
            self.queue.connections.advance()
        if self._error is not None:
            raise self._error
        return self._mean

    def if_failed(self, call: Callable[[BaseException], object]) -> None:
        """Call the function now or later."""
        if self._error is not None:
            call(self._error)
        self._if_failed.append(call)

    def send(self, results: list[Tensor] | None, groups: Sequence[dist.ProcessGroup]) -> None:
        """Go on with the results of the collectives that were asked for; None begins."""
        assert self._task is not None
        with torch.no_grad():
            try:
                requests = next(self._task) if results is None else self._task.send(results)
            except StopIteration as end:
                self._mean, self._task, self.pending = end.value, None, []
                return
            group = groups[0 if results is None else 1]
            self.pending = [request(group=group) for request in requests]

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self._error, self._task, self.pending = error, None, []
        for call in self._if_failed:
            call(error)


# Why: docs/decisions.md, "A reduction runs in the calls of its reducer".
class OverlappingQueue(ReductionQueue):
    """Begins tasks, and goes on with them in later calls.

    After a task has failed, the ranks no longer agree on what comes next: all later tasks of this queue fail with its
    error.

    Args:
        connections: The connections that its tasks share with those of other queues of the same ranks.
    """

    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self.connections = connections
        self._last: Running | None = None
        self._error: BaseException | None = None

    def begin(self, task: Task[Tensor], flat: Tensor) -> Handle:
        """Run the task up to its first collective."""
        self._check()
        self._last = Running(self, task)
        self.connections.begin(self._last)
        return self._last

    def go_on(self) -> None:
        """Go on with the first tasks, as far as their collectives are complete."""
        self.connections.go_on()

    def synchronize(self) -> None:
        """Run all tasks to the end."""
        while self._last is not None and not self._last.ended:
            self.connections.advance()
        self._last = None
        self._check()

    def fail(self, error: BaseException) -> None:
        """End all tasks with an error."""
        self._error = error
        self.connections.broken = True
        for running in [running for running in self.connections.running if running.queue is self]:
            self.connections.running.remove(running)
            running.fail(error)

    def _check(self) -> None:
        """Raise the error of a task that failed."""
        if self._error is not None:
            raise self._error


# Why: docs/decisions.md, "First and later collectives have a group each".
class Connections:
    """Gloo groups of the same ranks for the collectives of reducers, and the tasks that use them.

    First collectives run in the order of `begin`, in a group of their own. Later ones have another group, where all of
    a task come before those of the next: a rank may go on with a task earlier than another rank does.

    Args:
        ranks: The ranks; all of them must make this together.

    Attributes:
        groups: The group of first collectives, and that of later ones.
        running: The tasks that have not ended, of all queues.
        broken: Whether a task has failed, whose collective may run until its connections close.
    """

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        before = open_sockets()
        first = copied(ranks)
        self.groups = first, copied(first)
        self.running: deque[Running] = deque()
        self.broken = False
        self._sockets = open_sockets() - before

    def begin(self, running: Running) -> None:
        """Run a task up to its first collective."""
        self.running.append(running)
        self._send(running, None)
        self.go_on()

    def go_on(self) -> None:
        """Go on with the first tasks, as far as their collectives are complete."""
        while self.running and all(pending.complete for pending in self.running[0].pending):
            self.advance()

    def advance(self) -> None:
        """Wait for the collectives of the first task, and go on with it; never raises what it raises."""
        first = self.running[0]
        try:
            results = [pending.wait(slices=True) for pending in first.pending]
        except Exception as error:
            first.queue.fail(error)
        else:
            self._send(first, results)

    def abandon(self) -> None:
        """Close the connections of collectives that run, and wait until gloo's threads notice it.

        The descriptors stay open: gloo has no abort in Python.
        """
        works = [work for running in self.running for pending in running.pending for work in pending.works]
        left = [work for work in works if not work.is_completed()]
        for descriptor in self._sockets if left or self.broken else ():
            shut_down(descriptor)
        for work in left:
            with suppress(Exception):
                work.wait(ABORTED)

    def _send(self, running: Running, results: list[Tensor] | None) -> None:
        """Go on with a task; drop it when it has ended."""
        try:
            running.send(results, self.groups)
        except BaseException as error:
            running.queue.fail(error)
            if not isinstance(error, Exception):
                raise
        if running.ended and running in self.running:
            self.running.remove(running)


# Why: docs/decisions.md, "At exit a collective loses its connections".
@atexit.register
def abandon_all() -> None:
    """End collectives before the interpreter: their group would wait for them, up to its time limit."""
    for connections in [*CONNECTIONS.values()]:
        if connections.running or connections.broken:
            connections.abandon()
            gc.freeze()  # an interrupted process spends no second on the modules' cycles, which the system frees
    if METER.totals:
        wait_for_threads(LATE)


# One per group, for as long as the group exists. A copy of the group for each reducer could not be destroyed with it:
# torch names new groups by how many there are, and the ranks free a reducer at different times.
CONNECTIONS: WeakKeyDictionary[dist.ProcessGroup, Connections] = WeakKeyDictionary()


# Why: docs/decisions.md, "One queue per reducer".
def build_queue(group: Group, device: torch.device, overlap: bool) -> ReductionQueue:
    """Build the queue of a reducer; all ranks of ``group`` must call this together.

    Args:
        group: The ranks.
        device: Where the gradients are. gloo's collectives of CUDA tensors block the host and do not overlap, nor do
            those of simulated ranks.
        overlap: Whether the caller goes on while tasks communicate.
    """
    if overlap and device.type == "cpu" and not simulated(group):
        return OverlappingQueue(connections_of(group))
    if overlap and dist.get_backend(group) == "nccl":
        return StreamQueue(group, device)
    return ReductionQueue(group)


def connections_of(group: Group) -> Connections:
    """Return the connections of a group's ranks, which make them together at the first call."""
    ranks = group or dist.group.WORLD
    assert ranks is not None
    if ranks not in CONNECTIONS:
        CONNECTIONS[ranks] = Connections(ranks)
    return CONNECTIONS[ranks]


# Why: docs/decisions.md, "Ranks connect when a model is given its reducer".
def connect(group: Group, device: torch.device, overlap: bool) -> None:
    """Make now what `build_queue` needs of the ranks, with the same arguments; all of them call this together."""
    if overlap and device.type == "cpu" and not simulated(group) and dist.get_backend(group) != "nccl":
        connections_of(group)


# This process as Linux sees it; other systems show no sockets and no threads.


def open_sockets() -> set[int]:
    """Return the file descriptors of this process's sockets; nothing on a system that does not list them."""
    sockets = set[int]()
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_socket():
                sockets.add(int(entry.name))
    return sockets


def shut_down(descriptor: int) -> None:
    """Close both directions of a connection; its descriptor stays open. A socket that only listens is left alone."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()  # raises for one that listens: gloo aborts the process if that fails
        connection.shutdown(socket.SHUT_RDWR)


# Why: docs/decisions.md, "At exit gloo's threads come to rest first".
def wait_for_threads(seconds: float) -> None:
    """Wait until no other thread of this process runs or could run, but at most so long.

    One of gloo's that is late frees the tensors of a collective that has ended. It needs Python's lock for that, and
    aborts the process if the interpreter is ending.
    """
    rests, end = 0, time.monotonic() + seconds
    while rests < 2 and time.monotonic() < end:  # one that waits for Python's lock rests too, and gets it in between
        time.sleep(0.001)
        rests = 0 if any_thread_runs() else rests + 1


def any_thread_runs() -> bool:
    """Whether another thread of this process runs or could run; False on a system that does not say so."""
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            state = (thread / "stat").read_text().rpartition(") ")[2][0]
            if state == "R" and int(thread.name) != get_native_id():
                return True
    return False
