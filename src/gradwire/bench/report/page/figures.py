"""Figures of cells: perplexity over bytes, step time, seconds and ranks; the parts of a step; scaling over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import style
from gradwire.bench.report.page.style import Chart, Drawing, Look, Plot, axes, group_title, logarithmic, over_worlds
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.cells import GROUP, Group, of_estimates, slug, spread_text
from gradwire.bench.report.tables.time_to_loss import Cell, is_perplexity
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate

COSTS = {
    "bytes": ("sent_mb", "gradient megabytes sent per rank and step"),
    "time": ("step_time_ms_mean", "step time, ms"),
}
NARROW = 2.0  # a ratio of costs below which their axis shows more than them
WORST = 15.0  # percent; larger differences are drawn at the upper edge
STEP_PARTS = {  # of a step: colour and hatch
    "compute": (style.COLOURS[3], ""),
    "overlapped communication": (style.COLOURS[5], "---"),
    "exposed communication": (style.COLOURS[0], "///"),
    "encode": (style.COLOURS[1], "\\\\\\"),
    "decode": (style.COLOURS[4], "xxx"),
    "parameter codec": (style.COLOURS[6], "+++"),
    "idle": (style.NEUTRAL, ""),
}
Points = list[tuple[float, float]]  # seconds and perplexity


def quality(
    cost: str, group: Group, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]
) -> Drawing | None:
    """Perplexity differences over a cost; None without two cells that have both.

    Args:
        cost: A key of `COSTS`.
        group: The group.
        cells: All cells, as from `bench.report.tables.cells.cells_of`.
        runs: All runs, as from `bench.report.tables.cells.one_by_one`.
        looks: How each label is drawn.
    """
    column, _ = COSTS[cost]
    known, seeds = (
        of[(of[GROUP] == list(group)).all(axis=1)].dropna(subset=["worse_percent", column]) for of in (cells, runs)
    )
    shown = len(known) > 1 and known[column].max() > 0  # one rank sends nothing
    return partial(draw_quality, cost, group, known, seeds, looks) if shown else None


def draw_quality(cost: str, group: Group, cells: pd.DataFrame, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """One group: a named point for each label, with both spreads and a dot for each seed, and the band of the same."""
    column, label = COSTS[cost]
    chart, ax = axes(group_title(*group), label, "perplexity against the same\noptimizer in every step, %", left=0.85)
    ax.axhspan(-TOLERANCE, TOLERANCE, color=style.NEUTRAL, alpha=0.25, lw=0)
    ax.axhline(0, color=style.MUTED, lw=1, ls=(0, (2, 2)))
    highest = min(max(cells["worse_percent"].max(), cells["worse_percent_high"].max(), 2 * TOLERANCE), WORST)
    lowest = min(cells["worse_percent"].min(), cells["worse_percent_low"].min(), -2 * TOLERANCE)
    margin = 0.06 * (highest - lowest)
    ax.set_ylim(lowest - margin, highest + margin)
    if cells[column].min() > 0:
        logarithmic(ax, "x")
    low, high = cells[column].min(), cells[column].max()
    if low > 0 and high < NARROW * low:  # costs that hardly differ look so
        low, high = (low * high) ** 0.5 / NARROW**0.5, (low * high) ** 0.5 * NARROW**0.5
    room = (high / low) ** 0.12 if low > 0 else 1.0
    ax.set_xlim(low / room, high * room) if low > 0 else ax.margins(x=0.12)
    dots, colours = ([looks[name].colour for name in of["compressor"]] for of in (runs, cells))
    ax.scatter(runs[column], runs["worse_percent"], s=12, color=dots, alpha=0.7, lw=0)
    heights = cells["worse_percent"].clip(upper=highest)
    ax.vlines(cells[column], cells["worse_percent_low"], cells["worse_percent_high"], colours, lw=1)
    ax.hlines(heights, cells[f"{column}_low"], cells[f"{column}_high"], colours, lw=1)
    points = {}
    for cell, worse, x, y in zip(
        cells.to_dict("records"), of_estimates(cells, "worse_percent"), cells[column], heights, strict=True
    ):
        name, look = cell["compressor"], looks[cell["compressor"]]
        above = bool(worse.mean > highest)
        (point,) = ax.plot(x, y, color=look.colour, marker="^" if above else look.marker, ls="none", clip_on=False)
        number = f"{worse.mean:+.1f} %{spread_text(worse, '{:+.1f}')}"
        chart.tip(point, f"{name}: {number}, {x:,.4g} {label.removesuffix(', ms')}, n = {worse.n}, {cell['verdict']}")
        shown = "baseline" if name == BASELINE else f"{name}{f' {worse.mean:+.0f} %' * above}"
        points[shown], chart.handles[shown] = (x, y, worse), point
    chart.name(ax, points)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    alt = f"Perplexity difference over {label}, {group_title(*group)}: {'; '.join(chart.tips.values())}."
    return chart.plot(f"quality-{cost}-{group.slug}", alt)


def front(cost: np.ndarray, worse: np.ndarray) -> np.ndarray:
    """Indices of the Pareto-optimal points, by cost: no other point is at least as cheap and good, and not equal."""
    order = np.lexsort((worse, cost))
    best = np.minimum.accumulate(worse[order])
    first = np.concatenate([[True], worse[order][1:] < best[:-1]])
    return order[first]


def time_to_loss(cells: Sequence[Cell], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Perplexity over seconds on each link of a strategy and world size that has targets, the slowest link first."""
    places = {cell.place: group_title(*cell.place) for cell in reversed(cells)}
    for place, title in places.items():
        yield partial(draw_curves, [cell for cell in cells if cell.place == place], title, looks)


