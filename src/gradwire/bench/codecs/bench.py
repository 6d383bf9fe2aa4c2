"""The command ``bench compressors``: how long every compressor takes, against what the memory allows.

The **floor** of a call is (bytes of the tensor + bytes of the wire) / copy bandwidth, even where an algorithm reads
more. The bandwidth is that of ``y.copy_(x)`` for a tensor of the same size, read and written bytes alike.

Times are medians of `torch.utils.benchmark.Timer`. On a CPU everything runs on one core and processor time is measured,
so that other processes do not count; freed memory stays with the process, so that page faults do not fall on random
calls (the copy has none). On CUDA a call ends when the GPU is done. Errors are measured on a gradient of the model
`tiny` that reads source code of Python's standard library as bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from gradwire import __version__
from gradwire.base.errors import FAULT, BadInput
from gradwire.base.extras import require
from gradwire.base.files import write_json
from gradwire.base.flags import ELEMENTS, POSITIVE, SEED, output_file
from gradwire.base.machine import installed, one_thread, processor
from gradwire.base.strict import Strict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gradwire.bench.codecs.cases import Case

SCHEMA_VERSION = 3
NUMEL = {"cpu": 2**22, "cuda": 2**26}
PACKAGES = ("torch", "numpy", "numba", "triton")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
BATCH, LENGTH = 8, 256  # of the sample gradient


class Options(Strict):
    """Flags of ``gradwire bench compressors``."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to run; auto: CUDA where there is one")
    numel: Annotated[int, ELEMENTS] | None = Field(
        None,
        description="elements of the timed tensor, a matrix as square as can be (rounded down to fill it); "
        "by default 2^22 on a CPU core, 2^26 on CUDA",
    )
    methods: tuple[str, ...] | None = Field(None, description="methods and chains to time; by default all")
    min_run_time: Annotated[float, POSITIVE] = Field(0.2, description="seconds of each measurement")
    seed: Annotated[int, SEED] = Field(0, description="of the timed tensor, the codes and the sample gradient")
    gradient: Path | None = Field(
        None, description="tensor saved by torch.save, whose relative error is shown; by default a gradient of tiny"
    )
    output: Annotated[Path, output_file] | None = Field(None, alias="json", description="file to write the results to")


def main(options: Options) -> int | None:
    """Measure, print the table and write the JSON.

    Raises:
        ModuleNotFoundError: If tabulate or transformers is not installed.
        BadInput: If a method is unknown, CUDA is missing, or the file has no gradient.
    """
    import torch

    from gradwire.bench.codecs.cases import cases

    require("gradwire bench compressors", "tabulate")
    chosen = cases(options.methods)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device cuda: torch {torch.__version__} sees no CUDA device here.")
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    with one_thread():
        matrices = sample_gradient(options.seed) if options.gradient is None else read_gradient(options.gradient)
    numel = options.numel or NUMEL[device.type]
    result = measure(chosen, device, numel, options.min_run_time, options.seed, matrices)
    result["gradient"] = "the model tiny" if options.gradient is None else str(options.gradient)
    if options.output:
        write_json(options.output, result)
    print(report(result))
    failed = [record["method"] for record in result["records"] if record["error"]]
    if failed:
        print(f"gradwire bench compressors: failed: {', '.join(failed)}", file=sys.stderr)
    return FAULT if failed else None


def measure(
    cases: Sequence[Case],
    device: torch.device,
    numel: int,
    min_run_time: float = 0.2,
    seed: int = 0,
    matrices: Sequence[Tensor] = (),
) -> dict[str, Any]:
    """Measure cases on a matrix of at most ``numel`` elements, and their errors on ``matrices``, if any."""
    import torch

    rows = math.isqrt(numel)
    generator = torch.Generator(device).manual_seed(seed)
    with one_thread(), kept_memory():
        x = torch.randn((rows, numel // rows), generator=generator, device=device)
        y = torch.empty_like(x)
        copy = milliseconds(lambda: y.copy_(x), device, min_run_time)
        bytes_per_s = 2e3 * x.nbytes / median(copy)
        on_device = [matrix.to(device) for matrix in matrices]
        records = [record_of(case, x, on_device, generator, min_run_time, bytes_per_s) for case in cases]
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe(device),
        "shape": list(x.shape),
        "seed": seed,
        "copy_ms": median(copy),
        "copy_bytes_per_s": bytes_per_s,
        "gradient_numel": sum(matrix.numel() for matrix in matrices),
        "records": records,
    }


def record_of(
    case: Case,
    x: Tensor,
    matrices: Sequence[Tensor],
    generator: torch.Generator,
    min_run_time: float,
    bytes_per_s: float,
) -> dict[str, Any]:
    """Measure a case; if it fails, its record has the reason, and the others are measured.

    Returns:
        Its name, options and form, the bytes and bits of the wire, peak memory of encoding beyond x (None if unknown),
        milliseconds of both calls with their multiples of the floor, and bits and relative error of the matrices (None
        if their values are too large for the wire).
    """
    import torch

    from gradwire.bench.codecs.cases import size

    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)
    record: dict[str, Any] = {"method": case.name, "options": case.options, "form": "", "error": None}

    def encode(x: Tensor = x) -> Any:
        return case.codec.encode(x, generator=generator, flag=flag)

    try:
        record["form"] = case.form(x.device)
        wire, shape = encode(), tuple(x.shape)
        case.codec.decode(wire, shape)  # compiles what it needs
        record |= {"wire_bytes": size(wire), "bits_per_element": 8 * size(wire) / x.numel()}
        record["encode_peak_bytes"] = peak_bytes(encode, x.device)
        for name, call in (("encode", encode), ("decode", lambda: case.codec.decode(wire, shape))):
            record[f"{name}_ms"] = milliseconds(call, x.device, min_run_time)
            floor = (x.nbytes + size(wire)) / bytes_per_s
            record[f"{name}_x_floor"] = median(record[f"{name}_ms"]) / 1e3 / floor
        flag.zero_()
        lost = total = sent = 0.0
        for matrix in matrices:
            coded = encode(matrix)
            lost += float((case.codec.decode(coded, tuple(matrix.shape)).double() - matrix.double()).square().sum())
            total += float(matrix.double().square().sum())
            sent += 8 * size(coded)
        if matrices:
            record["relative_error"] = None if flag.item() else math.sqrt(lost / total)
            record["gradient_bits_per_element"] = sent / sum(matrix.numel() for matrix in matrices)
    except Exception as error:
        record["error"] = f"{type(error).__name__}: {error}"
    return record


