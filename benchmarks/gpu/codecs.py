"""The CUDA forms against the plain ones, byte for byte, then against the memory's speed: ``python -m gpu.codecs``.

Every method with a CUDA form, with the options of the tests: odd sizes, views that are not aligned or not contiguous,
values at the edges of float32, flags for NaN and infinity, 2^28 elements. Then `gradwire bench compressors` at three
sizes, some plain forms under ``torch.compile``, and the 28 tensors of the model `tiny` in one call, where launches and
the host's time count. Without a GPU Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from gpu.part import DEVICE, SMALL, Part, Row, run
from gpu.workers import Failed, Ranks, alone, each, lost

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from samples import METHODS, generator
from torch import Tensor

from gradwire.bench.codecs.cases import CHAINS, VARIANTS, Case, cases, torch_cases
from gradwire.bench.codecs.verb import times
from gradwire.comm.compressors import build, kernels, registry
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.segments import Segments
from gradwire.lm.models import causal

SHAPES: list[Any] = [0, 1, 2, 31, 255, 256, 257, 4095, 4097, 5003, 65_537, 1_000_003, (1, 1), (7, 11), (1000, 1001)]
SMALL_SHAPES: list[Any] = [0, 1, 257, 5003, (64, 129)]
SIZES = (2**12, 2**14) if SMALL else (2**20, 2**24, 2**28)
REPEATS = {2**20: 25, 2**24: 15, 2**28: 7}
DETERMINISTIC = ("int8", "fp8", "onebit", "signsgd")
FUSED = (*DETERMINISTIC, "natural", "terngrad", "qsgd")
TARGETS = {name: 1.3 if name in DETERMINISTIC else 1.6 for name in FUSED}
BIT_BY_BIT = 2**20  # most elements for Elias codes, which are written on the host


def title(name: str, options: dict[str, Any]) -> str:
    """A build's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def cuda_form(method: Any, device: torch.device | None = None) -> kernels.Kernel:
    """The CUDA form, also for CPU tensors: what `kernels.find` is replaced by without a GPU."""
    kernel = kernels.load("cuda", method.name)
    return kernel if kernel.covers(method) else kernels.PLAIN


def chosen(name: str, options: dict[str, Any]) -> Compressor:
    """A build whose CUDA form is used also without a GPU."""
    if DEVICE == "cpu":
        kernels.find = cuda_form
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
    plain = normal(5003, 2)
    yield "zeros", torch.zeros_like(plain)
    yield "equal magnitudes", plain.sign()
    yield "subnormal", plain * 1e-41
    yield "very large", plain.clamp(-3, 3) * 1e38


def differences(compressor: Compressor, label: str, x: Tensor) -> list[str]:
    """What of an encoding and its decoding is not as the plain form has it."""
    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)
    wire = compressor.encode(x, generator=generator(3, DEVICE), flag=flag)
    straight = x.to(torch.float32).contiguous()
    if flag.item():
        unfit = bool(compressor.not_representable(straight))
        return [] if unfit or label == "very large" else [f"{label}: flagged, though it fits"]
    plain = compressor.to_wire(straight.clone(), generator(3, DEVICE))
    if not torch.equal(wire, plain):
        return [f"{label}: {int((wire != plain).sum())} of {len(plain)} bytes differ"]
    expected = compressor.from_wire(plain.clone(), tuple(x.shape)).view(x.shape)
    elsewhere = torch.empty(len(plain) + 1, dtype=torch.uint8, device=x.device)
    elsewhere[1:] = plain  # an encoding at an odd byte of a message
    same = (torch.equal(compressor.decode(bytes_, tuple(x.shape)), expected) for bytes_ in (plain, elsewhere[1:]))
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
    """Compare every build with a CUDA form, several at a time: compiling takes most of it."""
    builds = [(name, options) for name, options in METHODS if cuda_form(build(name, **options)) is not kernels.PLAIN]
    builds = [(name, options) for name, options in builds if not (SMALL and options)]
    n = 100_003 if SMALL else 2**28 + 5
    jobs: dict[str, tuple[Any, ...]] = {f"bytes, {title(*build_)}": (check, *build_) for build_ in builds}
    jobs |= {f"bytes, {name}, {n:,} elements": (large, name, {}, n) for name in FUSED[: 1 if SMALL else None]}
    jobs = {name: job for name, job in jobs.items() if part.row(name) is None}
    for name, result in each(jobs, 2 if DEVICE == "cpu" else 8, 90, lambda: part.left):
        part.record(name, {"error": str(result)} if isinstance(result, Failed) else result)


