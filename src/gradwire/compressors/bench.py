"""The verb ``bench compressors``: how long every compressor takes, against what the memory allows.

A call's **floor** is (bytes that it cannot avoid to read + bytes that it cannot avoid to write) / copy bandwidth. The
bandwidth is that of ``y.copy_(x)`` for a tensor of the same size in the same run, read and written bytes alike. To
encode is to read x once and to write the wire, to decode is to read the wire and to write the tensor, even where an
algorithm needs more. Methods of matrix products count more passes, and their floor is the larger of this and
FLOPs / FLOPs per second of a square product (`bench_cases.Case.work` says what is counted).

Times are medians over rounds. In each round every case runs once, in a new random order, so that drift is shared;
compilation happens before. On a CPU everything runs on one core and processor time is measured, so that other processes
do not count; freed memory stays with the process, so that page faults do not fall on random calls (the copy has none).
On CUDA the time between two events is measured: before each call a buffer larger than the caches is overwritten, and
the GPU is kept busy until Python has submitted the call.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gradwire import __version__
from gradwire.errors import FAULT, BadInput
from gradwire.files import write_json
from gradwire.flags import COUNT, ELEMENTS, SEED, output_file
from gradwire.machine import installed, processor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gradwire.compressors.bench_cases import Case, Target, Work

T = TypeVar("T")

SCHEMA_VERSION = 1
NUMEL = {"cpu": 2**22, "cuda": 2**26}
PACKAGES = ("torch", "numpy", "numba", "triton")
COPIES = 5  # in a round
PRODUCT = 1024  # rows of the square product that measures FLOPs per second
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
FLUSH = 2**28  # bytes, more than the caches of any GPU of today
AHEAD = 4_000_000  # GPU cycles, about 2 ms: the GPU waits while Python prepares the call that is timed


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to run; auto: CUDA where there is one"
    )
    parser.add_argument(
        "--numel",
        type=ELEMENTS,
        help="elements of the timed tensor, a matrix as square as can be (rounded down to fill it); "
        "by default 2^22 on a CPU core, 2^26 on CUDA",
    )
    parser.add_argument("--methods", nargs="+", help="methods and chains to time; by default all, and PyTorch's own")
    parser.add_argument("--repeats", type=COUNT, default=15, help="rounds")
    parser.add_argument("--seed", type=SEED, default=0, help="of the timed tensor, the codes and the sample gradient")
    parser.add_argument(
        "--gradient",
        type=Path,
        help="tensor saved by torch.save, whose relative error is shown; by default a small model's gradient",
    )
    parser.add_argument("--json", type=output_file, help="file to write the results to")


def main(args: Namespace) -> int | None:
    """Measure, print the table and write the JSON."""
    result = bench(args.device, args.numel, args.methods, args.repeats, args.seed, args.gradient)
    if args.json:
        write_json(args.json, result)
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
    from gradwire.compressors.bench_cases import cases

    found = cases(methods)
    where = chosen_device(device)
    with one_thread():
        matrices = gradient_matrices(gradient, seed)
    result = times(found, where, numel or NUMEL[where.type], repeats, seed, matrices)
    return {**result, "gradient": str(gradient) if gradient else "a byte-level language model"}


def times(
    found: Sequence[Case], where: torch.device, numel: int, repeats: int, seed: int, matrices: Sequence[Tensor]
) -> dict[str, Any]:
    """Measure any cases on a matrix of at most ``numel`` elements, and their errors on ``matrices``, if any."""
    import torch

    rows = math.isqrt(numel)
    shape = (rows, numel // rows)
    generator = torch.Generator(where).manual_seed(seed)
    with one_thread(), kept_memory():
        matrices = [matrix.to(where) for matrix in matrices]
        x = torch.randn(shape, generator=generator, device=where)
        records = [prepare(case, x, matrices, seed) for case in found]
        running = [(case, record) for case, record in zip(found, records, strict=True) if not record.error]
        speed = measure(running, x, repeats, seed)
        environment = describe(where)
    for case, record in running:
        large = numel >= NUMEL[where.type]  # the targets are for large tensors
        judge(case, record, shape, speed, case.target(where.type) if large else None)
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's own operations on one core, like the fused forms."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Make glibc keep freed blocks of up to 32 MB; without glibc do nothing."""
    import ctypes

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


def gradient_matrices(path: Path | None, seed: int) -> list[Tensor]:
    """The gradient for relative errors, a matrix or vector per parameter.

    Raises:
        BadInput: If the file holds no finite, non-zero float tensor.
    """
    import torch

    from gradwire.compressors.sample_gradient import sample_gradient

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