def milliseconds(call: Callable[[], object], device: torch.device, min_run_time: float) -> list[float]:
    """Time a call on one core of a CPU, or on CUDA."""
    from torch.utils.benchmark import Timer
    from torch.utils.benchmark.utils.timer import timer  # waits for the GPU

    clock = time.process_time if device.type == "cpu" else timer
    measured = Timer("call()", globals={"call": call}, timer=clock).blocked_autorange(min_run_time=min_run_time)
    return [1e3 * seconds for seconds in measured.times]


@contextmanager
def kept_memory() -> Iterator[None]:
    """Make glibc keep freed blocks of up to 32 MB; without glibc do nothing."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, 2**25)
    library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            library.mallopt(option, 2**17)  # the default
        library.malloc_trim(0)


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of ``action`` beyond the memory in use before, including its result.

    From the allocator on CUDA, from the resident set on Linux (in pages); None elsewhere.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before

    def read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    try:
        ctypes.CDLL(None).malloc_trim(0)  # gives freed memory back
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read("VmRSS:")
        action()
        return max(0, read("VmHWM:") - before)
    except (OSError, AttributeError):  # not Linux, not glibc, or not allowed
        return None


def sample_gradient(seed: int = 0) -> list[Tensor]:
    """Compute a gradient of the model `tiny`: its matrices."""
    import torch

    from gradwire.lm.models import causal

    text = bytearray(inspect.getsource(argparse)[: BATCH * LENGTH].encode())
    tokens = torch.frombuffer(text, dtype=torch.uint8)[: BATCH * LENGTH].long().view(BATCH, LENGTH)
    model = causal.build("tiny", 256, LENGTH, seed).eval()
    logits = model(input_ids=tokens).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None and p.ndim > 1]


def read_gradient(path: Path) -> list[Tensor]:
    """Read a gradient, as one matrix or vector.

    Raises:
        BadInput: If the file holds no finite, non-zero float tensor.
    """
    import torch

    try:
        values = torch.load(path, map_location="cpu", weights_only=True).detach()
    except Exception as error:  # torch raises many kinds for unreadable files
        raise BadInput(f"--gradient: {path} is no tensor that torch.load reads ({type(error).__name__}).") from None
    if not values.is_floating_point() or values.layout is not torch.strided:
        raise BadInput(f"--gradient: {path} holds {values.dtype} ({values.layout}); save a dense tensor of floats.")
    values = values.to(torch.float32)
    if not values.isfinite().all() or not values.any():
        raise BadInput(f"--gradient: {path} is empty, all zeros, or holds values that are not finite.")
    return [values.reshape(len(values), -1) if values.ndim > 1 else values.view(-1)]


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions."""
    import torch

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "kind": device.type,
        "cores": os.cpu_count(),
        "gradwire": __version__,
        "packages": {name: installed(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda if cuda else None,
    }


def report(result: dict[str, Any]) -> str:
    """Format the results: the machine, the table, and what failed."""
    from tabulate import tabulate

    environment, records = result["environment"], result["records"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["packages"].items() if number)
    where = "one core" if environment["kind"] == "cpu" else f"CUDA {environment['cuda']}"
    rows = [line(record) for record in records if not record["error"]]
    sides = ["left" if column in ("method", "options", "form") else "right" for column in (rows[0] if rows else ())]
    lines = [
        f"{environment['device']}, {where}",
        f"{versions}, Python {environment['python']}",
        f"float32 {result['shape']}, copied at {result['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written)",
        f"error: on {result['gradient_numel']:,} elements of a gradient of {result['gradient']}",
        "",
        tabulate(rows, headers="keys", tablefmt="pipe", colalign=sides, disable_numparse=True),
    ]
    return "\n".join(lines + [f"{record['method']}: {record['error']}" for record in records if record["error"]])


def line(record: dict[str, Any]) -> dict[str, str]:
    """Format a line of the table, by column."""
    peak, error = record["encode_peak_bytes"], record["relative_error"]
    return {
        "method": record["method"],
        "options": " ".join(f"{key}={value}" for key, value in record["options"].items()),
        "form": record["form"],
        "encode ms": f"{median(record['encode_ms']):.2f}",
        "decode ms": f"{median(record['decode_ms']):.2f}",
        "encode x floor": f"{record['encode_x_floor']:.2f}",
        "decode x floor": f"{record['decode_x_floor']:.2f}",
        "bits": f"{record['bits_per_element']:.3f}",
        "bits, gradient": f"{record['gradient_bits_per_element']:.3f}",
        "error": "too large" if error is None else f"{error:.4f}",
        "peak MB": "–" if peak is None else f"{peak / 1e6:.1f}",
    }
