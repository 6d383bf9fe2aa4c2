"""Chains ``sparsifier+quantizer``: the values that a sparsifier sends travel through a quantizer.

As in Basu et al., "Qsparse-local-SGD" (NeurIPS 2019), for any pair of methods. Wire: the sparsifier's head, then the
quantizer's wire of the chosen values as a vector. Both draw from one generator, the sparsifier first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.comm.compressors import sparse
from gradwire.comm.compressors.base import Compressor, Quantizer, Section, Shape
from gradwire.comm.compressors.sparse import Sparsifier


class Chain(Compressor):
    """A sparsifier whose values a quantizer shortens."""

    sparsifier: Sparsifier
    quantizer: Quantizer

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

    def wire_bytes(self, shape: Shape) -> int | None:
        """Head and values; None where either depends on the data."""
        return sparse.wire_bytes(self.sparsifier, self.quantizer, shape)

    def index_bytes(self, wire: Tensor, shape: Shape) -> int:
        """The head's bytes."""
        return self.sparsifier.index_bytes(wire, shape)

    def sections(self, wire: Tensor, shape: Shape) -> list[Section]:
        """Head and values."""
        return sparse.sections(self.sparsifier, self.quantizer, wire, shape)

    def sent_elements(self, shape: Shape, wire: Tensor | None = None) -> int | None:
        """The sparsifier's."""
        return self.sparsifier.sent_elements(shape, wire)

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Head and quantized values."""
        return sparse.to_wire(self.sparsifier, self.quantizer, x, generator)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The values at their places."""
        return sparse.from_wire(self.sparsifier, self.quantizer, wire, shape)

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x is not representable."""
        return sparse.coded(self.sparsifier, self.quantizer, x, generator)

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        return sparse.decoded(self.sparsifier, self.quantizer, wire, shape)
