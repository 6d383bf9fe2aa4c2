"""The machine of a process: its processor, and the versions of packages."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def installed(package: str) -> str | None:
    """A package's version, if it is there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's model as the kernel names it."""
    names = re.findall(r"^(?:model name|Model)\s*:\s*(.+)$", text(CPUINFO) or "", re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def multiplies_bf16(device: str) -> bool:
    """Whether a type of device, such as ``cpu``, multiplies bf16 matrices about as fast as float32 ones.

    PyTorch's products of bf16 take about ten times as long on a CPU below AVX-512.
    """
    import torch

    return device != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's own operations on one core."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def text(path: Path) -> str | None:
    """The text of a file of the kernel; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
