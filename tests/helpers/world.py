"""One pool of gloo ranks per test session: real processes, forked from the session's own once its tests are imported.

``world(n).run(fn, *args)`` calls ``fn(rank, world_size, group, *args)`` on the first n ranks and returns their results.
``fn`` is a module-level function; ``group`` is a fresh default process group of n ranks, so that a test which broke its
group leaves nothing to the next one. An exception comes back as it was raised, with the rank's traceback as a note.

One thing survives: torch caches device meshes that compare equal, with the names of their groups. So meshes of one
shape and one set of names must create their groups in one order in all tests (`build_islands`), or a collective hangs.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

GROUP_TIMEOUT = timedelta(seconds=30)  # of one collective
RUN_TIMEOUT_S = 60.0  # of one `run`
THREADS = Path("/proc/self/task")
MOST_THREADS = 30  # of a rank between two tasks
PRELOAD = (  # imported once, before the ranks fork off
    "gradwire.comm.compressors.kernels.cpu",
    "gradwire.comm.parallel",
    "gradwire.bench.training.loop",
    "opacus.accountants",
    "pandas",
    "pyarrow.parquet",
    "torch.utils.tensorboard",
    "transformers.models.gpt2.modeling_gpt2",
)


class Failure(NamedTuple):
    """An exception on a rank; by ``when``, the cause is known among the failures that it brought to the other ranks."""

    when: float
    error: BaseException
    trace: str
    joined: bool  # the rank had joined its process group


def serve(rank: int, connection: Connection, port: int, inherited: Sequence[Connection] = ()) -> None:
    """A rank's main loop: take a task, run it in its own process group, send back a result or a `Failure`.

    Groups form by the store of the session at ``port``: one of a file is asked every ten milliseconds. ``inherited``
    are the session's ends of connections, which a forked rank closes: it ends when the session has closed its end.
    """
    import torch  # not above: conftest imports this module, also for tests that need no torch
    import torch.distributed as dist

    for end in inherited:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the session's to handle
    faulthandler.enable(file=sys.__stderr__)  # a crash in native code shows where
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays
    server = dist.TCPStore("127.0.0.1", port, timeout=GROUP_TIMEOUT)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        world_size, run, payload = pickle.loads(message)
        try:
            store = dist.PrefixStore(f"run{run}", server)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
            dist.barrier()  # no rank raises, and so closes its connections, while another still connects
            fn, args = pickle.loads(payload)
            answer = pickle.dumps(fn(rank, world_size, dist.group.WORLD, *args))
            dist.barrier()  # no rank leaves while another still talks to it
        except BaseException as error:
            answer = dump_failure(Failure(time.monotonic(), error, traceback.format_exc(), dist.is_initialized()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()  # the ranks that wait for this one fail at once
            if len([*THREADS.iterdir()]) > MOST_THREADS:
                free_groups()
        connection.send_bytes(answer)


def free_groups() -> None:
    """Free groups of earlier tasks, of reducers in cycles and of meshes in caches: their threads wake all the time.

    DDP frees its group with Python's lock held, and waits for the group's threads: none may need the lock by then.
    """
    from gradwire.comm.collectives.queue import wait_for_threads

    wait_for_threads(1.0)
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _collective_utils, _redistribute, debug

        debug._clear_sharding_prop_cache()
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        _redistribute._gen_transform_infos.cache_clear()
    gc.collect()
    gc.freeze()  # the next time it looks at what is new


def dump_failure(failure: Failure) -> bytes:
    """Pickle a failure; an exception that cannot travel becomes a RuntimeError with its text."""
    try:
        pickle.loads(answer := pickle.dumps(failure))
        return answer
    except Exception:
        return pickle.dumps(failure._replace(error=RuntimeError(repr(failure.error))))


class Pool:
    """The ranks' processes, which restart after a hang or a group that never formed.

    `fork` starts all at once; it needs a process that has computed no gradient, as autograd does not survive a fork.
    Later each starts when first needed, from a server that imports `PRELOAD`.
    """

    def __init__(self, size: int, timeout: float = RUN_TIMEOUT_S) -> None:
        self.size = size
        self.timeout = timeout
        self.ranks: list[tuple[BaseProcess, Connection]] = []
        self.store: Any = None  # of the ranks that run
        self.runs = 0

    def fork(self) -> None:
        """Start all ranks as copies of this process."""
        for name in PRELOAD:
            with suppress(ImportError):  # of an extra that is not installed, which the tests that need it name
                importlib.import_module(name)
        self.start(self.size, "fork")

    def start(self, world_size: int, method: str = "forkserver") -> None:
        """Start those of the first ``world_size`` ranks that do not run yet."""
        import torch.distributed as dist  # not above: see `serve`

        if not self.ranks:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload(list(PRELOAD))
        for rank in range(len(self.ranks), world_size):
            here, there = context.Pipe()
            inherited = [here, *(end for _, end in self.ranks)] if method == "fork" else []
            process = context.Process(
                target=serve, args=(rank, there, self.store.port, inherited), name=f"rank{rank}", daemon=True
            )
            process.start()
            there.close()
            self.ranks.append((process, here))

    def stop(self) -> None:
        """End every rank, also one that hangs."""
        for process, connection in self.ranks:
            process.kill()
            process.join()
            connection.close()
        self.ranks = []

    def run(self, world_size: int, fn: Callable[..., Any], args: tuple) -> list[Any]:
        """Run ``fn`` on the first ``world_size`` ranks; see the module's docstring."""
        assert world_size <= self.size, f"the pool has {self.size} ranks"
        self.start(world_size)
        self.runs += 1
        message = pickle.dumps((world_size, self.runs, pickle.dumps((fn, args))))
        for _, connection in self.ranks[:world_size]:
            connection.send_bytes(message)
        answers = self.collect(world_size, getattr(fn, "__name__", str(fn)))
        failures = [(answer, rank) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if not all(failure.joined for failure, _ in failures):
            self.stop()  # torch counts a group that failed to form on some ranks: the next one would have several names
        if failures:
            failure, rank = min(failures, key=lambda entry: entry[0].when)
            failure.error.add_note(f"on rank {rank} of {world_size}:\n{failure.trace}")
            raise failure.error
        return answers

    def collect(self, world_size: int, task: str) -> list[Any]:
        """Wait for every rank's answer, in rank order; end the pool if a rank dies or does not answer in time."""
        waiting = {connection: rank for rank, (_, connection) in enumerate(self.ranks[:world_size])}
        answers: list[Any] = [None] * world_size
        deadline = time.monotonic() + self.timeout
        while waiting:
            ready = wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                late = sorted(waiting.values())
                for rank in late:
                    self.dump_stack(rank)
                self.stop()
                raise TimeoutError(f"{task}: ranks {late} gave no answer in {self.timeout:.0f} s (stacks on stderr)")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process = self.ranks[rank][0]
                    process.join(timeout=1)
                    self.stop()
                    raise RuntimeError(f"{task}: rank {rank} died with exit code {process.exitcode}") from None
        return answers

    def dump_stack(self, rank: int) -> None:
        """Have a rank write its threads' stacks to stderr."""
        process = self.ranks[rank][0]
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)


class World(NamedTuple):
    """The first ``size`` ranks of a pool."""

    pool: Pool
    size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``[fn(rank, size, group, *args) for each rank]``, on as many processes."""
        return self.pool.run(self.size, fn, args)


class Turns(NamedTuple):
    """Simulated ranks: threads of this process that take turns."""

    size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """``[fn(rank, size, None, *args) for each rank]``; None is the default group of each."""
        from gradwire.comm.collectives.simulated import simulate  # not above: see `serve`

        return simulate(self.size, lambda rank: fn(rank, self.size, None, *args))
