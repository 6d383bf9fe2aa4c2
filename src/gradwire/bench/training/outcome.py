"""The results of a run in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradwire.bench.training.environment import PeakMemory
from gradwire.bench.training.evaluate import Quality
from gradwire.bench.training.privacy import Guarantee

Row = dict[str, Any]  # one rank's row of steps.parquet


@dataclass
class Outcome:
    """The results of a run in memory.

    Args:
        rows: This rank's rows of ``steps.parquet``, from the step on at which the run came to these ranks.
        moved_from: The strategies and ranks that took steps before, each with the step that it stopped at.
        config: The model's configuration.
        numel: Number of trainable parameters; tied ones count once.
        reduced_numel: Elements that the framework's own reduction handles in a step, including padding.
        dense_steps: Number of first steps in which everything travels as float32.
        algorithm: The reducer's algorithm, with ``auto`` resolved; None if nothing was reduced.
        residual_bytes: Memory of this rank's residuals; None without error feedback.
        memory: Peak memory.
        quality: The last evaluation; None if the run diverged or was not evaluated.
        diverged: Why the run diverged, or None.
        guarantee: The privacy guarantee of private training.
    """

    rows: list[Row] = field(default_factory=list)
    moved_from: list[Row] = field(default_factory=list)
    config: Any = None
    numel: int = 0
    reduced_numel: int = 0
    dense_steps: int = 0
    algorithm: str | None = None
    residual_bytes: int | None = None
    memory: PeakMemory = field(default_factory=PeakMemory)
    quality: Quality | None = None
    diverged: str | None = None
    guarantee: Guarantee | None = None

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has taken, on whatever ranks."""
        return len(self.rows) + (self.moved_from[-1]["step"] if self.moved_from else 0)
