"""Compression error: the distance of the delivered gradient from the exact mean, over all ranks and parameters.

It costs a float64 reduce-scatter of the whole gradient, counted as ``control``; use it on few steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.collectives import ops
from gradwire.comm.collectives.layout import Kind, Layout

BLOCK = 2**21  # elements of a row compared at once, which bounds the float64 copies


class Reduced(NamedTuple):
    """The input and output of a reduction on one rank.

    Attributes:
        kind: ``reduce_scatter`` or ``all_reduce``.
        flat: This rank's gradients: [world * row_numel].
        layout: The layout of ``flat``.
        mean: The delivered mean: float32 [row_numel], or [world * row_numel] for an all-reduce.
    """

    kind: Kind
    flat: Tensor
    layout: Layout
    mean: Tensor


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
