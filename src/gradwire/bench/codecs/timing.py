"""Timing on one core, with freed memory kept, by processor time, or on a GPU, by CUDA events."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
FLUSH = 2**28  # bytes, more than the caches of any GPU of today
AHEAD = 4_000_000  # GPU cycles, about 2 ms: the GPU waits while Python prepares the call that is timed


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's own operations on one core, like the fused forms."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
