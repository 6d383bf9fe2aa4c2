"""Reductions during the backward pass against reductions that it waits for; every figure of ``overlap.md``.

``python benchmarks/bench_overlap.py --links none 1gbit 100mbit`` (root, or a kernel that allows user namespaces).

Each cell has three models that take steps in turn, in random order: the framework untouched in float32, the reducer
with ``overlap: false`` and with ``overlap: true``. ``step`` is the median of the timed steps with a bootstrap interval
of 95 %, ``x float32`` the median quotient of neighbouring steps. The other times are means of profiled steps over the
ranks, as ``gradwire trace`` defines them. With compute c and transfer t of float32, and r its bytes over the cell's,
Amdahl's ceiling is (c + t) / (c + t / r), the one with overlap (c + t) / max(c, t / r); ``of it`` is the share of the
ceiling that the cell's speed-up is.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import on_links
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import GPT2Config, GPT2LMHeadModel

from gradwire.bench.trace import trace
from gradwire.bench.training.monitor import recorder_options
from gradwire.comm import parallel
from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.world import World, process_group
from gradwire.comm.compressors import build
from gradwire.comm.parallel import optimizers
from gradwire.lm.models import causal

VOCABULARY, LENGTH = 1024, 128  # of the default experiment
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "bf16": ("bf16", {}),
    "int8": ("int8", {}),
    "int4": ("int8", {"num_bits": 4}),
    "onebit": ("onebit", {}),
    "topk": ("topk", {"density": 0.01}),
    "powersgd": ("powersgd", {"rank": 4}),
    "onebit_adam": ("onebit", {}),
}
FEEDBACK = ("int4", "onebit", "topk", "powersgd", "onebit_adam")
COLUMNS = ("link", "strategy", "cell", "reductions", "step", "interval", "x float32", "compute", "encode", "decode")
COLUMNS = (*COLUMNS, "transfer", "exposed", "communication")
CEILINGS = ("Amdahl", "of it", "with overlap", "of it")


def model_of(name: str) -> nn.Module:
    """A preset, or ``8m``, between tiny and 62m."""
    if name != "8m":
        return causal.build(name, VOCABULARY, LENGTH, 0)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=288, n_layer=8, n_head=8)
    return GPT2LMHeadModel(config)


class Variant:
    """A model, its optimizer and perhaps a reducer, that take steps."""

    def __init__(self, args: argparse.Namespace, strategy: str, cell: str | None, overlap: bool) -> None:
        torch.manual_seed(0)
        self.reducer, communicates = None, cell == "onebit_adam"
        if cell is not None:
            method, options = CELLS[cell]
            given = {"error_feedback": cell in FEEDBACK, "overlap": overlap, "dense_steps": int(communicates)}
            self.reducer = Reducer(build(method, **options), **given)
        model = model_of(args.model)
        self.model = parallel.wrap(model, strategy, self.reducer, device="cpu", average=not communicates)
        groups = [{"params": list(self.model.parameters())}]
        self.optimizer: Any
        if communicates:
            self.optimizer = optimizers.build("onebit_adam", self.model, groups, self.reducer, lr=1e-4)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=1e-4)
        self.batch = torch.randint(0, VOCABULARY, (args.batch_size, LENGTH))

    def step(self) -> float:
        """Take an optimizer step and return its seconds."""
        dist.barrier()
        began = time.perf_counter()
        with record_function("gradwire/step"):
            self.model(input_ids=self.batch, labels=self.batch).loss.backward()
            if isinstance(self.optimizer, optimizers.Communicating):
                self.optimizer.communicate(1.0, torch.ones(3))
            else:
                totals = torch.ones(3)
                if self.reducer is not None:
                    self.reducer.finish(totals)
                else:
                    ops.all_reduce(totals)
                parallel.clip_grad_norm(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - began

    def profiled(self, folder: Path, rank: int, steps: int) -> None:
        """Write a trace of some steps."""
        path = folder / "profiler" / f"rank{rank}.pt.trace.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        with profile(
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda recorder: recorder.export_chrome_trace(str(path)),
            **recorder_options([ProfilerActivity.CPU]),
        ) as recorder:
            for _ in range(1 + steps):
                self.step()
                recorder.step()

    def sent(self) -> int:
        """Payload bytes of this rank so far."""
        return self.reducer.traffic["sent"] if self.reducer else 0


class Measured(NamedTuple):
    """Step times of a variant, its profile, and the bytes of a step over all ranks."""

    seconds: list[float]
    profile: dict[str, Any]
    bytes: float


def measure(world: World, args: argparse.Namespace, strategy: str, cell: str, folder: Path) -> list[Measured]:
    """The untouched framework, the synchronous and the overlapped reducer, interleaved."""
    variants = [Variant(args, strategy, None, False), *(Variant(args, strategy, cell, on) for on in (False, True))]
    order, seconds = random.Random(f"{strategy}{cell}"), [[] for _ in variants]  # type: ignore[var-annotated]
    for variant in variants:
        for _ in range(args.warmup):
            variant.step()
    before = [variant.sent() for variant in variants]
    for _ in range(args.rounds):
        for i in order.sample(range(len(variants)), len(variants)):
            seconds[i].append(variants[i].step())
    sent = [(variant.sent() - start) / args.rounds for variant, start in zip(variants, before, strict=True)]
    slowest = np.array(ops.gather_objects(seconds)).max(0).tolist()
    total = np.array(ops.gather_objects(sent)).sum(0).tolist()
    found = []
    for i, variant in enumerate(variants):
        own = folder / f"{strategy}-{cell}-{i}"
        variant.profiled(own, world.rank, args.profile_steps)
        dist.barrier()
        found.append(Measured(slowest[i], trace.profile(own) if world.rank == 0 else {}, total[i]))
    return found


def rows(world: World, args: argparse.Namespace, strategy: str, cell: str, found: list[Measured]) -> list[list[Any]]:
    """The table's rows of a cell; of float32 only with the first cell."""
    untouched = found[0]
    numel = sum(parameter.numel() for parameter in model_of(args.model).parameters())
    float32 = raw_bytes(parallel.strategy_class(strategy).kind, numel, world.world_size)
    compute, transfer = (untouched.profile[f"{name}_ms_per_step"] for name in ("compute", "transfer"))
    table = []
    for name, one in zip(("framework", "synchronous", "overlapped"), found, strict=True):
        if name == "framework" and cell != args.cells[0]:
            continue
        steps, times = 1e3 * np.array(one.seconds), one.profile
        speed_up = float(np.median(np.array(untouched.seconds) / np.array(one.seconds)))
        means = np.random.default_rng(0).choice(steps, (2000, len(steps)))
        low, high = np.percentile(np.median(means, 1), (2.5, 97.5))
        row = [args.links[0], strategy, "float32" if name == "framework" else cell, name, float(np.median(steps))]
        row += [f"{low:.1f} to {high:.1f}", speed_up]
        row += [times[f"{key}_ms_per_step"] for key in ("compute", "encode", "decode", "transfer")]
        row += [times["exposed_comm_ms"], times["comm_time_ms_per_step"]]
        if one.bytes:
            ratio = float32 / one.bytes
            amdahl = (compute + transfer) / (compute + transfer / ratio)
            overlap = (compute + transfer) / max(compute, transfer / ratio)
            row += [amdahl, f"{speed_up / amdahl:.0%}", overlap, f"{speed_up / overlap:.0%}"]
        table.append(row)
    return table


def rank(args: argparse.Namespace) -> None:
    """One rank on one link; rank 0 appends the rows to the file of results."""
    torch.set_num_threads(1)
    with process_group(device="cpu") as world:
        for strategy, cell in itertools.product(args.strategies, args.cells):
            if cell == "onebit_adam" and strategy.startswith("fsdp"):
                continue
            found = measure(world, args, strategy, cell, Path(args.folder) / args.links[0])
            if world.rank == 0:
                for row in rows(world, args, strategy, cell, found):
                    on_links.add(args, row)
                    print(*row, file=sys.stderr)


def main() -> None:
    """Run this file once per link, whose ranks run it again, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_links.add_arguments(parser, ["none", "1gbit", "100mbit"])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "bucket", "fsdp2"])
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=[*CELLS])
    parser.add_argument("--model", default="tiny", help="a preset, or 8m")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile_steps", type=int, default=5)
    args = parser.parse_args()
    if found := on_links.rows_of_links(args, rank):
        print(f"{args.model}, batch {args.batch_size}, W = {args.world_size}, {args.rounds} steps; times in ms\n")
        print(tabulate(found, [*COLUMNS, *CEILINGS], tablefmt="pipe", floatfmt=".2f"))


if __name__ == "__main__":
    main()