def draw_curves(cells: Sequence[Cell], title: str, looks: Mapping[str, Look]) -> Plot:
    """One link: the baselines and the labels on the front."""
    chart, ax = axes(title, "seconds of training", "validation perplexity")
    draw_lines(chart, ax, cells, looks)
    alt = f"Perplexity over seconds, {title}: {', '.join(chart.handles)}."
    return chart.plot(f"time-to-loss-{slug(title)}", alt)


def draw_lines(chart: Chart, ax: Axes, cells: Sequence[Cell], looks: Mapping[str, Look]) -> None:
    """The lines of one link."""
    for label, points in on_front(curves(cells)).items():
        (chart.handles[label],) = ax.plot(*zip(*points, strict=True), **looks[label].line, ms=4)
        said = ", ".join(f"{ppl:.4g} at {s:,.0f} s" for s, ppl in points)
        chart.tip(chart.handles[label], f"{label}: {said}")
    logarithmic(ax, "x")


def curves(cells: Sequence[Cell]) -> dict[str, Points]:
    """Seconds and perplexity at each target that a label reaches, and at the end of its runs."""
    last = {cell.compressor: cell.end()[1] for cell in cells}

    def perplexity(target: str) -> float:
        return float(target) if is_perplexity(target) else last.get(target, math.nan)

    lines = {}
    for cell in cells:
        points = {(cell.seconds(target), perplexity(target)) for target in cell.targets} | {cell.end()}
        if known := sorted(point for point in points if all(map(math.isfinite, point))):
            lines[cell.compressor] = known
    return lines


def on_front(lines: Mapping[str, Points]) -> dict[str, Points]:
    """The baselines, and the labels with a point that no other is both as soon and as good as."""
    points = [(label, *point) for label, of in lines.items() for point in of]
    best = front(np.array([s for _, s, _ in points]), np.array([ppl for *_, ppl in points]))
    kept = {points[i][0] for i in best} | {BASELINE, BF16}
    return {label: of for label, of in lines.items() if label in kept}


def draw_ranks(strategy: str, costs: Mapping[str, Mapping[int, Estimate]], looks: Mapping[str, Look]) -> Plot:
    """Draw what each label costs over world sizes, with the spread of its seeds.

    Args:
        strategy: The strategy of all.
        costs: By label and world size, percent of perplexity above the same optimizer in every step.
        looks: How each label is drawn.
    """
    title = group_title(strategy)
    chart, ax = axes(title, "world size W", "perplexity above its optimizer\nin every step, %", left=0.85)
    ax.axhline(0, color=style.MUTED, lw=1, ls=(0, (2, 2)))
    for label, of_label in costs.items():
        worlds = sorted(of_label)
        means = [of_label[world].mean for world in worlds]
        lows, highs = ([getattr(of_label[world], end) for world in worlds] for end in ("low", "high"))
        ax.vlines(worlds, lows, highs, color=looks[label].colour, lw=1, alpha=0.55)
        (chart.handles[label],) = ax.plot(worlds, means, **looks[label].line)
        points = (f"W = {world}: {mean:+.1f} %" for world, mean in zip(worlds, means, strict=True))
        chart.tip(chart.handles[label], f"{label}: {', '.join(points)}")
    over_worlds(ax, sorted({world for of_label in costs.values() for world in of_label}))
    said = "; ".join(chart.tips.values())
    alt = f"Perplexity above the same optimizer in every step, over world sizes, {title}: {said}."
    return chart.plot(f"ranks-{slug(strategy)}", alt)


