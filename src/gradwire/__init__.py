"""gradwire: what gradients cost on the wire, what compressing them buys, and what it takes away.

In a training script: ``gradwire.compress_gradients(model, "int8", optimizer=optimizer)``. Public names are
imported when they are first used, so that ``import gradwire`` loads no torch; ``__init__.pyi`` declares them for type
checkers.
"""

from importlib import import_module

__version__ = "0.1.0"

# Strings, not import statements: every module of the package imports this file, and must not import these packages.
HOMES = {
    "compress_gradients": "gradwire.comm.parallel",
    "comm_hook": "gradwire.comm.parallel",
    "Compression": "gradwire.comm.parallel",
    "DiLoCo": "gradwire.comm.parallel.optimizers.diloco",
    "StreamingDiLoCo": "gradwire.comm.parallel.optimizers.streaming",
    "ReplayDiLoCo": "gradwire.comm.parallel.optimizers.replay",
    "OneBitAdam": "gradwire.comm.parallel.optimizers.adam",
    "DeMo": "gradwire.comm.parallel.optimizers.demo",
    "Muon": "gradwire.comm.parallel.optimizers.muon",
    "BF16": "gradwire.comm.compressors.methods.bf16",
    "Bins": "gradwire.comm.compressors.methods.bins",
    "ChunkTopK": "gradwire.comm.compressors.methods.chunktopk",
    "DCTTopK": "gradwire.comm.compressors.methods.dcttopk",
    "FP16": "gradwire.comm.compressors.methods.fp16",
    "FP8": "gradwire.comm.compressors.methods.fp8",
    "GradiVeQ": "gradwire.comm.compressors.methods.gradiveq",
    "Hadamard": "gradwire.comm.compressors.methods.hadamard",
    "Int8": "gradwire.comm.compressors.methods.int8",
    "Natural": "gradwire.comm.compressors.methods.natural",
    "OneBit": "gradwire.comm.compressors.methods.onebit",
    "PowerSGD": "gradwire.comm.compressors.methods.powersgd",
    "QSGD": "gradwire.comm.compressors.methods.qsgd",
    "RandomK": "gradwire.comm.compressors.methods.randomk",
    "SignSGD": "gradwire.comm.compressors.methods.signsgd",
    "Sketch": "gradwire.comm.compressors.methods.sketch",
    "TernGrad": "gradwire.comm.compressors.methods.terngrad",
    "Threshold": "gradwire.comm.compressors.methods.threshold",
    "TopK": "gradwire.comm.compressors.methods.topk",
    "Uncompressed": "gradwire.comm.compressors.methods.none",
    "Zero": "gradwire.comm.compressors.methods.zero",
    "load_results": "gradwire.bench.report.rows.record",
}

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> object:
    """Import one of the public names from the room where it lives (PEP 562)."""
    if name not in HOMES:
        hint = import_module("gradwire.base.errors").did_you_mean(name, HOMES)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
