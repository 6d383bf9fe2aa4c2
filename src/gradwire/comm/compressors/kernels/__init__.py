"""Kernels of the methods, for a CPU core (numba) and for CUDA (Triton); the method's file is the reference.

Modules of ``cpu`` and ``cuda`` hold a `Kernel` for each method of a family in ``KERNELS``; a method declares nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread, current_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.compressors.methods import FAMILIES
from gradwire.comm.compressors.segments import Buffers, Segment, Segments

OLDEST = (8, 0)  # compute capability that Triton compiles for
COMPILING: set[Thread] = set()  # threads that compile kernels for a CPU, which have them before the others
FAILED: list[str] = []  # why kernels for a CPU did not compile: then the reference serves to the end
os.register_at_fork(after_in_child=COMPILING.clear)  # a child has no such thread


class Picked(NamedTuple):
    """The values that a sparsifier has chosen of many tensors.

    Attributes:
        values: float32 [k], tensor after tensor.
        keep: ``(sent, bad)``: finishes error feedback, given what of ``values`` arrives, and where nothing is kept.
    """

    values: Tensor
    keep: Callable[[Tensor, Tensor], None]


# Why: docs/decisions.md, "A reference implementation and its kernels, by one protocol".
@dataclass(frozen=True)
class Kernel:
    """A method's operations on one kind of device; None: the reference implementation is used.

    Each takes the method first, and gives the bytes or numbers of the reference. What it needs is checked before.

    Attributes:
        covers: ``(method) -> bool``: whether there is a kernel for these options.
        encode_many: ``(method, buffers)``, as `Compressor.encode_many`, for sizes that the shape gives. The bytes of a
            tensor that is not representable may differ from the reference's but still decode to something not finite.
        decode_add: ``(method, wires, segments, out, onto)``, as `Compressor.decode_add`, for uint8 [messages, b].
        pick: ``(method, x, generator) -> (head, values, bad)``, as `Sparsifier.pick`, and whether x is not
            representable (bool [1]).
        places: ``(method, wire, shape)``, as `Sparsifier.places`.
        place: ``(method, values, places, shape)``, as `Sparsifier.place`.
        pick_many: ``(method, buffers) -> Picked``: writes the heads of all tensors and flags them, as `encode_many`,
            and adds the values to the residuals; for a sparsifier that draws nothing.
        place_many: ``(method, wires, values, segments, out, onto)``: reads all tensors' heads, and puts the values
            of one message after the other to their places, as `decode_add`.
        rotate_many: ``(method, values, segments)``, as `Rotation.rotated_many`.
    """

    covers: Callable[[Any], bool] = lambda method: True
    encode_many: Callable[..., None] | None = None
    decode_add: Callable[..., None] | None = None
    pick: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    places: Callable[..., tuple[Tensor, int]] | None = None
    place: Callable[..., Tensor] | None = None
    pick_many: Callable[..., Picked] | None = None
    place_many: Callable[..., None] | None = None
    rotate_many: Callable[..., Tensor] | None = None

    def encode(self, method: Any, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor] | None:
        """The encoding of one tensor, and whether it is not representable (uint8 [1]); None without a kernel."""
        shape = tuple(x.shape)
        if self.encode_many is None or (size := method.wire_bytes(shape)) is None:
            return None
        wire = torch.empty(size, dtype=torch.uint8, device=x.device)
        bad = torch.zeros(1, dtype=torch.uint8, device=x.device)
        self.encode_many(method, Buffers(x.view(-1), alone(method, shape), wire, [generator], bad, None))
        return wire, bad

    def decode(self, method: Any, wire: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """float32 with as many elements as ``shape`` has; None without a kernel."""
        if self.decode_add is None or method.wire_bytes(shape) is None:
            return None
        segments = alone(method, shape)
        out = torch.empty(segments.numel, dtype=torch.float32, device=wire.device)
        self.decode_add(method, wire.unsqueeze(0), segments, out, "blank")
        return out


REFERENCE = Kernel()


def find(method: Any, device: torch.device) -> Kernel:
    """The kernel of ``method`` on ``device``; `REFERENCE` if it has none, a thread is compiling it, or did so in vain.

    Raises:
        BadInput: If the device is a GPU older than the kernels support.
    """
    kernel = load(device.type, method.name)
    if kernel is REFERENCE or not kernel.covers(method):
        return REFERENCE
    if device.type == "cuda":
        check_capability(method.name, device.index)
    elif FAILED or (COMPILING and current_thread() not in COMPILING):
        return REFERENCE
    return kernel


@cache
def check_capability(name: str, index: int | None) -> None:
    """Check that a CUDA device is new enough for the kernels.

    Raises:
        BadInput: If it is not.
    """
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        raise BadInput(
            f"{name}: the CUDA kernels need compute capability {'.'.join(map(str, OLDEST))} or later (A100, H100), and "
            f"{torch.cuda.get_device_name(index)} has {'.'.join(map(str, capability))}; use --device cpu."
        )


@cache
def load(kind: str, name: str) -> Kernel:
    """The kernel of a method; `REFERENCE` if it has none, or the compiler is not installed."""
    family = FAMILIES.get(name, name)
    if not Path(__file__).parent.joinpath(kind, f"{family}.py").is_file():
        return REFERENCE
    if kind == "cuda" and find_spec("triton") is None:
        warnings.warn(
            f"triton is not installed: {name} runs on CUDA in its slow reference implementation", stacklevel=4
        )
        return REFERENCE
    kernels: dict[str, Kernel] = import_module(f"{__name__}.{kind}.{family}").KERNELS
    return kernels.get(name, REFERENCE)


@lru_cache(4096)
def alone(method: Any, shape: tuple[int, ...]) -> Segments:
    """A table of one tensor."""
    return Segments([Segment(0, shape, 0, method.wire_bytes(shape))])
