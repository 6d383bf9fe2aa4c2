"""Measurements of one case: bytes, memory, error, times, and multiples of the floor.

Errors are measured on the gradient of a small byte-level language model in training. Its text is source code of
Python's standard library, so the gradient is the same for the same Python, torch and seed, and nearly the same
elsewhere.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from gradwire.bench.codecs.cases import Case, Work, size

T = TypeVar("T")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
FLUSH = 2**28  # bytes, more than the caches of any GPU of today
AHEAD = 4_000_000  # GPU cycles, about 2 ms: the GPU waits while Python prepares the call that is timed
COPIES = 5  # in a round
PRODUCT = 1024  # rows of the square product that measures FLOPs per second
MODULES = ("argparse", "inspect", "tarfile", "typing")
CONTEXT, WIDTH, HIDDEN = 8, 64, 640
SHAPES = {
    "embedding": (256, WIDTH),
    "hidden.0": (HIDDEN, CONTEXT * WIDTH),
    "hidden.1": (HIDDEN, HIDDEN),
    "output": (256, HIDDEN),
}
BATCH = 256


@dataclass
class Record:
    """Measurements of one case.

    Args:
        method: Its name.
        options: Options that are not defaults.
        form: The implementation (`cases.Case.form`).
        error: Why it failed, or None.
        wire_bytes: Size of the timed tensor's encoding.
        bits_per_element: The same, per element.
        gradient_bits_per_element: The same for the real gradient.
        relative_error: Of the real gradient; None if its values are too large for the wire.
        encode_peak_bytes: Memory of encoding beyond x, including the wire; None if unknown.
        encode_ms: Milliseconds of each round; also ``decode_ms``.
        encode_x_floor: Median time as a multiple of the floor; also ``decode_x_floor``.
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
    encode_x_floor: float | None = None
    decode_x_floor: float | None = None


def prepare(case: Case, x: Tensor, matrices: Sequence[Tensor], seed: int) -> Record:
    """Compile a case's code and measure everything but time: bytes, memory, the error on the gradient.

    If a case fails, its record has the reason, and the others are measured.
    """
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


class Speed(NamedTuple):
    """Speed of the machine during the rounds: time of a copy, its bytes per second, and FLOPs per second."""

    copy_ms: float
    copy_bytes_per_s: float
    product_flops_per_s: float


def measure(running: Sequence[tuple[Case, Record]], x: Tensor, repeats: int, seed: int) -> Speed:
    """Fill each record's ``encode_ms`` and ``decode_ms``, and time copies and products in the same rounds."""
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


def judge(case: Case, record: Record, shape: tuple[int, int], speed: Speed) -> None:
    """Add to a measured record its multiples of the floor."""

    def multiple(times: list[float], work: Work) -> float:
        floor = max(work.moved / speed.copy_bytes_per_s, work.flops / speed.product_flops_per_s)
        return median(times) / 1e3 / floor

    encode, decode = case.work(shape, record.wire_bytes)
    record.encode_x_floor = multiple(record.encode_ms, encode)
    record.decode_x_floor = multiple(record.decode_ms, decode)


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


def stopwatch(device: torch.device) -> Callable[[Callable[[], T]], tuple[T, float]]:
    """Return a function that runs an action and measures its milliseconds on the device."""
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


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of ``action`` beyond the memory in use before, including its result.

    From the allocator on CUDA, from the resident set on Linux (in pages); None elsewhere.
    """
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


def sample_gradient(seed: int = 0, steps: int = 40) -> dict[str, Tensor]:
    """The gradient of the step after ``steps`` steps of Adam.

    Args:
        seed: Of the initial weights and the batches. The global random state is not touched.
        steps: Steps of training before it; 40 take about two seconds of one core.

    Returns:
        float32 matrices by the parameters' names, about 0.9 million elements.
    """
    generator = torch.Generator().manual_seed(seed)
    text = corpus()
    weights = {
        name: (torch.randn(shape, generator=generator) / shape[1] ** 0.5).requires_grad_()
        for name, shape in SHAPES.items()
    }
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)
    with torch.enable_grad():
        for _ in range(steps + 1):
            optimizer.step()  # does nothing before the first gradient
            optimizer.zero_grad()
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
            loss(weights, text[starts + torch.arange(CONTEXT + 1)]).backward()
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def corpus() -> Tensor:
    """The text's bytes: int64 [n]."""
    source = "".join(inspect.getsource(import_module(module)) for module in MODULES)
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).to(torch.int64)


def loss(weights: dict[str, Tensor], windows: Tensor) -> Tensor:
    """Mean cross-entropy of each window's last byte, given those before it.

    Args:
        weights: The parameters, of `SHAPES`.
        windows: int64 [batch, CONTEXT + 1].
    """
    state = functional.embedding(windows[:, :-1], weights["embedding"]).flatten(1)
    for layer in ("hidden.0", "hidden.1"):
        state = functional.gelu(functional.linear(state, weights[layer]))
    return functional.cross_entropy(functional.linear(state, weights["output"]), windows[:, -1])
