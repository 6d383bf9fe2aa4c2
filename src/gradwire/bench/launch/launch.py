"""The command ``launch``: checks a command's input, runs it on several ranks and reports the first failure once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import NATURAL, PORT, RANKS, Positional
from gradwire.base.rank_env import LOCAL_WORLD_SIZE
from gradwire.base.strict import Strict
from gradwire.base.units import UNSHAPED
from gradwire.bench.command import Command
from gradwire.bench.launch import leases, links, nodes
from gradwire.bench.launch.board import board
from gradwire.bench.launch.fork import Template
from gradwire.bench.launch.ranks import FORK, check, check_address, environment, rank_variables, start
from gradwire.comm.topology import between_islands, check_topology, link_rate

RANK = (sys.executable, "-m", "gradwire")  # command line of `gradwire` in a rank


class Options(Strict):
    """Flags of ``gradwire launch``."""

    world_size: Annotated[int, RANKS] | Literal["auto"] = Field(
        description="number of ranks; auto: one for each GPU of this machine"
    )
    nodes: Annotated[int, RANKS] = Field(1, description="nodes of this Slurm job to start the ranks on, with srun")
    launcher: Literal["fork", "torchrun", "spawn"] | None = Field(
        None,
        description="fork: fork ranks from one process that has imported torch; torchrun; spawn: start plain processes "
        "(default: fork on the CPU of one machine, else torchrun)",
    )
    master_addr: str = Field("127.0.0.1", description="address of rank 0")
    master_port: Annotated[int, PORT] = Field(0, description="port of rank 0; 0 picks a free one")
    link: str = Field(
        UNSHAPED,
        description="rate of each rank's link, such as 100mbit, in a simulated network, or between-100mbit: of each "
        "island's; none: the machine's own network",
    )
    gpus: Annotated[int, NATURAL] | None = Field(
        None, description="GPUs granted by a scheduler; an error if fewer than --world_size"
    )
    alone: bool = Field(False, description="for timings: run while this machine trains nothing else; wait if necessary")
    tensorboard: bool = Field(
        False, description="show a training in TensorBoard, on a free port that is printed, until it ends"
    )
    command: Annotated[tuple[str, ...], Positional("COMMAND")] = Field(
        description="the command to run on each rank, with its flags, after --"
    )

    @property
    def ranks(self) -> int:
        """Number of ranks, once ``auto`` is resolved."""
        return int(self.world_size)


def main(options: Options) -> None:
    """Run the command on all ranks.

    Raises:
        GradwireError: If a check fails, or with the message and exit code of the first rank that failed.
    """
    command = Command(options.command)
    with _board(options, command):
        start_ranks(options, command)


def _board(options: Options, command: Command) -> AbstractContextManager[None]:
    """TensorBoard for the run, if it is asked for.

    Raises:
        BadInput: If the command writes nothing that TensorBoard shows, or TensorBoard could not be reached.
    """
    if not options.tensorboard:
        return nullcontext()
    if command.name != "train":
        raise BadInput(f"--tensorboard shows a training; {command.name} is none: omit it.")
    if options.link != UNSHAPED:
        raise BadInput(
            f"--tensorboard cannot be reached in the simulated network of --link {options.link}: omit it, and run "
            "`tensorboard --logdir FOLDER` in another terminal."
        )
    return board(command.arguments.output_dir)


def start_ranks(options: Options, command: Command) -> None:
    """Run the command on all ranks of this machine or job."""
    if options.world_size == "auto":
        options = options.model_copy(update={"world_size": _rank_per_gpu(options, command)})
    _check_size(options, command.arguments)
    leases.folder()  # checked before the command's data
    if options.link == UNSHAPED and options.nodes == 1:
        check_address(options.master_addr, options.master_port)
    if options.link != UNSHAPED:
        _check_link(options, command)
        links.enter(options.link)
    command.arguments.world_size = options.ranks
    gpus = _wanted_gpus(options, command.arguments)
    with (
        environment({LOCAL_WORLD_SIZE: str(options.ranks // options.nodes)}),
        _launcher(options, gpus, command.module) as launcher,
    ):
        if hasattr(command.module, "preflight"):
            _check_input(options, command, launcher)
        # On several nodes Slurm assigns the devices.
        with leases.machine(options.alone), leases.gpus(gpus) as variables, environment(variables):
            _start(options, command, launcher)


def _rank_per_gpu(options: Options, command: Command) -> int:
    """Return the number of this machine's GPUs.

    Raises:
        BadInput: If there are none, the command uses none, or there are several machines.
    """
    from gradwire.comm.collectives.world import detect_gpus

    if options.nodes != 1:
        raise BadInput(f"--world_size auto counts this machine's GPUs: give a number with --nodes {options.nodes}.")
    if getattr(command.arguments, "device", "cpu") == "cpu":
        raise BadInput(f"--world_size auto starts a rank per GPU, and {command.name} runs on the CPU: give a number.")
    gpus = detect_gpus()
    if not gpus:
        raise BadInput("--world_size auto starts a rank per GPU, and torch sees no GPU here: give a number.")
    return gpus


def _check_link(options: Options, command: Command) -> None:
    """Raise if the link is invalid, or it and the command's flags disagree on islands."""
    link_rate(options.link)
    islands = getattr(command.arguments, "islands", 1)
    if islands != 1 or between_islands(options.link):
        strategy = getattr(command.arguments, "strategy", command.name)
        check_topology(strategy, options.ranks, islands, options.link)


