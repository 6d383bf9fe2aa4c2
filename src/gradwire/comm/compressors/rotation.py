"""Rotations: a stage before a quantizer, which spreads outliers over their neighbours.

In ``rotation+quantizer`` the quantizer sees the rotated tensor, and the receiver turns what it decodes back. A rotation
ships no bytes, and keeps lengths: a quantizer's squared error is the same before and after turning back.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.comm.compressors import kernels
from gradwire.comm.compressors.base import Compressor, Quantizer, Shape, as_numbers, numel
from gradwire.comm.compressors.driver import Onto, put
from gradwire.comm.compressors.segments import Buffers, Segments


# Why: docs/decisions.md, "A rotation is a chain's first member, like a sparsifier".
class Rotation(Compressor):
    """An orthogonal transform that is its own inverse; alone it travels as float32."""

    group: ClassVar[int]
    """The most elements that are mixed with each other."""
    overflow: ClassVar[float] = 2.0**125  # sums of rotated elements stay finite below it

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """The rotated vector, new: float32 [n] from float32 [n]."""

    def rotated(self, x: Tensor) -> Tensor:
        """`rotate` in its fastest form for x's device."""
        return self.rotated_many(x, kernels.alone(self, tuple(x.shape)))

    def rotated_many(self, values: Tensor, segments: Segments) -> Tensor:
        """A new buffer like ``values`` (float32 [n]), with each segment rotated; the rest of it has no meaning."""
        rotate_many = kernels.find(self, values.device).rotate_many
        if rotate_many:
            return rotate_many(self, values, segments)
        out = torch.empty_like(values)
        for segment in segments:
            out[segment.elements] = self.rotate(values[segment.elements])
        return out

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per element."""
        return 4 * numel(shape)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """The rotated values."""
        return self.rotate(x.view(-1)).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The values turned back."""
        return self.rotate(as_numbers(wire, torch.float32))

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x is not representable."""
        return self.rotated(x.view(-1)).view(torch.uint8), self.not_representable(x)

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        return self.rotated(as_numbers(wire, torch.float32))


class Rotated(Compressor):
    """A quantizer behind a rotation."""

    rotation: Rotation
    quantizer: Quantizer

    @property
    def name(self) -> str:  # type: ignore[override]
        """Both names, as in ``hadamard+int8``."""
        return f"{self.rotation.name}+{self.quantizer.name}"

    @property
    def unbiased(self) -> bool:
        """If the quantizer is: a rotation is linear."""
        return self.quantizer.unbiased

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """The quantizer's, since a rotated element may be larger than every one that it is made of."""
        return min(self.rotation.overflow, self.quantizer.overflow / self.rotation.group**0.5)

    def wire_bytes(self, shape: Shape) -> int | None:
        """The quantizer's."""
        return self.quantizer.wire_bytes(numel(shape))

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Rotate and quantize."""
        return self.quantizer.to_wire(self.rotation.rotate(x.view(-1)), generator)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Decode and turn back."""
        return self.rotation.rotate(self.quantizer.from_wire(wire, (numel(shape),)))

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x is not representable."""
        return self.quantizer.coded(self.rotation.rotated(x.view(-1)), generator)

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        return self.rotation.rotated(self.quantizer.decoded(wire, (numel(shape),)))

    def encode_each(self, buffers: Buffers) -> tuple[Tensor, Segments]:
        """Rotate all tensors, then the quantizer's `encode_many`."""
        values, segments, wire, generators, bad, residual = buffers
        end = segments.numel
        given = values[:end] if residual is None else residual[:end] + values[:end]
        rotated = self.rotation.rotated_many(given, segments)
        wire, placed = self.quantizer.encode_many(rotated, vectors(segments), wire, generators=generators, flags=bad)
        if residual is not None:
            sent = self._decoded_many(wire, placed, segments)
            for segment, flag in zip(segments, bad.split(1), strict=True):
                elements = segment.elements
                torch.sub(given[elements], sent[elements], out=residual[elements]).masked_fill_(flag.to(torch.bool), 0)
        return wire, segments if segments.fixed else segments.placed(segment.size or 0 for segment in placed)

    def decode_each(self, wires: Tensor, segments: Segments, out: Tensor, onto: Onto) -> None:
        """The quantizer's `decode_add`, then turn all tensors back."""
        for message in wires:
            values = self._decoded_many(message, vectors(segments), segments)
            for segment in segments:
                put(values[segment.elements], out[segment.elements], onto)
            onto = "sum"

    def _decoded_many(self, wire: Tensor, placed: Segments, segments: Segments) -> Tensor:
        """All tensors of a message in a new buffer."""
        decoded = torch.empty(segments.numel, dtype=torch.float32, device=wire.device)
        self.quantizer.decode_add(wire, placed, decoded, onto="blank")
        return self.rotation.rotated_many(decoded, segments)


def vectors(segments: Segments) -> Segments:
    """The same tensors as vectors, which is how a quantizer sees what is rotated."""

    def flat() -> Segments:
        return Segments((segment._replace(form=(segment.numel,)) for segment in segments), fixed=segments.fixed)

    return segments.derive("vectors", flat)
