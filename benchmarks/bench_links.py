"""Bytes and times of gloo's collectives on links of a given rate.

``python benchmarks/bench_links.py --link 100mbit --world_size 2`` (root, or a kernel that allows user namespaces).
``x bytes`` is what the ranks' interfaces transmitted over what a bandwidth-optimal collective would send: the backend's
own factor, with the protocol's headers and acknowledgements; ``x time`` is the time over those optimal bytes at the
link's rate, the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate

from gradwire.base.units import bits_per_second
from gradwire.bench.launch import links
from gradwire.bench.launch.ranks import environment, start
from gradwire.bench.training import link
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World, process_group


def collectives(world: int, numel: int) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Each collective on a buffer of ``numel`` float32, with the bytes that a rank has to send on average."""
    buffer = torch.ones(world, -(-numel // world))
    message = buffer.view(torch.uint8).view(-1)
    sizes = [message.numel() // world] * world
    once = (world - 1) / world * ops.nbytes(buffer)
    return {
        "all_reduce": (2 * once, lambda: ops.all_reduce(buffer)),
        "reduce_scatter": (once, lambda: ops.reduce_scatter(buffer)),
        "all_gather, gloo's": (once, lambda: ops.all_gather(message[: sizes[0]])),
        "all_gather, in messages": (once, lambda: ops.all_gather(message[: sizes[0]], bulk=True)),
        "all_to_all, gloo's": (once, lambda: ops.all_to_all(message, sizes, sizes)),
        "all_to_all, in messages": (once, lambda: ops.all_to_all(message, sizes, sizes, bulk=True)),
        "broadcast": (once, lambda: ops.broadcast(buffer)),
    }


def measure(world: World, numel: int, rounds: int) -> list[list[Any]]:
    """A row for each collective."""
    rate = bits_per_second(link.link())
    rows = []
    for name, (ideal, job) in collectives(world.world_size, numel).items():
        seconds, sent = [], []
        for _ in range(1 + rounds):
            dist.barrier()
            before, began = link.transmitted(), time.perf_counter()
            job()
            seconds.append(time.perf_counter() - began)
            dist.barrier()
            sent.append(link.transmitted_since(before))
        slowest = np.array(ops.gather_objects(seconds))[:, 1:].max(0)
        bytes_each = np.array(ops.gather_objects(sent))[:, 1:].mean(0)
        rows.append(
            [
                name,
                f"{4 * numel:,}",
                float(np.median(bytes_each)) / ideal,
                1e3 * float(np.median(slowest)),
                float(np.median(slowest)) / (8 * ideal / rate),
            ]
        )
    return rows


def rank(args: argparse.Namespace) -> None:
    """One rank on the link."""
    torch.set_num_threads(1)
    with process_group(device="cpu") as world:
        rows = [row for numel in args.numels for row in measure(world, numel, args.rounds)]
        if world.rank == 0:
            print(f"gloo, {link.link()}, W = {world.world_size}, {args.rounds} rounds\n")
            print(tabulate(rows, ["op", "buffer, bytes", "x bytes", "ms", "x time"], tablefmt="pipe", floatfmt=".2f"))


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--numels", type=int, nargs="+", default=[2**14, 2**19, 2**21])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if "RANK" in os.environ:
        rank(args)
        return
    links.enter(args.link)
    with links.testbed(args.link, args.world_size) as testbed, environment(testbed.environment):
        command = testbed.command([sys.executable, __file__, *sys.argv[1:]])
        start(command, args.world_size, "spawn", *testbed.meeting_point("spawn"))


if __name__ == "__main__":
    main()
