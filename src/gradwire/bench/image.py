"""The container image that rules run in. Its file name has a digest of its recipe and locks.

The image holds gradwire's dependencies, not gradwire: jobs import the checkout's ``src/``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, sha256_file

CONTAINERS = Path(__file__).parents[3] / "containers"
VARIANTS = ("cpu", "cuda")
RECIPE = ("gradwire.def", "rootfs", "check.py")  # with the locks, every file that determines an image
# The host's environment variables that jobs in an image see. profiles/container sets Snakemake's numbers of threads.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_", "NCCL_", "GLOO_", "SLURM_", "GRADWIRE_", "HF_")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
CROSSING = (*VARIABLES, *PROXIES)  # names and prefixes
OWN = ("GRADWIRE_IMAGE",)  # set by the image itself


class Package(NamedTuple):
    """A Debian package of an image: a line of ``lock/debian.txt``."""

    name: str
    version: str
    sha256: str
    variants: str


def variant_for(device: str) -> str:
    """The image variant for ``training.device``; ``auto`` requests no GPU, so it is ``cpu`` too."""
    return "cuda" if device == "cuda" else "cpu"


def packages(variant: str, folder: Path = CONTAINERS) -> list[Package]:
    """The locked Debian packages of an image."""
    lines = (folder / "lock" / "debian.txt").read_text().splitlines()
    locked = [Package(*line.split()) for line in lines if line and not line.startswith("#")]
    return [package for package in locked if variant in package.variants.split(",")]


def inputs(variant: str, folder: Path = CONTAINERS) -> dict[str, str]:
    """Digests of all that determines an image: its recipe, Debian packages and wheels."""
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
    """The file that ``make image`` writes and the rules use."""
    return folder / "images" / f"{image_name(variant, folder)}.sif"


def check_apptainer() -> None:
    """Check that Apptainer is installed.

    Raises:
        BadInput: If not; the message has the command that installs it.
    """
    if shutil.which("apptainer") is None:
        raise BadInput(
            "Apptainer is not installed. On Debian 12, run `containers/get-apptainer` as root; elsewhere, install the "
            "distribution's package `apptainer`. On a cluster it is often a module."
        )


def check_image(variant: str, folder: Path = CONTAINERS) -> None:
    """Check that rules can run in an image.

    Raises:
        BadInput: If Apptainer or the image is missing; the message has the command that makes it.
    """
    check_apptainer()
    if not folder.is_dir():
        raise BadInput("images are built and used in a checkout of gradwire, not by an installed package.")
    file = image_file(variant, folder)
    if not file.is_file():
        others = ", ".join(sorted(image.name for image in file.parent.glob(f"gradwire-{variant}-*.sif")))
        raise BadInput(
            f"{file} is missing: run `make image VARIANT={variant}`."
            + (f" Found images of other recipes or locks: {others}." if others else "")
        )


def crossing(variables: Mapping[str, str], source: Path, *, gpus: bool = False) -> dict[str, str]:
    """Environment variables that make Apptainer pass the host's variables and source to jobs.

    Args:
        variables: The host's environment; only variables in ``CROSSING`` are passed.
        source: The folder with the package, which jobs import.
        gpus: Whether jobs need the host's GPU driver.
    """
    seen = {name: value for name, value in variables.items() if name.startswith(CROSSING) and name not in OWN}
    binds = [bind for bind in variables.get("APPTAINER_BIND", "").split(",") if bind and bind != str(source)]
    return {
        **{f"APPTAINERENV_{name}": value for name, value in seen.items()},
        "APPTAINERENV_PYTHONPATH": str(source),
        "APPTAINER_BIND": ",".join([*binds, str(source)]),
        **({"APPTAINER_NV": "1"} if gpus else {}),
    }
