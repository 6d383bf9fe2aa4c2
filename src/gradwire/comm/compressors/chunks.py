"""Sparsifiers that send the largest elements of every chunk.

Wire: for each chunk in turn the places inside it in ascending order, of ``ceil(log2(chunk))`` bits each, packed; then
the values in the same order. The last chunk may be shorter, and sends as much of its elements as the others of theirs.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack
from gradwire.comm.compressors.sparse import Sparsifier, magnitudes, share


class Chunked(Sparsifier):
    """Sends as many elements of each chunk; of equal magnitudes, those of lower index. NaN counts as the largest."""

    @property
    @abstractmethod
    def density(self) -> float:
        """Part of a chunk's elements that are sent."""

    @abstractmethod
    def length(self, shape: Shape) -> int:
        """Elements of a whole chunk."""

    def chunked(self, x: Tensor) -> Tensor:
        """What the chunks follow each other in: float32 [n]."""
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
        order = torch.arange(whole, device=device).repeat_interleave(self.of_chunk(length))
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
            part.argsort(dim=1, descending=True, stable=True)[:, : self.of_chunk(part.shape[1])].sort(dim=1).values
            for part in parts
        ]
        inside = torch.cat([part.reshape(-1) for part in chosen])
        places = inside + self.starts(shape, x.device)
        return pack(inside, self.bits(shape)), values[places]

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Unpack the places."""
        head, kept = self.head_bytes(shape), self.kept(shape)
        if wire.numel() < head:
            raise ValueError(f"{wire.numel()} bytes do not hold {kept} places of {self.name}")
        inside = unpack(wire[:head], self.bits(shape), kept).to(torch.int64)
        return indices.checked(inside + self.starts(shape, wire.device), numel(shape)), head
