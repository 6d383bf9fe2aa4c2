"""The CUDA kernels on paper: ``python benchmarks/kernel_table.py [--method int8 ...]``, without a GPU.

Every method with a CUDA form encodes and decodes 2^22 elements while Triton's launches are recorded instead of run.
What was recorded is compiled ahead of time for sm_80 and sm_90. Of each kernel the table has, from the compiled code:

- **registers**, **spills** (bytes, by ptxas) and **shared** memory, and the **occupancy** that they allow;
- **loads**, **stores**: instructions on global memory by their width in bits, as 4x128; the masked forms count too;
- **MB**: bytes of its arguments, which a kernel that passes over them once moves;
- **instructions** per element of x that a thread runs (of code without loops), and **issue**: how long a GPU needs to
  issue them, as a multiple of how long it needs to move the bytes. Above 1 the kernel cannot run at the memory's speed.

Instructions are an upper bound: both branches of a masked tail count. Rates are those of an A100 and an H100 (SXM).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from gradwire.bench.codecs.cases import VARIANTS
from gradwire.comm.compressors import build, kernels, registry

NUMEL = 2**22
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HARDLY_X = (
    "guess",
    "count_digits",
    "compare",
    "collect",
)  # of x these read a sample, what is sent, or nothing
FREE = ("empty", "view", "split", "slice", "detach", "alias", "as_strided", "reshape", "_local_scalar_dense", "select")


class Gpu(NamedTuple):
    """What an architecture offers a multiprocessor, and a whole GPU."""

    capability: int
    shared: int  # bytes
    processors: int
    gigahertz: float
    dram: float  # bytes per second that a copy reaches, read and written
    warps: int = 64
    registers: int = 65536
    blocks: int = 32

    @property
    def lanes(self) -> float:
        """Instructions of one thread issued per second: four warps a cycle."""
        return self.processors * 128 * self.gigahertz * 1e9


GPUS = {
    "sm_80": Gpu(80, 164 * 1024, 108, 1.41, 1.75e12),
    "sm_90": Gpu(90, 228 * 1024, 132, 1.755, 2.9e12),
}


class Paper(DriverBase):
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


class Launch(NamedTuple):
    """A launch that was asked for."""

    kernel: JITFunction
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def moved(self) -> int:
        """Bytes of its tensors, each once."""
        skip = self.kernel.__name__ in HARDLY_X
        tensors = {id(one): one for one in self.arguments[skip:] if isinstance(one, torch.Tensor)}
        return sum(tensor.nbytes for tensor in tensors.values())


class Operations(TorchDispatchMode):
    """Counts torch's own operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not func.is_view and not name.startswith(FREE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Collect launches, and run none."""
    found: list[Launch] = []
    run = JITFunction.run

    def record(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(Launch(self, grid[0], arguments, options))

    JITFunction.run = record
    try:
        yield found
    finally:
        JITFunction.run = run


@dataclass
class Kernel:
    """A compiled kernel, from its PTX and SASS."""

    registers: int
    spills: int
    shared: int
    warps: int
    loads: str
    stores: str
    instructions: int
    loops: bool

    def occupancy(self, gpu: Gpu) -> float:
        """Share of a multiprocessor's warps that can be resident."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = gpu.registers // (per_warp * self.warps)
        by_shared = gpu.shared // (self.shared + 1024) if self.shared else gpu.blocks
        return min(by_registers, by_shared, gpu.blocks, gpu.warps // self.warps) * self.warps / gpu.warps


def compiled(launch: Launch, gpu: Gpu) -> Kernel:
    """Compile a recorded launch."""
    triton.runtime.driver.set_active(Paper(gpu.capability))
    made = launch.kernel.warmup(*launch.arguments, grid=(launch.programs,), **launch.options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        usage = said("cuobjdump", "--dump-resource-usage", str(cubin))
        sass = said("cuobjdump", "-sass", str(cubin))
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(made.asm["ptx"])
        arch = re.search(r"\.target (\w+)", made.asm["ptx"])[1]  # type: ignore[index]
        verbose = said("ptxas", "-v", f"--gpu-name={arch}", str(ptx), "-o", "/dev/null")
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)\s*([^;]*);", sass)
    operations = [(int(at, 16), name, rest) for at, name, rest in code if name != "NOP"]
    jumps = [(at, int(target, 16)) for at, name, rest in operations if name.startswith("BRA") for target in hexes(rest)]
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", verbose)))
    return Kernel(
        registers=int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        spills=spills,
        shared=made.metadata.shared,
        warps=made.metadata.num_warps,
        loads=widths(name for _, name, _ in operations if name.startswith("LDG")),
        stores=widths(name for _, name, _ in operations if name.startswith("STG")),
        instructions=len(operations),
        loops=any(target < at for at, target in jumps),  # the last one jumps to itself
    )


def hexes(text: str) -> list[str]:
    """Addresses that a jump names."""
    return re.findall(r"0x([0-9a-f]+)", text)


def widths(names: Iterator[str]) -> str:
    """How many memory instructions there are of each width in bits."""
    found = ([part.lstrip("US") for part in name.split(".") if part.lstrip("US").isdigit()] for name in names)
    bits = Counter(int(parts[0]) if parts else 32 for parts in found)
    return " ".join(f"{count}x{width}" for width, count in sorted(bits.items(), reverse=True)) or "–"


def said(tool: str, *arguments: str) -> str:
    """What one of Triton's own tools prints."""
    done = subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def cuda_form(method: Any, device: torch.device) -> Any:
    """The CUDA form, whatever the device."""
    module = kernels.load("cuda", method.name)
    return module if module is not None and module.covers(method) else None


def calls(name: str, options: dict[str, Any]) -> Iterator[tuple[str, list[Launch], Counter[str]]]:
    """What encoding and decoding launch."""
    compressor = build(name, **options)
    x = torch.randn(2048, NUMEL // 2048, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    flag = torch.zeros(1, dtype=torch.uint8)
    kernels.find = lambda method, device: None
    wire = compressor.encode(x, generator=generator)
    kernels.find = cuda_form
    with recorded():  # what is made once, such as tables, is made here
        compressor.encode(x, generator=generator, flag=flag)
        compressor.decode(wire, tuple(x.shape))
    with recorded() as launches, Operations() as operations:
        compressor.encode(x, generator=generator, flag=flag)
    yield "encode", launches, operations.counts
    with recorded() as launches, Operations() as operations:
        compressor.decode(wire, tuple(x.shape))
    yield "decode", launches, operations.counts


def rows(names: list[str]) -> Iterator[dict[str, str]]:
    """The table."""
    for name in names:
        for options in ({}, *VARIANTS.get(name, [])):
            if cuda_form(build(name, **options), torch.device("cuda")) is None:
                continue
            title = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            for way, launches, operations in calls(name, options):
                others = " ".join(f"{count}x{op}" for op, count in operations.items())
                print(f"{title}, {way}: {len(launches)} launches of Triton's; torch's own: {others or 'none'}")
                seen: set[str] = set()
                for launch in launches:
                    if (key := f"{launch.kernel.__name__} {launch.options}") not in seen:
                        seen.add(key)
                        yield from lines(title, way, launch)


def lines(title: str, way: str, launch: Launch) -> Iterator[dict[str, str]]:
    """A kernel's lines, one for each architecture."""
    for arch, gpu in GPUS.items():
        kernel = compiled(launch, gpu)
        per_element = kernel.instructions * kernel.warps * 32 * launch.programs / NUMEL
        issue = per_element * NUMEL / gpu.lanes / (launch.moved / gpu.dram)
        yield {
            "method": title,
            "call": way,
            "kernel": launch.kernel.__name__,
            "arch": arch,
            "registers": str(kernel.registers),
            "spills": str(kernel.spills),
            "shared": f"{kernel.shared:,}",
            "occupancy": f"{100 * kernel.occupancy(gpu):.0f} %",
            "loads": kernel.loads,
            "stores": kernel.stores,
            "MB": f"{launch.moved / 1e6:.1f}",
            "instructions": "loops" if kernel.loops else f"{per_element:.1f}",
            "issue": "" if kernel.loops or launch.moved < 1e6 else f"{issue:.2f}",
        }


def main() -> None:
    """Print the table."""
    from gpu.part import table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", nargs="+", help="by default all with a CUDA form")
    args = parser.parse_args()
    print("\n" + table(list(rows(args.method or registry.available()))))


if __name__ == "__main__":
    main()
