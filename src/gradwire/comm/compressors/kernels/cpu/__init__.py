"""Fused forms for one CPU core, compiled by numba; `compiled` keeps the machine code on disk.

They give the plain forms' bits: float32 arithmetic stays float32 (a bare literal would make it float64; numba makes
integer arithmetic 64 bits wide) and is neither reassociated nor contracted; sums are float64 (`summing`). Magnitudes
are compared as integers: their order is that of their bits, with NaN above infinity. Inner loops run from 0 over
slices, or they do not vectorize.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numba
import numpy as np
from numba import config

Function = TypeVar("Function", bound=Callable)

SIGNLESS = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)  # the bits from which on a magnitude is not finite


def cache_folder() -> str:
    """Where compiled kernels are kept: a folder of the user's that goes by the digest of this folder's source.

    numba notices an edit of a function's own file only, not of what it calls; the digest covers both.
    """
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "gradwire" / "numba" / hashlib.sha256(source).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return str(folder) if writable else tempfile.mkdtemp(prefix="gradwire-numba-")


CACHE = cache_folder()


def compiled(function: Function, reassociate: bool = False) -> Function:
    """Compile ``function`` at its first call, or take it from the disk; it releases the GIL."""
    before, config.CACHE_DIR = config.CACHE_DIR, CACHE
    try:
        fastmath = {"reassoc"} if reassociate else False
        return numba.njit(function, cache=True, nogil=True, error_model="numpy", fastmath=fastmath)
    finally:
        config.CACHE_DIR = before


def summing(function: Function) -> Function:
    """`compiled`, with sums in whatever order vectorizes: for float64 sums that are rounded to float32 later."""
    return compiled(function, reassociate=True)


@compiled
def largest(bits: np.ndarray) -> np.uint32:
    """The largest magnitude among float32 numbers given as uint32 bits, as bits; any NaN is larger than infinity."""
    most = np.uint32(0)
    for i in range(bits.size):
        most = max(most, np.uint32(bits[i] & SIGNLESS))
    return most
