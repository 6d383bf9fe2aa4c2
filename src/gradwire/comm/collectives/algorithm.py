"""Base class of the algorithms that average a flat gradient buffer over the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor

from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.group import Ranks
from gradwire.comm.collectives.layout import Layout

Kind = Literal["reduce_scatter", "all_reduce"]


class Algorithm(ABC):
    """A reduction over at least two ranks.

    Args:
        codec: This rank's codec.
        ranks: The participating ranks.
    """

    name: ClassVar[str]

    def __init__(self, codec: Codec, ranks: Ranks) -> None:
        self.codec = codec
        self.ranks = ranks

    @abstractmethod
    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return this rank's row of the mean: float32 [row_numel]; padding is 0."""

    @abstractmethod
    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return the mean, bit-equal on all ranks: float32 [numel]; padding is 0."""

    @abstractmethod
    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes of one call at the current step over all ranks; None if it depends on the data."""
