"""Starts a command on several ranks and reports which rank failed first, and why."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.base.errors import FAULT, BadInput, GradwireError, RunFault, Stopped
from gradwire.base.failures import CHECK, RANK_FAILURES, rank_failures
from gradwire.base.parent_watch import PARENT, RANK_GRACE
from gradwire.base.rank_env import is_loopback
from gradwire.base.units import plural
from gradwire.bench.launch.fork import Template

# Threads per rank. Snakemake sets all of these to the job's threads, and MKL's own variable overrides OpenMP's. Ranks
# with more threads than their share of the cores are several times slower.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# glibc's allocator in a rank: it keeps the memory of freed tensors, in one heap for all threads. Otherwise it returns
# large ones to the kernel, and each step takes them back as pages that the kernel has to zero.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_ARENA_MAX": "1"}
TRACES = {"PYTHONFAULTHANDLER": "1"}  # a crash in native code prints the Python stacks of all threads
# Ranks of one machine only use the loopback device. "=" makes NCCL match the whole name, not a prefix.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
POLL = 0.02  # seconds between polls of the ranks
HINTS = {signal.SIGKILL: " (out of memory?)", signal.SIGABRT: " (ranks out of step? see its output)"}


class RankFailure(GradwireError):
    """The failure of the rank that failed first, or of the check before them, with its exit code."""

    def __init__(
        self, rank: int | None, message: str, exit_code: int, step: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(message if rank is None else f"rank {rank}: {message}", step=step)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback


class Ended(NamedTuple):
    """How the ranks ended.

    Attributes:
        codes: Nonzero exit codes by rank, negative for signals, including ranks that the launcher ended.
        stopped: Whether a signal stopped the launcher, which stopped the ranks.
    """

    codes: Mapping[int, int]
    stopped: bool = False


def check_address(master_addr: str, master_port: int) -> None:
    """Check that rank 0 can listen at this address and port; 0 is any free port.

    Raises:
        BadInput: If the port is in use or the address is not this machine's.
    """
    try:
        socket.create_server((master_addr, master_port)).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadInput(
            f"--master_addr {master_addr} --master_port {master_port}: {error}. "
            "Use another port, or omit --master_port to pick a free one."
        ) from None


def start(
    command: Sequence[str],
    world_size: int,
    launcher: str | Template = "torchrun",
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
) -> None:
    """Run ``command`` on ``world_size`` ranks of this machine and wait for all of them.

    Args:
        command: The full command line of a rank.
        world_size: Number of ranks.
        launcher: A key of ``LAUNCHERS``, or the template that forks the ranks.
        master_addr: Address of rank 0.
        master_port: Port of rank 0; 0 picks a free one.

    Raises:
        RankFailure: If a rank failed; the others have ended too.
        RunFault: If a signal stopped the ranks and none can be resumed.
    """
    # Ranks get SIGTERM, whichever signal stops the launcher.
    to_sigterm = on((signal.SIGINT, signal.SIGHUP), lambda: signal.raise_signal(signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="gradwire-launch-") as folder, to_sigterm:
        mine = {RANK_FAILURES: folder, PARENT: str(os.getpid()), **rank_variables(world_size)}
        if is_loopback(master_addr):
            mine |= {name: os.environ.get(name, device) for name, device in LOOPBACK.items()}
        run = partial(forked, launcher) if isinstance(launcher, Template) else LAUNCHERS[launcher]
        with environment(mine):
            ended = run(list(command), world_size, master_addr, master_port)
        if ended.codes or ended.stopped:
            raise first_cause(ended, rank_failures(Path(folder)))


def check(command: Sequence[str], template: Template) -> None:
    """Run the checks of a command in a fork of the template.

    Args:
        command: The full command line of a rank.
        template: The template.

    Raises:
        RankFailure: If a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-launch-") as folder:
        template.start(command, [{CHECK: "1", RANK_FAILURES: folder, **rank_variables(1)}])
        (code,) = template.wait()
        if code:
            raise failure(None, rank_failures(Path(folder)).get(0), code)


def forked(template: Template, command: list[str], world_size: int, master_addr: str, master_port: int) -> Ended:
    """Fork the ranks from the template."""
    template.start(command, places(world_size, master_addr, master_port))
    with on((signal.SIGTERM,), template.stop):
        codes = template.wait()
    failed = {rank: code for rank, code in enumerate(codes) if code}
    return Ended(failed, stopped=bool(template.stopped and failed))


def spawn(command: list[str], world_size: int, master_addr: str, master_port: int) -> Ended:
    """Start the ranks as plain processes with torchrun's variables, without importing torch here."""
    ranks: list[subprocess.Popen[bytes]] = []
    stops: list[bool] = []
    with on((signal.SIGTERM,), lambda: stops.append(True)):
        try:
            for place in places(world_size, master_addr, master_port):
                ranks.append(subprocess.Popen(command, env=os.environ | place))
            while not stops and None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(POLL)
        finally:
            _end(ranks)
    failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
    return Ended(failed, stopped=bool(stops and failed))


