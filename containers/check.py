"""The image's own test: imports what gradwire imports, adds up over two ranks, and prints the versions as JSON."""

from __future__ import annotations

import importlib
import json
import platform
import sys
import tempfile
from importlib import metadata

# What pyproject.toml asks for, by the name it is imported under; a test holds the two together.
PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pyyaml": "yaml",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "ijson": "ijson",
    "jinja2": "jinja2",
    "markupsafe": "markupsafe",
    "matplotlib": "matplotlib",
    "numba": "numba",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "tabulate": "tabulate",
    "tensorboard": "tensorboard",
    "tqdm": "tqdm",
    "datasets": "datasets",
    "huggingface_hub": "huggingface_hub",
    "peft": "peft",
    "opacus": "opacus",
}
RANKS = 2


def versions() -> dict[str, str | None]:
    """Versions of what an image is told apart by; null for CUDA's in a build of torch without it."""
    import torch

    cuda = torch.version.cuda
    return {
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }


def add_up(rank: int, meeting_point: str) -> None:
    """A rank of an all-reduce over gloo: 1 + 2 on every rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=RANKS)
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    dist.destroy_process_group()
    if number.item() != sum(range(1, RANKS + 1)):
        raise SystemExit(f"rank {rank} of an all-reduce got {number.item()}.")


def main() -> None:
    """Fail with a traceback if anything does not work."""
    import torch.multiprocessing as multiprocessing

    for module in PACKAGES.values():
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(add_up, (f"{folder}/meeting_point",), RANKS)
    found = {name: metadata.version(name) for name in PACKAGES}
    json.dump({**versions(), "packages": found}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
