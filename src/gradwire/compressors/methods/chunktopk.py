"""Top-k of every chunk: the k elements of the largest magnitude among each so many consecutive ones.

As in SparseLoCo (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706, 2025), and
DeMo before it: a place inside a chunk takes few bits, and every region of the tensor sends something. They cut matrices
into tiles of 64 x 64; here a chunk is as many consecutive elements.

Wire: for each chunk in turn the places inside it in ascending order, of ``ceil(log2(chunk))`` bits each, packed; then
the values in the same order. The last chunk may be shorter, and sends as much of its elements as the others of theirs.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gradwire.compressors import indices
from gradwire.compressors.base import Block, Count, Shape, numel
from gradwire.compressors.packing import pack, packed_bytes, unpack
from gradwire.compressors.sparse import Sparsifier, magnitudes, share


class ChunkTopK(Sparsifier):
    """Sends exactly ``k`` elements of each chunk; of equal magnitudes, those of lower index.

    NaN counts as the largest.
    """

    name = "chunktopk"
    use = "What local updates send (`comm_optimizer: sparseloco`), with a quantizer for the values and error feedback."

    k: Count = Field(64, description="elements of a chunk that are sent")
    chunk: Block = Field(4096, description="consecutive elements of a chunk")

    def of_chunk(self, length: int) -> int:
        """Elements that a chunk of ``length`` sends."""
        return min(length, share(self.k / self.chunk, length))

    def kept(self, shape: Shape) -> int:
        """Those of the whole chunks and of the last one."""
        whole, rest = divmod(numel(shape), self.chunk)
        return whole * self.of_chunk(self.chunk) + self.of_chunk(rest)

    def bits(self, shape: Shape) -> int:
        """Bits of a place inside a chunk."""
        return max(1, (min(self.chunk, numel(shape)) - 1).bit_length())

    def head_bytes(self, shape: Shape) -> int:
        """The packed places."""
        return packed_bytes(self.kept(shape), self.bits(shape))

    def starts(self, shape: Shape, device: torch.device) -> Tensor:
        """Where the chunk of each sent element begins: int64 [kept]."""
        whole = numel(shape) // self.chunk
        order = torch.arange(whole, device=device).repeat_interleave(self.of_chunk(self.chunk))
        rest = order.new_full((self.kept(shape) - order.numel(),), whole)
        return torch.cat([order, rest]) * self.chunk

    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sort each chunk by magnitude, then by index."""
        order = magnitudes(x)
        cut = order.numel() - order.numel() % self.chunk
        parts = [order[:cut].view(-1, self.chunk), order[cut:].view(1, -1)]
        chosen = [
            part.argsort(dim=1, descending=True, stable=True)[:, : self.of_chunk(part.shape[1])].sort(dim=1).values
            for part in parts
        ]
        inside = torch.cat([part.reshape(-1) for part in chosen])
        places = inside + self.starts(x.numel(), x.device)
        return pack(inside, self.bits(x.numel())), x.view(-1)[places]

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Unpack the places."""
        head, kept = self.head_bytes(shape), self.kept(shape)
        if wire.numel() < head:
            raise ValueError(f"{wire.numel()} bytes do not hold {kept} places of {self.name}")
        inside = unpack(wire[:head], self.bits(shape), kept).to(torch.int64)
        return indices.checked(inside + self.starts(shape, wire.device), numel(shape)), head
