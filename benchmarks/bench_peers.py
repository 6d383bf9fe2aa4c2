"""Our compressors next to torch's own hooks and torchft's local updates: every figure of ``peers.md``.

``python benchmarks/bench_peers.py --links none 100mbit`` (root, or a kernel that allows user namespaces for links).

Each variant has a separate model under DDP, from the same seed, with the same batches. They take steps in turn, in
random order; local updates take a round of `H` steps at a time, whose mean counts. ``ms`` is the median step, ``cpu``
the processor time of rank 0 in the mean, ``x float32`` the median quotient of neighbouring float32 steps over the
variant's (more is faster), with its bootstrap interval of 95 %. ``float32 again`` is the control. torchft is measured
where it is installed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
import on_links
import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire import DiLoCo, OneBitAdam, comm_hook, compress_gradients
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import process_group
from gradwire.lm.models import causal

VOCABULARY, LENGTH = 1024, 128
H = 5  # local steps of a round
RANK4 = {"method": "powersgd", "rank": 4}
Step = Callable[[], None]


class Trainee:
    """A model, AdamW and one batch."""

    def __init__(self, args: argparse.Namespace, **ddp: Any) -> None:
        torch.manual_seed(0)
        self.inner: nn.Module = causal.build(args.model, VOCABULARY, LENGTH, 0).train()
        self.model = self.inner if ddp.get("local") else DistributedDataParallel(self.inner, **ddp)
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randint(0, VOCABULARY, (args.batch_size, LENGTH), generator=generator)

    def step(self) -> None:
        """Forward, backward with its reduction, the optimizer."""
        self.model(input_ids=self.batch, labels=self.batch, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def float32(args: argparse.Namespace) -> Step:
    """DDP itself."""
    return Trainee(args).step


def torch_fp16(args: argparse.Namespace) -> Step:
    """torch's hook that casts to float16 and all-reduces."""
    trainee = Trainee(args)
    trainee.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trainee.step


def torch_powersgd(args: argparse.Namespace) -> Step:
    """torch's PowerSGD of rank 4, in one bucket: gloo fails with several."""
    trainee = Trainee(args, bucket_cap_mb=1024)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    trainee.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trainee.step


def compressed(compressor: Any, **options: Any) -> Callable[[argparse.Namespace], Step]:
    """`compress_gradients`: reductions overlap the backward pass."""

    def make(args: argparse.Namespace) -> Step:
        trainee = Trainee(args)
        compress_gradients(trainee.model, compressor, optimizer=trainee.optimizer, **options)
        return trainee.step

    return make


def hooked(compressor: Any, **options: Any) -> Callable[[argparse.Namespace], Step]:
    """`comm_hook`, registered as torch's hooks are."""

    def make(args: argparse.Namespace) -> Step:
        trainee = Trainee(args)
        trainee.model.register_comm_hook(*comm_hook(trainee.model, compressor, **options))
        return trainee.step

    return make


def diloco(compressor: str) -> Callable[[argparse.Namespace], Step]:
    """Local updates, one reduction each `H` steps."""

    def make(args: argparse.Namespace) -> Step:
        trainee = Trainee(args, local=True)
        trainee.optimizer = DiLoCo(trainee.optimizer, trainee.inner, sync_every=H, compressor=compressor)  # type: ignore[assignment]
        return lambda: [trainee.step() for _ in range(H)] and None

    return make


def onebit_adam(args: argparse.Namespace) -> Step:
    """1-bit Adam after its warm-up."""
    trainee = Trainee(args, local=True)
    trainee.optimizer = OneBitAdam(trainee.inner.parameters(), trainee.inner, dense_steps=1, lr=1e-4)
    return trainee.step


def torchft_rounds(kind: str) -> Callable[[argparse.Namespace], Step]:
    """torchft's local updates: every rank is a replica group, as on machines of their own."""

    def make(args: argparse.Namespace) -> Step:
        from torchft import Manager, ProcessGroupGloo
        from torchft._torchft import LighthouseServer
        from torchft.local_sgd import DiLoCo as TheirDiLoCo
        from torchft.local_sgd import LocalSGD

        trainee = Trainee(args, local=True)
        host = [LighthouseServer(bind="[::]:0", min_replicas=dist.get_world_size())] if dist.get_rank() == 0 else [None]
        address = [host[0].address() if host[0] is not None else None]
        dist.broadcast_object_list(address)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
            min_replica_size=dist.get_world_size(),
            load_state_dict=lambda state: None,
            state_dict=dict,
            use_async_quorum=kind == "LocalSGD",
            replica_id=f"{kind}{dist.get_rank()}",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=address[0],
        )
        if kind == "LocalSGD":
            rounds: Any = LocalSGD(manager, trainee.inner, trainee.optimizer, sync_every=H)
        else:
            outer = torch.optim.SGD(trainee.inner.parameters(), lr=1.0)
            rounds = TheirDiLoCo(manager, [trainee.inner], trainee.optimizer, outer, sync_every=H)
        rounds.__enter__()
        trainee.kept = (host, store, manager, rounds)  # type: ignore[attr-defined]
        return lambda: [trainee.step() for _ in range(H)] and None

    return make


