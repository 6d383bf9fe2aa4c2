"""Starting one command on several ranks, and finding out which of them failed first and why."""

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

from gradwire.errors import FAULT, BadInput, GradwireError, RunFault, Stopped
from gradwire.failures import RANK_FAILURES, rank_failures
from gradwire.launch.fork import Template
from gradwire.launch.keeper import KEEPER, RANK_GRACE
from gradwire.seat import is_loopback

# A rank's threads. Snakemake sets all of these to the whole job's, and MKL heeds its own before OpenMP's; ranks that
# take more than their share of the cores take several times as long.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# Ranks of one machine meet on the loopback device alone; NCCL takes "=" to mean no other whose name begins so.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
POLL = 0.02  # seconds between two looks at the ranks
HINTS = {signal.SIGKILL: " (out of memory?)", signal.SIGABRT: " (ranks out of step? its own output says more)"}


class RankFailure(GradwireError):
    """The failure of the rank that failed first, under that rank's own exit code."""

    def __init__(self, rank: int, message: str, exit_code: int, step: int | None = None, traceback: str = "") -> None:
        super().__init__(f"rank {rank}: {message}", step=step)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback


class Ended(NamedTuple):
    """How the ranks ended.

    Attributes:
        codes: Exit codes other than 0 by rank, a signal's number negative; those that the launcher ended count too.
        stopped: Whether the launcher was told to stop, and stopped them.
    """

    codes: Mapping[int, int]
    stopped: bool = False


def check_address(master_addr: str, master_port: int) -> None:
    """Check that rank 0 can listen there; port 0 stands for a free one.

    Raises:
        BadInput: If the port is in use or the address is not this machine's.
    """
    try:
        socket.create_server((master_addr, master_port)).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadInput(
            f"--master_addr {master_addr} --master_port {master_port}: {error}. "
            "Give another port, or leave --master_port out: a free one is taken."
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
        command: The whole command line of a rank.
        world_size: Number of ranks.
        launcher: A key of ``LAUNCHERS``, or the template that forks the ranks.
        master_addr: Where rank 0 listens.
        master_port: The port rank 0 listens on; 0 takes a free one.

    Raises:
        RankFailure: If a rank failed; the others have ended too.
        RunFault: If a signal stopped the ranks and none of them says that it can be resumed.
    """
    # Whatever stops the launcher, the ranks are stopped by SIGTERM.
    to_sigterm = on((signal.SIGINT, signal.SIGHUP), lambda: signal.raise_signal(signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="gradwire-launch-") as folder, to_sigterm:
        mine = {RANK_FAILURES: folder, KEEPER: str(os.getpid()), **threads(world_size)}
        if is_loopback(master_addr):
            mine |= {name: os.environ.get(name, device) for name, device in LOOPBACK.items()}
        run = partial(forked, launcher) if isinstance(launcher, Template) else LAUNCHERS[launcher]
        with environment(mine):
            ended = run(list(command), world_size, master_addr, master_port)
        if ended.codes or ended.stopped:
            raise first_cause(ended, rank_failures(Path(folder)))


def forked(template: Template, command: list[str], world_size: int, master_addr: str, master_port: int) -> Ended:
    """Have the ranks forked from a process that has imported torch and transformers already."""
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
    """Start the ranks as ``torchrun --nproc_per_node`` does, in this process so that torch is imported once."""
    from gradwire.collectives.world import host_store

    store = host_store(master_addr, master_port)
    endpoint = f"{master_addr}:{store.port}"
    return agent(command, world_size, endpoint, rdzv_backend="static", rdzv_configs={"rank": 0})


def agent(command: list[str], ranks: int, endpoint: str, nodes: int = 1, **rendezvous: Any) -> Ended:
    """Be torchrun's agent for the ranks of this node.

    There are no restarts, and the agent's own log is silent.

    Args:
        command: The whole command line of a rank.
        ranks: How many to start here.
        endpoint: ``address:port`` where a store is hosted.
        nodes: How many agents meet there.
        rendezvous: How they meet: ``rdzv_backend`` and what it needs.
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
    """This machine's own address on the way to ``address:port``; nothing is sent."""
    host, port = endpoint.rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))
        return way.getsockname()[0]


LAUNCHERS: dict[str, Callable[[list[str], int, str, int], Ended]] = {"torchrun": torchrun, "spawn": spawn}
FORK = "fork"  # the launcher whose template starts before the verb's input is checked


def threads(ranks: int) -> dict[str, str]:
    """The variables that give each rank its share of this process's cores, or what OMP_NUM_THREADS says."""
    share = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return dict.fromkeys(THREADS, share)


def places(world_size: int, master_addr: str, master_port: int) -> list[dict[str, str]]:
    """torchrun's variables of each rank of this machine; port 0 takes a free one."""
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": master_addr}
    shared["MASTER_PORT"] = str(master_port or _free_port(master_addr))
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(world_size)]


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which child processes inherit, and restore the old ones."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def on(numbers: Sequence[signal.Signals], act: Callable[[], None]) -> Iterator[None]:
    """Do ``act`` when one of these signals comes, and restore the old handlers afterwards."""
    before = {number: signal.signal(number, lambda *_: act()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that still run to end; kill those that have not after ``RANK_GRACE`` seconds."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + RANK_GRACE
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def first_cause(ended: Ended, told: Mapping[int, Mapping[str, Any]]) -> GradwireError:
    """The failure that made the others happen, or, after a stop, what can be resumed."""
    if ended.stopped:
        resumable = [rank for rank in told if told[rank]["exit_code"] == Stopped.exit_code]
        if not resumable:
            return RunFault("stopped by a signal; no rank saved anything to resume from.")
        return _failure(resumable[0], told[resumable[0]], 0)
    hung = [rank for rank, code in ended.codes.items() if code == -signal.SIGKILL and rank not in told]
    waited = [rank for rank in told if told[rank]["timed_out"]]
    if hung and waited:  # who is killed is missed at once; who does not answer is missed after a while, and ended by us
        return RankFailure(
            hung[0],
            f"hung: {_listed(waited)} waited for it in vain ({told[waited[0]]['reason']}); it was ended.",
            FAULT,
        )
    failures = [(rank, told.get(rank), ended.codes.get(rank, 0)) for rank in {*told, *ended.codes}]
    return _failure(*min(failures, key=lambda failure: _precedence(*failure[1:])))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _precedence(told: Mapping[str, Any] | None, code: int) -> tuple[int, float]:
    """Sorts first causes before what follows from them, and within a kind by time.

    The kinds: a rank's word on itself; a rank that was killed; one that only lost a peer, or ended without a word; one
    that was asked to end, as the launcher does when another has failed, and saved; one that was and did not.
    """
    if told is None:
        return 4 if code == -signal.SIGTERM else 1 if code < 0 else 2, 0.0
    return 3 if told["exit_code"] == Stopped.exit_code else 2 if told["lost_peer"] else 0, told["time"]


def _failure(rank: int, told: Mapping[str, Any] | None, code: int) -> RankFailure:
    """What there is to say of one rank."""
    if told is None and code < 0:
        number = signal.Signals(-code)
        return RankFailure(rank, f"was killed by {number.name}{HINTS.get(number, '')} and left no message.", FAULT)
    if told is None:
        return RankFailure(rank, f"ended with code {code} and left no message but its own output.", FAULT)
    lost = "waited in vain for another rank, which ended, hangs or is out of step: " if told["lost_peer"] else ""
    return RankFailure(rank, lost + told["reason"], told["exit_code"], told["last_step"], told["traceback"])
