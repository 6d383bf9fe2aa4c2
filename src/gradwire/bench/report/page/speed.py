"""Figures of speed: where a step's time goes, scaling over world sizes, and the map of the fastest compressors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from gradwire.base.units import UNSHAPED, rate_text
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import style
from gradwire.bench.report.page.style import Drawing, Look, Plot, axes, fills, group_title, over_worlds
from gradwire.bench.report.tables.cells import Group, slug
from gradwire.bench.statistics.cost_model import GRID, Model

STEP_PARTS = {  # of a step: colour and hatch
    "compute": (style.COLOURS[2], ""),
    "overlapped communication": (style.COLOURS[5], "---"),
    "exposed communication": (style.COLOURS[0], "///"),
    "encode": (style.COLOURS[1], "\\\\\\"),
    "decode": (style.COLOURS[4], "xxx"),
    "parameter codec": (style.COLOURS[3], "+++"),
    "idle": (style.NEUTRAL, ""),
}
WORLDS = tuple(2**power for power in range(1, 11))
SLOWEST, HIGHEST = 1e7, 1e11  # bits per second; the map begins at the slowest measured link if that is slower
LATENCY = 50e-6  # seconds per message


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


def draw_winners(model: Model, strategy: str, labels: Collection[str], limit: str, looks: Mapping[str, Look]) -> Plot:
    """Draw which of a strategy's labels has the shortest predicted step, over bandwidth and world size.

    Args:
        model: The fitted cost model.
        strategy: The strategy.
        labels: The labels to choose from.
        limit: How they were chosen, in words.
        looks: How each label is drawn.
    """
    measured = (run for run in model.measurements if run.strategy == strategy and run.world in WORLDS)
    points = sorted({(run.world, run.rate) for run in measured})
    slowest = min([SLOWEST, *(0.8 * rate for _, rate in points)])  # with room for the point
    rates = GRID[(slowest <= GRID) & (GRID <= HIGHEST)][::4]
    steps = [[model.steps((strategy, label), world, rates, LATENCY)[1].min(0) for world in WORLDS] for label in labels]
    fastest = np.array(steps).argmin(0)  # index of a label, [worlds, rates]
    chart, ax = axes(f"{group_title(strategy)}: {limit}", "bandwidth of each rank's link", "world size W")
    ax.grid(visible=False)
    x = np.log10(rates)
    edges = np.append(x, 2 * x[-1] - x[-2]) - (x[1] - x[0]) / 2
    won = {label: fastest == i for i, label in enumerate(labels) if (fastest == i).any()}
    filled = fills(won, looks)
    for label, area in won.items():
        for row, line in enumerate(area):
            for start, end in _stretches(line):
                ax.broken_barh([(edges[start], edges[end] - edges[start])], (row - 0.5, 1), **filled[label])
        rows, columns = np.nonzero(area)
        if len(rows) > fastest.size / 12:
            middle = int(np.median(rows))
            centre = x[int(np.median(columns[rows == middle]))]
            ax.text(centre, middle, label, ha="center", va="center", fontsize=8, color=style.INK, bbox=style.LABEL_BOX)
    chart.handles = {label: Patch(**filled[label]) for label in won}
    point_style: dict[str, Any] = {"color": style.INK, "mfc": style.PAPER, "ms": 7, "mew": 1.5, "ls": ""}
    for world, rate in points:
        limited = math.isfinite(rate)
        centre, marker = (math.log10(rate), "o") if limited else (x[-1], ">")
        (point,) = ax.plot(centre, WORLDS.index(world), marker=marker, clip_on=False, **point_style)
        chart.handles |= {"measured": point} if limited else {}
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(-0.5, len(WORLDS) - 0.5)
    ticks = [power for power in range(4, 12) if edges[0] <= power <= edges[-1]]
    ax.set_xticks(ticks, [rate_text(10.0**power) for power in ticks])
    ax.set_yticks(range(len(WORLDS)), [str(world) for world in WORLDS])
    alt = f"Fastest compressor over bandwidth and world size, {strategy}, {limit}: {', '.join(won)}."
    return chart.plot(f"winners-{slug(strategy)}-{slug(limit)}", alt)


def _stretches(line: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Start and end of each stretch of True values."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], line, [False]]).astype(int)))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
