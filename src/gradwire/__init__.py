"""gradwire: what gradients cost on the wire, what compressing them buys, and what it takes away.

In a training script: ``gradwire.compress_gradients(model, "int8", optimizer=optimizer)``. Public names are
imported when they are first used, so that ``import gradwire`` loads no torch; ``__init__.pyi`` declares them, for this
file and for type checkers.
"""

import re
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

# Text, not import statements: every module of the package imports this file, and must not import these packages.
NAMES = re.findall(r"^from (\S+) import (\S+) as", Path(__file__).with_suffix(".pyi").read_text("utf-8"), re.MULTILINE)
HOMES = {name: home for home, name in NAMES}

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Import one of the public names from the room where it lives (PEP 562)."""
    if name not in HOMES:
        hint = import_module("gradwire.base.errors").did_you_mean(name, HOMES)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
