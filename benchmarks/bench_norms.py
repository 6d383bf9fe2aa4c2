"""Norms of per-sample gradients: how fast, against plain passes and the batch-1 loop.

``python benchmarks/bench_norms.py passes|share|private``, each a table of its own. Samples are random tokens, distinct,
all of one length. Rounds are interleaved, and ratios are medians over them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bench_gradients import interleaved, samples, show, spread

from gradwire.attribution.persample import loop, norms
from gradwire.attribution.persample.batch import losses_of
from gradwire.attribution.persample.square_norms import SquareNorms
from gradwire.bench.config import Training
from gradwire.bench.training.objective import Private
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch, collate
from gradwire.lm.models import causal


def made(args: argparse.Namespace) -> tuple[torch.nn.Module, Batch]:
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    data = samples(args.batch_size, args.length, args.vocabulary)
    return model, collate(data, 0, args.batch_size).to(args.device)


def plain(model: torch.nn.Module, batch: Batch) -> None:
    losses_of(model, batch).sum().backward()
    model.zero_grad(set_to_none=True)


def forward(model: torch.nn.Module, batch: Batch) -> None:
    """With the graph for a backward pass that does not come."""
    losses_of(model, batch).sum()


def pass_jobs(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    model, batch = made(args)
    return {
        "forward": lambda: forward(model, batch),
        "forward + backward": lambda: plain(model, batch),
        "norms": lambda: norms.norms(model, batch),
        "norms, by the loop": lambda: loop.gradients(model, batch, "mean"),
    }


def passes(args: argparse.Namespace) -> None:
    """A norm pass against a plain forward and backward pass of the same batch, and against the loop over samples."""
    seconds = interleaved(args.device, pass_jobs(args), args.rounds)
    whole, first = seconds["forward + backward"], seconds["forward"]
    table = [[name, f"{1e3 * np.median(of):,.0f}", spread(of / whole)] for name, of in seconds.items()]
    show(table, ["", "ms", "× forward + backward"])
    print(
        f"\nnorms without their forward pass, × plain backward: {spread((seconds['norms'] - first) / (whole - first))}"
    )
    print(f"the loop's time, × norms: {spread(seconds['norms, by the loop'] / seconds['norms'])}")


def share(args: argparse.Namespace) -> None:
    """The norm computation itself, where two ranks with the same samples share out the layers."""
    model, batch = made(args)

    def inside(names: list[str] | None) -> float:
        """Seconds in the sums of squares, passes left out."""
        spent, take = 0.0, SquareNorms.take

        def timed(self: SquareNorms, name: str, use: Any) -> None:
            nonlocal spent
            began = time.perf_counter()
            take(self, name, use)
            if args.device == "cuda":
                torch.cuda.synchronize()
            spent += time.perf_counter() - began

        SquareNorms.take = timed  # type: ignore[method-assign]
        try:
            norms.norms(model, batch, "mean", names)
        finally:
            SquareNorms.take = take  # type: ignore[method-assign]
        return spent

    ratios, alone = [], []
    for _ in range(args.rounds + 1):
        all_of_it = inside(None)
        ratios.append(max(inside(norms.share(model, rank, 2)) for rank in range(2)) / all_of_it)
        alone.append(1e3 * all_of_it)
    print(f"one rank: {np.median(alone[1:]):,.1f} ms; the slower of two: {spread(np.array(ratios[1:]))} of it")


def private(args: argparse.Namespace) -> None:
    """The passes of a private step against those of a plain one."""
    model, batch = made(args)
    place = World(0, 0, 1, "gloo", torch.device(args.device))

    def step(noise: float) -> Callable[[], None]:
        training = Training(batch_size=args.batch_size, dp_max_grad_norm=1.0, dp_noise_multiplier=noise)
        objective = Private(model, training, 0, place)

        def job() -> None:
            objective.begin(model, [batch], 0)
            loss, _ = objective.loss(model, batch, torch.tensor(1.0, device=args.device), True)
            loss.backward()
            model.zero_grad(set_to_none=True)

        return job

    jobs = {"plain": lambda: plain(model, batch), "clipped": step(0.0), "clipped, with noise": step(1.0)}
    seconds = interleaved(args.device, jobs, args.rounds)
    table = [[name, f"{1e3 * np.median(of):,.0f}", spread(of / seconds["plain"])] for name, of in seconds.items()]
    show(table, ["passes of a step", "ms", "× plain"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["passes", "share", "private"])
    parser.add_argument("--model", default="62m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"passes": passes, "share": share, "private": private}[args.what](args)


if __name__ == "__main__":
    main()
