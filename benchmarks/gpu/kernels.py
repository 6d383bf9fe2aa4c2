"""The fused forms against the plain ones, byte for byte: ``python -m gpu.kernels``, or ``--sanitized`` for a few.

Every method with a CUDA form, with all options of the tests, and every chain: odd sizes, views that are not aligned or
not contiguous, values at the edges of float32, flags for NaN and infinity, 2^28 elements. Without a GPU Triton's
interpreter runs the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from gpu.part import DEVICE, SMALL, Part, Row, failed, run
from gpu.workers import Failed, each, lost

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from samples import CHAINS, METHODS, generator
from torch import Tensor

from gradwire.comm.compressors import build, kernels
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.sparse import Chain

SHAPES: list[Any] = [0, 1, 2, 3, 31, 255, 256, 257, 4095, 4096, 4097, 5003, 65_537, 1_000_003, 2**20]
SHAPES += [(1, 1), (7, 11), (64, 129), (1000, 1001)]
SMALL_SHAPES: list[Any] = [0, 1, 257, 5003, (64, 129)]
LARGE = 2**28 + 5
LARGE_BUILDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("int8", "fp8", "bf16", "onebit", "signsgd", "natural", "terngrad", "qsgd", "topk")),
    ("int8", {"num_bits": 4}),
    ("int8", {"rounding": "stochastic"}),
    ("threshold", {}),
    ("topk+int8", {}),
]
SLOW = ("topk", "threshold")  # to compile
SANITIZED = [("int8", {}), ("onebit", {}), ("topk", {}), ("natural", {}), ("terngrad", {"packing": "base3"})]


def title(name: str, options: dict[str, Any]) -> str:
    """A build's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def cuda_form(method: Any, device: torch.device) -> Any:
    """The CUDA form, also for CPU tensors: what `kernels.find` is replaced by without a GPU."""
    module = kernels.load("cuda", method.name)
    return module if module is not None and module.covers(method) else None


def fused(compressor: Compressor) -> bool:
    """Whether a CUDA kernel takes part."""
    parts = [compressor.sparsifier, compressor.quantizer] if isinstance(compressor, Chain) else [compressor]
    return any(cuda_form(part, torch.device("cuda")) for part in parts)


