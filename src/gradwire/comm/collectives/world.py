"""The process group of a run: choice of backend and device, start and shutdown."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from gradwire.base.errors import BadInput, RunFault, unknown
from gradwire.base.rank_env import BACKENDS, DEVICES, TIMEOUT, RankEnv, rank_env, ranks_here
from gradwire.base.units import amount
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.simulated import SIMULATED, simulate

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """A rank's view of its process group."""

    rank: int
    local_rank: int
    world_size: int
    backend: str
    device: torch.device

    @property
    def simulated(self) -> bool:
        """Whether the ranks take turns in one process, so that times and memory are not a rank's."""
        return self.backend == SIMULATED


class Choice(NamedTuple):
    """A backend, a device type, and a note on the choice for the user ("" if none)."""

    backend: str
    device_type: str
    note: str


def detect_gpus() -> int:
    """Return the number of CUDA devices that this process can use."""
    return torch.cuda.device_count()


def choose(backend: str, device: str, ranks: int, gpus: int) -> Choice:
    """Choose backend and device: NCCL with a GPU per rank, gloo on the CPU and if ranks share a GPU.

    Args:
        backend: ``auto``, ``nccl`` or ``gloo``.
        device: ``auto``, ``cpu`` or ``cuda``.
        ranks: Number of ranks on this machine.
        gpus: Number of GPUs of this machine.

    Raises:
        BadInput: If a name is unknown, or the machine or the other argument does not support the choice.
    """
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if device not in DEVICES:
        raise unknown("device", device, DEVICES)
    if device == "cuda" and not gpus:
        raise BadInput("--device cuda: torch sees no CUDA device here; use --device cpu, or auto.")
    device_type = device if device != "auto" else "cuda" if gpus else "cpu"
    gpu_each = device_type == "cuda" and gpus >= ranks
    if backend == "nccl" and not gpu_each:
        raise BadInput(
            f"--backend nccl needs a GPU for each of the {ranks} ranks here; there are {gpus} and the device is "
            f"{device_type}. Use --backend gloo, or auto."
        )
    if backend == "auto":
        backend = "nccl" if gpu_each else "gloo"
    shared = device_type == "cuda" and not gpu_each
    note = f"{ranks} ranks share {amount(gpus, 'GPU')}: gloo replaces NCCL; timings are unreliable" if shared else ""
    return Choice(backend, device_type, note)


def check_architecture(device: torch.device) -> None:
    """Check that this build of torch runs on a GPU, by a kernel; the message of the first one in a run is less clear.

    Raises:
        BadInput: If it has no code for the GPU.
    """
    try:
        torch.zeros(1, dtype=torch.float32, device=device)
    except RuntimeError as error:
        if "no kernel image" not in str(error):
            raise
        raise BadInput(
            f"torch {torch.__version__} is built for {', '.join(torch.cuda.get_arch_list())}, and "
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; install another build of torch, or use "
            f"--device cpu."
        ) from error


@contextmanager
def process_group(
    *, backend: str = "auto", device: str = "auto", here: RankEnv | None = None, timeout: float = TIMEOUT
) -> Iterator[World]:
    """Join the process group, and destroy it at the end; a single process needs no port.

    After an exception a group of several ranks is not destroyed: that would wait for collectives that the peers may
    never finish, and the process is about to exit.

    Args:
        backend: ``auto``, ``nccl`` or ``gloo``, as in :func:`choose`.
        device: ``auto``, ``cpu`` or ``cuda``, as in :func:`choose`.
        here: This process's rank and address; default: from torchrun's environment, else a single process.
        timeout: Seconds for startup and for each collective.

    Raises:
        BadInput: If the environment is incomplete, CUDA is not available, torch has no code for the GPU, or the port is
            in use.
        RunFault: If not all ranks join in time.
    """
    here = here or rank_env({}, os.environ)
    gpus = detect_gpus()
    choice = choose(backend, device, ranks_here(here.world_size), gpus)
    if choice.note and here.rank == 0:
        print(f"gradwire: NOTE: {choice.note}.", file=sys.stderr)
    where = torch.device("cpu")
    if choice.device_type == "cuda":
        where = torch.device("cuda", here.local_rank % gpus)
        check_architecture(where)
        torch.cuda.set_device(where)
    _join(here, choice.backend, where, timedelta(seconds=timeout))
    finished = False
    try:
        yield World(here.rank, here.local_rank, here.world_size, choice.backend, where)
        finished = True
    finally:
        if finished or here.world_size == 1:
            dist.destroy_process_group()


def simulated_world(ranks: int, device: torch.device, run: Callable[[World], T]) -> list[T]:
    """Run a function on simulated ranks, each with its view of their group; as `simulated.simulate`.

    Args:
        ranks: Number of ranks.
        device: The device that all of them compute on.
        run: Called with each rank's view.
    """
    return simulate(ranks, lambda rank: run(World(rank, 0, ranks, SIMULATED, device)), device)


def _join(here: RankEnv, backend: str, device: torch.device, timeout: timedelta) -> None:
    """Initialise the default process group and wait for all ranks."""
    bound = device if backend == "nccl" else None
    if here.master_port is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=bound)
        return
    address = f"{here.master_addr}:{here.master_port}"
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        host = host_store(here.master_addr, here.master_port) if here.rank == 0 and not agent_hosts else None
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}",
            rank=here.rank,
            world_size=here.world_size,
            timeout=timeout,
            device_id=bound,
        )
        del host  # the group holds a reference now
    except (OSError, UnicodeError) as error:
        raise BadInput(f"{address} is in use, or not this machine's: use another ({error}).") from None
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunFault(
            f"not all {here.world_size} ranks connected to {address} within {timeout.total_seconds():g} s."
        ) from error


def host_store(address: str, port: int) -> dist.TCPStore:
    """Host the rendezvous store, listening on this address only; torch's own listens on all.

    A process group of this process that hosts a store on the same port later reuses this one.

    Args:
        address: An address of this machine; empty for all.
        port: The port to listen on; 0 picks a free port, which the store's ``port`` gives.

    Raises:
        OSError: If the port is in use, or the address is not this machine's.
    """
    listening = socket.create_server((address, port))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


def check_initialized(what: str) -> None:
    """Check that there is a process group, and that it communicates.

    Args:
        what: The message's subject, with its article.

    Raises:
        BadInput: If there is none, or it is of torch's backend ``fake``.
    """
    if not dist.is_initialized():
        raise BadInput(
            f"{what} needs a process group: call torch.distributed.init_process_group first, in a script that torchrun "
            f"starts."
        )
    if dist.get_backend() == "fake":
        raise BadInput(f"{what} needs ranks, and torch's backend 'fake' has none: initialize gloo or nccl.")


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
        return bool(
            ops.all_reduce(
                torch.tensor(int(done.is_set()), dtype=torch.int64, device="cpu"), "min", group, meter=Meter()
            )
        )

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