@dataclass
class Record:
    """Measurements of one case.

    Args:
        method: Its name.
        options: Options that are not defaults.
        form: The implementation (`bench_cases.Case.form`).
        error: Why it failed, or None.
        wire_bytes: Size of the timed tensor's encoding.
        bits_per_element: The same, per element.
        gradient_bits_per_element: The same for the real gradient.
        relative_error: Of the real gradient; None if its values are too large for the wire.
        encode_peak_bytes: Memory of encoding beyond x, including the wire; None if unknown.
        encode_ms: Milliseconds of each round; also ``decode_ms``.
        encode_floor: The bytes of the floor; also ``decode_floor``.
        encode_x_floor: Median time as a multiple of the floor; also ``decode_x_floor``.
        encode_x_kept: The same as a multiple of copying only what is sent, if that is chosen without reading x.
        target: The largest acceptable multiples, as (encode, decode).
        met: Whether both are met.
    """

    method: str
    options: dict[str, Any]
    form: str = ""
    error: str | None = None
    wire_bytes: int = 0
    bits_per_element: float = 0
    gradient_bits_per_element: float = 0
    relative_error: float | None = None
    encode_peak_bytes: int | None = None
    encode_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    encode_floor: str = ""
    decode_floor: str = ""
    encode_x_floor: float | None = None
    decode_x_floor: float | None = None
    encode_x_kept: float | None = None
    target: tuple[float, float] | None = None
    met: bool | None = None


def prepare(case: Case, x: Tensor, matrices: Sequence[Tensor], seed: int) -> Record:
    """Compile a case's code and measure everything but time: bytes, memory, the error on the gradient.

    If a case fails, its record has the reason, and the others are measured.
    """
    import torch

    from gradwire.compressors.bench_cases import size

    record = Record(case.name, case.options)
    generator = torch.Generator(x.device).manual_seed(seed)
    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)

    def encode() -> Any:
        return case.codec.encode(x, generator=generator, flag=flag)

    try:
        record.form = case.form(x.device)
        for _ in range(2):
            wire = encode()
            case.codec.decode(wire, tuple(x.shape))
        record.wire_bytes = size(wire)
        record.bits_per_element = 8 * record.wire_bytes / x.numel()
        del wire
        record.encode_peak_bytes = peak_bytes(encode, x.device)
        if matrices:
            on_gradient(case, record, matrices, generator)
    except Exception as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def on_gradient(case: Case, record: Record, matrices: Sequence[Tensor], generator: torch.Generator) -> None:
    """Measure ||g - decode(encode(g))|| / ||g|| and the bits per element, each parameter encoded alone."""
    import torch

    from gradwire.compressors.bench_cases import size

    flag = torch.zeros(1, dtype=torch.uint8, device=generator.device)
    lost = total = 0.0
    sent = 0
    for matrix in matrices:
        wire = case.codec.encode(matrix, generator=generator, flag=flag)
        decoded = case.codec.decode(wire, tuple(matrix.shape))
        lost += float((decoded.double() - matrix.double()).square().sum())
        total += float(matrix.double().square().sum())
        sent += size(wire)
    record.relative_error = None if flag.item() else math.sqrt(lost / total)
    record.gradient_bits_per_element = 8 * sent / sum(matrix.numel() for matrix in matrices)


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
    try:
        return resident_peak(action)
    except OSError:
        return None


def resident_peak(action: Callable[[], object]) -> int:
    """Growth of the process's resident set during ``action``, in bytes.

    Raises:
        OSError: If the kernel does not report it.
    """
    import ctypes

    def read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        raise OSError("no malloc_trim: cannot distinguish freed memory from used memory")
    trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read("VmRSS:")
    action()
    return max(0, read("VmHWM:") - before)


class Speed(NamedTuple):
    """Speed of the machine during the rounds: time of a copy, its bytes per second, and FLOPs per second."""

    copy_ms: float
    copy_bytes_per_s: float
    product_flops_per_s: float


