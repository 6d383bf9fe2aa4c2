"""Ranks that work without a word to each other: each shows that it lives, so that one which hangs is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

import torch
import torch.distributed as dist

from gradwire.collectives import ops
from gradwire.collectives.meter import Meter
from gradwire.collectives.world import World
from gradwire.errors import RunFault

BEATS = 10  # signs of life within the time after which a rank is missed


@contextmanager
def all_alive(world: World, timeout: float) -> Iterator[Callable[[], None]]:
    """Do this rank's share of the work inside; leaving waits for the other ranks, for as long as they live.

    A thread of each rank gives signs of life, so a rank that computes for hours is not missed; one is that was stopped,
    that failed, or whose machine is gone.

    Args:
        world: This rank among the others; all of them enter.
        timeout: Seconds without a sign of life until a rank is missed.

    Yields:
        A check to make now and then, which is quick.

    Raises:
        RunFault: From the check, and on leaving, if a rank is missed.
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
            raise RunFault(f"a rank ended, or gave no sign of life for {timeout:g} s.") from missed[0]

    thread = Thread(target=beat, daemon=True)  # a rank that failed does not wait for the others
    thread.start()
    try:
        yield check
    except BaseException:
        gone.set()
        raise
    done.set()
    thread.join()
    check()