class Compiled:
    """A method's plain form under ``torch.compile``, without the check for values that are not finite."""

    def __init__(self, method: Compressor) -> None:
        options: dict[str, Any] = {"dynamic": False, "backend": "eager" if SMALL else "inductor"}
        self._encode, self._decode = (torch.compile(form, **options) for form in (method.to_wire, method.from_wire))

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Tensor:
        """`to_wire`."""
        return self._encode(x, None)

    def decode(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire`."""
        return self._decode(wire, shape)


def timed_cases(numel: int) -> dict[str, Callable[[], Case]]:
    """What is timed at a size, by name: methods, PyTorch's own operations, chains, and compiled plain forms."""
    methods = [*FUSED, *(name for name in registry.available() if name not in FUSED)]
    listed = [case for name in methods[: 2 if SMALL else None] for case in cases([name])]
    listed += [*torch_cases(), *cases(CHAINS)][: 1 if SMALL else None]
    made: dict[str, Callable[[], Case]] = {
        title(case.name, case.options): lambda case=case: case
        for case in listed
        if numel <= BIT_BY_BIT or case.options.get("coding") != "elias"
    }
    names = ("int8",) if SMALL else DETERMINISTIC if numel == max(SIZES) else ()
    for name in names:
        made[f"torch.compile {name}"] = lambda name=name: Case(f"torch.compile {name}", Compiled(build(name)))
    return made


def timed(_: None, name: str, numel: int) -> Row:
    """Time one case."""
    result = times([timed_cases(numel)[name]()], torch.device(DEVICE), numel, 2 if SMALL else REPEATS[numel], 0, [])
    (record,) = result["records"]
    if record["error"]:
        raise RuntimeError(record["error"])
    return {
        "form": record["form"],
        "encode_ms": median(record["encode_ms"]),
        "decode_ms": median(record["decode_ms"]),
        "encode_x_floor": record["encode_x_floor"],
        "decode_x_floor": record["decode_x_floor"],
        "peak_mb": (record["encode_peak_bytes"] or 0) / 1e6,
    }


def tensors_of_tiny(_: None, name: str, options: dict[str, Any]) -> Row:
    """Milliseconds to encode and to decode the 28 tensors of `tiny` in one call, and the host's share of it."""
    compressor, where = build(name, **options), torch.device(DEVICE)
    shapes = [tuple(p.shape) for p in causal.build("tiny", 2048, 256, 0).parameters()]
    starts = torch.tensor([0, *map(torch.Size.numel, map(torch.Size, shapes))]).cumsum(0).tolist()
    segments = Segments.of(compressor, zip(starts, shapes, strict=False))
    values = torch.randn(starts[-1], device=where)
    drawn = [torch.Generator(where).manual_seed(seed) for seed in range(len(shapes))]
    flags, out = torch.zeros(len(shapes), dtype=torch.uint8, device=where), torch.zeros_like(values)
    wire, placed = compressor.encode_many(values, segments, generators=drawn, flags=flags)
    room = wire.clone() if segments.fixed else None
    calls = {
        "encode": lambda: compressor.encode_many(values, segments, room, generators=drawn, flags=flags),
        "decode": lambda: compressor.decode_add(wire, placed, out),
    }
    measured: Row = {"tensors": len(shapes)}
    for which, call in calls.items():
        host, whole = [], []
        for _turn in range(2 if SMALL else 30):
            synchronize()
            began = time.perf_counter()
            call()
            host.append(time.perf_counter() - began)
            synchronize()
            whole.append(time.perf_counter() - began)
        measured |= {f"{which}_ms": 1e3 * median(whole), f"{which}_host_ms": 1e3 * median(host)}
    return measured


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def targets(part: Part) -> None:
    """Hold the largest size against the targets."""
    for case in (case for name in TARGETS for case in cases([name])):
        if case.options in ({"means": "column"}, {"coding": "elias"}):
            continue
        limit = 1.6 if case.options.get("rounding") == "stochastic" else TARGETS[case.name]
        row = part.row(f"{max(SIZES):,} {title(case.name, case.options)}") or {}
        for which in ("encode", "decode"):
            part.target(f"{title(case.name, case.options)}, {which}, x floor", row.get(f"{which}_x_floor"), limit)


def main() -> int:
    """Compare, then time, the largest size first: it has the targets."""
    part = Part("codecs")
    compare(part)
    worker = Ranks(lambda: [alone])

    def ask(name: str, seconds: float, task: Callable[..., Row], *arguments: Any) -> None:
        optional = "torch" in name
        part.measure(name, lambda: worker.run(part.at_most(seconds), task, *arguments)[0], optional=optional)

    for numel in sorted(SIZES, reverse=True):
        for name in timed_cases(numel):
            ask(f"{numel:,} {name}", 60 if "compile" in name else 45, timed, name, numel)
    builds = [(name, options) for name in (*FUSED, "topk", "none") for options in ({}, *VARIANTS.get(name, []))]
    for name, options in builds[: 2 if SMALL else None]:
        ask(f"tensors of tiny, {title(name, options)}", 30, tensors_of_tiny, name, options)
    worker.end()
    if not SMALL:
        targets(part)
    columns = [f"{which}_{what}" for which in ("encode", "decode") for what in ("ms", "x_floor", "host_ms")]
    return part.finish(["form", "inputs", *columns, "peak_mb"])


if __name__ == "__main__":
    run(main)
