"""The delivered gradient against the exact mean, at the steps that are evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.collectives import Reducer
from gradwire.collectives.fidelity import fidelity
from gradwire.training.environment import PeakMemory

COLUMNS = ("grad_rel_error", "grad_rel_error_linf", "grad_cos_sim")


@contextmanager
def sampled(reducer: Reducer | None, memory: PeakMemory) -> Iterator[dict[str, float | None]]:
    """Compare what the reducer delivers in here; the columns are filled at the end, after the step was timed.

    Training goes on as if nobody had looked: the gradients are kept, not copied, what is compared are copies of their
    blocks, and nothing draws a random number.

    Args:
        reducer: None, in a step that is not sampled: the columns stay null.
        memory: What the sample needs is left out of it where that is possible.
    """
    columns: dict[str, Any] = dict.fromkeys(COLUMNS)
    if reducer is None:
        yield columns
        return
    with memory.left_out(), reducer.keeping() as reductions:
        yield columns
        found = fidelity(reductions, reducer.group)
        reductions.clear()
    if found is not None:
        columns.update(zip(COLUMNS, found, strict=True))
