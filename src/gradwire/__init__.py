"""gradwire: what gradients cost on the wire, what compressing them buys, and what it takes away.

In a training script of one's own: ``from gradwire import Reducer, build, wrap``. These names are imported when they are
first used, so that ``import gradwire`` loads no torch; ``__init__.pyi`` declares them for type checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

# Strings, not import statements: every module of the package imports this file, and must not import these packages.
HOMES = {
    "Reducer": "gradwire.comm.collectives",
    "accumulation": "gradwire.comm.parallel",
    "build": "gradwire.comm.compressors",
    "clip_grad_norm": "gradwire.comm.parallel",
    "ddp_hook": "gradwire.comm.parallel",
    "hook": "gradwire.comm.parallel",
    "load_results": "gradwire.bench.report.verbs.results",
    "wrap": "gradwire.comm.parallel",
}

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Import one of the public names from the room where it lives (PEP 562)."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
