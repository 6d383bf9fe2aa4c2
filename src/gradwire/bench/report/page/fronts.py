"""Pareto fronts, and time to loss.

Fronts show the perplexity difference over gradient bytes, and over step time. Time to loss is perplexity over seconds,
a panel for each link, and the soonest label by link and target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import style
from gradwire.bench.report.page.style import (
    Drawing,
    Look,
    Plot,
    axes,
    fills,
    group_title,
    heading,
    logarithmic,
    panels,
)
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.cells import GROUP, Group, groups, on_one_link, slug
from gradwire.bench.report.tables.time_to_loss import Cell, Goal, is_perplexity, loads, ordered

COSTS = {
    "bytes": ("sent_mb", "gradient megabytes sent per rank and step"),
    "time": ("step_time_ms_mean", "step time, ms"),
}
NARROW = 2.0  # a ratio of costs below which their axis shows more than them
LARGE = 10.0  # percent: larger differences are drawn on a logarithmic scale
Points = list[tuple[float, float]]  # seconds and perplexity


def plots(cost: str, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Yield a front for each group with a baseline and a perplexity; over bytes for one link only, as all are equal.

    Args:
        cost: A key of `COSTS`.
        cells: As from `bench.report.tables.cells.cells_of`.
        runs: Single runs, as from `bench.report.tables.cells.one_by_one`.
        looks: How each label is drawn.
    """
    column, _ = COSTS[cost]
    by_group = dict(groups(cells))
    for group in on_one_link(by_group) if cost == "bytes" else by_group:
        of_group = by_group[group]
        needed = ["worse_percent", column, *(["speed_up"] if cost == "time" else [])]
        known = of_group.dropna(subset=needed)
        if len(known) > 1 and known[column].max() > 0:  # one rank sends nothing
            seeds = runs[(runs[GROUP] == list(group)).all(axis=1)]
            yield partial(draw, cost, group, known, seeds, looks)


