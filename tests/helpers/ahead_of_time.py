"""Compile CUDA kernels for three architectures, without a GPU: ``python ahead_of_time.py METHOD|projections ...``.

Each method encodes and decodes a tensor while Triton's launches are recorded
instead of run; what was recorded is compiled ahead of time. Prints a line for each kernel: registers of a thread, and
bytes that it spills to memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from gradwire.attribution.projections import cuda
from gradwire.comm.compressors import build, kernels

CAPABILITIES = (80, 90, 100)  # A100, H100, B200


class Absent(DriverBase):
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(work: Callable[[], Any]) -> list[tuple[JITFunction, Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernel, grid, arguments and options of the launches of some work."""
    recorded = []

    def record(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded.append((self, grid, arguments, options))

    run, JITFunction.run = JITFunction.run, record
    try:
        work()
    finally:
        JITFunction.run = run
    return recorded


def coded(name: str) -> None:
    """Encode and decode a matrix."""
    compressor, kernel = build(name), kernels.load("cuda", name)
    x, generator = torch.randn(100, 100), torch.Generator().manual_seed(0)
    wire = compressor.to_wire(x, generator)
    kernel.encode(compressor, x, generator)
    kernel.decode(compressor, wire, (100, 100))


def projected() -> None:
    """Project a batch by the kernels of both matrices that have one."""
    values = torch.randn(32, 2**17)
    cuda.add_turned(torch.zeros(32, 2**16), values, torch.zeros(2, dtype=torch.int32), 5)
    cuda.add_signed(torch.zeros(32, 4096), values, 5)


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for kernel, grid, arguments, options in launches(
            projected if name == "projections" else lambda name=name: coded(name)
        ):
            for capability in CAPABILITIES:
                triton.runtime.driver.set_active(Absent(capability))
                made = kernel.warmup(*arguments, grid=grid, **options)
                print(name, kernel.__name__, capability, *usage(made.asm["cubin"]), flush=True)
