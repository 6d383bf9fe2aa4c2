"""Quality against what it costs: perplexity difference over gradient bytes, and over step time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from gradwire.report.cells import Group, groups, on_one_link
from gradwire.report.figures.style import INK, MUTED, PAPER, Look, Plot, axes, group_title, legend

COSTS = {
    "bytes": ("sent_mb", "gradient megabytes sent per rank and step"),
    "time": ("step_time_ms_mean", "step time, ms"),
}
LARGE = 10.0  # percent: from here on differences are drawn on a logarithmic scale


def plots(cost: str, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Iterator[Plot]:
    """A front for each group with a baseline and a perplexity; over bytes for one link, which changes nothing of it.

    Args:
        cost: A key of `COSTS`.
        cells: As from `report.cells.cells_of`.
        runs: Single runs, as from `report.table.one_by_one`.
        looks: How each label is drawn.
    """
    column, _ = COSTS[cost]
    by_group = dict(groups(cells))
    for group in on_one_link(by_group) if cost == "bytes" else by_group:
        found = by_group[group]
        known = found[found["worse_percent"].notna() & found[column].notna()]
        if len(known) > 1:
            mine = runs[(runs[["strategy", "world_size", "link"]] == list(group)).all(axis=1)]
            yield draw(cost, group, known, mine, looks)


def front(cost: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Which points no other one beats: cheaper or equal, and better or equal, and not the same; as indices by cost."""
    order = np.lexsort((worse, cost))
    best = np.minimum.accumulate(worse[order])
    first = np.concatenate([[True], worse[order][1:] < best[:-1]])
    return order[first]


def draw(cost: str, group: Group, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """One group's front."""
    column, label = COSTS[cost]
    figure, ax = axes(group_title(*group), label, "perplexity against none, %")
    x, y = cells[column].to_numpy(), cells["worse_percent"].to_numpy()
    best = front(x, y)
    ax.axhline(1, color=MUTED, lw=0.8, ls=(0, (2, 2)))
    ax.step(x[best], y[best], where="post", color=MUTED, lw=1)
    tips, handles = {}, []
    for i, cell in enumerate(cells.to_dict("records")):
        look = looks[cell["compressor"]]
        seeds = runs[runs["compressor"] == cell["compressor"]]
        ax.plot(seeds[column], seeds["worse_percent"], ".", color=look.colour, ms=3, alpha=0.55, mew=0)
        gid = f"point{i}"
        handle, _, _ = ax.errorbar(
            x[i],
            y[i],
            xerr=_error(cell, column),
            yerr=_error(cell, "worse_percent"),
            color=look.colour,
            marker=look.marker,
            mfc=look.colour if i in best else PAPER,
            mew=1.3,
            lw=1,
            capsize=2,
            ls="none",
        )
        handle.set_gid(gid)
        handles.append(handle)
        tips[gid] = f"{cell['compressor']}: {y[i]:+.2f} %, {x[i]:,.4g} {label}, n = {cell['n']}"
        if i in best:
            right = x[i] > x.min() + 0.6 * (x.max() - x.min())  # no room beside it
            ax.annotate(
                cell["compressor"],
                (x[i], y[i]),
                xytext=(-5 if right else 5, 4),
                ha="right" if right else "left",
                textcoords="offset points",
                fontsize=7.5,
                color=INK,
            )
    if np.abs(y).max() > LARGE:
        ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    if cost == "bytes" and x.min() > 0 and x.max() > 4 * x.min():
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.margins(x=0.12, y=0.1)
    legend(figure, handles, cells["compressor"].tolist())
    names = ", ".join(cells["compressor"].iloc[best])
    alt = f"Pareto front of {group_title(*group)}: perplexity difference over {label}. On the front: {names}."
    return Plot(f"pareto-{cost}-{group.slug}", alt, figure, tips)


def _error(cell: Mapping[Any, Any], column: str) -> list[list[float]] | None:
    """The interval's distances from the mean; None with a single seed."""
    mean, low, high = (cell[f"{column}{part}"] for part in ("", "_low", "_high"))
    return None if np.isnan(low) else [[max(mean - low, 0)], [max(high - mean, 0)]]
