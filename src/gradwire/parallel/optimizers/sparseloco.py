"""SparseLoCo: local AdamW steps, and sparse pseudo-gradients under an error feedback that decays, without momentum.

Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv:2508.15706, 2025). A cell of it sends
the 64 largest of each 4,096 elements in 2 bits (``chunktopk+bins``) to all ranks, with ``ef_decay`` 0.95.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from gradwire.collectives import Reducer
from gradwire.parallel.optimizers.diloco import DiLoCo
from gradwire.parallel.optimizers.rounds import Interval


class SparseLoCo(DiLoCo):
    """DiLoCo with the paper's defaults; the rest of the method is the reducer's compressor and error feedback."""

    def __init__(
        self,
        model: nn.Module,
        groups: Iterable[dict[str, Any]],
        reducer: Reducer,
        *,
        H: Interval = 30,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(model, groups, reducer, H=H, outer_lr=outer_lr, outer_momentum=outer_momentum, **options)
