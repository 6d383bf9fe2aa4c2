"""The queue of a reducer: reductions run in the order in which they were begun, while the caller goes on.

On the CPU a thread runs those of all reducers of a group, through a separate process group: a collective that another
thread starts in between, such as FSDP's all-gather of parameters, cannot take the place of one of the queue's. With
NCCL they are launched on a separate stream, and nothing waits on the host.
"""

from __future__ import annotations

import atexit
import gc
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeAlias
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.collectives.ops import Group
from gradwire.comm.collectives.simulated import simulated
from gradwire.comm.torch_internals import timeout_of

Task: TypeAlias = Callable[[], Tensor]
Item: TypeAlias = tuple["Future[Tensor]", Task, list[BaseException]]

IDLE_S = 0.1  # seconds in which a thread without tasks ends
ABORTED_S = 2.0  # seconds in which a thread ends whose collective was aborted; it may be encoding


class Handle:
    """A reduction that has begun."""

    def __init__(self, future: Future[Tensor], ready: torch.cuda.Event | None = None) -> None:
        self._future = future
        self._ready = ready

    def wait(self) -> Tensor:
        """Return the mean, which the current stream may use.

        Raises:
            Exception: What the reduction, or one that began before it, raised.
        """
        mean = self._future.result()
        if self._ready is not None:
            stream = torch.cuda.current_stream(mean.device)
            stream.wait_event(self._ready)
            mean.record_stream(stream)
        return mean

    def if_failed(self, call: Callable[[BaseException], object]) -> None:
        """Call a function with the error if the reduction fails or has failed."""
        self._future.add_done_callback(lambda future: call(error) if (error := future.exception()) else None)


class ReductionQueue:
    """Runs a task in the thread that begins it, which waits; subclasses do not wait, and keep the order of `begin`."""

    def begin(self, task: Task, flat: Tensor) -> Handle:
        """Run a task after all earlier ones.

        Args:
            task: Reads ``flat``, and returns the mean.
            flat: The input; not to be changed before the task has finished.

        Raises:
            Exception: What an earlier task raised in the meantime; without overlap what this one raises.
        """
        return finished(task())

    def synchronize(self) -> None:
        """Wait for all tasks: on the host, or with the current CUDA stream.

        Raises:
            Exception: What a task raised.
        """


class StreamQueue(ReductionQueue):
    """Launches tasks on a separate CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def begin(self, task: Task, flat: Tensor) -> Handle:
        """Launch the task after the work of the current stream, which made ``flat``."""
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        flat.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return finished(task(), self._stream.record_event)

    def synchronize(self) -> None:
        """Make the current stream wait."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


# Why: docs/decisions.md, "At exit a thread in mid-collective loses its connections".
class WorkerThread(Thread):
    """A thread that runs tasks until it gets None.

    It is a daemon, so that a process which fails or is interrupted does not wait for its collectives.

    Args:
        sockets: File descriptors of the connections that the tasks' collectives use.
    """

    def __init__(self, sockets: Collection[int]) -> None:
        super().__init__(name="gradwire-reducer", daemon=True)
        self.items: SimpleQueue[Item | None] = SimpleQueue()
        self.sockets = sockets
        self.ready = Event()

    def run(self) -> None:
        """Compute with one thread, since the rank's others are at work in the backward pass."""
        torch.get_num_threads()  # otherwise torch sets the process's number at this thread's first operation
        torch.set_num_threads(1)
        self.ready.set()
        with torch.no_grad():
            while (item := self.items.get()) is not None:
                future, task, faults = item
                try:
                    if faults:
                        raise faults[0]
                    future.set_result(task())
                except BaseException as error:
                    if not faults:
                        faults.append(error)
                    future.set_exception(error)
                del item, future, task, faults  # they would keep the last reduction's buffers until the next

    def end(self) -> bool:
        """End the thread, also in mid-collective: gloo stops one only if it loses its connections.

        Returns:
            Whether the thread was idle.
        """
        self.items.put(None)
        self.join(IDLE_S)
        if not self.is_alive():
            return True
        for descriptor in self.sockets:
            shut_down(descriptor)
        self.join(ABORTED_S)
        return False


