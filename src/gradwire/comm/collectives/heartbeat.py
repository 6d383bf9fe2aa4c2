"""Heartbeats between ranks that work without collectives, to detect a rank that hangs or died."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import torch
import torch.distributed as dist

from gradwire.base.errors import RunFault
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.world import World

BEATS = 10  # heartbeats per timeout


@contextmanager
def all_alive(world: World, timeout: float) -> Iterator[Callable[[], None]]:
    """Send heartbeats while this rank works inside the context; the exit waits for the other ranks while they live.

    A thread sends the heartbeats, so a rank that computes for hours is not reported; one that was stopped, failed, or
    lost its machine is.

    Args:
        world: This rank's process group; all of its ranks must enter the context.
        timeout: Seconds without a heartbeat after which a rank counts as dead.

    Yields:
        A cheap check to call from time to time.

    Raises:
        RunFault: From the check, and on exit, if a rank counts as dead.
    """
    if world.world_size == 1:
        yield lambda: None
        return
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    done, gone = Event(), Event()
    missed: list[Exception] = []

    def all_done() -> bool:
        return bool(ops.all_reduce(torch.tensor(int(done.is_set())), "min", group, meter=Meter()))

    def beat() -> None:
        try:
            while not (gone.is_set() or all_done()):
                done.wait(timeout / BEATS)
        except Exception as error:
            missed.append(error)

    def check() -> None:
        if missed:
            raise RunFault(f"a rank exited, or sent no heartbeat for {timeout:g} s.") from missed[0]

    thread = Thread(target=beat, daemon=True)  # a failed rank does not wait for the others
    thread.start()
    try:
        yield check
    except BaseException:
        gone.set()
        raise
    done.set()
    thread.join()
    check()
