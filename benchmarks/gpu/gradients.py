"""Per-sample gradients, projections and norms of the 62M model at 128 tokens: ``python -m gpu.gradients``."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import bench_gradients
import numpy as np
import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the workers are forked
from gpu.part import DEVICE, SMALL, Part, Row, run
from gpu.workers import Ranks, alone

MODEL, VOCABULARY, LENGTH = ("micro", 512, 16) if SMALL else ("62m", 50257, 128)
SAMPLES, BATCH = (4, 2) if SMALL else (64, 32)
ROUNDS = 2 if SMALL else 5
DIMS = (64, 128) if SMALL else (4096, 8192)
ROWS = [("factored", "loop"), ("factored", "hooks"), ("sjlt", "hooks"), ("factored", "vmap"), ("sjlt", "loop")]
PROJECTIONS = {"sjlt": 2**16 if SMALL else 2**24, "rademacher": 2**12 if SMALL else 2**22}
PROJECTIONS |= {} if SMALL else {"factored": 2**24, "normal": 2**20, "srht": 2**22}


def options(dim: int, **others: Any) -> Namespace:
    """The arguments of the benchmarks that run here."""
    given: dict[str, Any] = {"model": MODEL, "vocabulary": VOCABULARY, "length": LENGTH, "device": DEVICE, "dim": dim}
    return Namespace(**given | {"samples": SAMPLES, "batch_size": BATCH} | others)


def fresh() -> None:
    """Free what earlier work left."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def medians(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each job, the rounds interleaved."""
    seconds = bench_gradients.interleaved(DEVICE, jobs, rounds)
    return {name: 1e3 * float(np.median(of)) for name, of in seconds.items()}


def rows(_: None, projection: str, method: str, dim: int) -> Row:
    """Rows of all samples beside plain passes of the same batches."""
    fresh()
    given = options(dim)
    data = bench_gradients.samples(SAMPLES, LENGTH, VOCABULARY)
    jobs = {
        "plain": bench_gradients.plain_passes(given, data),
        "rows": bench_gradients.rows_by(given, data, method, projection),
    }
    found = medians(jobs, 2 if method == "loop" else ROUNDS)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else None
    return {
        "samples_per_s": 1e3 * SAMPLES / found["rows"],
        "plain_samples_per_s": 1e3 * SAMPLES / found["plain"],
        "of_plain": found["plain"] / found["rows"],
        "peak_gb": peak,
    }


def projected(_: None, name: str, numel: int, dim: int) -> Row:
    """A projection beside reading the gradients and beside the dense product."""
    fresh()
    height = 2 if SMALL else 16
    jobs = bench_gradients.projection_jobs(options(dim, numel=numel, batch_size=height), [name])
    found = medians(jobs, 2 if SMALL else 3)
    read, product = found[bench_gradients.READ], found[bench_gradients.PRODUCT]
    return {"ms": found[name], "x_reading": found[name] / read, "x_product": found[name] / product}


def norm_passes(_: None, batch_size: int) -> Row:
    """Norms beside forward, and forward and backward."""
    fresh()
    found = medians(bench_gradients.norm_jobs(options(0, batch_size=batch_size)), ROUNDS)
    plain = found["forward + backward"]
    return {f"{name} ms": ms for name, ms in found.items()} | {
        "norms_of_plain": found["norms"] / plain,
        "loop_of_norms": found["norms, by the loop"] / found["norms"],
    }


def main() -> int:
    """Measure everything."""
    part = Part("gradients")
    worker = Ranks(lambda: [alone])

    def ask(name: str, task: Callable[..., Row], *arguments: Any) -> Row | None:
        return part.measure(name, lambda: worker.run(part.at_most(60), task, *arguments)[0])

    ask(f"norms, batch {BATCH}", norm_passes, BATCH)
    for name, numel in PROJECTIONS.items():
        ask(f"{name} of {numel:,} to {DIMS[0]:,}", projected, name, numel, DIMS[0])
    for dim in DIMS:
        for projection, method in ROWS:
            ask(f"{projection}, {method}, D = {dim:,}", rows, projection, method, dim)
    worker.end()
    if not SMALL:
        targets(part)
    rates = ["samples_per_s", "plain_samples_per_s", "of_plain", "peak_gb", "ms", "x_reading", "x_product"]
    return part.finish([*rates, "forward + backward ms", "norms ms", "norms_of_plain", "loop_of_norms"])


def targets(part: Part) -> None:
    """Hold what was measured against the targets."""

    def value(name: str, key: str) -> float | None:
        row = part.row(name)
        return row[key] if row and key in row else None

    for dim in DIMS:
        factored = value(f"factored, hooks, D = {dim:,}", "samples_per_s")
        slow = value(f"factored, loop, D = {dim:,}", "samples_per_s")
        times = factored / slow if factored and slow else None
        part.target(f"factored, D = {dim:,}, × the loop", times, 10, at_least=True)
        share = value(f"factored, hooks, D = {dim:,}", "of_plain")
        part.target(f"factored, D = {dim:,}, of forward + backward", share, 0.9, at_least=True)
    part.target("norms, × forward + backward", value(f"norms, batch {BATCH}", "norms_of_plain"), 1.6)
    for name, key, limit in (("sjlt", "x_reading", 4), ("rademacher", "x_product", 2)):
        found = value(f"{name} of {PROJECTIONS[name]:,} to {DIMS[0]:,}", key)
        part.target(f"{name}, × {key.removeprefix('x_')}", found, limit)


if __name__ == "__main__":
    run(main)