def front(cost: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Indices of the Pareto-optimal points, by cost: no other point is at least as cheap and good, and not equal."""
    order = np.lexsort((worse, cost))
    best = np.minimum.accumulate(worse[order])
    first = np.concatenate([[True], worse[order][1:] < best[:-1]])
    return order[first]


def draw(cost: str, group: Group, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """One group's front."""
    column, label = COSTS[cost]
    chart, ax = axes(group_title(*group), label, "perplexity above its optimizer's, %")
    x, y = cells[column].to_numpy(), cells["worse_percent"].to_numpy()
    best = front(-cells["speed_up"].to_numpy() if cost == "time" else x, y)  # speed-ups are paired by seed

    def colours(of: pd.DataFrame) -> list[str]:
        return [looks[label].colour for label in of["compressor"]]

    ax.axhline(1, color=style.MUTED, lw=0.8, ls=(0, (2, 2)))
    ax.step(x[best], y[best], where="post", color=style.MUTED, lw=1)
    seeds = runs[runs["compressor"].isin(cells["compressor"])]
    ax.scatter(seeds[column], seeds["worse_percent"], s=6, c=colours(seeds), alpha=0.55, lw=0)
    wide = cells.dropna(subset=f"{column}_low")  # one seed has no spread
    tall = cells.dropna(subset="worse_percent_low")
    ax.hlines(wide["worse_percent"], wide[f"{column}_low"], wide[f"{column}_high"], colours(wide), lw=1)
    ax.vlines(tall[column], tall["worse_percent_low"], tall["worse_percent_high"], colours(tall), lw=1)
    for i, cell in enumerate(cells.to_dict("records")):
        look = looks[cell["compressor"]]
        face = look.colour if i in best else style.PAPER
        (point,) = ax.plot(x[i], y[i], color=look.colour, marker=look.marker, mfc=face, mew=1.3, ls="none")
        chart.handles[cell["compressor"]] = point
        chart.tip(point, f"{cell['compressor']}: {y[i]:+.2f} %, {x[i]:,.4g} {label}, n = {cell['n']}")
    if np.abs(y).max() > LARGE:
        ax.set_yscale("symlog", linthresh=1, linscale=0.6)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    if x.min() > 0:
        logarithmic(ax, "x")
    ax.margins(x=0.12, y=0.1)
    if x.max() < NARROW * x.min():  # costs that hardly differ look so
        middle, half = (x.min() * x.max()) ** 0.5, NARROW**0.5
        ax.set_xlim(middle / half, middle * half)
    names = ", ".join(cells["compressor"].iloc[best])
    alt = f"Pareto front of {group_title(*group)}: perplexity difference over {label}. On the front: {names}."
    return chart.plot(f"pareto-{cost}-{group.slug}", alt)


def time_to_loss(cells: Sequence[Cell], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Curves and a map for each strategy and world size that has targets on two links or more."""
    for place in dict.fromkeys((cell.strategy, cell.world_size) for cell in cells):
        of_place = [cell for cell in cells if (cell.strategy, cell.world_size) == place]
        if len(ordered(cell.link for cell in of_place)) > 1:
            yield partial(draw_curves, of_place, looks)
            yield partial(draw_map, of_place, looks)


def draw_curves(cells: Sequence[Cell], looks: Mapping[str, Look]) -> Plot:
    """One strategy and world size: on each link the baselines and the labels on the front."""
    place = cells[0].strategy, cells[0].world_size
    links = ordered(cell.link for cell in cells)
    chart, all_axes = panels(len(links), "seconds of training", "validation perplexity")
    m = loads(cells)
    for ax, link in zip(all_axes, links, strict=True):
        lines = on_front({label: points for label, points in curves(cells, link).items() if points})
        for label, points in lines.items():
            (chart.handles[label],) = ax.plot(*zip(*points, strict=True), **looks[label].line, ms=4)
            said = ", ".join(f"{ppl:.4g} at {s:,.0f} s" for s, ppl in points)
            chart.tip(chart.handles[label], f"{label}, {named(link)}: {said}")
        ax.set_title(named(link) + (f", m = {m[link]:.3g}" if link in m and link != UNSHAPED else ""))
        logarithmic(ax, "x")
    chart.handles = {label: chart.handles[label] for label in looks if label in chart.handles}
    alt = f"Perplexity over seconds on each link, {group_title(*place)}: {', '.join(chart.handles)}."
    made = chart.plot(f"time-to-loss-{slug(place[0])}-ws{place[1]}", alt)
    heading(made.figure, group_title(*place))
    return made


def curves(cells: Sequence[Cell], link: str) -> dict[str, Points]:
    """Seconds and perplexity at each target that a label reaches on a link, and at the end of its runs."""
    on_link = [cell for cell in cells if cell.link == link]
    last = {cell.compressor: cell.end()[1] for cell in on_link}

    def perplexity(target: str) -> float:
        return float(target) if is_perplexity(target) else last.get(target, math.nan)

    lines = {}
    for cell in on_link:
        points = {(cell.seconds(target), perplexity(target)) for target in cell.targets} | {cell.end()}
        lines[cell.compressor] = sorted(point for point in points if all(map(math.isfinite, point)))
    return lines


def on_front(lines: Mapping[str, Points]) -> dict[str, Points]:
    """The baselines, and the labels with a point that no other is both as soon and as good as."""
    points = [(label, *point) for label, of in lines.items() for point in of]
    best = front(np.array([s for _, s, _ in points]), np.array([ppl for *_, ppl in points]))
    kept = {points[i][0] for i in best} | {BASELINE, BF16}
    return {label: of for label, of in lines.items() if label in kept}


def draw_map(cells: Sequence[Cell], looks: Mapping[str, Look]) -> Plot:
    """One strategy and world size: the soonest label at each target on each link, with its seconds."""
    place = cells[0].strategy, cells[0].world_size
    links = ordered(cell.link for cell in cells)
    targets = list(dict.fromkeys(target for cell in cells for target in cell.targets))
    m = loads(cells)
    title = f"{group_title(*place)}: the soonest at each target"
    chart, ax = axes(title, "", "perplexity", height=0.42 * len(targets), left=1.1)
    ax.grid(visible=False)
    known = {
        (row, column): best
        for row, target in enumerate(targets)
        for column, link in enumerate(links)
        if (best := soonest(cells, link, target)) is not None
    }
    labels = [label for label in looks if label in {label for label, _ in known.values()}]
    filled = fills(labels, looks)
    answers = []
    for (row, column), (label, seconds) in known.items():
        ax.broken_barh([(column - 0.5, 1)], (row - 0.5, 1), **(filled[label] | {"lw": 1.5}))
        ax.text(column, row, f"{seconds:,.0f} s", ha="center", va="center", color=style.INK, bbox=style.LABEL_BOX)
        answers.append(f"{Goal(targets[row], *place).named} on {named(links[column])}: {label}, {seconds:,.0f} s")
    ax.set_xlim(-0.5, len(links) - 0.5)
    ax.set_ylim(len(targets) - 0.5, -0.5)
    names = {link: link if link != UNSHAPED else "no limit" for link in links}
    ax.set_xticks(range(len(links)), [names[link] + (f"\nm = {m[link]:.3g}" if link in m else "") for link in links])
    ax.set_yticks(range(len(targets)), targets)
    chart.handles = {label: Patch(**filled[label]) for label in labels}
    alt = f"The soonest label at each target on each link, {group_title(*place)}: {'; '.join(answers)}."
    return chart.plot(f"soonest-{slug(place[0])}-ws{place[1]}", alt)


def soonest(cells: Sequence[Cell], link: str, target: str) -> tuple[str, float] | None:
    """The label that reaches a target first on a link, and its seconds, of the seeds of all; None if none does."""
    judged = [cell for cell in cells if cell.link == link and target in cell.targets]
    seeds = set.intersection(*({run.seed for run in cell.asked(target)} for cell in judged)) if judged else set()
    times = [(cell.seconds(target, seeds), cell.compressor) for cell in judged]
    best = min((time for time in times if math.isfinite(time[0])), default=None)
    return None if best is None else (best[1], best[0])


def named(link: str) -> str:
    """A link in words."""
    return "no shaped link" if link == UNSHAPED else link