def step_parts(profile: Mapping[str, float]) -> dict[str, float]:
    """The parts of a ``profile.json``'s mean step in milliseconds.

    Computation during communication counts as overlapped communication, so the parts add up to the step.
    """
    overlap = profile["overlap_ms_per_step"]
    times = [
        profile["compute_ms_per_step"] - overlap,
        overlap,
        profile["exposed_comm_ms"],
        profile["encode_ms_per_step"],
        profile["decode_ms_per_step"],
        profile["parameter_codec_ms_per_step"],
        profile["idle_ms_per_step"],
    ]
    return dict(zip(STEP_PARTS, times, strict=True))


def draw_step(group: Group, times: pd.DataFrame) -> Plot:
    """Draw where a step's time goes: a bar for each label, in parts that add up to the profiled step.

    Args:
        group: The group.
        times: Mean milliseconds, a column for each of `STEP_PARTS`, by label; the first is drawn at the top.
    """
    longest = max(len(str(label)) for label in times.index)
    left_inches = min(0.25 + 0.075 * longest, style.WIDTH / 2)
    title, height = group_title(*group), 0.27 * len(times)
    chart, ax = axes(title, "ms of the mean profiled step", "", height=height, left=left_inches)
    ax.grid(visible=False, axis="y")
    left = pd.Series(0.0, times.index)
    for part, (colour, hatch) in STEP_PARTS.items():
        values = times[part]
        if not (values > 0).any():
            continue
        look: dict[str, Any] = {"color": colour, "edgecolor": style.PAPER, "hatch": hatch, "lw": 0.5}
        chart.handles[part] = bars = ax.barh(range(len(times)), values, 0.7, left, **look)
        for bar, (label, value) in zip(bars, values.items(), strict=True):
            chart.tip(bar, f"{label}: {part} {value:,.1f} ms")
        left = left + values
    ax.set_yticks(range(len(times)), [str(label) for label in times.index])
    ax.set_ylim(len(times) - 0.5, -0.5)
    totals = "; ".join(f"{label} {total:,.0f} ms" for label, total in left.items())
    return chart.plot(f"step-time-{group.slug}", f"Where a step's time goes, {title}: {totals}")


def scaling(runs: pd.DataFrame, looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Yield a figure for each strategy and link with runs of two world sizes or more.

    One rank sends nothing, so its runs are shown on all links of their strategy, and those of the baseline start the
    line of every label without such runs.
    """
    runs = runs[runs["tokens_per_s"].notna()]
    for strategy, of_strategy in runs.groupby("strategy", sort=False):
        alone = of_strategy[(of_strategy["world_size"] == 1) & (of_strategy["link"] == UNSHAPED)]
        for link, measured in of_strategy.groupby("link", sort=False):
            shown = measured if link == UNSHAPED else pd.concat([alone, measured])
            if measured["world_size"].max() > 1 and shown["world_size"].nunique() > 1:
                yield partial(draw_scaling, str(strategy), str(link), shown, looks)


def draw_scaling(strategy: str, link: str, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """Draw tokens per second of one strategy on one link: single seeds as dots; means are joined."""
    title = group_title(strategy, link=link)
    chart, ax = axes(title, "world size W", "tokens/s of all ranks", left=0.85)
    worlds = np.array(sorted(runs["world_size"].unique()))
    of_base = runs[runs["compressor"] == BASELINE]
    base, alone = rates(of_base), of_base[of_base["world_size"] == 1]
    if len(base):
        smallest = base.index[0]
        linear = base.iloc[0] * worlds / smallest
        (line,) = ax.plot(worlds, linear, color=style.MUTED, lw=1, ls=(0, (2, 2)))
        chart.handles[f"linear from W = {smallest}"] = line
    for label, of_label in runs.groupby("compressor", sort=False):
        look, means = looks[str(label)], rates(of_label)
        if len(alone) and 1 not in of_label["world_size"].to_numpy():
            means = rates(pd.concat([alone, of_label]))
        ax.plot(of_label["world_size"], of_label["tokens_per_s"], ".", color=look.colour, ms=3, alpha=0.55, mew=0)
        (line,) = ax.plot(means.index, means, **look.line)
        chart.handles[str(label)] = line
        chart.tip(line, f"{label}: " + ", ".join(f"W = {world}: {rate:,.0f}" for world, rate in means.items()))
    over_worlds(ax, worlds)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    alt = f"Tokens per second over world sizes, {title}: {', '.join(chart.handles)}."
    return chart.plot(f"scaling-{slug(strategy)}-{slug(link)}", alt)


def rates(runs: pd.DataFrame) -> pd.Series[float]:
    """Tokens per second by world size, the mean over the seeds that all world sizes have."""
    by_world = runs.groupby("world_size")
    seeds = set.intersection(*(set(of["seed"]) for _, of in by_world)) if len(runs) else set()
    return runs[runs["seed"].isin(seeds)].groupby("world_size")["tokens_per_s"].mean()
