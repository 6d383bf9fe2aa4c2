"""The verb ``launch``: checks a verb's input, runs the verb on several ranks and reports the first failure once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gradwire.base.errors import BadInput
from gradwire.base.failures import clear_failure, refuse_again, write_failure
from gradwire.base.flags import NATURAL, PORT, RANKS, check_numbers, check_paths
from gradwire.base.rank_env import LOCAL_WORLD_SIZE
from gradwire.base.units import UNSHAPED
from gradwire.bench.launch import leases, links, nodes
from gradwire.bench.launch.fork import Template
from gradwire.bench.launch.ranks import FORK, LAUNCHERS, check_address, environment, rank_variables, start
from gradwire.comm.topology import between_islands, check_topology, link_rate

RANK = (sys.executable, "-m", "gradwire")  # command line of `gradwire` in a rank


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``gradwire launch``."""
    parser.usage = "gradwire launch --world_size N [options] -- VERB ..."
    parser.add_argument("--world_size", type=RANKS, required=True, help="number of ranks")
    parser.add_argument(
        "--nodes", type=RANKS, default=1, help="nodes of this Slurm job to start the ranks on, with srun"
    )
    parser.add_argument(
        "--launcher",
        choices=(FORK, *LAUNCHERS),
        help="fork: fork ranks from one process that has imported torch; torchrun; spawn: start plain processes "
        "(default: fork on the CPU of one machine without --link, else torchrun)",
    )
    parser.add_argument(
        "--torchrun", dest="launcher", action="store_const", const="torchrun", help="same as --launcher torchrun"
    )
    parser.add_argument("--master_addr", default="127.0.0.1", help="address of rank 0")
    parser.add_argument("--master_port", type=PORT, default=0, help="port of rank 0; 0 picks a free one")
    parser.add_argument(
        "--link",
        metavar="RATE",
        default=UNSHAPED,
        help="rate of each rank's link, such as 100mbit, in a simulated network, or between-100mbit: of each island's; "
        "none: the machine's own network",
    )
    parser.add_argument("--gpus", type=NATURAL, help="GPUs granted by a scheduler; an error if fewer than --world_size")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="for timings: run while this machine trains nothing else; wait if necessary",
    )
    parser.add_argument(
        "command", nargs="+", metavar="VERB", help="the verb to run on each rank, with its flags, after --"
    )


def main(args: argparse.Namespace) -> None:
    """Run the command on all ranks; a failure is written into the folder of the verb's outputs.

    Raises:
        GradwireError: If a check fails, or with the message and exit code of the first rank that failed.
    """
    verb, module, child = args.parse(args.command)
    check_paths(child)
    folder = module.beside(child) if hasattr(module, "beside") else None
    if args.attempt > 1 and folder is not None:
        refuse_again(folder, verb)
    try:
        check_numbers(child)
        _check_size(args, child)
        leases.folder()  # checked before the verb's data
        if args.link != UNSHAPED:
            _check_link(args, child)
            links.enter(args.link)
        child.world_size = args.world_size
        with (
            environment({LOCAL_WORLD_SIZE: str(args.world_size // args.nodes)}),
            _launcher(args, child, module) as launcher,
        ):
            if hasattr(module, "preflight"):
                module.preflight(args.options_of(module, child))
            with _leased(args, child):
                _start(args, child, folder, launcher)
    except Exception as error:
        if folder is not None:
            write_failure(folder, verb, error)
        raise
    if folder is not None:
        clear_failure(folder, verb)


def _check_link(args: argparse.Namespace, child: argparse.Namespace) -> None:
    """Raise if the link is invalid, or it and the verb's flags disagree on islands."""
    link_rate(args.link)
    islands = getattr(child, "islands", 1)
    if islands != 1 or between_islands(args.link):
        check_topology(getattr(child, "strategy", args.command[0]), args.world_size, islands, args.link)


@contextmanager
def _leased(args: argparse.Namespace, child: argparse.Namespace) -> Iterator[None]:
    """Hold this machine, alone or shared with other runs, and a GPU per rank if the verb uses GPUs.

    On several nodes Slurm assigns the devices.
    """
    with leases.machine(args.alone), leases.gpus(_wanted_gpus(args, child)) as variables, environment(variables):
        yield


def _wanted_gpus(args: argparse.Namespace, child: argparse.Namespace) -> int:
    if args.nodes != 1:
        return 0
    return leases.wanted_gpus(getattr(child, "device", None), getattr(child, "backend", None), args.world_size)


@contextmanager
def _launcher(args: argparse.Namespace, child: argparse.Namespace, module: ModuleType) -> Iterator[str | Template]:
    """Yield the launcher's name, or the template that forks the ranks, which starts its imports here.

    Ranks on GPUs are started by torchrun, as CUDA does not survive a fork.
    """
    simple = args.nodes == 1 and args.link == UNSHAPED and not _wanted_gpus(args, child)
    chosen = args.launcher or (FORK if simple else "torchrun")
    if chosen != FORK:
        yield chosen
        return
    if not simple:
        raise BadInput(f"--launcher {FORK} starts ranks on the CPU of one machine, without --link: use torchrun.")
    with environment(rank_variables(args.world_size)), Template(getattr(module, "PRELOAD", ())) as template:
        yield template


def _start(args: argparse.Namespace, child: argparse.Namespace, folder: Path | None, launcher: str | Template) -> None:
    """Run the command on all ranks; with several nodes, they write their messages to ``folder``."""
    command = [*RANK, *args.command]
    if args.nodes > 1:
        nodes.start(command, args.world_size, args.nodes, folder or Path(), args.master_port)
        return
    if args.link == UNSHAPED:
        check_address(args.master_addr, args.master_port)
        start(command, args.world_size, launcher, args.master_addr, args.master_port)
        return
    assert isinstance(launcher, str)  # no template with links
    namespaces = child.islands if between_islands(args.link) else args.world_size
    with (
        links.testbed(args.link, namespaces, args.world_size // namespaces) as testbed,
        environment(testbed.environment),
    ):
        start(testbed.command(command), args.world_size, launcher, *testbed.meeting_point(launcher))


def _check_size(args: argparse.Namespace, child: argparse.Namespace) -> None:
    """Raise if the ranks cannot be split over the nodes, lack GPUs, or disagree with the verb's own flag."""
    if args.nodes != 1:
        _check_nodes(args)
    if args.gpus is not None and args.gpus < args.world_size:
        raise BadInput(
            f"{args.world_size} ranks need a GPU each and {args.gpus} were granted: raise the limit "
            "(snakemake --resources gpu=N) if the machine has more, else use a smaller world size."
        )
    given = getattr(child, "world_size", None)
    if given not in (None, args.world_size):
        raise BadInput(
            f"`launch --world_size {args.world_size}` but --world_size {given} for the verb: omit the second."
        )


def _check_nodes(args: argparse.Namespace) -> None:
    """Raise if the nodes cannot share the ranks evenly, or with options for a single machine."""
    if args.world_size % args.nodes:
        raise BadInput(f"--nodes {args.nodes} cannot share --world_size {args.world_size} evenly.")
    if args.link != UNSHAPED:
        raise BadInput(f"--link {args.link} makes links within one machine: omit --nodes {args.nodes}.")
    if args.launcher not in (None, "torchrun"):
        raise BadInput(f"--launcher {args.launcher} supports one machine only: ranks on several nodes need torchrun.")
    nodes.check_allocation(args.nodes)
