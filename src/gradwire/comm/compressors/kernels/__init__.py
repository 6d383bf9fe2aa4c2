"""Fused forms of the methods, for a CPU core (numba) and for CUDA (Triton); the plain form stays the definition.

``cpu/<method>.py`` and ``cuda/<method>.py`` hold three functions:

- ``covers(method) -> bool``: whether this build of the method, with its options, has a fused form here;
- ``encode_many(method, values, segments, wire, generators, bad, residual)``: what `Compressor.encode_many` does, with
  all checks made and sizes known; sets ``bad`` (integers, zeros [tensors]) where a tensor is not representable, whose
  bytes may differ from the plain form's but still decode to something not finite;
- ``decode_add(method, wires, segments, out, onto)``: what `Compressor.decode_add` does, for uint8 [messages, b].

Or, for one tensor at a time, and for encodings whose size depends on the data:

- ``to_wire(method, x, generator) -> (wire, bad)``: the same bytes as ``method.to_wire(x, generator)``, and whether x is
  not representable (bool [1]);
- ``from_wire(method, wire, shape)``: the same numbers as ``method.from_wire(wire, shape)``.

A sparsifier's file has ``pick(method, x, generator) -> (head, values, bad)``, ``places(method, wire, shape)`` and
``place(method, values, places, shape)`` in the stead of these two (`gradwire.comm.compressors.sparse`). A rotation's
has ``rotate(method, x)`` and ``rotate_many(method, values, segments)`` (`gradwire.comm.compressors.rotation`).
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.compressors.segments import Segment, Segments

OLDEST = (8, 0)  # compute capability that Triton compiles for, and the kernels' casts need


class Method(Protocol):
    """A compressor, as far as it is looked at here."""

    name: ClassVar[str]

    def __hash__(self) -> int:
        """Equal builds have equal hashes."""

    def wire_bytes(self, shape: tuple[int, ...]) -> int | None:
        """The size of an encoding."""


def find(method: Method, device: torch.device) -> ModuleType | None:
    """The module with the fused form of ``method`` for ``device``; None where the plain form is the only one.

    Raises:
        BadInput: If the device is a GPU older than the kernels support.
    """
    module = load(device.type, method.name)
    if module is None or not module.covers(method):
        return None
    if device.type == "cuda":
        check_capability(method.name, device.index)
    return module


@cache
def check_capability(name: str, index: int | None) -> None:
    """Check that a CUDA device is new enough for the kernels.

    Raises:
        BadInput: If it is not.
    """
    found = torch.cuda.get_device_capability(index)
    if found < OLDEST:
        raise BadInput(
            f"{name}: the CUDA kernels need compute capability {'.'.join(map(str, OLDEST))} or later (A100, H100), and "
            f"{torch.cuda.get_device_name(index)} has {'.'.join(map(str, found))}; use --device cpu."
        )


@cache
def load(kind: str, name: str) -> ModuleType | None:
    """The module ``kernels/<kind>/<name>.py``, if there is one and what it is built on is installed."""
    if kind not in ("cpu", "cuda") or find_spec(f"{__name__}.{kind}.{name}") is None:
        return None
    if kind == "cuda" and find_spec("triton") is None:
        warnings.warn(f"triton is not installed: {name} runs on CUDA in its plain, slow form", stacklevel=4)
        return None
    return import_module(f"{__name__}.{kind}.{name}")


def coded(fused: ModuleType, method: Method, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The encoding of one tensor, and whether it is not representable (bool or integer [1])."""
    size = method.wire_bytes(tuple(x.shape))
    if size is None or not hasattr(fused, "encode_many"):
        return fused.to_wire(method, x, generator)
    wire = torch.empty(size, dtype=torch.uint8, device=x.device)
    bad = torch.zeros(1, dtype=torch.uint8, device=x.device)
    fused.encode_many(method, x.view(-1), alone(method, tuple(x.shape)), wire, [generator], bad, None)
    return wire, bad


def decoded(fused: ModuleType, method: Method, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What the encoding of one tensor represents: float32 with as many elements as ``shape`` has."""
    if method.wire_bytes(shape) is None or not hasattr(fused, "decode_add"):
        return fused.from_wire(method, wire, shape)
    segments = alone(method, tuple(shape))
    out = torch.empty(segments.numel, device=wire.device)
    fused.decode_add(method, wire.unsqueeze(0), segments, out, "blank")
    return out


@lru_cache(4096)
def alone(method: Method, shape: tuple[int, ...]) -> Segments:
    """A table of one tensor."""
    return Segments([Segment(0, shape, 0, method.wire_bytes(shape))])
