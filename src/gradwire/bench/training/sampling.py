"""Compression error: the distance of the reduced gradient from the exact mean, at evaluated steps.

It costs a float64 reduce-scatter of the whole gradient, counted as ``control``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.bench.training.environment import PeakMemory
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.reducer import Reduced

COLUMNS = ("grad_rel_error", "grad_rel_error_linf", "grad_cos_sim")
BLOCK = 2**21  # elements of a row compared at once, which bounds the float64 copies


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


class CompressionError(NamedTuple):
    """A delivered gradient d compared with the exact mean g of the ranks' gradients, without residuals.

    Attributes:
        rel_error: ||d - g|| / ||g||.
        rel_error_linf: max |d - g| / max |g|.
        cos_sim: <d, g> / (||d|| ||g||); None if d is 0.
    """

    rel_error: float
    rel_error_linf: float
    cos_sim: float | None


# Why: docs/decisions.md, "Sampled gradients".
def compression_error(
    reductions: Iterable[Reduced], group: ops.Group = None, everyone: ops.Group = None
) -> CompressionError | None:
    """Compare the results of reductions, taken together, with float64 means. Every rank must call it.

    Args:
        reductions: This rank's reductions.
        group: The ranks of each reduction.
        everyone: All ranks whose reductions are taken together: those of ``group``, or more.

    Returns:
        The comparison, equal on all ranks; None if nothing was reduced, the mean is 0, or a value is not finite.
    """
    sums = maxima = None
    for exact, delivered in (pair for reduction in reductions for pair in _blocks(reduction, group)):
        error = delivered - exact
        dots = torch.stack([error.dot(error), exact.dot(exact), delivered.dot(delivered), delivered.dot(exact)])
        peaks = torch.stack([error.abs().amax(), exact.abs().amax()]) if error.numel() else dots.new_zeros(2)
        sums = dots if sums is None else sums + dots
        maxima = peaks if maxima is None else torch.maximum(maxima, peaks)
    if sums is None or maxima is None:
        return None
    error, exact, delivered, both = ops.all_reduce(sums, "sum", everyone).tolist()
    furthest, largest = ops.all_reduce(maxima, "max", everyone).tolist()
    if not math.isfinite(error + exact + delivered) or not exact:
        return None
    return CompressionError(
        math.sqrt(error / exact), furthest / largest, both / math.sqrt(exact * delivered) if delivered else None
    )


def _blocks(reduction: Reduced, group: ops.Group) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the exact and the delivered mean of this rank's row in blocks: float64 vectors, without padding."""
    kind, flat, layout, mean = reduction
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = flat.view(world, layout.row_numel)
    own = mean if kind == "reduce_scatter" else mean.view(rows.shape)[rank]
    real = torch.zeros(layout.row_numel, dtype=torch.bool, device=flat.device)
    for piece in layout.rows[rank]:
        real[layout.place_in_row(piece)] = True
    for start in range(0, layout.row_numel, BLOCK):
        block = slice(start, start + BLOCK)
        exact = ops.reduce_scatter(rows[:, block].to(torch.float64).contiguous(), group).div_(world)
        yield exact[real[block]], own[block][real[block]].to(torch.float64)
