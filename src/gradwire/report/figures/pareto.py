"""Pareto fronts: perplexity difference over gradient bytes, and over step time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from gradwire.report.cells import Group, groups, on_one_link
from gradwire.report.figures.style import (
    INK,
    MUTED,
    PAPER,
    SMALL,
    Drawing,
    Look,
    Plot,
    axes,
    group_title,
    legend,
    logarithmic,
)

COSTS = {
    "bytes": ("sent_mb", "gradient megabytes sent per rank and step"),
    "time": ("step_time_ms_mean", "step time, ms"),
}
NARROW = 1.25  # a ratio of costs below which their axis begins at 0
LARGE = 10.0  # percent: larger differences are drawn on a logarithmic scale


def plots(cost: str, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Yield a front for each group with a baseline and a perplexity; over bytes for one link only, as all are equal.

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
        if len(known) > 1 and known[column].max() > 0:  # one rank sends nothing
            mine = runs[(runs[["strategy", "world_size", "link"]] == list(group)).all(axis=1)]
            yield partial(draw, cost, group, known, mine, looks)


def front(cost: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Indices of the Pareto-optimal points, by cost: no other point is at least as cheap and good, and not equal."""
    order = np.lexsort((worse, cost))
    best = np.minimum.accumulate(worse[order])
    first = np.concatenate([[True], worse[order][1:] < best[:-1]])
    return order[first]


def name_points(ax: Axes, x: np.ndarray, y: np.ndarray, names: Iterable[str]) -> None:
    """Write names beside points, without those that would cover an earlier one; call it when the axes are final."""
    places = ax.transData.transform(np.column_stack([x, y]))
    middle = ax.transAxes.transform((0.6, 0))[0]
    taken: list[np.ndarray] = []
    for place, at, name in zip(places, zip(x, y, strict=True), names, strict=True):
        if any(abs(place[0] - other[0]) < 90 and abs(place[1] - other[1]) < 14 for other in taken):
            continue
        taken.append(place)
        right = place[0] > middle  # no room beside it
        offset, side = ((-5, 4), "right") if right else ((5, 4), "left")
        ax.annotate(name, at, xytext=offset, ha=side, textcoords="offset points", fontsize=SMALL, color=INK)


def draw(cost: str, group: Group, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """One group's front."""
    column, label = COSTS[cost]
    figure, ax = axes(group_title(*group), label, "perplexity against none, %")
    x, y = cells[column].to_numpy(), cells["worse_percent"].to_numpy()
    best = front(x, y)

    def colours(of: pd.DataFrame) -> list[str]:
        return [looks[label].colour for label in of["compressor"]]

    ax.axhline(1, color=MUTED, lw=0.8, ls=(0, (2, 2)))
    ax.step(x[best], y[best], where="post", color=MUTED, lw=1)
    seeds = runs[runs["compressor"].isin(cells["compressor"])]
    ax.scatter(seeds[column], seeds["worse_percent"], s=6, c=colours(seeds), alpha=0.55, lw=0)
    wide = cells.dropna(subset=f"{column}_low")  # one seed has no spread
    tall = cells.dropna(subset="worse_percent_low")
    ax.hlines(wide["worse_percent"], wide[f"{column}_low"], wide[f"{column}_high"], colours(wide), lw=1)
    ax.vlines(tall[column], tall["worse_percent_low"], tall["worse_percent_high"], colours(tall), lw=1)
    tips, handles = {}, []
    for i, cell in enumerate(cells.to_dict("records")):
        look, gid = looks[cell["compressor"]], f"point{i}"
        face = look.colour if i in best else PAPER
        (handle,) = ax.plot(x[i], y[i], color=look.colour, marker=look.marker, mfc=face, mew=1.3, ls="none", gid=gid)
        handles.append(handle)
        tips[gid] = f"{cell['compressor']}: {y[i]:+.2f} %, {x[i]:,.4g} {label}, n = {cell['n']}"
    if np.abs(y).max() > LARGE:
        ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    if cost == "bytes" and x.min() > 0 and x.max() > 4 * x.min():
        logarithmic(ax, "x")
    ax.margins(x=0.12, y=0.1)
    if ax.get_xscale() == "linear" and x.max() < NARROW * x.min():
        ax.set_xlim(left=0)  # costs that hardly differ look so
    legend(figure, handles, cells["compressor"].tolist())
    name_points(ax, x[best], y[best], cells["compressor"].iloc[best])
    names = ", ".join(cells["compressor"].iloc[best])
    alt = f"Pareto front of {group_title(*group)}: perplexity difference over {label}. On the front: {names}."
    return Plot(f"pareto-{cost}-{group.slug}", alt, figure, tips)
