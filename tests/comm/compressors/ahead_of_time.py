"""Compile the CUDA kernels of methods for two architectures, without a GPU: ``python ahead_of_time.py METHOD ...``.

Each method encodes and decodes a tensor while Triton's launches are recorded instead of run; what was recorded is
compiled ahead of time. Prints a line for each kernel.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from gradwire.comm.compressors import build, kernels

CAPABILITIES = (80, 90)


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


def launches(method: str) -> list[tuple[JITFunction, Any, tuple[Any, ...], dict[str, Any]]]:
    """Kernel, grid, arguments and options of the launches that encode and decode."""
    recorded = []

    def record(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded.append((self, grid, arguments, options))

    compressor, kernel = build(method), kernels.load("cuda", method)
    x, generator = torch.randn(10_000), torch.Generator().manual_seed(0)
    run, JITFunction.run = JITFunction.run, record
    try:
        kernel.encode(compressor, x, generator)
        kernel.decode(compressor, compressor.to_wire(x, generator), (10_000,))
    finally:
        JITFunction.run = run
    return recorded


if __name__ == "__main__":
    for method in sys.argv[1:]:
        for kernel, grid, arguments, options in launches(method):
            for capability in CAPABILITIES:
                triton.runtime.driver.set_active(Absent(capability))
                made = kernel.warmup(*arguments, grid=grid, **options)
                print(method, kernel.__name__, capability, len(made.asm["cubin"]), flush=True)
