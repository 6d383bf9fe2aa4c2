"""The map of winners: the compressor with the shortest predicted step, over bandwidth and world size."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Patch
from numpy.typing import NDArray

from gradwire.base.units import rate_text
from gradwire.bench.report.page.style import INK, PAPER, Look, Plot, axes, fills, group_title, legend
from gradwire.bench.report.tables.cells import slug
from gradwire.bench.statistics.cost_model import GRID

if TYPE_CHECKING:
    from gradwire.bench.statistics.cost_model import Model

WORLDS = tuple(2**power for power in range(1, 11))
SLOWEST, HIGHEST = 1e7, 1e11  # bits per second; the map begins at the slowest measured link if that is slower
LATENCY = 50e-6  # seconds per message


def fastest(model: Model, strategy: str, labels: Collection[str], rates: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which of ``labels`` has the shortest step: indices ``[worlds, rates]``."""
    steps = [[model.steps((strategy, label), world, rates, LATENCY)[1].min(0) for world in WORLDS] for label in labels]
    return np.array(steps).argmin(0)


def draw(model: Model, strategy: str, labels: Collection[str], limit: str, looks: Mapping[str, Look]) -> Plot:
    """One strategy's map, among ``labels``; ``limit`` describes how they were chosen."""
    names = list(labels)
    points = {(one.world, one.rate) for one in model.measurements if one.strategy == strategy and one.world in WORLDS}
    slowest = min([SLOWEST, *(0.8 * rate for _, rate in points)])  # with room for the point
    rates = GRID[(slowest <= GRID) & (GRID <= HIGHEST)][::4]
    won = fastest(model, strategy, names, rates)
    figure, ax = axes(f"{group_title(strategy)}: {limit}", "bandwidth of each rank's link", "world size W")
    ax.grid(visible=False)
    x = np.log10(rates)
    half = (x[1] - x[0]) / 2
    edges = np.concatenate([x - half, [x[-1] + half]])
    present = [i for i in range(len(names)) if (won == i).any()]
    handles: list[Any] = []
    filled = fills([names[i] for i in present], looks)
    for i in present:
        look = filled[names[i]]
        for row, line in enumerate(won == i):
            for start, end in _stretches(line):
                ax.broken_barh([(edges[start], edges[end] - edges[start])], (row - 0.5, 1), **look)
        handles.append(Patch(**look))
        rows, columns = np.nonzero(won == i)
        if len(rows) > won.size / 12:
            middle = int(np.median(rows))
            at = x[int(np.median(columns[rows == middle]))]
            box = {"fc": PAPER, "ec": "none", "pad": 2, "alpha": 0.9}
            ax.text(at, middle, names[i], ha="center", va="center", fontsize=8, color=INK, bbox=box)
    shown = [names[i] for i in present]
    for world, rate in sorted(points):
        at = math.log10(rate) if math.isfinite(rate) else x[-1]
        marker = "o" if math.isfinite(rate) else ">"
        (point,) = ax.plot(at, WORLDS.index(world), marker, color=INK, mfc=PAPER, ms=7, mew=1.5, clip_on=False, ls="")
        if math.isfinite(rate):
            handle = point
    if any(math.isfinite(rate) for _, rate in points):
        handles.append(handle)
        shown.append("measured")
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(-0.5, len(WORLDS) - 0.5)
    ticks = [power for power in range(4, 12) if edges[0] <= power <= edges[-1]]
    ax.set_xticks(ticks, [rate_text(10.0**power) for power in ticks])
    ax.set_yticks(range(len(WORLDS)), [str(world) for world in WORLDS])
    legend(figure, handles, shown)
    winning = ", ".join(names[i] for i in present)
    alt = f"Fastest compressor over bandwidth and world size, {strategy}, {limit}: {winning}."
    return Plot(f"winners-{slug(strategy)}-{slug(limit)}", alt, figure, {})


def _stretches(line: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and end of each stretch of True values."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(int)))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
