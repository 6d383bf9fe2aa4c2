"""Step times of strategies and the reducer against the unmodified frameworks: the first tables of ``strategies.md``.

``python benchmarks/bench_strategies.py`` runs two ranks; the jobs of a round are interleaved, and compared as ratios.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy import stats
from tabulate import tabulate
from torch import Tensor, nn

from gradwire.comm import parallel
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.meter import METER, Meter
from gradwire.comm.compressors import build
from gradwire.lm.models import causal

VOCABULARY, LENGTH = 1024, 128  # of the default experiment
CONTROL = {"algorithm": "exchange"}


def spawn(world: int, task: Callable[..., Any], *args: Any) -> Any:
    """Run ``task(rank, world, *args)`` on gloo ranks of one thread each; return the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.pt"
        mp.spawn(enter, (world, Path(folder) / "store", answer, task, args), nprocs=world)
        return torch.load(answer, weights_only=False)


def enter(rank: int, world: int, store: Path, answer: Path, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    result = task(rank, world, *args)
    if rank == 0:
        torch.save(result, answer)
    dist.barrier()
    dist.destroy_process_group()


class Trainee:
    """A small GPT-2 under one strategy, ready to take steps."""

    def __init__(self, strategy: str, reducer: Reducer | None, batch: Tensor) -> None:
        self.reducer = reducer
        self.batch = batch
        self.model = parallel.wrap(causal.build("tiny", VOCABULARY, LENGTH, 0).train(), strategy, reducer, device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> None:
        """Forward, backward with its reduction, the optimizer."""
        self.model(input_ids=self.batch, labels=self.batch, use_cache=False).loss.backward()
        if self.reducer is not None:
            self.reducer.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bare:
    """The bare cost of a reduction: the collectives and sums of its algorithm, on plain buffers."""

    def __init__(self, kind: str, numels: Iterable[int], world: int) -> None:
        self.kind = kind
        self.buffers = [torch.randn(world, -(-numel // world)) for numel in numels]

    def native(self) -> None:
        """The framework's own collective."""
        for buffer in self.buffers:
            if self.kind == "all_reduce":
                dist.all_reduce(buffer.div_(dist.get_world_size()))
            else:
                dist.reduce_scatter_tensor(buffer[0].clone(), buffer.view(-1))

    def exchanged(self) -> None:
        """All-to-all, sum and division; for an all-reduce also the all-gather of the means."""
        for buffer in self.buffers:
            received = torch.empty_like(buffer)
            dist.all_to_all_single(received, buffer)
            mean = received.sum(0).div_(len(buffer))
            if self.kind == "all_reduce":
                dist.all_to_all_single(received, mean.expand_as(buffer).contiguous())
                buffer.copy_(received)


def block_numels(model: nn.Module) -> list[int]:
    """Number of elements of each block, and of the rest."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.transformer.h]  # type: ignore[union-attr]
    return [*blocks, sum(p.numel() for p in model.parameters()) - sum(blocks)]


def timed_steps(rank: int, world: int, rounds: int, warmup: int, batch_size: int) -> dict[str, Any]:
    """Milliseconds of every job in every round: all jobs once a round, in a new order."""
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randint(0, VOCABULARY, (batch_size, LENGTH), generator=generator)
    numels = block_numels(causal.build("tiny", VOCABULARY, LENGTH, 0))
    jobs: dict[str, Callable[[], None]] = {}
    trainees: dict[str, Trainee] = {}
    for strategy in ("bucket", "ddp", "fsdp1", "fsdp2"):
        trainees[strategy] = Trainee(strategy, None, batch)
        trainees[f"{strategy} again"] = Trainee(strategy, None, batch)
        trainees[f"{strategy}, exchange"] = Trainee(strategy, Reducer(build("none"), **CONTROL), batch)
    for strategy in ("bucket", "ddp"):
        trainees[f"{strategy}, none"] = Trainee(strategy, Reducer(build("none")), batch)
    jobs |= {name: trainee.step for name, trainee in trainees.items()}
    for kind, sizes in (("all_reduce", [sum(numels)]), ("reduce_scatter", numels)):
        bare = Bare(kind, sizes, world)
        jobs |= {f"bare {kind}": bare.native, f"bare {kind}, exchanged": bare.exchanged}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    order = random.Random(0)  # the same on all ranks
    for turn in range(warmup + rounds):
        for name in order.sample(list(jobs), len(jobs)):
            dist.barrier()
            began = time.perf_counter()
            jobs[name]()
            if turn >= warmup:
                times[name].append(1e3 * (time.perf_counter() - began))
    slowest = {name: np.array(ops.gather_objects(own)).max(0) for name, own in times.items()}
    spans = {name: spans_of(trainee) for name, trainee in trainees.items() if trainee.reducer is not None}
    return {"times": slowest, "spans": spans, "span_us": span_microseconds(), "numel": sum(numels)}


def spans_of(trainee: Trainee) -> int:
    """Number of calls of the meter in a step."""
    before = sum(cost.calls for cost in METER.totals.values())
    trainee.step()
    return sum(cost.calls for cost in METER.totals.values()) - before


def span_microseconds(calls: int = 20_000) -> float:
    """Microseconds of one call of the meter, including its profiler range."""
    meter = Meter(Meter())
    began = time.perf_counter()
    for _ in range(calls):
        with meter.span("all_reduce", "payload", 1):
            pass
    return 1e6 * (time.perf_counter() - began) / calls


class Ratio(NamedTuple):
    """The median over rounds of one time ÷ another, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(times: np.ndarray, others: np.ndarray) -> Ratio:
    """`Ratio` of two jobs, paired by round."""
    values = times / others
    interval = stats.bootstrap((values,), np.median, rng=np.random.default_rng(0)).confidence_interval
    return Ratio(float(np.median(values)), *interval)


def speed(args: argparse.Namespace) -> None:
    """Print the table of step times."""
    found = spawn(2, timed_steps, args.rounds, args.warmup, args.batch_size)
    times = found["times"]
    print(f"tiny, {found['numel']:,} parameters, batch {args.batch_size} x {LENGTH}, W = 2, {args.rounds} rounds\n")

    def row(name: str, base: str, extra: np.ndarray | float = 0.0) -> list[Any]:
        plain, beyond = ratio(times[name], times[base]), ratio(times[name], times[base] + extra)
        again = ratio(times[f"{base} again"], times[base])
        return [name, float(np.median(times[name])), base, plain, beyond, again]

    rows = [row("bucket", "ddp")]
    for strategy in ("bucket", "ddp", "fsdp1", "fsdp2"):
        kind = "reduce_scatter" if "fsdp" in strategy else "all_reduce"
        extra = times[f"bare {kind}, exchanged"] - times[f"bare {kind}"]
        for name in (f"{strategy}, exchange", f"{strategy}, none"):
            if name in times:
                rows.append(row(name, strategy, extra))
    headers = ["step", "ms", "against", "ratio", "beyond the algorithm", "A/A"]
    print(tabulate(rows, headers, tablefmt="pipe", floatfmt=".1f"))
    print()
    bare = [[name, float(np.median(values))] for name, values in times.items() if name.startswith("bare")]
    print(tabulate(bare, ["collectives alone", "ms"], tablefmt="pipe", floatfmt=".2f"))
    print()
    cost = found["span_us"]
    meter = [
        [name, calls, cost, f"{calls * cost / 10 / float(np.median(times[name])):.2f} %"]
        for name, calls in found["spans"].items()
    ]
    print(tabulate(meter, ["step", "calls of the meter", "us each", "of the step"], tablefmt="pipe", floatfmt=".1f"))


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=8)
    speed(parser.parse_args())


if __name__ == "__main__":
    main()
