"""Per-sample gradients on the GPU: ``python -m gpu.gradients``.

Projections against reading the gradients once, against the dense product, and against their reference implementations;
norms against a forward and backward pass; rows of the 62M model; steps of private training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import bench_gradients
import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.part import DEVICE, OUT, SMALL, Part, Row, host_waits, run
from gpu.strategies import corpus, trained
from gpu.workers import Ranks, alone, group

from gradwire.attribution import projections
from gradwire.attribution.projections import hashing, matrices

ARGUMENTS = argparse.Namespace(
    model="micro" if SMALL else "62m",
    device=DEVICE,
    vocabulary=512 if SMALL else 50257,
    length=32 if SMALL else 128,
    batch_size=2 if SMALL else 32,
    samples=4 if SMALL else 64,
    dim=64 if SMALL else 4096,
    numel=2**16 if SMALL else 2**25,
    rounds=2 if SMALL else 3,
)
TARGETS = {"sjlt": (bench_gradients.READ, 4.0), "rademacher": (bench_gradients.PRODUCT, 2.0)}


def exact(_: None, name: str) -> Row:
    """Compare a projection's kernel with the reference, bit by bit where it adds alike, else by their errors."""
    numel = 5003 if SMALL else 3 * 2**16 + 4_000_037
    shapes, dim = {"w": (numel,)}, 200
    rows = torch.randn(5, numel, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    kernel = projections.build(name, shapes, 0).project(rows, [dim])[dim]
    reference = without_kernels(lambda: projections.build(name, shapes, 0).project(rows, [dim])[dim])
    columns = torch.arange(numel, device=DEVICE)
    if name == "sjlt":
        difference, of_reference = (kernel - reference).abs().max().item(), 0.0
        bound = 0.0
    else:
        signs = hashing.sign_table(hashing.key(0, "w"), columns, dim).double()
        truth = rows.double() @ signs / dim**0.5
        difference, of_reference = ((result - truth).abs().max().item() for result in (kernel, reference))
        bound = 2 * of_reference
    return {
        "difference": difference,
        "of_plain": of_reference,
        "wrong": [] if difference <= bound else [f"differs by {difference}"],
    }


def without_kernels(work: Callable[[], Any]) -> Any:
    """The result of work that uses reference implementations."""
    kept, matrices.kernels_for = matrices.kernels_for, lambda device: None
    try:
        return work()
    finally:
        matrices.kernels_for = kept


def projected(_: None, names: list[str]) -> Row:
    """Milliseconds of projections, of reading and of the dense product, interleaved."""
    jobs = bench_gradients.projection_jobs(ARGUMENTS, names)
    return {name: 1e3 * median(of) for name, of in bench_gradients.interleaved(DEVICE, jobs, ARGUMENTS.rounds).items()}


def normed(_: None) -> Row:
    """Milliseconds of norms and of plain passes."""
    jobs = bench_gradients.norm_jobs(ARGUMENTS)
    return {name: 1e3 * median(of) for name, of in bench_gradients.interleaved(DEVICE, jobs, 3).items()}


def rows(_: None, projection: str) -> Row:
    """Rows per second, samples per second of plain passes, and how often the host waits in a batch of either."""
    data = bench_gradients.samples(ARGUMENTS.samples, ARGUMENTS.length, ARGUMENTS.vocabulary)
    jobs = {
        "rows": bench_gradients.rows_by(ARGUMENTS, data, "hooks", projection),
        "plain": bench_gradients.plain_passes(ARGUMENTS, data),
    }
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    speed = {
        name: ARGUMENTS.samples / median(of)
        for name, of in bench_gradients.interleaved(DEVICE, jobs, ARGUMENTS.rounds).items()
    }
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    found = {"rows_per_s": speed["rows"], "of_plain": speed["rows"] / speed["plain"], "peak_gb": peak}
    if DEVICE == "cuda":
        batches = ARGUMENTS.samples / ARGUMENTS.batch_size
        found |= {f"waits_{name}": host_waits(work) / batches for name, work in jobs.items()}
    return found


def private(world: Any, shards: Path, label: str, training: dict[str, Any]) -> Row:
    """Steps of the model with and without clipped gradients of samples."""
    model = "micro" if SMALL else "62m"
    row = trained(world, shards, OUT / "runs" / label, "ddp", {"method": "none"}, model, {"steps": 6, **training})
    return {"step_ms": median(row["step_ms"]), "loss": row["losses"][-1], "peak_gb": row["peak_bytes"] / 1e9}


def main() -> int:
    """Measure everything."""
    part = Part("gradients")
    shards = corpus(OUT / "made-up-gradients")
    single, member = Ranks(lambda: [alone]), Ranks(lambda: group(1, "auto", DEVICE))

    def ask(name: str, ranks: Ranks, task: Callable[..., Row], *arguments: Any) -> Row | None:
        return part.measure(name, lambda: ranks.run(part.at_most(40), task, *arguments)[0])

    for name in TARGETS:
        ask(f"{name} is exact", single, exact, name)
    times = ask("projections, ms", single, projected, list(TARGETS))
    for name, (floor, limit) in TARGETS.items():
        if not SMALL:
            part.target(f"{name} ÷ {floor}", times and times[name] / times[floor], limit)
    passes = ask("norms, ms", single, normed)
    if passes and not SMALL:
        part.target("norms ÷ forward + backward", passes["norms"] / passes["forward + backward"], 1.6)
    for projection in ("factored", "sjlt", "rademacher"):
        found = ask(f"rows, {projection}", single, rows, projection)
        if projection == "factored" and not SMALL:
            part.target("rows of plain passes", found and found["of_plain"], 0.9, at_least=True)
    single.end()
    for label, training in {
        "plain steps": {},
        "clipped steps": {"dp_max_grad_norm": 1.0, "dp_noise_multiplier": 0.0},
        "private steps": {"dp_max_grad_norm": 1.0, "dp_noise_multiplier": 1.0},
    }.items():
        if label != "private steps" or find_spec("opacus"):  # it knows what the noise guarantees
            ask(label, member, private, shards, label, training)
    member.end()
    return part.finish(
        ["difference", "rows_per_s", "of_plain", "waits_rows", "waits_plain", "step_ms", "loss", "peak_gb"]
    )


if __name__ == "__main__":
    run(main)
