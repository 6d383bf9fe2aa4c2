"""What each rank ran on: versions, processor, threads, devices."""

from __future__ import annotations

import os
import platform
import resource
from importlib import metadata
from typing import Any

import torch

from gradwire import __version__
from gradwire.collectives.world import World

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def environment(world: World) -> dict[str, Any]:
    """The software and hardware of this rank, as JSON."""
    cuda = world.device.type == "cuda"
    return {
        "rank": world.rank,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine(),
        "gradwire": __version__,
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cuda": torch.version.cuda if cuda else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "image": os.environ.get("GRADWIRE_IMAGE"),
    }


def peak_memory_gb(device: torch.device) -> tuple[float, float | None]:
    """Peak memory of this rank in GB: allocated and reserved on CUDA, the resident set (and None) on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9, torch.cuda.max_memory_reserved(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, None
