"""Top-k of every chunk: the k elements of the largest magnitude among each so many consecutive ones.

As in SparseLoCo (Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", arXiv:2508.15706, 2025). It
cuts matrices into tiles of 64 x 64; here a chunk is as many consecutive elements.

Wire: that of `gradwire.comm.compressors.sparse.Chunked`.
"""

from __future__ import annotations

from pydantic import Field

from gradwire.comm.compressors.base import Block, Count, Shape
from gradwire.comm.compressors.sparse import Chunked


class ChunkTopK(Chunked):
    """Sends exactly ``k`` elements of each chunk; of equal magnitudes, those of lower index.

    NaN counts as the largest.
    """

    name = "chunktopk"
    use = "What local updates send (`comm_optimizer: sparseloco`), with a quantizer for the values and error feedback."

    k: Count = Field(default=64, description="elements of a chunk that are sent")
    chunk: Block = Field(default=4096, description="consecutive elements of a chunk")

    @property
    def density(self) -> float:
        """``k`` of a chunk's elements."""
        return self.k / self.chunk

    def length(self, shape: Shape) -> int:
        """As given, whatever the shape."""
        return self.chunk
