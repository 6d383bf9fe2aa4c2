"""The machine, the versions and what is missing: ``python -m gpu.environment``; exit code 2 where nothing can run."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

NEEDED = ("torch", "triton", "transformers", "numba", "numpy", "pydantic")
FOR_SOME = {  # package: what cannot run without it
    "ijson": "strategies and quality (they read a corpus)",
    "tokenizers": "strategies and quality",
    "pyarrow": "strategies and quality (they import the data package)",
    "yaml": "strategies and quality",
    "safetensors": "model and gradients",
    "tqdm": "strategies and quality",
}


def missing(names: tuple[str, ...]) -> list[str]:
    """Those that cannot be imported."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def version(name: str) -> str | None:
    """A package's version."""
    try:
        return metadata.version({"yaml": "pyyaml"}.get(name, name))
    except metadata.PackageNotFoundError:
        return None


def gpu() -> dict[str, object]:
    """What torch sees of the GPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpus": torch.cuda.device_count(),
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
        "tf32_cudnn": torch.backends.cudnn.allow_tf32,
    }


def main() -> int:
    """Print everything and write environment.json."""
    device, out = os.environ.get("DEVICE", "cuda"), Path(os.environ.get("OUT", "results/gpu"))
    found: dict[str, object] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in (*NEEDED, *FOR_SOME, "scipy", "tabulate")},
        "c_compiler": shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"),
        "python_headers": (Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        "compute_sanitizer": shutil.which("compute-sanitizer"),
        "nccl_variables": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit", "--format=csv"]
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[1:]
    absent = missing(NEEDED)
    if not absent:
        found |= gpu()
    for name, value in found.items():
        print(f"{name}: {value}")
    for name in missing(tuple(FOR_SOME)):
        print(f"{name} is missing: {FOR_SOME[name]}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.json").write_text(json.dumps(found, indent=1, default=str))
    if absent:
        print(f"gpu.sh: {sys.executable} has no {', '.join(absent)}; put it on PYTHONPATH", file=sys.stderr)
        return 2
    if device == "cuda" and "gpus" not in found:
        print("gpu.sh: torch sees no GPU; DEVICE=cpu tries the script without one", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
