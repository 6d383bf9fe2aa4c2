"""Each rank's environment (versions, processor, threads, clocks, devices) and its peak memory."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gradwire import __version__
from gradwire.base.machine import CPUINFO, installed, processor, text
from gradwire.bench.launch.ranks import ALLOCATOR
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import kernels

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "triton", "pyarrow", "pydantic", "safetensors")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS")
COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # beginnings of the variables that configure collectives
CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")
NVIDIA_SMI = {  # field of `nvidia-smi --query-gpu`: key in the manifest
    "driver_version": "driver",
    "clocks.sm": "sm_clock",
    "clocks.mem": "memory_clock",
    "clocks.max.sm": "largest_sm_clock",
    "power.limit": "power_limit",
}
CPU = torch.device("cpu")
MACHINE = ("processor", "cores", "device")  # if these differ, times are not comparable


def environment(world: World) -> dict[str, Any]:
    """The software and hardware of this rank as JSON; null if unknown or not applicable."""
    cuda = world.device.type == "cuda"
    return {
        "rank": world.rank,
        "world_size": world.world_size,
        "node": os.environ.get("SLURMD_NODENAME") or platform.node(),
        "backend": world.backend,
        "device": torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine(),
        "gradwire": __version__,
        "packages": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "libraries": libraries(cuda),
        "preloaded": os.environ.get("LD_PRELOAD"),  # may replace the allocator, or choose MKL's kernels
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda if cuda else None,
        "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),  # below AVX512, Muon multiplies in float32
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "clocks": clocks(),
        "gpu": gpu(world.device) if cuda else None,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "kernels_failed": kernels.FAILED[0] if kernels.FAILED else None,  # else CPU kernels serve where there are any
        "float32_matmul_precision": torch.get_float32_matmul_precision(),  # highest: no TF32
        "communication_variables": {
            name: value for name, value in os.environ.items() if name.startswith(COMMUNICATION)
        },
        "thread_variables": {name: os.environ[name] for name in THREADS if name in os.environ},
        "allocator_variables": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
        "distribution": distribution(),
        "image": os.environ.get("GRADWIRE_IMAGE"),
    }


def same_machine(environments: list[dict[str, Any]]) -> bool:
    """Whether all ranks report the same hardware."""
    return all(rank[key] == environments[0][key] for rank in environments for key in MACHINE)


def distribution() -> str | None:
    """The operating system's name, inside a container if the process runs in one."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return None


def libraries(cuda: bool) -> dict[str, str]:
    """Versions of the libraries that torch was built with or loads."""
    versions = dict(re.findall(r"(oneAPI Math Kernel Library|MKL-DNN) (?:Version |v)(\S+)", torch.__config__.show()))
    if cuda:
        versions["cudnn"] = str(torch.backends.cudnn.version())
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def clocks() -> dict[str, str | None]:
    """The processor's current lowest and highest core frequency, its maximum, and its frequency governor."""
    now = sorted(float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text(CPUINFO) or "", re.MULTILINE))
    return {
        "mhz": f"{now[0]:.0f} to {now[-1]:.0f}" if now else None,
        "largest_khz": text(CPUFREQ / "cpuinfo_max_freq"),
        "governor": text(CPUFREQ / "scaling_governor"),
    }


def gpu(device: torch.device) -> dict[str, str]:
    """The device's properties, with driver and clocks if ``nvidia-smi`` reports them."""
    properties = torch.cuda.get_device_properties(device)
    reported = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": f"{properties.total_memory / 1e9:.1f}",
    }
    query = f"nvidia-smi --query-gpu={','.join(NVIDIA_SMI)} --format=csv,noheader --id=GPU-{properties.uuid}"
    try:
        output = subprocess.run(query.split(), capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return reported
    return reported | dict(zip(NVIDIA_SMI.values(), (value.strip() for value in output.split(",")), strict=False))


class PeakMemory:
    """Peak memory of this rank: allocated and reserved on CUDA, the resident set on CPU."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._allocated = self._reserved = 0

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Exclude CUDA allocations made in this context; the peak resident set on CPU cannot be reset."""
        self._look()
        try:
            yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)

    def gb(self) -> tuple[float, float | None]:
        """Peak allocated and reserved memory in GB; on CPU the resident set and None."""
        if self.device.type != "cuda":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, None
        self._look()
        return self._allocated / 1e9, self._reserved / 1e9

    def _look(self) -> None:
        if self.device.type == "cuda":
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(self.device))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
