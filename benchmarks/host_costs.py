"""Processor time and memory of one rank's host code for one optimizer step, over the number of ranks.

``python benchmarks/host_costs.py [--width 512] [--worlds 8 64 512]`` prints a table. The ranks are those of torch's
``fake`` process group, in which rank 0 meets nobody: a message arrives as repetitions of what it sent, which
decodes. The time is the processor's, of one thread, without that of the fake collectives: ``encode`` and ``decode``
as the reducer counts them, and ``rest``. The memory is what the process has grown by at its peak.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradwire.comm.collectives import Layout, Reducer, meter, reducer
from gradwire.comm.compressors import build
from gradwire.comm.compressors.driver import rehearse

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "int4": ("int8", {"num_bits": 4}),
    "onebit": ("onebit", {}),
    "topk": ("topk", {"density": 0.01}),
    "topk+int8": ("topk+int8", {}),
    "powersgd": ("powersgd", {"rank": 4}),
}
KINDS = ("all_reduce", "reduce_scatter")
STEPS = 7


class Cost(NamedTuple):
    """Milliseconds of the fastest step, and MB."""

    encode: float
    decode: float
    rest: float
    grown: float


def shapes(width: int) -> list[tuple[str, tuple[int, ...]]]:
    """The 29 parameters of a GPT of four layers."""
    of_layer = {"q": (width, width), "k": (width, width), "v": (width, width), "o": (width, width), "norm": (width,)}
    of_layer |= {"up": (4 * width, width), "down": (width, 4 * width)}
    return [("embedding", (1024, width)), *((f"{i}.{name}", form) for i in range(4) for name, form in of_layer.items())]


def resident() -> float:
    """MB of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measured(name: str, kind: str, world: int, width: int) -> Cost:
    """Take steps as rank 0."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    reducer.check_initialized = lambda what: None  # it refuses ranks that are not there
    meter.time.perf_counter = time.process_time
    method, options = METHODS[name]
    before, parameters = resident(), shapes(width)
    reduces = Reducer(build(method, **options), error_feedback=name not in ("none", "bf16"), overlap=False)
    reduces.prepare(kind, sum(math.prod(shape) for _, shape in parameters))
    layout = reduces.layout(parameters) if kind == "all_reduce" else Layout.dim0(parameters, world)
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0))
    costs = []
    for _ in range(STEPS):
        counted, start = reduces.traffic.details, time.process_time()
        getattr(reduces, kind)(flat, layout)
        reduces.finish()
        seconds, now = time.process_time() - start, reduces.traffic.details
        encode, decode = (now[key] - counted[key] for key in ("encode_seconds", "decode_seconds"))
        fake = sum(cost["seconds"] for cost in now["by_op"].values())
        fake -= sum(cost["seconds"] for cost in counted["by_op"].values())
        costs.append(Cost(1e3 * encode, 1e3 * decode, 1e3 * (seconds - encode - decode - fake), 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return min(costs, key=lambda cost: sum(cost))._replace(grown=peak - before)


def main() -> None:
    """Measure each case in a process, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--methods", nargs="+", default=[*METHODS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in args.methods:
        method, options = METHODS[name]
        rehearse([build(method, **options)], [(40, 30)], torch.device("cpu"), feedback=True)  # compiles its kernels
        for kind in KINDS:
            costs = []
            for world in args.worlds:
                with multiprocessing.get_context("fork").Pool(1) as pool:
                    costs.append(pool.apply(measured, (name, kind, world, args.width)))
            totals = [sum(cost[:3]) for cost in costs]
            times = [f"{sum(cost[:3]):.1f} ({' + '.join(f'{part:.1f}' for part in cost[:3])})" for cost in costs]
            memory = [f"{cost.grown:.0f}" for cost in costs]
            ratios = [f"{totals[-1] / totals[0]:.2f}", f"{costs[-1].grown / costs[0].grown:.2f}"]
            rows.append([name, kind, *times, ratios[0], *memory, ratios[1]])
            print(*rows[-1], sep=" | ", flush=True)
    worlds = [f"W = {world}" for world in args.worlds]
    header = ["method", "collective", *(f"ms, {world}" for world in worlds), "x", *(f"MB, {w}" for w in worlds), "x"]
    print(tabulate(rows, header, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
