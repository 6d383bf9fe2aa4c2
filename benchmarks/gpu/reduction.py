"""Reductions of the 62M model's gradient on one GPU: ``python -m gpu.reduction``.

One rank encodes, hands its message to itself by NCCL, and decodes it, in the phases of an exchange: the GPU does what
it does at W = 2, and no wire costs anything. So a reduction has a time, and with it the speed of a link below which it
saves more than it takes. Each is followed by steps whose backward pass it overlaps, by the queue on a stream.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.model import BATCH, LENGTH, PRESET, STEPS, VOCABULARY, OfOne, Trainee, precision, reduction_of
from gpu.part import DEVICE, SMALL, Part, Row, run, synchronize
from gpu.workers import Ranks, group

from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build
from gradwire.lm.models import causal

CELLS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "none": ("none", {}, {}),
    "bf16": ("bf16", {}, {}),
    "fp16": ("fp16", {}, {}),
    "int8": ("int8", {}, {}),
    "int4": ("int8", {"num_bits": 4, "block": 64}, {}),
    "onebit": ("onebit", {}, {"error_feedback": True}),
    "signsgd": ("signsgd", {}, {}),
    "powersgd": ("powersgd", {"rank": 4}, {"error_feedback": True}),
    "topk, by row": ("topk", {"density": 0.01}, {"error_feedback": True, "granularity": "row"}),
    "topk": ("topk", {"density": 0.01}, {"error_feedback": True}),
}
HOST_MS = 1.0  # of a reduction: the target


def reducer_of(label: str) -> Reducer:
    """A reducer that averages in both phases, as with more than two ranks."""
    method, options, how = CELLS[label]
    reducer = OfOne(build(method, **options), **how)
    reducer.prepare("all_reduce", 1)
    if reducer.algorithm == "gather":
        reducer.algorithm = "exchange"
    return reducer


def alone(world: World, label: str) -> Row:
    """An all-reduce of all parameters: its time, the host's, the GPU's kernels and the bytes of its message."""
    gc.collect()
    reducer = reducer_of(label)
    shapes = [(name, tuple(p.shape)) for name, p in causal.build(PRESET, VOCABULARY, LENGTH, 0).named_parameters()]
    layout = Layout.dim0(shapes, world.world_size)
    flat = torch.randn(layout.numel, device=world.device)
    reduction = reduction_of(reducer, "all_reduce")

    def once() -> tuple[float, float]:
        synchronize()
        began = time.perf_counter()
        reduction(flat, layout)
        reducer.codec.step += 1  # what begins with the first step does not begin again
        host = time.perf_counter() - began
        synchronize()
        return 1e3 * host, 1e3 * (time.perf_counter() - began)

    turns = [once() for _ in range(2 + STEPS)][2:]
    counts = reducer.codec.plan(layout, "scatter", world.rank).whole.sizes.total
    found: Row = {"host_ms": median(host for host, _ in turns), "ms": median(whole for _, whole in turns)}
    if DEVICE == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            reduction(flat, layout)
            synchronize()
        kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found |= {"kernels": len(kernels), "kernels_ms": 1e-3 * sum(event.device_time for event in kernels)}
    if reducer.algorithm == "exchange" and counts is not None:
        saved = 4 * layout.numel - counts  # per rank at W = 2, of both phases
        found |= {"bytes": counts, "pays_below_gbit_s": 8e-6 * saved / found["ms"]}
    return found


def stepped(world: World, label: str | None) -> Row:
    """Steps of a model wrapped by ddp that reduces, or does not."""
    reducer = reducer_of(label) if label else None
    trainee = Trainee(BATCH, world, strategy="ddp", reducer=reducer)
    with precision("bf16") as context:
        turns = []
        for _turn in range(3 + STEPS):
            synchronize()
            began = time.perf_counter()
            trainee.step(context)
            synchronize()
            turns.append(1e3 * (time.perf_counter() - began))
    sent = reducer.traffic.details["encoded_elements"] if reducer is not None else None
    return {"step_ms": median(turns[3:]), "encoded": sent}


def main() -> int:
    """Measure each reduction by itself, then inside of steps."""
    part = Part("reduction")
    ranks = Ranks(lambda: group(1, "auto", DEVICE))

    def ask(name: str, task: Callable[..., Row], *arguments: Any) -> Row | None:
        return part.measure(name, lambda: ranks.run(part.at_most(30), task, *arguments)[0])

    labels = list(CELLS)[:4] if SMALL else list(CELLS)
    bare = ask("step, unhooked", stepped, None)
    for label in labels:
        reduced = ask(f"{label} alone", alone, label)
        if label in ("int8", "bf16", "signsgd") and not SMALL:
            part.target(f"{label} alone, host, ms", reduced and reduced["host_ms"], HOST_MS)
        step = ask(f"step, {label}", stepped, label)
        if step and bare and reduced:
            step["exposed_ms"] = step["step_ms"] - bare["step_ms"]
            step["hidden"] = 1 - step["exposed_ms"] / reduced["ms"]
    ranks.end()
    return part.finish(
        ["ms", "host_ms", "kernels", "kernels_ms", "bytes", "pays_below_gbit_s", "step_ms", "exposed_ms", "hidden"]
    )


if __name__ == "__main__":
    run(main)
