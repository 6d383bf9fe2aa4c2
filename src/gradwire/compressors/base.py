"""What every compressor is: options as typed data, and a pair of functions between a tensor and its bytes.

A method implements `to_wire`, `from_wire` and `wire_bytes`; the checks that all methods share are here, once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from gradwire.errors import NonFiniteGradient

Shape = int | tuple[int, ...]


def numel(shape: Shape) -> int:
    """Number of elements of a tensor of ``shape``."""
    return shape if isinstance(shape, int) else math.prod(shape)


def as_numbers(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes (uint8, contiguous) as numbers of ``dtype``; copied only where they do not lie aligned in memory."""
    aligned = wire.storage_offset() % dtype.itemsize == 0
    return (wire if aligned else wire.clone()).view(dtype)


class Compressor(BaseModel, ABC):
    """Base of all compressors: frozen, and its fields are the method's options.

    An encoding is self-contained: who has the bytes and the shape can decode it. The wire is little-endian.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    overflow: ClassVar[float] = math.inf
    """The smallest magnitude that the wire can no longer carry as a finite number."""

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of ``decode(encode(x))`` is ``x``; declared here, checked by the tests."""
        return False

    def encode(self, x: Tensor, *, generator: torch.Generator | None = None, flag: Tensor | None = None) -> Tensor:
        """All bytes that travel for ``x``.

        Args:
            x: Float vector or matrix of any float type, on any device, contiguous or not.
            generator: Source of randomness on x's device; methods without randomness ignore it. The global random
                state is never touched.
            flag: uint8 [1] on x's device, set to 1 if ``x`` holds a value that is not finite or becomes so on the wire
                (fp16 beyond 65,519). Nothing synchronises then, and the bytes decode to something not finite.

        Returns:
            uint8 [wire_bytes], contiguous, on x's device. It may share memory with ``x``.

        Raises:
            NonFiniteGradient: Without ``flag``, where the flag would be set.
            ValueError: If ``x`` is no float vector or matrix.
        """
        if x.ndim not in (1, 2) or not x.is_floating_point():
            raise ValueError(f"{self.name} encodes float vectors and matrices, not {x.dtype} of shape {tuple(x.shape)}")
        values = x.detach().to(torch.float32).contiguous()
        if values.numel():
            low, high = torch.aminmax(values)  # both are NaN where any value is, and NaN fails every comparison
            bad = torch.logical_and(low > -self.overflow, high < self.overflow).logical_not_()
            if flag is not None:
                flag.logical_or_(bad)
            elif bad.item():
                raise NonFiniteGradient(
                    f"{self.name}: the gradient holds NaN or a magnitude of {self.overflow:g} or more, "
                    f"which its wire cannot carry"
                )
        return self.to_wire(values, generator)

    def decode(self, wire: Tensor, shape: Shape) -> Tensor:
        """The tensor that ``wire`` stands for.

        Args:
            wire: uint8 [b] as `encode` made it, on any device.
            shape: Shape of the encoded tensor.

        Returns:
            float32 of ``shape`` on the wire's device. It may share memory with ``wire``.

        Raises:
            ValueError: If so many bytes cannot be an encoding of that shape.
        """
        expected = self.wire_bytes(shape)
        if wire.dtype != torch.uint8 or expected not in (None, wire.numel()):
            raise ValueError(
                f"{self.name}: {wire.numel()} elements of {wire.dtype} are no encoding of shape {shape}, "
                f"which takes {expected} bytes"
            )
        return self.from_wire(wire, (shape,) if isinstance(shape, int) else tuple(shape)).view(shape)

    @abstractmethod
    def wire_bytes(self, shape: Shape) -> int | None:
        """Exact size of an encoding in bytes; None only where it depends on the data."""

    @abstractmethod
    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode ``x``, a contiguous float32 vector or matrix: uint8 [b], contiguous, on the same device."""

    @abstractmethod
    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Decode to float32 with as many elements as ``shape`` has."""
