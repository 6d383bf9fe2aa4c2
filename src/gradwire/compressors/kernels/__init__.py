"""Fused forms of the methods, for a CPU core (numba) and for CUDA (Triton); the plain form stays the definition.

``cpu/<method>.py`` and ``cuda/<method>.py`` hold three functions:

- ``covers(method) -> bool``: whether this build of the method, with its options, has a fused form here;
- ``to_wire(method, x, generator) -> (wire, bad)``: the same bytes as ``method.to_wire(x, generator)``, and whether x is
  unfit for the wire (bool [1]); where it is, the bytes may differ but still decode to something not finite;
- ``from_wire(method, wire, shape)``: the same numbers as ``method.from_wire(wire, shape)``.

A sparsifier's file has ``pick(method, x, generator) -> (head, values, bad)``, ``places(method, wire, shape)`` and
``place(method, values, places, shape)`` in their stead (`gradwire.compressors.sparse`).
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch


class Method(Protocol):
    """A compressor, as far as it is looked at here."""

    name: ClassVar[str]


def find(method: Method, device: torch.device) -> ModuleType | None:
    """The module with the fused form of ``method`` for ``device``; None where the plain form is the only one."""
    module = load(device.type, method.name)
    return module if module is not None and module.covers(method) else None


@cache
def load(kind: str, name: str) -> ModuleType | None:
    """The module ``kernels/<kind>/<name>.py``, if there is one and what it is built on is installed."""
    if kind not in ("cpu", "cuda") or find_spec(f"{__name__}.{kind}.{name}") is None:
        return None
    if kind == "cuda" and find_spec("triton") is None:
        warnings.warn(f"triton is not installed: {name} runs on CUDA in its plain, slow form", stacklevel=4)
        return None
    return import_module(f"{__name__}.{kind}.{name}")
