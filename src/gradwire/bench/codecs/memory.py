"""Peak memory of a call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch


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
