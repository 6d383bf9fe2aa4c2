"""Ranks that work without a word to each other: who computes for long is waited for, who is silent is missed."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pytest
import torch

from gradwire.base.errors import RunFault
from gradwire.base.failures import lost_peer, timed_out
from gradwire.comm.collectives.world import World, all_alive

TIMEOUT = 1.0


def of(rank: int, ranks: int) -> World:
    return World(rank, rank, ranks, "gloo", torch.device("cpu"))


def long_work(rank, ranks, group):
    began = time.monotonic()
    with all_alive(of(rank, ranks), TIMEOUT) as check:
        if rank == 1:
            time.sleep(3 * TIMEOUT)
        check()
    return time.monotonic() - began


def test_who_works_for_long_is_waited_for(world):
    assert all(seconds >= 3 * TIMEOUT for seconds in world(3).run(long_work))


def silence(rank, ranks, group):
    """Rank 1 holds the interpreter's lock, so that no thread of it runs, as if it were stopped."""
    began = time.monotonic()
    try:
        with all_alive(of(rank, ranks), TIMEOUT) as check:
            if rank == 1:
                ctypes.PyDLL(None).sleep(4)
            while time.monotonic() < began + 3 * TIMEOUT:
                check()
                time.sleep(0.01)
    except RunFault as fault:
        return str(fault), lost_peer(fault), timed_out(fault)
    return None


def test_who_is_silent_is_missed_at_the_next_check(world):
    assert world(2).run(silence)[0] == ("a rank exited, or sent no heartbeat for 1 s.", True, True)


def failure(rank, ranks, group):
    """Rank 1 fails and lives on, as in a program that handles it."""
    with contextlib.suppress(ZeroDivisionError), all_alive(of(rank, ranks), TIMEOUT):
        if rank == 1:
            1 / 0  # noqa: B018
    if rank == 1:
        time.sleep(3 * TIMEOUT)


def test_who_failed_is_missed(world):
    with pytest.raises(RunFault, match="a rank exited, or sent no heartbeat for 1 s"):
        world(2).run(failure)


def test_a_process_alone_waits_for_nobody():
    with all_alive(of(0, 1), TIMEOUT) as check:
        check()
