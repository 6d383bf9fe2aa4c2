"""Encoding and decoding against the memory's speed: ``python -m gpu.codecs``.

`gradwire bench compressors` at three sizes, beside the plain forms of some methods under ``torch.compile``; and the 28
tensors of the model `tiny`, where launches and the host's time count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from gpu.part import DEVICE, SMALL, Part, Row, run
from gpu.workers import Ranks, alone
from torch import Tensor

from gradwire.bench.codecs.cases import CHAINS, VARIANTS, Case, cases, torch_cases
from gradwire.bench.codecs.verb import times
from gradwire.comm.compressors import build, registry
from gradwire.comm.compressors.base import Compressor

SIZES = (2**12, 2**14) if SMALL else (2**20, 2**24, 2**28)
REPEATS = {2**20: 25, 2**24: 15, 2**28: 7}
FIRST = ("int8", "onebit", "signsgd", "fp8", "natural", "terngrad", "qsgd", "topk", "threshold")  # have targets
COMPILED = ("int8", "onebit", "signsgd")
OPTIONS: dict[str, Any] = {"dynamic": False, "backend": "eager" if SMALL else "inductor"}  # of torch.compile
TARGETS = {
    **dict.fromkeys(("int8", "fp8", "signsgd", "onebit"), 1.3),
    **dict.fromkeys(("natural", "terngrad", "qsgd"), 1.6),
    **dict.fromkeys(("topk", "threshold"), 4.0),
}
CODED_BIT_BY_BIT = 2**20  # most elements for Elias codes, which have no CUDA form
UNTARGETED = ({"means": "column"}, {"coding": "elias"})
TINY = [(2048, 128), (256, 128)]  # the shapes of `tiny` with 2,048 tokens and 256 positions: 28 tensors
for _ in range(2):
    TINY += [(128,), (128,), (128, 384), (384,), (128, 128), (128,)]
    TINY += [(128,), (128,), (128, 512), (512,), (512, 128), (128,)]
TINY += [(128,), (128,)]


@dataclass
class Compiled:
    """A method's plain form under ``torch.compile``, without the check for values that are not finite.

    At a small size nothing is compiled: it is to try this script.
    """

    method: Compressor
    done: dict[str, Callable[..., Tensor]] = field(default_factory=dict)

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Tensor:
        """`to_wire`."""
        if "encode" not in self.done:
            self.done["encode"] = torch.compile(lambda y: self.method.to_wire(y, None), **OPTIONS)
        return self.done["encode"](x)

    def decode(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire`."""
        if "decode" not in self.done:
            self.done["decode"] = torch.compile(lambda bytes_: self.method.from_wire(bytes_, shape), **OPTIONS)
        return self.done["decode"](wire)


def groups(numel: int) -> dict[str, Callable[[], list[Case]]]:
    """What is timed at a size, by name, each by itself so that it fails by itself: methods, PyTorch's own, chains."""
    methods = [*FIRST, *(name for name in registry.available() if name not in FIRST)]
    own = [case for name in (methods[:3] if SMALL else methods) for case in cases([name])]
    others = [*torch_cases()[: 1 if SMALL else None], *cases(CHAINS[: 1 if SMALL else None])]
    found = [case for case in own if numel <= CODED_BIT_BY_BIT or case.options.get("coding") != "elias"]
    return {title(case.name, case.options): lambda case=case: [case] for case in [*found, *others]}


def title(name: str, options: dict[str, Any]) -> str:
    """What a case is called."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def compiled() -> dict[str, Callable[[], list[Case]]]:
    """The plain forms under ``torch.compile``, by name."""
    names = COMPILED[:1] if SMALL else COMPILED
    return {
        f"torch.compile: {name}": lambda name=name: [Case(f"torch.compile: {name}", Compiled(build(name)))]
        for name in names
    }


def timed(_: None, name: str, numel: int) -> Row:
    """`times` of a group, and how many kernels each call launches."""
    where = torch.device(DEVICE)
    found = (groups(numel) | compiled())[name]()
    result = times(found, where, numel, 2 if SMALL else REPEATS[numel], 0, [])
    lines = []
    for case, record in zip(found, result["records"], strict=True):
        line: Row = {"method": title(case.name, case.options)}
        if record["error"]:
            lines.append(line | {"error": record["error"][:500]})
            continue
        line |= {
            "form": record["form"],
            "encode_ms": median(record["encode_ms"]),
            "decode_ms": median(record["decode_ms"]),
            "encode_x_floor": record["encode_x_floor"],
            "decode_x_floor": record["decode_x_floor"],
            "bits": record["bits_per_element"],
            "peak_mb": (record["encode_peak_bytes"] or 0) / 1e6,
        } | launches_of(case, result["shape"])
        lines.append(line)
    wrong = [line["error"] for line in lines if "error" in line and not line["method"].startswith("torch")]
    return {"copy_gb_per_s": result["copy_bytes_per_s"] / 1e9, "lines": lines, "wrong": wrong}


def launches_of(case: Case, shape: list[int]) -> Row:
    """Launches of a case's calls."""
    if DEVICE == "cpu":
        return {}
    x, flag = torch.randn(shape, device=DEVICE), torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    wire = case.codec.encode(x, generator=generator, flag=flag)
    return {
        "launches": launches(lambda: case.codec.encode(x, generator=generator, flag=flag)),
        "decode_launches": launches(lambda: case.codec.decode(wire, tuple(shape))),
    }