VARIANTS: dict[str, tuple[Callable[[argparse.Namespace], Step], int]] = {
    "float32": (float32, 1),
    "float32 again": (float32, 1),
    "torch: fp16_compress_hook": (torch_fp16, 1),
    "fp16": (compressed("fp16"), 1),
    "fp16, algorithm native": (compressed("fp16", algorithm="native"), 1),
    "bf16, algorithm native": (compressed("bf16", algorithm="native"), 1),
    "fp16, native, by comm_hook": (hooked("fp16", algorithm="native"), 1),
    "int8": (compressed("int8"), 1),
    "int8, by comm_hook": (hooked("int8"), 1),
    "int8, 4 bits": (compressed({"method": "int8", "num_bits": 4, "block": 64}), 1),
    "onebit, error feedback": (compressed("onebit", error_feedback=True), 1),
    "OneBitAdam": (onebit_adam, 1),
    "torch: PowerSGD rank 4": (torch_powersgd, 1),
    "powersgd rank 4": (compressed(RANK4, error_feedback=True), 1),
    f"DiLoCo onebit, H = {H}": (diloco("onebit"), H),
    f"DiLoCo none, H = {H}": (diloco("none"), H),
    f"torchft: LocalSGD, H = {H}": (torchft_rounds("LocalSGD"), H),
    f"torchft: DiLoCo, H = {H}": (torchft_rounds("DiLoCo"), H),
}


def made(args: argparse.Namespace) -> dict[str, tuple[Step, int]]:
    """The variants that run here, after their first steps; what fails is named."""
    steps = {}
    for name, (make, length) in VARIANTS.items():
        if name.startswith("torchft") and find_spec("torchft") is None:
            continue
        if args.only and not any(word in name for word in (*args.only, "float32")):
            continue
        try:
            step = make(args)
            for _ in range(args.warmup):
                step()
            steps[name] = step, length
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return steps


def measured(args: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of a step of each variant in each round, of the slowest rank; this rank's mean processor time."""
    steps = made(args)
    times: dict[str, list[float]] = {name: [] for name in steps}
    processor = dict.fromkeys(steps, 0.0)
    order = random.Random(0)  # the same on all ranks
    for _ in range(args.rounds):
        for name in order.sample(list(steps), len(steps)):
            step, length = steps[name]
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            step()
            times[name].append(1e3 * (time.perf_counter() - began) / length)
            processor[name] += 1e3 * (time.process_time() - used) / length / args.rounds
    slowest = {name: np.array(ops.gather_objects(values)).max(0).tolist() for name, values in times.items()}
    return slowest, processor


def rank(args: argparse.Namespace) -> None:
    """One rank on one link; rank 0 writes the rows."""
    torch.set_num_threads(1)
    with process_group(device="cpu") as world:
        times, processor = measured(args)
        if world.rank == 0:
            for name, values in times.items():
                on_links.add(args, row(args.links[0], name, values, processor[name], times["float32"]))
    os._exit(0)  # torchft's threads would wait for each other


def row(link: str, name: str, values: list[float], processor: float, base: list[float]) -> list[Any]:
    """A line of the table."""
    quotients = np.array(base) / np.array(values)
    draws = np.random.default_rng(0).choice(quotients, (2000, len(quotients)))
    low, high = np.percentile(np.median(draws, 1), (2.5, 97.5))
    return [link, name, float(np.median(values)), processor, float(np.median(quotients)), f"{low:.2f} to {high:.2f}"]


def main() -> None:
    """Run this file once per link, whose ranks run it again, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_links.add_arguments(parser, ["none", "100mbit"])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", help="variants with one of these words in their names, and float32")
    args = parser.parse_args()
    if rows := on_links.rows_of_links(args, rank):
        print(f"{args.model}, batch {args.batch_size}, W = {args.world_size}, {args.rounds} rounds\n")
        print(tabulate(rows, ["link", "method", "ms", "cpu", "x float32", "interval"], tablefmt="pipe", floatfmt=".2f"))


if __name__ == "__main__":
    main()