class Worker:
    """A thread that runs the tasks of all queues of a group in one order; it ends with this object.

    Args:
        group: The process group of the tasks' collectives.
        sockets: File descriptors of its connections.
    """

    def __init__(self, group: Group = None, sockets: Collection[int] = ()) -> None:
        self.group = group
        threads, thread = torch.get_num_threads(), WorkerThread(sockets)
        thread.start()
        thread.ready.wait()
        torch.set_num_threads(threads)  # later threads of this process take the last number that any thread set
        self.items = thread.items
        finalize(self, self.items.put, None)


@atexit.register
def end_threads() -> None:
    """End all workers' threads before the interpreter: a collective that returns after it aborts the process."""
    idle = [thread.end() for thread in threading.enumerate() if isinstance(thread, WorkerThread)]
    if not all(idle):
        gc.freeze()  # an interrupted process spends no second on the modules' cycles, which the system frees


def shut_down(descriptor: int) -> None:
    """Close both directions of a connection; its descriptor stays open. A socket that only listens is left alone."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()  # raises for one that listens: gloo aborts the process if that fails
        connection.shutdown(socket.SHUT_RDWR)


def open_sockets() -> set[int]:
    """Return the file descriptors of this process's sockets; nothing on a system that does not list them."""
    sockets = set[int]()
    with suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            if entry.is_socket():
                sockets.add(int(entry.name))
    return sockets


class ThreadQueue(ReductionQueue):
    """Runs tasks in a worker's thread.

    After a task has failed, the ranks no longer agree on what comes next: all later tasks of this queue fail with its
    error.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._begun: deque[Future[Tensor]] = deque()  # tasks that may not have finished
        self._faults: list[BaseException] = []

    def begin(self, task: Task, flat: Tensor) -> Handle:
        """Hand the task to the thread."""
        self._settle(wait=False)
        future: Future[Tensor] = Future()
        self._begun.append(future)
        self._worker.items.put((future, task, self._faults))
        return Handle(future)

    def synchronize(self) -> None:
        """Wait for the thread to finish all tasks of this queue."""
        self._settle(wait=True)

    def _settle(self, wait: bool) -> None:
        """Forget the tasks that have finished; one that has failed stays, and raises its error each time."""
        while self._begun and (wait or self._begun[0].done()):
            self._begun[0].result()
            self._begun.popleft()


def finished(mean: Tensor, record: Callable[[], torch.cuda.Event] | None = None) -> Handle:
    """Return the handle of a reduction that has run, or was launched before the event that ``record`` returns."""
    future: Future[Tensor] = Future()
    future.set_result(mean)
    return Handle(future, record and record())


# One per group, for as long as the group exists. A copy of the group for each reducer could not be destroyed with it:
# torch names new groups by how many there are, and the ranks free a reducer at different times.
WORKERS: WeakKeyDictionary[dist.ProcessGroup, Worker] = WeakKeyDictionary()


# Why: docs/decisions.md, "One queue per reducer".
def build_queue(group: Group, device: torch.device, overlap: bool) -> tuple[ReductionQueue, Group]:
    """Build the queue of a reducer, and the group of its collectives; all ranks of ``group`` must call this together.

    Args:
        group: The ranks.
        device: Where the gradients are. gloo's collectives of CUDA tensors block the host and do not overlap, nor do
            those of simulated ranks.
        overlap: Whether tasks run while the caller goes on.
    """
    if overlap and device.type == "cpu" and not simulated(group):
        ranks = group or dist.group.WORLD
        assert ranks is not None
        if ranks not in WORKERS:
            before = open_sockets()
            copy = copied(ranks)
            WORKERS[ranks] = Worker(copy, open_sockets() - before)
        return ThreadQueue(WORKERS[ranks]), WORKERS[ranks].group
    if overlap and dist.get_backend(group) == "nccl":
        return StreamQueue(device), group
    return ReductionQueue(), group


def copied(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, with the same timeout."""
    ranks = dist.get_process_group_ranks(group)
    some = len(ranks) < dist.get_world_size()  # the other ranks do not take part then
    return dist.new_group(ranks, timeout=timeout_of(group), backend="gloo", use_local_synchronization=some)