def launches(action: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills that an action starts on the GPU; None without one."""
    if DEVICE == "cpu":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events())


def tensors_of_tiny(_: None, name: str, options: dict[str, Any]) -> Row:
    """Milliseconds to encode and to decode 28 tensors, and the host's share of it."""
    where = torch.device(DEVICE)
    compressor = build(name, **options)
    generator = torch.Generator(where).manual_seed(0)
    gradients = [torch.randn(shape, generator=generator, device=where) for shape in TINY]
    flag = torch.zeros(1, dtype=torch.uint8, device=where)

    def encode() -> list[Tensor]:
        return [compressor.encode(gradient, generator=generator, flag=flag) for gradient in gradients]

    def decode() -> list[Tensor]:
        return [compressor.decode(wire, tuple(gradient.shape)) for wire, gradient in zip(wires, gradients, strict=True)]

    wires = encode()
    decode()
    rounds = 2 if SMALL else 30
    found: Row = {}
    for which, action in (("encode", encode), ("decode", decode)):
        host, whole = [], []
        for _turn in range(rounds):
            synchronize()
            began = time.perf_counter()
            action()
            host.append(time.perf_counter() - began)
            synchronize()
            whole.append(time.perf_counter() - began)
        found[f"{which}_ms"] = 1e3 * median(whole)
        found[f"{which}_host_us_per_call"] = 1e6 * median(host) / len(TINY)
        found[f"{which}_launches"] = launches(action)
    return found


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def targets(part: Part) -> None:
    """Hold the largest size against the targets."""
    for row in part.rows:
        if "lines" not in row or not row["name"].startswith(f"{SIZES[-1]:,} "):
            continue
        for line in row["lines"]:
            name, *words = line["method"].split()
            limit = 1.6 if "rounding=stochastic" in words else TARGETS.get(name)
            if limit is None or any(f"{key}={value}" in words for one in UNTARGETED for key, value in one.items()):
                continue
            for which in ("encode", "decode"):
                part.target(f"{line['method']}, {which}, × floor", line.get(f"{which}_x_floor"), limit)


def main() -> int:
    """Time everything, the largest size first: it has the targets."""
    part = Part("codecs")
    assert len(TINY) == 28
    worker = Ranks(lambda: [alone])

    def ask(name: str, seconds: float, task: Callable[..., Row], *arguments: Any) -> None:
        def work() -> Row:
            return worker.run(part.at_most(seconds), task, *arguments)[0]

        part.measure(name, work, optional="torch" in name)

    builds = [(name, options) for name in FIRST for options in ({}, *VARIANTS.get(name, []))]
    builds = builds[:2] if SMALL else [*builds, ("none", {}), ("topk+int8", {})]
    largest = max(SIZES)
    for numel in sorted(SIZES, reverse=True):
        for name in groups(numel):
            ask(f"{numel:,} {name}", 45, timed, name, numel)
        if numel == largest:
            for name, options in builds:
                ask(f"28 tensors of tiny, {title(name, options)}", 30, tensors_of_tiny, name, options)
    for name in compiled():
        ask(f"{largest:,} {name}", 60, timed, name, largest)
    worker.end()
    if not SMALL:
        targets(part)
    flat = [{"elements": row["name"].split()[0], **line} for row in part.rows for line in row.get("lines", [])]
    show(flat)
    return part.finish(
        [f"{way}_{what}" for way in ("encode", "decode") for what in ("ms", "host_us_per_call", "launches")]
    )


def show(lines: list[Row]) -> None:
    """Print the lines of all sizes as a table."""
    from gpu.part import short, table

    print("\n" + table([{key: short(value) for key, value in line.items()} for line in lines]))


if __name__ == "__main__":
    run(main)
