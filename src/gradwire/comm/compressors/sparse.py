"""Sparsifiers: some places are chosen, and their values travel, as float32 or, in a chain, through a quantizer.

Wire: the head, which encodes the places, then the values' own wire.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gradwire.comm.compressors import indices, kernels
from gradwire.comm.compressors.base import Compressor, Quantizer, Shape, numel
from gradwire.comm.compressors.driver import Onto
from gradwire.comm.compressors.methods.none import Uncompressed
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.segments import Buffers, Segment, Segments

FLOAT32 = Uncompressed()


def magnitudes(x: Tensor) -> Tensor:
    """The bits of |x| for a contiguous float32 ``x``, as int32 [n]: in the order of |x|, NaN above infinity."""
    return x.view(-1).view(torch.int32) & 0x7FFFFFFF


def share(density: float, n: int) -> int:
    """Number of elements that are ``density`` of n: at least one where there is any."""
    return max(1, round(density * n)) if n else 0


def largest(x: Tensor, keep: int) -> Tensor:
    """Mask of the ``keep`` elements of largest magnitude in a float32 vector: bool, ties to the lowest index.

    NaN counts as the largest.
    """
    magnitude = magnitudes(x)
    least = magnitude.topk(keep).values[-1:]  # empty, as the mask, where nothing is kept
    above, tied = magnitude > least, magnitude == least
    order = tied.cumsum(0, dtype=torch.int32 if x.numel() < 2**31 else torch.int64)
    return above | (tied & (order <= keep - above.sum()))


def largest_places(x: Tensor, keep: int) -> Tensor:
    """Where `largest` is True, ascending: int64 [keep]; nothing synchronises."""
    return torch.nonzero_static(largest(x, keep), size=keep).view(-1)


class Sparse(Compressor):
    """An encoding of chosen elements: the sparsifier's head, then the quantizer's encoding of their values."""

    if TYPE_CHECKING:  # a chain has them as options, a sparsifier is its own and sends float32
        sparsifier: ClassVar[Sparsifier]
        quantizer: ClassVar[Quantizer]

    def wire_bytes(self, shape: Shape) -> int | None:
        """Head and values; None where either depends on the data."""
        head, kept = self.sparsifier.head_bytes(shape), self.sparsifier.kept(shape)
        values = None if kept is None else self.quantizer.wire_bytes(kept)
        return None if head is None or values is None else head + values

    def index_bytes(self, wire: Tensor, shape: Shape) -> int:
        """The head's bytes."""
        size = self.sparsifier.head_bytes(shape)
        return self.sparsifier.places(wire, shape)[1] if size is None else size

    def sent_elements(self, shape: Shape, wire: Tensor | None = None) -> int | None:
        """As many as are kept."""
        kept = self.sparsifier.kept(shape)
        return self.sparsifier.places(wire, shape)[0].numel() if kept is None and wire is not None else kept

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Head and values; both draw from one generator, the sparsifier first."""
        head, values = self.sparsifier.pick(x, generator)
        return torch.cat([head, self.quantizer.to_wire(values, generator)])

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x or a chosen value is not representable."""
        head, values, bad = self.sparsifier.picked(x, generator)
        wire, bad_values = self.quantizer.coded(values, generator)
        return torch.cat([head, wire]), bad.to(torch.bool) | bad_values.to(torch.bool)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The values at their places."""
        places, head = self.sparsifier.places(wire, shape)
        values = self.quantizer.from_wire(self._values(wire[head:], places), (places.numel(),))
        return self.sparsifier.place(values, places, shape)

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        places, head = self.sparsifier.decoded_places(wire, shape)
        values = self.quantizer.decoded(self._values(wire[head:], places), (places.numel(),))
        return self.sparsifier.placed(values, places, shape)

    def _values(self, wire: Tensor, places: Tensor) -> Tensor:
        """The values' encoding, whose size is checked where it is known."""
        expected = self.quantizer.wire_bytes(places.numel())
        if expected not in (None, wire.numel()):
            raise ValueError(
                f"invalid payload: {self.name} takes {expected} bytes for the values of {places.numel()} elements, "
                f"got {wire.numel()}"
            )
        return wire