def _wanted_gpus(options: Options, child: argparse.Namespace) -> int:
    if options.nodes != 1:
        return 0
    return leases.wanted_gpus(getattr(child, "device", None), getattr(child, "backend", None), options.ranks)


def _check_input(options: Options, command: Command, launcher: str | Template) -> None:
    """Run the command's checks: in a fork of the template, or here without one, where torchrun imports torch too."""
    if not isinstance(launcher, Template):
        command.module.preflight(command.options)
        return
    size = ["--world_size", str(options.ranks)] if hasattr(command.arguments, "world_size") else []
    check([*RANK, *options.command, *size], launcher)


@contextmanager
def _launcher(options: Options, gpus: int, module: ModuleType) -> Iterator[str | Template]:
    """Yield the launcher's name, or the template that forks the ranks, which starts its imports here.

    Ranks on GPUs are started by torchrun, as CUDA does not survive a fork.
    """
    simple = options.nodes == 1 and not gpus
    chosen = options.launcher or (FORK if simple else "torchrun")
    if chosen != FORK:
        yield chosen
        return
    if not simple:
        raise BadInput(f"--launcher {FORK} starts ranks on the CPU of one machine: use torchrun.")
    with Template(getattr(module, "PRELOAD", ()), rank_variables(options.ranks)) as template:
        yield template


def _start(options: Options, command: Command, launcher: str | Template) -> None:
    """Run the command on all ranks; with several nodes, they write their messages to the folder of its outputs."""
    words = [*RANK, *options.command]
    if options.nodes > 1:
        nodes.start(words, options.ranks, options.nodes, command.output_folder() or Path(), options.master_port)
        return
    if options.link == UNSHAPED:
        start(words, options.ranks, launcher, options.master_addr, options.master_port)
        return
    namespaces = command.arguments.islands if between_islands(options.link) else options.ranks
    with (
        links.testbed(options.link, namespaces, options.ranks // namespaces) as testbed,
        environment(testbed.environment),
    ):
        start(words, options.ranks, launcher, *testbed.meeting_point(launcher))


def _check_size(options: Options, child: argparse.Namespace) -> None:
    """Raise if the ranks cannot be split over the nodes, lack GPUs, or disagree with the command's own flag."""
    if options.nodes != 1:
        _check_nodes(options)
    if options.gpus is not None and options.gpus < options.ranks:
        raise BadInput(
            f"{options.ranks} ranks need a GPU each and {options.gpus} were granted: raise the limit "
            "(snakemake --resources gpu=N) if the machine has more, else use a smaller world size."
        )
    given = getattr(child, "world_size", None)
    if given not in (None, options.ranks):
        raise BadInput(
            f"`launch --world_size {options.ranks}` but --world_size {given} for the command: omit the second."
        )


def _check_nodes(options: Options) -> None:
    """Raise if the nodes cannot share the ranks evenly, or with options for a single machine."""
    if options.ranks % options.nodes:
        raise BadInput(f"--nodes {options.nodes} cannot share --world_size {options.ranks} evenly.")
    if options.link != UNSHAPED:
        raise BadInput(f"--link {options.link} makes links within one machine: omit --nodes {options.nodes}.")
    if options.launcher not in (None, "torchrun"):
        raise BadInput(
            f"--launcher {options.launcher} supports one machine only: ranks on several nodes need torchrun."
        )
    nodes.check_allocation(options.nodes)
