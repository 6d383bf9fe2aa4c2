"""Compare the reduced gradient with the exact mean, at evaluated steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gradwire.bench.training.environment import PeakMemory
from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.compression_error import compression_error

COLUMNS = ("grad_rel_error", "grad_rel_error_linf", "grad_cos_sim")


@contextmanager
def sampled(reducer: Reducer | None, memory: PeakMemory) -> Iterator[dict[str, float | None]]:
    """Compare the gradients reduced in this context; the columns are filled on exit, after the step is timed.

    Sampling does not affect training: gradients are kept by reference, the comparison copies them block by block, and
    no random numbers are drawn.

    Args:
        reducer: The reducer, or None in a step that is not sampled; the columns are null then.
        memory: Peak memory, which excludes the sample's own memory where possible.
    """
    columns: dict[str, Any] = dict.fromkeys(COLUMNS)
    if reducer is None:
        yield columns
        return
    with memory.left_out(), reducer.keeping() as reductions:
        yield columns
        found = compression_error(reductions, reducer.group, reducer.everyone)
        reductions.clear()
    if found is not None:
        columns.update(zip(COLUMNS, found, strict=True))
