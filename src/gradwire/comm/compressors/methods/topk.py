"""Top-k: the k elements of the largest magnitude, with their places.

As in Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), with k exact.

Wire: the places in ascending order (`gradwire.comm.compressors.indices`), then the values.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.indices import CodeName
from gradwire.comm.compressors.sparse import Sparsifier, largest_places, share


class TopK(Sparsifier):
    """Sends exactly ``k = max(1, round(density * n))`` elements; of equal magnitudes, those of lower index.

    This is the best approximation of x by k elements. The squared error is at most ``(1 - k / n) ||x||^2`` for n
    elements, reached when all magnitudes are equal. NaN counts as the largest.
    """

    name = "topk"
    use = "Slow links and SGD with error feedback, after some dense steps; a chain such as topk+int8 packs the values."

    density: float = Field(default=0.01, gt=0, le=1, description="part of the elements that is sent")
    indices: CodeName = Field(default="auto", description="how the places are written; auto: the shortest code")

    def kept(self, shape: Shape) -> int:
        """k."""
        return share(self.density, numel(shape))

    def head_bytes(self, shape: Shape) -> int:
        """Bytes of the places' code."""
        return indices.coded_bytes(numel(shape), self.kept(shape), self.indices)

    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Compare with the k-th largest magnitude."""
        places = largest_places(x.view(-1), self.kept(x.numel()))
        return indices.encode(places, x.numel(), self.indices), x.view(-1)[places]

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Read the code of the places."""
        return indices.decode(wire, numel(shape), self.kept(shape), self.indices)