def measure(running: Sequence[tuple[Case, Record]], x: Tensor, repeats: int, seed: int) -> Speed:
    """Fill each record's ``encode_ms`` and ``decode_ms``, and time copies and products in the same rounds."""
    import torch

    clock = stopwatch(x.device)
    generator = torch.Generator(x.device).manual_seed(seed)
    flag = torch.zeros(1, dtype=torch.uint8, device=x.device)
    y, square = torch.empty_like(x), torch.randn((PRODUCT, PRODUCT), generator=generator, device=x.device)
    copies: list[float] = []
    products: list[float] = []

    def code(case: Case, record: Record) -> None:
        wire, took = clock(lambda: case.codec.encode(x, generator=generator, flag=flag))
        record.encode_ms.append(took)
        record.decode_ms.append(clock(lambda: case.codec.decode(wire, tuple(x.shape)))[1])

    def copy() -> None:
        copies.append(clock(lambda: y.copy_(x))[1])

    def multiply() -> None:
        products.append(clock(lambda: square @ square)[1])

    copy()  # warm-up; the cases are warm
    multiply()
    copies.clear()
    products.clear()
    jobs: list[Callable[[], None]] = [partial(code, case, record) for case, record in running]
    jobs += [*[copy] * COPIES, multiply]
    shuffle = random.Random(seed).shuffle
    for turn in range(repeats):
        if sys.stderr.isatty():
            print(f"round {turn + 1} of {repeats}", end="\r", file=sys.stderr)
        shuffle(jobs)
        for job in jobs:
            job()
    return Speed(median(copies), 2e3 * x.nbytes / median(copies), 2e3 * PRODUCT**3 / median(products))


def stopwatch(device: torch.device) -> Callable[[Callable[[], T]], tuple[T, float]]:
    """Return a function that runs an action and measures its milliseconds on the device."""
    import torch

    if device.type == "cpu":

        def cpu(action: Callable[[], T]) -> tuple[T, float]:
            began = time.process_time()
            result = action()
            return result, (time.process_time() - began) * 1e3

        return cpu

    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def cuda(action: Callable[[], T]) -> tuple[T, float]:
        flush.zero_()
        torch.cuda._sleep(AHEAD)
        begin.record()
        result = action()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end)

    return cuda


def judge(case: Case, record: Record, shape: tuple[int, int], speed: Speed, target: Target | None) -> None:
    """Add to a measured record its multiples of the floor, and whether they meet the target."""

    def multiple(times: list[float], work: Work) -> float:
        floor = max(work.moved / speed.copy_bytes_per_s, work.flops / speed.product_flops_per_s)
        return median(times) / 1e3 / floor

    encode, decode = case.work(shape, record.wire_bytes)
    record.encode_floor, record.decode_floor = encode.counted, decode.counted
    record.encode_x_floor = multiple(record.encode_ms, encode)
    record.decode_x_floor = multiple(record.decode_ms, decode)
    kept = case.kept(shape)
    if kept is not None:
        record.encode_x_kept = multiple(record.encode_ms, encode._replace(moved=4 * kept + record.wire_bytes))
    if target is not None:
        held = record.encode_x_kept if target.kept else record.encode_x_floor
        record.target = target.encode, target.decode
        record.met = held is not None and held <= target.encode and record.decode_x_floor <= target.decode


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
    lines += [
        f"{record['method']}: encoding takes {record['encode_x_kept']:.1f} times as long as copying what is sent"
        for record in result["records"]
        if record["encode_x_kept"] is not None
    ]
    lines += [f"{record['method']}: {record['error']}" for record in result["records"] if record["error"]]
    return "\n".join(lines)


def line(record: dict[str, Any]) -> dict[str, str]:
    """One line of the table, by column."""
    target, peak, error = record["target"], record["encode_peak_bytes"], record["relative_error"]
    verdict = {True: "met", False: "missed", None: "–"}[record["met"]]
    return {
        "method": record["method"],
        "options": " ".join(f"{key}={value}" for key, value in record["options"].items()),
        "form": record["form"],
        "encode ms": f"{median(record['encode_ms']):.2f}",
        "decode ms": f"{median(record['decode_ms']):.2f}",
        "encode x floor": f"{record['encode_x_floor']:.2f}",
        "decode x floor": f"{record['decode_x_floor']:.2f}",
        "target": f"{target[0]:g} / {target[1]:g} {verdict}" if target else verdict,
        "bits": f"{record['bits_per_element']:.3f}",
        "bits, gradient": f"{record['gradient_bits_per_element']:.3f}",
        "error": "too large" if error is None else f"{error:.4f}",
        "peak MB": "–" if peak is None else f"{peak / 1e6:.1f}",
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows as text; as JSON lines, with a note, where tabulate is not installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        print("gradwire bench compressors: tabulate is not installed: JSON lines instead of a table.", file=sys.stderr)
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    left = ("method", "options", "form", "target")
    align = ["left" if column in left else "right" for column in (rows[0] if rows else ())]
    return tabulate(rows, headers="keys", tablefmt="pipe", colalign=align, disable_numparse=True)
