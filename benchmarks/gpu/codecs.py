"""Encoding and decoding against the memory's speed: ``python -m gpu.codecs``.

`gradwire bench compressors` at three sizes, the largest first: it has the targets. Then the 28 tensors of the model
`tiny` in one call, where launches and the host's time count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gpu.part import DEVICE, SMALL, Part, Row, run, synchronize
from gpu.torch_codecs import torch_cases
from gpu.workers import Ranks, alone

from gradwire.bench.codecs.bench import measure
from gradwire.bench.codecs.cases import CHAINS, VARIANTS, Case, cases
from gradwire.comm.compressors import build, registry
from gradwire.comm.compressors.segments import Segments
from gradwire.lm.models import causal

SIZES = (2**12, 2**14) if SMALL else (2**20, 2**24, 2**28)
DETERMINISTIC = ("int8", "onebit", "signsgd")
KERNELS = (*DETERMINISTIC, "qsgd")
TARGETS = {name: 1.3 if name in DETERMINISTIC else 1.6 for name in KERNELS}
OF_OPTIONS = {("rounding", "stochastic"): 1.6}  # targets in place of those
# Slow reference implementations that nobody runs at such sizes.
UNUSED = ("sketch", "gradiveq", "bins", "dcttopk", "hadamard")


def title(name: str, options: dict[str, Any]) -> str:
    """A build's name."""
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def timed_cases(numel: int) -> dict[str, Case]:
    """Timed cases of a size, by name: methods with kernels, PyTorch's operations, chains, and the other methods."""
    rest = [name for name in registry.available() if name not in KERNELS and (name not in UNUSED or numel < max(SIZES))]
    listed = [*cases(KERNELS), *torch_cases(), *cases(CHAINS), *cases(rest)]
    if SMALL:
        listed = [*cases(KERNELS[:2]), torch_cases()[0]]
    return {title(case.name, case.options): case for case in listed}


def timed(_: None, name: str, numel: int) -> Row:
    """Time one case."""
    seconds = 1e-3 if SMALL else 0.2
    result = measure([timed_cases(numel)[name]], torch.device(DEVICE), numel, seconds)
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


def targets(part: Part) -> None:
    """Hold the largest size against the targets."""
    for case in (case for name in TARGETS for case in cases([name])):
        limit = next((OF_OPTIONS[item] for item in case.options.items() if item in OF_OPTIONS), TARGETS[case.name])
        row = part.row(f"{max(SIZES):,} {title(case.name, case.options)}") or {}
        for which in ("encode", "decode"):
            part.target(f"{title(case.name, case.options)}, {which}, x floor", row.get(f"{which}_x_floor"), limit)


def main() -> int:
    """Time all cases; the tensors of `tiny` come after the largest size."""
    part = Part("codecs")
    worker = Ranks(lambda: [alone])

    def ask(name: str, task: Callable[..., Row], *arguments: Any) -> None:
        part.measure(name, lambda: worker.run(part.at_most(30), task, *arguments)[0], optional="torch" in name)

    builds = [(name, options) for name in (*KERNELS, "none") for options in ({}, *VARIANTS.get(name, []))]
    for numel in sorted(SIZES, reverse=True):
        for name in timed_cases(numel):
            ask(f"{numel:,} {name}", timed, name, numel)
        if numel == max(SIZES):
            for name, options in builds[: 2 if SMALL else None]:
                ask(f"tensors of tiny, {title(name, options)}", tensors_of_tiny, name, options)
    worker.end()
    if not SMALL:
        targets(part)
    columns = [f"{which}_{what}" for which in ("encode", "decode") for what in ("ms", "x_floor", "host_ms")]
    return part.finish(["form", *columns, "peak_mb"])


if __name__ == "__main__":
    run(main)
