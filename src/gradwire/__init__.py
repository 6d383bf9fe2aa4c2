"""gradwire: what gradients cost on the wire, what compressing them buys, and what it takes away.

In a training script: ``gradwire.compress_gradients(model, "int8", optimizer=optimizer)``. Public names are
imported when they are first used, so that ``import gradwire`` loads no torch; ``__init__.pyi`` declares them for type
checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

# Strings, not import statements: every module of the package imports this file, and must not import these packages.
HOMES = {
    "Compression": "gradwire.comm.parallel",
    "comm_hook": "gradwire.comm.parallel",
    "compress_gradients": "gradwire.comm.parallel",
    "DeMo": "gradwire.comm.parallel.optimizers.demo",
    "DesLoc": "gradwire.comm.parallel.optimizers.desloc",
    "DiLoCo": "gradwire.comm.parallel.optimizers.diloco",
    "Muon": "gradwire.comm.parallel.optimizers.muon",
    "OneBitAdam": "gradwire.comm.parallel.optimizers.adam",
    "StreamingDiLoCo": "gradwire.comm.parallel.optimizers.streaming",
    "ZeroOneAdam": "gradwire.comm.parallel.optimizers.adam",
    "load_results": "gradwire.bench.report.verbs.results",
}

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Import one of the public names from the room where it lives (PEP 562)."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
