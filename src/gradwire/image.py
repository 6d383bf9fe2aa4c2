"""The container image that rules run in: its name follows from its recipe and locks, so another image is another file.

The image holds what gradwire needs, not gradwire: jobs in it import the checkout's own ``src/``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gradwire.errors import BadInput
from gradwire.files import digest, sha256_file

CONTAINERS = Path(__file__).parents[2] / "containers"
VARIANTS = ("cpu", "cuda")
RECIPE = ("gradwire.def", "rootfs", "check.py")  # every file that decides what is in an image, but for the locks
# What jobs in an image see of the variables around it. Snakemake's numbers of threads are in profiles/container.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "NCCL_", "GLOO_", "SLURM_", "GRADWIRE_", "HF_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
CROSSING = (*VARIABLES, *PROXIES)  # names, and beginnings of names
OWN = ("GRADWIRE_IMAGE",)  # set by the image itself


class Package(NamedTuple):
    """A line of ``lock/debian.txt``: a Debian package that goes into an image."""

    name: str
    version: str
    sha256: str
    variants: str


def variant_for(device: str) -> str:
    """The image for ``training.device``. With ``auto`` no GPU is asked for, so that is ``cpu`` too."""
    return "cuda" if device == "cuda" else "cpu"


def packages(variant: str, folder: Path = CONTAINERS) -> list[Package]:
    """The Debian packages of an image, as locked."""
    lines = (folder / "lock" / "debian.txt").read_text().splitlines()
    locked = [Package(*line.split()) for line in lines if line and not line.startswith("#")]
    return [package for package in locked if variant in package.variants.split(",")]


def inputs(variant: str, folder: Path = CONTAINERS) -> dict[str, str]:
    """Digests of all that decides what is in an image: its recipe, its Debian packages, its wheels."""
    recipe = {name: sha256_file(folder / name) for name in RECIPE}
    debian = [package[:3] for package in packages(variant, folder)]
    return {
        "recipe": digest(recipe, length=64),
        "debian": digest(debian, length=64),
        "wheels": sha256_file(folder / "lock" / f"{variant}.txt"),
    }


def image_name(variant: str, folder: Path = CONTAINERS) -> str:
    """The image's name, such as ``gradwire-cpu-0123456789ab``."""
    return f"gradwire-{variant}-{digest(inputs(variant, folder))}"


def image_file(variant: str, folder: Path = CONTAINERS) -> Path:
    """Where ``make image`` puts an image and the rules look for it."""
    return folder / "images" / f"{image_name(variant, folder)}.sif"


def check_apptainer() -> None:
    """Check that there is an Apptainer.

    Raises:
        BadInput: If there is none, with how to get it.
    """
    if shutil.which("apptainer") is None:
        raise BadInput(
            "Apptainer is missing. On Debian 12 `containers/get-apptainer` installs it (as root); elsewhere it is the "
            "distribution's package `apptainer`. On a cluster it is often a module."
        )


def check_image(variant: str, folder: Path = CONTAINERS) -> None:
    """Check that rules can run in an image.

    Raises:
        BadInput: If there is no Apptainer or no such image, with how to get it.
    """
    check_apptainer()
    file = image_file(variant, folder)
    if not file.is_file():
        others = ", ".join(sorted(found.name for found in file.parent.glob(f"gradwire-{variant}-*.sif")))
        raise BadInput(
            f"there is no {file}: run `make image VARIANT={variant}`."
            + (f" Images of other recipes or locks are here: {others}." if others else "")
        )


def crossing(variables: Mapping[str, str], source: Path, *, gpus: bool = False) -> dict[str, str]:
    """Variables that tell Apptainer what jobs see of the world around their image.

    Args:
        variables: The environment; of it, what ``CROSSING`` names or begins.
        source: The folder that holds the package, which jobs import from there.
        gpus: Whether jobs need the host's driver.
    """
    seen = {name: value for name, value in variables.items() if name.startswith(CROSSING) and name not in OWN}
    binds = [bind for bind in variables.get("APPTAINER_BIND", "").split(",") if bind and bind != str(source)]
    return {
        **{f"APPTAINERENV_{name}": value for name, value in seen.items()},
        "APPTAINERENV_PYTHONPATH": str(source),
        "APPTAINER_BIND": ",".join([*binds, str(source)]),
        **({"APPTAINER_NV": "1"} if gpus else {}),
    }