def torchrun(command: list[str], world_size: int, master_addr: str, master_port: int) -> Ended:
    """Start the ranks as ``torchrun --nproc_per_node`` does, in this process to import torch only once."""
    from gradwire.comm.collectives.world import host_store

    store = host_store(master_addr, master_port)
    endpoint = f"{master_addr}:{store.port}"
    return agent(command, world_size, endpoint, rdzv_backend="static", rdzv_configs={"rank": 0})


def agent(command: list[str], ranks: int, endpoint: str, nodes: int = 1, **rendezvous: Any) -> Ended:
    """Run torchrun's agent for the ranks of this node, without restarts and logging.

    Args:
        command: The full command line of a rank.
        ranks: Number of ranks on this node.
        endpoint: ``address:port`` of the store.
        nodes: Number of nodes, each with an agent.
        rendezvous: ``rdzv_backend`` and its options.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id="gradwire",
        rdzv_endpoint=endpoint,
        local_addr=_address_towards(endpoint),
        max_restarts=0,
        monitor_interval=POLL,
        signals_to_handle="SIGTERM",
        logs_specs=DefaultLogsSpecs(log_dir=os.environ[RANK_FAILURES]),
        **rendezvous,
    )
    logging.disable(logging.CRITICAL)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return Ended({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException:
        return Ended({}, stopped=True)
    finally:
        logging.disable(logging.NOTSET)
    return Ended({})


def _address_towards(endpoint: str) -> str:
    """The local address of the route to ``address:port``; nothing is sent."""
    host, port = endpoint.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return probe.getsockname()[0]


LAUNCHERS: dict[str, Callable[[list[str], int, str, int], Ended]] = {"torchrun": torchrun, "spawn": spawn}
FORK = "fork"  # the launcher whose template starts before the input is checked


def rank_variables(ranks: int) -> dict[str, str]:
    """Environment variables of each rank's threads and allocator, and of traces of crashes.

    They limit it to OMP_NUM_THREADS threads, or its share of the cores if unset. Variables of the allocator that are
    set stay.
    """
    share = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    allocator = {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    return {**dict.fromkeys(THREADS, share), **allocator, **TRACES}


def places(world_size: int, master_addr: str, master_port: int) -> list[dict[str, str]]:
    """torchrun's variables for each rank of this machine; port 0 picks a free one."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": master_addr}
    shared["MASTER_PORT"] = str(master_port or _free_port(master_addr))
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which child processes inherit, and restore the old ones on exit."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def on(numbers: Sequence[signal.Signals], act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on these signals; restore the old handlers on exit."""
    before = {number: signal.signal(number, lambda *_: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate running ranks; kill those that have not exited after ``RANK_GRACE`` seconds."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + RANK_GRACE
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def first_cause(ended: Ended, messages: Mapping[int, Mapping[str, Any]]) -> GradwireError:
    """The root cause, or after a stop the rank that can be resumed."""
    if ended.stopped:
        resumable = [rank for rank in messages if messages[rank]["exit_code"] == Stopped.exit_code]
        if not resumable:
            return RunFault("stopped by a signal; no rank saved anything to resume from.")
        return failure(resumable[0], messages[resumable[0]], 0)
    hung = [rank for rank, code in ended.codes.items() if code == -signal.SIGKILL and rank not in messages]
    waited = [rank for rank in messages if messages[rank]["timed_out"]]
    if hung and waited:  # a killed peer is lost at once; a hung one times out and is ended by the launcher
        ranks = f"{plural('rank', len(waited))} {', '.join(map(str, sorted(waited)))}"
        message = f"hung: {ranks} timed out waiting for it ({messages[waited[0]]['reason']}); it was ended."
        return RankFailure(hung[0], message, FAULT)
    failures = [(rank, messages.get(rank), ended.codes.get(rank, 0)) for rank in {*messages, *ended.codes}]
    return failure(*min(failures, key=lambda known: _precedence(*known[1:])))


def _precedence(message: Mapping[str, Any] | None, code: int) -> tuple[int, float]:
    """Sort key: root causes before their consequences, each kind by time.

    The kinds are: ranks with their own error; killed ranks; ranks that lost a peer or left no message; ranks that
    the launcher terminated after a failure elsewhere and that saved a checkpoint; those that did not.
    """
    if message is None:
        return 4 if code == -signal.SIGTERM else 1 if code < 0 else 2, 0.0
    return 3 if message["exit_code"] == Stopped.exit_code else 2 if message["lost_peer"] else 0, message["time"]


def failure(rank: int | None, message: Mapping[str, Any] | None, code: int) -> RankFailure:
    """The failure of one rank; of the check if ``rank`` is None."""
    if message is None and code < 0:
        number = signal.Signals(-code)
        return RankFailure(rank, f"was killed by {number.name}{HINTS.get(number, '')} and left no message.", FAULT)
    if message is None:
        return RankFailure(rank, f"exited with code {code} and left no message; see its output.", FAULT)
    lost = "lost contact with another rank, which exited, hangs or is out of step: " if message["lost_peer"] else ""
    return RankFailure(rank, lost + message["reason"], message["exit_code"], message["last_step"], message["traceback"])
