"""The CUDA kernels against the reference implementations, byte for byte: ``python -m gpu.bytes``.

Every method with a CUDA kernel, with the options of the tests: odd sizes, views that are not aligned or not contiguous,
values at the edges of float32, flags for NaN and infinity, 2^28 elements. Without a GPU Triton's interpreter runs the
kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from gpu.part import DEVICE, SMALL, Part, Row, run
from gpu.workers import Failed, each, lost

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from samples import METHODS, generator
from torch import Tensor

from gradwire.comm.compressors import build, kernels
from gradwire.comm.compressors.base import Compressor

SHAPES: list[Any] = [0, 1, 2, 31, 255, 256, 257, 4095, 4097, 5003, 65_537, 1_000_003, (1, 1), (7, 11), (1000, 1001)]
SMALL_SHAPES: list[Any] = [0, 1, 257, 5003, (64, 129)]
KERNELS = ("int8", "onebit", "signsgd", "qsgd")


def title(name: str, options: dict[str, Any]) -> str:
    """A build's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def cuda_kernel(method: Any, device: torch.device | None = None) -> kernels.Kernel:
    """The CUDA kernel, also for CPU tensors: what `kernels.find` is replaced by without a GPU."""
    kernel = kernels.load("cuda", method.name)
    return kernel if kernel.covers(method) else kernels.REFERENCE


def chosen(name: str, options: dict[str, Any]) -> Compressor:
    """A build whose CUDA kernel is used also without a GPU."""
    if DEVICE == "cpu":
        kernels.find = cuda_kernel
    return build(name, **options)


def inputs() -> Iterator[tuple[str, Tensor]]:
    """Tensors with what they are called."""

    def normal(shape: Any, seed: int = 1) -> Tensor:
        return torch.randn(shape, generator=generator(seed)).to(DEVICE)

    for shape in SMALL_SHAPES if SMALL else SHAPES:
        yield str(shape), normal(shape)
    for offset in (1, 2, 3):
        yield f"5003 from element {offset} on", normal(5011)[offset : offset + 5003]
    yield "(129, 128) transposed", normal((128, 129)).t()
    yield "every second of 10,006", normal(10_006)[::2]
    yield "bfloat16 5003", normal(5003).bfloat16()
    values = normal(5003, 2)
    yield "zeros", torch.zeros_like(values)
    yield "equal magnitudes", values.sign()
    yield "subnormal", values * 1e-41
    yield "very large", values.clamp(-3, 3) * 1e38


def differences(compressor: Compressor, label: str, x: Tensor) -> list[str]:
    """Differences of an encoding and its decoding from the reference implementation."""
    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)
    wire = compressor.encode(x, generator=generator(3, DEVICE), flag=flag)
    straight = x.to(torch.float32).contiguous()
    if flag.item():
        unfit = bool(compressor.not_representable(straight))
        return [] if unfit or label == "very large" else [f"{label}: flagged, though it fits"]
    reference = compressor.to_wire(straight.clone(), generator(3, DEVICE))
    if not torch.equal(wire, reference):
        return [f"{label}: {int((wire != reference).sum())} of {len(reference)} bytes differ"]
    expected = compressor.from_wire(reference.clone(), tuple(x.shape)).view(x.shape)
    elsewhere = torch.empty(len(reference) + 1, dtype=torch.uint8, device=x.device)
    elsewhere[1:] = reference  # an encoding at an odd byte of a message
    same = (torch.equal(compressor.decode(bytes_, tuple(x.shape)), expected) for bytes_ in (reference, elsewhere[1:]))
    return [] if all(same) else [f"{label}: decoded numbers differ"]


def unflagged(compressor: Compressor) -> list[str]:
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


def check(_: None, name: str, options: dict[str, Any]) -> Row:
    """Compare one build on all inputs, and with what a CPU decodes."""
    compressor = chosen(name, options)
    wrong, compared = unflagged(compressor), 0
    for label, x in inputs():
        compared += 1
        try:
            wrong += differences(compressor, label, x)
        except Exception as error:
            if lost(str(error)):
                raise
            wrong.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
    x = torch.randn((64, 129), generator=generator(1)).to(DEVICE)
    wire = compressor.encode(x, generator=generator(3, DEVICE))
    if not torch.allclose(
        compressor.decode(wire, (64, 129)).cpu(), compressor.from_wire(wire.cpu(), (64, 129)).view(64, 129)
    ):
        wrong.append("a CPU decodes other numbers")
    return {"inputs": compared, "wrong": wrong}


def large(_: None, name: str, options: dict[str, Any], n: int) -> Row:
    """Compare one build on a large tensor, a view that is not aligned."""
    compressor = chosen(name, options)
    x = torch.randn(n + 1, generator=generator(5, DEVICE), device=DEVICE)[1:]
    return {"inputs": 1, "wrong": differences(compressor, f"{n:,}", x)}


def compare(part: Part) -> None:
    """Compare every build with a CUDA kernel, several at a time: compiling takes most of it."""
    builds = [
        (name, options) for name, options in METHODS if cuda_kernel(build(name, **options)) is not kernels.REFERENCE
    ]
    builds = [(name, options) for name, options in builds if not (SMALL and options)]
    n = 100_003 if SMALL else 2**28 + 5
    jobs: dict[str, tuple[Any, ...]] = {f"bytes, {title(*build_)}": (check, *build_) for build_ in builds}
    largest: list[tuple[str, dict[str, str]]] = [(name, {}) for name in KERNELS][: 1 if SMALL else None]
    jobs |= {f"bytes, {title(*build_)}, {n:,} elements": (large, *build_, n) for build_ in largest}
    jobs = {name: job for name, job in jobs.items() if part.row(name) is None}
    for name, result in each(jobs, 2 if DEVICE == "cpu" else 8, 90, lambda: part.left):
        part.record(name, {"error": str(result)} if isinstance(result, Failed) else result)


def main() -> int:
    """Compare every build."""
    part = Part("bytes")
    compare(part)
    return part.finish(["inputs"])


if __name__ == "__main__":
    run(main)
