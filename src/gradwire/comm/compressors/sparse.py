"""Sparsifiers: some places are chosen, and their values travel, as float32 or, in a chain, through a quantizer.

Wire: the head, which says the places, then the values' own wire.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.compressors import kernels
from gradwire.comm.compressors.base import Compressor, Quantizer, Section, Shape, numel
from gradwire.comm.compressors.methods.none import Uncompressed

FLOAT32 = Uncompressed()


def magnitudes(x: Tensor) -> Tensor:
    """The bits of |x| for a contiguous float32 ``x``, as int32 [n]: in the order of |x|, NaN above infinity."""
    return x.view(-1).view(torch.int32) & 0x7FFFFFFF


def share(density: float, n: int) -> int:
    """How many of n elements that is: at least one where there is any."""
    return max(1, round(density * n)) if n else 0


def largest(x: Tensor, keep: int) -> Tensor:
    """Mask of the ``keep`` elements of largest magnitude in a float32 vector: bool, ties to the lowest index.

    NaN counts as the largest.
    """
    magnitude = magnitudes(x)
    least = magnitude.topk(keep).values[-1:]  # empty, as the mask, where nothing is kept
    above, tied = magnitude > least, magnitude == least
    return above | (tied & (tied.cumsum(0) <= keep - above.sum()))


def largest_places(x: Tensor, keep: int) -> Tensor:
    """Where `largest` is True, ascending: int64 [keep]; nothing synchronises."""
    return torch.nonzero_static(largest(x, keep), size=keep).view(-1)


class Picked(NamedTuple):
    """The chosen elements.

    Attributes:
        head: What says the places (and how many there are, where that is not known): uint8 [h].
        values: float32 [k], in the order in which `Sparsifier.places` gives the places.
        bad: Whether x is not representable: bool [1] or [].
    """

    head: Tensor
    values: Tensor
    bad: Tensor


class Sparsifier(Compressor):
    """A compressor that sends some elements; the others decode to 0."""

    @property
    def growth(self) -> float:
        """How many times larger than all elements a sent value may be."""
        return 1.0

    @abstractmethod
    def kept(self, shape: Shape) -> int | None:
        """How many elements are sent; None where that depends on the data."""

    @abstractmethod
    def head_bytes(self, shape: Shape) -> int | None:
        """Bytes that say the places; None where that depends on the data."""

    @abstractmethod
    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The head (uint8 [h]) and the values (float32 [k]) of ``x``, a contiguous float32 vector or matrix."""

    @abstractmethod
    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Read the head at the start of ``wire``.

        Returns:
            The places (int64 [k], distinct, below the number of elements), and the bytes of the head.

        Raises:
            ValueError: If the bytes are not a head of this shape.
        """

    def gain(self, shape: Shape) -> float:
        """What the receiver multiplies the values by."""
        return 1.0

    def place(self, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
        """A vector of zeros with ``gain * values`` at ``places``: float32 [n]."""
        out = torch.zeros(numel(shape), dtype=torch.float32, device=values.device)
        out[places] = values if self.gain(shape) == 1.0 else values * self.gain(shape)
        return out

    def picked(self, x: Tensor, generator: torch.Generator | None) -> Picked:
        """`pick` in its fastest form for x's device, with the check for values that are not finite."""
        fused = kernels.find(self, x.device)
        return (
            Picked(*fused.pick(self, x, generator))
            if fused
            else Picked(*self.pick(x, generator), self.not_representable(x))
        )

    def found(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """`places` in its fastest form for the wire's device."""
        fused = kernels.find(self, wire.device)
        return (fused or type(self)).places(self, wire, shape)

    def placed(self, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
        """`place` in its fastest form for the values' device."""
        fused = kernels.find(self, values.device)
        return (fused or type(self)).place(self, values, places, shape)

    def wire_bytes(self, shape: Shape) -> int | None:
        """The head, and four bytes per sent element."""
        return wire_bytes(self, FLOAT32, shape)

    def index_bytes(self, wire: Tensor, shape: Shape) -> int:
        """The head's bytes."""
        size = self.head_bytes(shape)
        return self.places(wire, shape)[1] if size is None else size

    def sections(self, wire: Tensor, shape: Shape) -> list[Section]:
        """Head and values."""
        return sections(self, FLOAT32, wire, shape)

    def sent_elements(self, shape: Shape, wire: Tensor | None = None) -> int | None:
        """As many as are kept."""
        kept = self.kept(shape)
        return self.places(wire, shape)[0].numel() if kept is None and wire is not None else kept

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Head and values."""
        return to_wire(self, FLOAT32, x, generator)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The values at their places."""
        return from_wire(self, FLOAT32, wire, shape)

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x is not representable."""
        return coded(self, FLOAT32, x, generator)

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        return decoded(self, FLOAT32, wire, shape)


def wire_bytes(sparsifier: Sparsifier, quantizer: Quantizer, shape: Shape) -> int | None:
    """Head and values; None where either depends on the data."""
    head, kept = sparsifier.head_bytes(shape), sparsifier.kept(shape)
    values = None if kept is None else quantizer.wire_bytes(kept)
    return None if head is None or values is None else head + values


def sections(sparsifier: Sparsifier, quantizer: Quantizer, wire: Tensor, shape: Shape) -> list[Section]:
    """The head, and the sections of the values' encoding."""
    head, kept = sparsifier.index_bytes(wire, shape), sparsifier.sent_elements(shape, wire)
    assert kept is not None
    return [Section(head, 1, True), *quantizer.sections(wire[head:], kept)]


def to_wire(sparsifier: Sparsifier, quantizer: Quantizer, x: Tensor, generator: torch.Generator | None) -> Tensor:
    """The plain form of a sparsifier with a quantizer for its values."""
    head, values = sparsifier.pick(x, generator)
    return torch.cat([head, quantizer.to_wire(values, generator)])


def coded(
    sparsifier: Sparsifier, quantizer: Quantizer, x: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The fastest form, and whether x or a chosen value is not representable."""
    head, values, bad = sparsifier.picked(x, generator)
    wire, bad_values = quantizer.coded(values, generator)
    return torch.cat([head, wire]), bad.to(torch.bool) | bad_values.to(torch.bool)


def from_wire(sparsifier: Sparsifier, quantizer: Quantizer, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The plain form of decoding."""
    places, values = _parts(sparsifier, quantizer, wire, sparsifier.places(wire, shape))
    return sparsifier.place(quantizer.from_wire(values, (places.numel(),)), places, shape)


def decoded(sparsifier: Sparsifier, quantizer: Quantizer, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The fastest form of decoding."""
    places, values = _parts(sparsifier, quantizer, wire, sparsifier.found(wire, shape))
    return sparsifier.placed(quantizer.decoded(values, (places.numel(),)), places, shape)


def _parts(
    sparsifier: Sparsifier, quantizer: Quantizer, wire: Tensor, found: tuple[Tensor, int]
) -> tuple[Tensor, Tensor]:
    """The places and the values' wire, whose size is checked where it is known."""
    places, head = found
    values = wire[head:]
    expected = quantizer.wire_bytes(places.numel())
    if expected not in (None, values.numel()):
        raise ValueError(
            f"{sparsifier.name}: expected {expected} bytes for the values of {places.numel()} elements, "
            f"got {values.numel()}"
        )
    return places, values
