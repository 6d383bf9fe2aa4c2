"""A warning for a training loop that never ends its optimizer steps with ``reducer.finish()``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from gradwire.collectives import Reducer


class ForgottenFinish:
    """Warns, once, if parameters changed between two reductions of the same optimizer step.

    Parameters change when the optimizer steps, and not between the micro-batches of one step, whether or not all of
    them are reduced. Autograd's version counters show a change without reading a value.

    Args:
        reducer: Its ``step`` advances with each ``finish``.
        parameters: What the optimizer updates in place.
    """

    def __init__(self, reducer: Reducer, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer = reducer
        self._parameters = parameters
        self._seen: tuple[int, int] | None = None  # optimizer step and versions at the previous reduction
        self._warned = False

    def __call__(self) -> None:
        """Compare with the previous reduction; called as each one begins."""
        if self._warned:
            return
        step, version = self._reducer.step, sum(parameter._version for parameter in self._parameters)
        if self._seen is not None and self._seen[0] == step and self._seen[1] != version:
            self._warned = True
            warnings.warn(
                "parameters changed between two reductions without reducer.finish(): call it once per optimizer step, "
                "after backward and before optimizer.step(). Without it schedules do not advance, and NaN or infinity "
                "is not detected.",
                stacklevel=2,
            )
        self._seen = step, version