def inputs(few: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors with what they are called; ``few``: those that chains are tried with, whose members have seen all."""

    def normal(shape: Any, seed: int = 1) -> Tensor:
        return torch.randn(shape, generator=generator(seed)).to(DEVICE)

    for shape in SMALL_SHAPES if few else SHAPES:
        yield str(shape), normal(shape)
    for n in (5003,) if few else (5003, 8192, 100_003):
        for offset in (1, 3) if few else (1, 2, 3):
            yield f"{n} from element {offset} on", normal(n + 8)[offset : offset + n]
    yield "(129, 128) transposed", normal((128, 129)).t()
    yield "every second of 10,006", normal(10_006)[::2]
    yield "bfloat16 5003", normal(5003).bfloat16()
    plain = normal(5003, 2)
    yield "zeros", torch.zeros_like(plain)
    yield "equal magnitudes", plain.sign()
    yield "subnormal", plain * 1e-41
    yield "large", plain * 1e4
    yield "very large", plain.clamp(-3, 3) * 1e38


def differences(compressor: Compressor, label: str, x: Tensor) -> list[str]:
    """What of an encoding and its decoding is not as the plain form has it."""
    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)
    wire = compressor.encode(x, generator=generator(3, DEVICE), flag=flag)
    straight = x.to(torch.float32).contiguous()
    unfit = bool(compressor.not_representable(straight))
    if flag.item():
        return [] if unfit or label == "very large" else [f"{label}: flagged, though it fits"]
    plain = compressor.to_wire(straight.clone(), generator(3, DEVICE))
    if wire.shape != plain.shape:
        return [f"{label}: {wire.numel()} bytes instead of {plain.numel()}"]
    wrong = []
    if not torch.equal(wire, plain):
        places = (wire != plain).nonzero().view(-1)
        wrong.append(f"{label}: {len(places)} of {len(wire)} bytes differ, first at {int(places[0])}")
    shape = tuple(x.shape)
    expected = compressor.from_wire(plain.clone(), shape).view(shape)
    if not torch.equal(compressor.decode(plain, shape), expected):
        wrong.append(f"{label}: decoded numbers differ")
    elsewhere = torch.empty(len(plain) + 3, dtype=torch.uint8, device=x.device)
    for offset in (1, 3):  # a wire within a message
        elsewhere[offset : offset + len(plain)] = plain
        if not torch.equal(compressor.decode(elsewhere[offset : offset + len(plain)], shape), expected):
            wrong.append(f"{label}: decoded numbers differ where the wire is at byte {offset}")
    return wrong


def flags(compressor: Compressor) -> list[str]:
    """Values that are not finite and are not flagged."""
    wrong = []
    for value in (float("nan"), float("inf"), float("-inf")):
        for place in (0, 4097, 5002):
            x = torch.randn(5003, generator=generator(1)).to(DEVICE)
            x[place] = value
            flag = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
            compressor.encode(x, generator=generator(3, DEVICE), flag=flag)
            if not flag.item():
                wrong.append(f"{value} at {place} is not flagged")
    return wrong


def across(compressor: Compressor) -> list[str]:
    """Whether a CPU decodes what a GPU encoded."""
    x = torch.randn((64, 129), generator=generator(1)).to(DEVICE)
    wire = compressor.encode(x, generator=generator(3, DEVICE))
    here = compressor.decode(wire, (64, 129)).cpu()
    there = compressor.from_wire(wire.cpu(), (64, 129)).view(64, 129)
    close = torch.allclose(here, there, rtol=1e-6, atol=1e-6 * float(there.abs().max()))
    return [] if close else ["a CPU decodes other numbers"]


def choose_forms() -> None:
    """CUDA forms also without a GPU."""
    if DEVICE == "cpu":
        kernels.find = cuda_form


def check(_: None, name: str, options: dict[str, Any]) -> Row:
    """Compare one build on all inputs."""
    choose_forms()
    compressor = build(name, **options)
    wrong, compared = [], 0
    if fused(compressor):
        for label, x in inputs(SMALL or isinstance(compressor, Chain)):
            compared += 1
            try:
                wrong += differences(compressor, label, x)
            except Exception as error:
                if lost(str(error)):
                    raise
                wrong.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        wrong += flags(compressor)
    wrong += across(compressor)
    return {"form": "fused" if fused(compressor) else "plain", "inputs": compared, "wrong": wrong}


def large(_: None, name: str, options: dict[str, Any], n: int) -> Row:
    """Compare one build on a large tensor, a view that is not aligned."""
    choose_forms()
    compressor = build(name, **options)
    x = torch.randn(n + 1, generator=generator(5, DEVICE), device=DEVICE)[1:]
    wrong = differences(compressor, f"{n:,}", x)
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else None
    return {"form": "fused", "inputs": 1, "peak_gb": peak, "wrong": wrong}


def sanitized() -> int:
    """A few builds in this process, for compute-sanitizer."""
    choose_forms()
    failed = False
    for name, options in SANITIZED:
        compressor = build(name, **options)
        for label, x in (("5003", torch.randn(5003)), ("4096 from 1", torch.randn(4097)[1:])):
            wrong = differences(compressor, label, x.to(DEVICE))
            print(title(name, options), label, wrong or "ok", flush=True)
            failed |= bool(wrong)
    return int(failed)


def sanitizer(part: Part) -> None:
    """Run `sanitized` under compute-sanitizer, where it is installed."""
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if found is None or DEVICE == "cpu":
        print("compute-sanitizer: not found", flush=True)
        return

    def work() -> Row:
        command = [found, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "gpu.kernels"]
        try:
            done = subprocess.run([*command, "--sanitized"], capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            return {"outcome": "took more than 60 s"}
        tail = (done.stdout + done.stderr)[-1500:]
        return {"outcome": "ok"} if done.returncode == 0 else {"wrong": [f"exit code {done.returncode}: {tail}"]}

    part.measure("compute-sanitizer", work)


def compare(part: Part, jobs: dict[str, tuple[Any, ...]], workers: int, seconds: float) -> None:
    """Do the jobs that were not done before."""
    coming = {name: job for name, job in jobs.items() if part.row(name) is None}
    for name, found in each(coming, workers, seconds, lambda: part.left):
        part.record(name, {"error": str(found)} if isinstance(found, Failed) else found)
        coming.pop(name)
    for name in coming:
        part.skip(name)


def main() -> int:
    """Compare everything."""
    if "--sanitized" in sys.argv:
        return sanitized()
    part = Part("kernels")
    methods = [(name, options) for name, options in METHODS if not (SMALL and options)]
    chains = [("topk+int8", {}), ("threshold+onebit", {}), ("randomk+natural", {})] if SMALL else CHAINS
    n, large_builds = (100_003, LARGE_BUILDS[:2]) if SMALL else (LARGE, LARGE_BUILDS)
    workers = 2 if DEVICE == "cpu" else min(16, os.cpu_count() or 1)
    # Compiling takes most of the time: what needs one form of each kernel comes first, then what needs most of them.
    compare(part, {f"{title(*one)}, {n:,} elements": (large, *one, n) for one in large_builds}, min(3, workers), 40)
    sanitizer(part)
    methods.sort(key=lambda one: one[0] not in SLOW)
    compare(part, {title(*one): (check, *one) for one in methods}, workers, 90)
    compare(part, {title(*one): (check, *one) for one in chains}, workers, 60)
    right = sum(not failed(row) for row in part.rows)
    print(f"\n{right} of {len(part.rows)} as the plain forms have it")
    return part.finish(["form", "inputs", "peak_gb"])


if __name__ == "__main__":
    run(main)
