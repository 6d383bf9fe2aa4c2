"""Packages that ``pip install gradwire`` leaves out, and the extras that install them."""

from __future__ import annotations

from importlib.util import find_spec

from gradwire.base.errors import BadInput

EXTRAS = {  # names of imports; an extra may include others (pyproject.toml)
    "attribution": ("tokenizers", "transformers", "jinja2", "ijson", "peft", "pyarrow", "safetensors", "scipy", "tqdm"),
    "bench": (
        *("jinja2", "markupsafe", "matplotlib", "opacus", "pandas", "tabulate", "tensorboard"),
        *("snakemake", "snakemake_executor_plugin_slurm", "snakemake_interface_logger_plugins"),
    ),
    "datasets": ("datasets", "huggingface_hub"),
    "trainer": ("accelerate",),
}


# Why: docs/decisions.md, "Floors check their packages at import".
def require(user: str, *packages: str) -> None:
    """Check that packages are installed, without importing them.

    Args:
        user: The part of gradwire that needs them, for the message.
        packages: Names of imports.

    Raises:
        ModuleNotFoundError: If one is missing; the message has the command that installs it.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"{user} needs {package}: {install(package, user)}.", name=package)


def install(package: str, user: str = "") -> str:
    """Return the command that installs a package for a part of gradwire: a name of a module, or any text."""
    extra = next(extra for extra, packages in EXTRAS.items() if package in packages)
    if extra == "attribution" and user.startswith("gradwire.bench"):
        extra = "bench"  # includes the other
    return f"pip install 'gradwire[{extra}]'"


def missing(error: BaseException, user: str) -> BadInput | None:
    """Return the message for a package of an extra that is not installed; None for any other error.

    Args:
        error: The error.
        user: The module that needs the package.
    """
    package = ((isinstance(error, ModuleNotFoundError) and error.name) or "").partition(".")[0]
    if not any(package in packages for packages in EXTRAS.values()):
        return None
    return BadInput(f"this needs {package}: {install(package, user)}.")
