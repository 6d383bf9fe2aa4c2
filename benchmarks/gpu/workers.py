"""Processes forked from one that has imported everything and never touched CUDA: each begins within a second.

A worker that crashes, hangs or loses its CUDA context takes nothing else with it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from gpu.part import DEVICE, message_of

START_SECONDS = 60.0
METHODS = [os.environ.get("START", "fork"), "spawn"]  # the second where a fork cannot use CUDA as its parent touched it

Setup = Callable[[], AbstractContextManager[Any]]


class Failed(Exception):
    """The failure of a worker, as text."""


@contextmanager
def alone() -> Iterator[None]:
    """A worker without a process group."""
    yield None


def serve(connection: Connection, setup: Setup) -> None:
    """A worker's life: answer each request with (result, None) or (None, error)."""
    import torch

    torch.set_num_threads(1 if DEVICE == "cpu" else 4)
    try:
        with setup() as context:
            if DEVICE == "cuda":
                torch.zeros(1, device="cuda")
            connection.send((None, None))
            while True:
                task, arguments = connection.recv()
                try:
                    answer = task(context, *arguments), None
                except Exception as error:
                    answer = None, message_of(error)
                connection.send(answer)
    except EOFError:
        os._exit(0)
    except Exception as error:
        with suppress(OSError):
            connection.send((None, message_of(error)))
        os._exit(1)


class Worker:
    """One process."""

    def __init__(self, setup: Setup = alone) -> None:
        context: Any = multiprocessing.get_context(METHODS[0])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, task: Callable[..., Any], *arguments: Any) -> None:
        """Ask for ``task(context, *arguments)``."""
        self.connection.send((task, arguments))

    def receive(self, seconds: float) -> Any:
        """The answer.

        Raises:
            Failed: If the task failed, the process ended, or neither came in time.
        """
        if not self.connection.poll(max(0.0, seconds)):
            raise Failed(f"no answer in {seconds:.0f} s")
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise Failed(f"the process ended with exit code {self.process.exitcode}") from None
        if error is not None:
            raise Failed(error)
        return result

    def end(self) -> None:
        """End the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def started(setups: list[Setup]) -> list[Worker]:
    """One worker for each setup, all ready.

    Raises:
        Failed: If one does not get ready.
    """
    workers = [Worker(setup) for setup in setups]
    try:
        for worker in workers:
            worker.receive(START_SECONDS)
    except Failed as error:
        for worker in workers:
            worker.end()
        if "forked subprocess" in str(error) and len(METHODS) > 1:
            print(f"workers are spawned, not forked: {error}", flush=True)
            del METHODS[0]
            return started(setups)
        raise
    return workers


class Ranks:
    """Workers that do the same at the same time; all are replaced after a failure."""

    def __init__(self, setups: Callable[[], list[Setup]]) -> None:
        self.setups = setups
        self.workers: list[Worker] = []

    def run(self, seconds: float, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Every rank's answer to a task, in rank order.

        Raises:
            Failed: If a rank failed; the message of the first one.
        """
        if not self.workers:
            self.workers = started(self.setups())
        for worker in self.workers:
            worker.send(task, *arguments)
        deadline = time.monotonic() + seconds
        waiting = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        answers: list[Any] = [None] * len(self.workers)
        try:
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise Failed(f"ranks {sorted(waiting.values())} gave no answer in {seconds:.0f} s")
                for connection in ready:
                    rank = waiting.pop(connection)  # type: ignore[call-overload]
                    try:
                        answers[rank] = self.workers[rank].receive(0)
                    except Failed as error:
                        raise Failed(f"rank {rank}: {error}") from None
        except Failed:
            self.end()
            raise
        return answers

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.end()
        self.workers = []


def each(
    jobs: dict[str, tuple[Any, ...]], count: int, seconds: float, left: Callable[[], float]
) -> Iterator[tuple[str, Any]]:
    """Spread jobs over so many workers; yield (name, result or `Failed`) as they finish.

    Args:
        jobs: A task and its arguments by name.
        count: Workers at the same time.
        seconds: For each job; a worker that takes longer is ended.
        left: Seconds that are left; none is begun without any.
    """
    coming = list(jobs.items())
    idle = started([alone] * min(count, len(coming)))
    busy: dict[Connection, tuple[Worker, str, float]] = {}
    while coming or busy:
        while coming and idle and left() > 0:
            name, (task, *arguments) = coming.pop(0)
            worker = idle.pop()
            worker.send(task, *arguments)
            busy[worker.connection] = worker, name, time.monotonic() + seconds
        if not busy:
            break
        first = min(deadline for _, _, deadline in busy.values())
        ready = set(wait(list(busy), timeout=max(0.0, first - time.monotonic())))
        for connection, (worker, name, deadline) in list(busy.items()):
            if connection not in ready and time.monotonic() < deadline:
                continue
            del busy[connection]
            try:
                result: Any = worker.receive(0)
            except Failed as error:
                result = error
            broken = isinstance(result, Failed) and ("no answer" in str(result) or lost(str(result)))
            if broken:
                worker.end()
                worker = started([alone])[0] if coming else None  # type: ignore[assignment]
            if worker is not None:
                idle.append(worker)
            yield name, result
    for worker in idle:
        worker.end()


def lost(error: str) -> bool:
    """Whether a process or its CUDA context cannot be used any more."""
    return any(word in error for word in ("exit code", "CUDA error", "illegal", "launch failure", "Triton Error"))


def group(world: int, backend: str, device: str) -> list[Setup]:
    """Setups of the ranks of a new process group, made by the package itself."""
    from gradwire.comm.collectives.world import host_store

    store = host_store("127.0.0.1", 0)  # closed again: only its port is wanted
    port = store.port
    del store
    return [partial(member, rank, world, port, backend, device) for rank in range(world)]


def member(rank: int, world: int, port: int, backend: str, device: str) -> AbstractContextManager[Any]:
    """A rank's process group; its context is `gradwire.comm.collectives.world.World`."""
    from gradwire.base.rank_env import RankEnv
    from gradwire.comm.collectives.world import process_group

    here = RankEnv(rank, rank, world, "127.0.0.1", port if world > 1 else None)
    return process_group(backend=backend, device=device, here=here, timeout=30)
