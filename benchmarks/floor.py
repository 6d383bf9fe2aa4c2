"""Steps on a link against the shortest ones that are possible: ``python benchmarks/floor.py`` (as bench_overlap.py).

Each cell of ``bench_overlap.py`` takes steps with overlapped reductions, in turn with a model that does not
communicate, whose gradients say when they are ready. The table has the floor of each cell, as ``overlap.md`` defines
it, and its step over the floor. Times are in ms; coding is a mean of these steps, transfer and what is exposed of the
communication are means of profiled ones.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import on_links
import torch
import torch.distributed as dist
from bench_overlap import CELLS, FEEDBACK, LENGTH, VOCABULARY, Variant, model_of
from tabulate import tabulate

from gradwire.bench.launch.links import BURST
from gradwire.bench.trace import trace
from gradwire.comm import parallel
from gradwire.comm.closed_forms import parameters_unhooked
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.reducer import payload
from gradwire.comm.collectives.world import World, process_group
from gradwire.comm.parallel.model import block_sizes
from gradwire.comm.topology import link_rate

HEADERS = 1514 / 1448  # bytes of a full Ethernet frame over those of its TCP segment
COLUMNS = ("link", "strategy", "cell", "alone", "coding", "sending", "floor", "step", "interval", "step / floor")
COLUMNS = (*COLUMNS, "transfer", "exposed")


class Floor(NamedTuple):
    """Seconds that a step takes at least: the longest of three bounds.

    Attributes:
        processor: Its computation and codecs, one after another.
        sending: All bytes on the link, and the optimizer after them.
        ready: From a gradient that is ready the bytes of those that are ready no earlier, and the optimizer.
    """

    processor: float
    sending: float
    ready: float


def least(
    ready: Mapping[str, float], sent: Mapping[str, float], gathered: float, work: Sequence[float], rate: float
) -> Floor:
    """The bounds of a step.

    Args:
        ready: Seconds from the start of a step until each gradient is ready, without communication.
        sent: Bytes that a rank sends for each gradient.
        gathered: Bytes of parameters that it sends.
        work: Seconds of encodings and decodings, and of what follows the last gradient.
        rate: The link's rate in bits per second.
    """
    coding, rest = work
    order = sorted(ready, key=ready.__getitem__)
    after = np.cumsum([sent[name] for name in reversed(order)])[::-1]

    def travel(nbytes: float) -> float:
        """Seconds of bytes on the link, which lets a burst pass."""
        return max(8 * HEADERS * nbytes / rate - max(8 * BURST / rate, 1e-3), 0.0)

    return Floor(
        max(ready.values()) + coding + rest,
        travel(gathered + float(after[0])) + rest,
        max(ready[name] + travel(nbytes) for name, nbytes in zip(order, after, strict=True)) + rest,
    )


class Alone:
    """A model that takes steps without communication."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = model_of(args.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, VOCABULARY, (args.batch_size, LENGTH))
        self.began, self.ready = 0.0, dict[str, float]()
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self.note, name))

    def note(self, name: str, _: torch.Tensor) -> None:
        """Note when a gradient is ready."""
        self.ready[name] = time.perf_counter() - self.began

    def step(self) -> float:
        """Take an optimizer step and return its seconds."""
        dist.barrier()
        self.began = time.perf_counter()
        self.model(input_ids=self.batch, labels=self.batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - self.began


def bytes_of(model: torch.nn.Module, strategy: str, cell: str, world: int) -> tuple[dict[str, float], float]:
    """Bytes that a rank sends in a step for each gradient, and for sharded parameters."""
    method, options = CELLS[cell]
    kind = parallel.strategy_class(strategy).kind
    given, reduction = {"method": method, **options}, {"error_feedback": cell in FEEDBACK}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    numbers = {shape: [*shapes.values()].count(shape) for shape in shapes.values()}
    algorithm = payload(given, numbers, kind, world, **reduction).algorithm

    def of(shape: tuple[int, ...]) -> float:
        total = payload(given, {shape: 1}, kind, world, algorithm=algorithm, **reduction).bytes
        return (total or 0) / world

    gathered = parameters_unhooked(kind, block_sizes(model), world) or 0
    return {name: of(shape) for name, shape in shapes.items()}, gathered / world


def coded(variant: Variant) -> float:
    """Seconds of a variant's encodings and decodings so far."""
    assert variant.reducer is not None
    return sum(variant.reducer.meter.totals[op, "codec"].seconds for op in ("encode", "decode"))


def measure(world: World, args: argparse.Namespace, strategy: str) -> None:
    """Take steps of a strategy's cells, in turn with the model alone; rank 0 keeps the rows."""
    alone, cells = Alone(args), {cell: Variant(args, strategy, cell, True) for cell in args.cells}
    variants: list[Any] = [alone, *cells.values()]
    order, times, ready = random.Random(strategy), list[list[float]](), list[list[float]]()
    for number in range(args.warmup + args.rounds):
        if number == args.warmup:
            before = [coded(variant) for variant in cells.values()]
        seconds = [0.0] * len(variants)
        for i in order.sample(range(len(variants)), len(variants)):
            seconds[i] = variants[i].step()
        if number >= args.warmup:
            times.append(seconds)
            ready.append([*alone.ready.values()])
    codecs = [(coded(variant) - start) / args.rounds for variant, start in zip(cells.values(), before, strict=True)]
    coding = np.array(ops.gather_objects(codecs)).mean(0)
    steps = np.array(ops.gather_objects(times)).max(0)  # of the slowest rank
    when = np.median(np.array(ops.gather_objects(ready)).max(0), 0)
    gradients = dict(zip(alone.ready, map(float, when), strict=True))
    rest, rate = float(np.median(steps[:, 0])) - max(gradients.values()), link_rate(args.links[0])
    for number, (cell, variant) in enumerate(cells.items(), start=1):
        folder = Path(args.folder) / args.links[0] / f"{strategy}-{cell}"
        variant.profiled(folder, world.rank, args.profile_steps)
        dist.barrier()
        if world.rank == 0:
            sent, gathered = bytes_of(alone.model, strategy, cell, world.world_size)
            after = rest / (world.world_size if gathered else 1)  # an optimizer of shards has those of its rank
            floor = max(least(gradients, sent, gathered, (float(coding[number - 1]), after), rate))
            sending = 8 * HEADERS * (sum(sent.values()) + gathered) / rate
            known = np.median(steps[:, 0]), coding[number - 1], sending, floor
            shown = row_of(steps[:, number], [float(each) for each in known], trace.profile(folder))
            on_links.add(args, [args.links[0], strategy, cell, *shown])


def row_of(steps: Any, known: Sequence[float], profile: Mapping[str, Any]) -> list[Any]:
    """A cell's numbers: what is known of its step, the floor last, the step itself, and what its profile has."""
    step = float(np.median(steps))
    draws = np.random.default_rng(0).choice(steps, (2000, len(steps)))
    low, high = 1e3 * np.percentile(np.median(draws, 1), (2.5, 97.5))
    times = [1e3 * each for each in (*known, step)]
    shown = [f"{low:.1f} to {high:.1f}", step / known[-1]]
    return [*times, *shown, profile["transfer_ms_per_step"], profile["exposed_comm_ms"]]


def rank(args: argparse.Namespace) -> None:
    """One rank on one link; rank 0 keeps the rows."""
    torch.set_num_threads(1)
    with process_group(device="cpu") as world:
        for strategy in args.strategies:
            measure(world, args, strategy)


def main() -> None:
    """Run this file once per link, whose ranks run it again, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_links.add_arguments(parser, ["1gbit", "100mbit"])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["int8", "int4", "onebit", "powersgd"])
    parser.add_argument("--model", default="tiny", help="a preset, or 8m")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile_steps", type=int, default=4)
    args = parser.parse_args()
    if rows := on_links.rows_of_links(args, rank):
        print(f"{args.model}, batch {args.batch_size}, W = {args.world_size}, {args.rounds} steps; times in ms\n")
        print(tabulate(rows, COLUMNS, tablefmt="pipe", floatfmt=".2f") + "\n")
        places: dict[tuple[str, str], list[str]] = {}
        for link, strategy, _, *times in rows:
            floor, step, _, over = times[3:7]
            places.setdefault((link, strategy), []).append(f"{step:.1f} / {floor:.1f} = {over:.2f}")
        table = [[*place, *shown] for place, shown in places.items()]
        print(tabulate(table, ["link", "strategy", *args.cells], tablefmt="pipe"))


if __name__ == "__main__":
    main()