class Sparsifier(Sparse):
    """A compressor that sends some elements; the others decode to 0."""

    quantizer: ClassVar[Quantizer] = FLOAT32

    @property
    def sparsifier(self) -> Sparsifier:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def growth(self) -> float:
        """How many times larger than all elements a sent value may be."""
        return 1.0

    @abstractmethod
    def kept(self, shape: Shape) -> int | None:
        """How many elements are sent; None where that depends on the data."""

    @abstractmethod
    def head_bytes(self, shape: Shape) -> int | None:
        """Bytes of the head; None where that depends on the data."""

    @abstractmethod
    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The head (uint8 [h]) and the values (float32 [k]) of ``x``, a contiguous float32 vector or matrix.

        The head encodes the places (and how many there are, where that is not known); the values are in their order.
        """

    @abstractmethod
    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Read the head at the start of ``wire``.

        Returns:
            The places (int64 [k], distinct, below the number of elements), and the bytes of the head.

        Raises:
            ValueError: If the bytes are not a head of this shape.
        """

    def gain(self, shape: Shape) -> float:
        """The factor that the receiver multiplies the values by."""
        return 1.0

    def place(self, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
        """A vector of zeros with ``gain * values`` at ``places``: float32 [n]."""
        out = torch.zeros(numel(shape), dtype=torch.float32, device=values.device)
        out[places] = values if self.gain(shape) == 1.0 else values * self.gain(shape)
        return out

    def picked(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """`pick` in its fastest form for x's device, and whether x is not representable (bool [1] or [])."""
        if pick := kernels.find(self, x.device).pick:
            return pick(self, x, generator)
        return *self.pick(x, generator), self.not_representable(x)

    def decoded_places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """`places` in its fastest form for the wire's device."""
        return (kernels.find(self, wire.device).places or type(self).places)(self, wire, shape)

    def placed(self, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
        """`place` in its fastest form for the values' device."""
        return (kernels.find(self, values.device).place or type(self).place)(self, values, places, shape)


class Chain(Sparse):
    """A sparsifier whose values a quantizer shortens: ``sparsifier+quantizer``, for any pair of methods.

    As in Basu et al., "Qsparse-local-SGD" (NeurIPS 2019).
    """

    sparsifier: Sparsifier  # type: ignore[misc]
    quantizer: Quantizer  # type: ignore[misc]

    @property
    def name(self) -> str:  # type: ignore[override]
        """Both names, as in ``topk+int8``."""
        return f"{self.sparsifier.name}+{self.quantizer.name}"

    @property
    def unbiased(self) -> bool:
        """If both members are: the quantizer draws independently of the choice."""
        return self.sparsifier.unbiased and self.quantizer.unbiased

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """The quantizer's; what the sparsifier leaves out need not be small enough for it."""
        return min(self.sparsifier.overflow, self.quantizer.overflow / self.sparsifier.growth)

    def encode_each(self, buffers: Buffers) -> tuple[Tensor, Segments]:
        """Choose of all tensors, then the quantizer's `encode_many`; or one after the other, without a kernel."""
        values, segments, wire, generators, bad, residual = buffers
        pick_many = kernels.find(self.sparsifier, values.device).pick_many
        if pick_many is None or not segments.fixed:
            return super().encode_each(buffers)
        chosen, keep = pick_many(self.sparsifier, buffers)
        inner = self._chosen(segments, 1, wire.numel())
        self.quantizer.encode_many(chosen, inner, wire, generators=generators, flags=bad)
        if residual is not None:
            sent = torch.empty_like(chosen)
            self.quantizer.decode_add(wire, inner, sent, onto="blank")
            keep(sent, bad)
        return wire, segments

    def decode_each(self, wires: Tensor, segments: Segments, out: Tensor, onto: Onto) -> None:
        """The quantizer's `decode_add`, then put the values of all tensors to their places."""
        place_many = kernels.find(self.sparsifier, wires.device).place_many
        if place_many is None or not segments.fixed:
            super().decode_each(wires, segments, out, onto)
            return
        inner = self._chosen(segments, *wires.shape)
        values = torch.empty(inner.numel, dtype=torch.float32, device=wires.device)
        self.quantizer.decode_add(wires.view(-1), inner, values, onto="blank")
        place_many(self.sparsifier, wires, values, segments, out, onto)

    def _chosen(self, segments: Segments, messages: int, nbytes: int) -> Segments:
        """The chosen values of all tensors of some messages of ``nbytes``, in order, and their encodings' positions."""

        def make() -> Segments:
            inner, start = [], 0
            for message in range(messages):
                for segment in segments:
                    head, kept = self.sparsifier.head_bytes(segment.form), self.sparsifier.kept(segment.form)
                    assert head is not None and kept is not None and segment.size is not None  # segments are fixed
                    at = message * nbytes + segment.at + head
                    inner.append(Segment(start, (kept,), at, segment.size - head))
                    start += kept
            return Segments(inner)

        return segments.derive(("chosen", self, messages, nbytes), make)


class Chunked(Sparsifier):
    """Sends as many elements of each chunk; of equal magnitudes, those of lower index. NaN counts as the largest.

    Wire: for each chunk in turn the places inside it in ascending order, of ``ceil(log2(chunk))`` bits each, packed;
    then the values in the same order. The last chunk may be shorter, and sends as much of its elements as the others
    of theirs.
    """

    @property
    @abstractmethod
    def density(self) -> float:
        """Part of a chunk's elements that are sent."""

    @abstractmethod
    def length(self, shape: Shape) -> int:
        """Elements of a whole chunk."""

    def chunked(self, x: Tensor) -> Tensor:
        """The vector that is cut into chunks: float32 [n]."""
        return x.view(-1)

    def of_chunk(self, length: int) -> int:
        """Elements that a chunk of ``length`` sends."""
        return min(length, share(self.density, length))

    def kept(self, shape: Shape) -> int:
        """Those of the whole chunks and of the last one."""
        length = self.length(shape)
        whole, rest = divmod(numel(shape), length)
        return whole * self.of_chunk(length) + self.of_chunk(rest)

    def bits(self, shape: Shape) -> int:
        """Bits of a place inside a chunk."""
        return max(1, (min(self.length(shape), numel(shape)) - 1).bit_length())

    def head_bytes(self, shape: Shape) -> int:
        """The packed places."""
        return packed_bytes(self.kept(shape), self.bits(shape))

    def starts(self, shape: Shape, device: torch.device) -> Tensor:
        """Where the chunk of each sent element begins: int64 [kept]."""
        length = self.length(shape)
        whole = numel(shape) // length
        order = torch.arange(whole, dtype=torch.int64, device=device).repeat_interleave(self.of_chunk(length))
        rest = order.new_full((self.kept(shape) - order.numel(),), whole)
        return torch.cat([order, rest]) * length

    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sort each chunk by magnitude, then by index."""
        values, shape = self.chunked(x), tuple(x.shape)
        order = magnitudes(values)
        length = self.length(shape)
        cut = order.numel() - order.numel() % length
        parts = [order[:cut].view(-1, length), order[cut:].view(1, -1)]
        chosen = [
            chunk.argsort(dim=1, descending=True, stable=True)[:, : self.of_chunk(chunk.shape[1])].sort(dim=1).values
            for chunk in parts
        ]
        inside = torch.cat([chunk.reshape(-1) for chunk in chosen])
        places = inside + self.starts(shape, x.device)
        return pack(inside, self.bits(shape)), values[places]

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Unpack the places."""
        head, kept = self.head_bytes(shape), self.kept(shape)
        if wire.numel() < head:
            raise ValueError(f"invalid payload: {wire.numel()} bytes cannot encode {kept} places of {self.name}")
        inside = unpack(wire[:head], self.bits(shape), kept).to(torch.int64)
        return indices.checked(inside + self.starts(shape, wire.device), numel(shape)), head
