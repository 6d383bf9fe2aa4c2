"""MuLoCo: local steps of Muon, and few bits per element of the pseudo-gradient.

Thérien et al., "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo" (arXiv:2505.23725, 2025). A
cell of it sends 2 bits per element (``bins``) with ``ef_decay`` 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gradwire.collectives import Reducer
from gradwire.parallel.optimizers.diloco import DiLoCo
from gradwire.parallel.optimizers.rounds import Interval


class MuLoCo(DiLoCo):
    """DiLoCo with Muon inside, and the paper's defaults."""

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]],
        reducer: Reducer,
        *,
        H: Interval = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.6,
        inner: str = "muon",
        **options: Any,
    ) -> None:
        super().__init__(
            model, groups, reducer, H=H, outer_lr=outer_lr, outer_momentum=outer_momentum, inner=inner, **options
        )
