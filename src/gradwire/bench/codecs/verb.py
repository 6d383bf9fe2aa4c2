"""The verb ``bench compressors``: how long every compressor takes, against what the memory allows.

A call's **floor** is (bytes that it cannot avoid to read + bytes that it cannot avoid to write) / copy bandwidth. The
bandwidth is that of ``y.copy_(x)`` for a tensor of the same size in the same run, read and written bytes alike. To
encode is to read x once and to write the wire, to decode is to read the wire and to write the tensor, even where an
algorithm needs more. Methods of matrix products count more passes, and their floor is the larger of this and
FLOPs / FLOPs per second of a square product (`cases.Case.work`).

Times are medians over rounds. In each round every case runs once, in a new random order, so that drift is shared;
compilation happens before. On a CPU everything runs on one core and processor time is measured, so that other processes
do not count; freed memory stays with the process, so that page faults do not fall on random calls (the copy has none).
On CUDA the time between two events is measured: before each call a buffer larger than the caches is overwritten, and
the GPU is kept busy until Python has submitted the call.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from gradwire import __version__
from gradwire.base.errors import FAULT, BadInput
from gradwire.base.extras import require
from gradwire.base.files import write_json
from gradwire.base.flags import COUNT, ELEMENTS, SEED, output_file
from gradwire.base.machine import installed, one_thread, processor
from gradwire.base.strict import Strict

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gradwire.bench.codecs.cases import Case


SCHEMA_VERSION = 2
NUMEL = {"cpu": 2**22, "cuda": 2**26}
PACKAGES = ("torch", "numpy", "numba", "triton")


class Options(Strict):
    """Flags of ``gradwire bench compressors``."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where to run; auto: CUDA where there is one")
    numel: Annotated[int, ELEMENTS] | None = Field(
        None,
        description="elements of the timed tensor, a matrix as square as can be (rounded down to fill it); "
        "by default 2^22 on a CPU core, 2^26 on CUDA",
    )
    methods: tuple[str, ...] | None = Field(
        None, description="methods and chains to time; by default all, and PyTorch's own"
    )
    repeats: Annotated[int, COUNT] = Field(15, description="rounds")
    seed: Annotated[int, SEED] = Field(0, description="of the timed tensor, the codes and the sample gradient")
    gradient: Path | None = Field(
        None,
        description="tensor saved by torch.save, whose relative error is shown; by default a small model's gradient",
    )
    output: Annotated[Path, output_file] | None = Field(None, alias="json", description="file to write the results to")


def main(options: Options) -> int | None:
    """Measure, print the table and write the JSON.

    Raises:
        ModuleNotFoundError: If tabulate is not installed.
    """
    require("gradwire bench compressors", "tabulate")
    result = bench(options.device, options.numel, options.methods, options.repeats, options.seed, options.gradient)
    if options.output:
        write_json(options.output, result)
    print(report(result))
    failed = [record["method"] for record in result["records"] if record["error"] and record["form"] != "torch"]
    if failed:
        print(f"gradwire bench compressors: failed: {', '.join(failed)}", file=sys.stderr)
    return FAULT if failed else None


def bench(
    device: str = "auto",
    numel: int | None = None,
    methods: Sequence[str] | None = None,
    repeats: int = 15,
    seed: int = 0,
    gradient: Path | None = None,
) -> dict[str, Any]:
    """Measure everything and return it as JSON; the arguments are the verb's flags.

    Raises:
        BadInput: For a missing device, an unknown name, or a file without a gradient.
    """
    from gradwire.bench.codecs.cases import cases

    timed = cases(methods)
    where = chosen_device(device)
    with one_thread():
        matrices = gradient_matrices(gradient, seed)
    result = times(timed, where, numel or NUMEL[where.type], repeats, seed, matrices)
    return {**result, "gradient": str(gradient) if gradient else "a byte-level language model"}


def times(
    timed: Sequence[Case], where: torch.device, numel: int, repeats: int, seed: int, matrices: Sequence[Tensor]
) -> dict[str, Any]:
    """Measure any cases on a matrix of at most ``numel`` elements, and their errors on ``matrices``, if any."""
    import torch

    from gradwire.bench.codecs.measure import judge, kept_memory, measure, prepare

    rows = math.isqrt(numel)
    shape = (rows, numel // rows)
    generator = torch.Generator(where).manual_seed(seed)
    with one_thread(), kept_memory():
        matrices = [matrix.to(where) for matrix in matrices]
        x = torch.randn(shape, generator=generator, device=where)
        records = [prepare(case, x, matrices, seed) for case in timed]
        running = [(case, record) for case, record in zip(timed, records, strict=True) if not record.error]
        speed = measure(running, x, repeats, seed)
        environment = describe(where)
    for case, record in running:
        judge(case, record, shape, speed)
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "shape": list(shape),
        "repeats": repeats,
        "seed": seed,
        "gradient_numel": sum(matrix.numel() for matrix in matrices),
        **speed._asdict(),
        "records": [asdict(record) for record in records],
    }


def chosen_device(name: str) -> torch.device:
    """The device selected by ``--device``.

    Raises:
        BadInput: If CUDA is requested but not available.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"--device cuda: torch {torch.__version__} sees no CUDA device here.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def gradient_matrices(path: Path | None, seed: int) -> list[Tensor]:
    """The gradient for relative errors, a matrix or vector per parameter.

    Raises:
        BadInput: If the file holds no finite, non-zero float tensor.
    """
    import torch

    from gradwire.bench.codecs.measure import sample_gradient

    if path is None:
        return list(sample_gradient(seed).values())
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for unreadable files
        raise BadInput(f"--gradient: {path} cannot be read by torch.load ({type(error).__name__}).") from None
    if not (isinstance(loaded, torch.Tensor) and loaded.is_floating_point() and loaded.layout is torch.strided):
        kind = f"a tensor of {loaded.dtype}" if isinstance(loaded, torch.Tensor) else f"a {type(loaded).__name__}"
        raise BadInput(f"--gradient: {path} holds {kind}, not a dense float tensor.")
    values = loaded.detach().to(torch.float32)
    if not values.isfinite().all() or not values.any():
        raise BadInput(f"--gradient: {path} is empty, all zeros, or holds values that are not finite.")
    return [values.reshape(len(values), -1) if values.ndim > 1 else values.view(-1)]


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
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
    """The results as text: the machine, the table, and what failed."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["packages"].items() if number)
    where = "one core" if environment["kind"] == "cpu" else f"CUDA {environment['cuda']}"
    rows, columns = result["shape"]
    lines = [
        f"{environment['device']}, {where}",
        f"{versions}, Python {environment['python']}",
        f"float32 [{rows}, {columns}], copied at {result['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written), "
        f"{result['product_flops_per_s'] / 1e9:.0f} GFLOP/s; medians of {result['repeats']} rounds",
        f"error: on {result['gradient_numel']:,} elements of the gradient of {result['gradient']}",
        "",
        table([line(record) for record in result["records"] if not record["error"]]),
    ]
    lines += [f"{record['method']}: {record['error']}" for record in result["records"] if record["error"]]
    return "\n".join(lines)


def line(record: dict[str, Any]) -> dict[str, str]:
    """One line of the table, by column."""
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


def table(rows: Sequence[dict[str, str]]) -> str:
    """Format rows as Markdown."""
    from tabulate import tabulate

    left = ("method", "options", "form")
    align = ["left" if column in left else "right" for column in (rows[0] if rows else ())]
    return tabulate(rows, headers="keys", tablefmt="pipe", colalign=align, disable_numparse=True)
