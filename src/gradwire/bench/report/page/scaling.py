"""Scaling over world sizes: tokens per second, with the line of linear scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page.style import MUTED, Drawing, Look, Plot, axes, group_title, legend
from gradwire.bench.report.tables.cells import slug


def plots(runs: pd.DataFrame, looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """A figure for each strategy and link with runs of two world sizes or more.

    One rank sends nothing, so its runs are shown on all links of their strategy, and those of the baseline start the
    line of every label without such runs.
    """
    runs = runs[runs["tokens_per_s"].notna()]
    for strategy, own in runs.groupby("strategy", sort=False):
        alone = own[own["world_size"] == 1]
        for link, measured in own.groupby("link", sort=False):
            found = measured if link == UNSHAPED else pd.concat([alone[alone["link"] == UNSHAPED], measured])
            if measured["world_size"].max() > 1 and found["world_size"].nunique() > 1:
                yield partial(draw, str(strategy), str(link), found, looks)


def draw(strategy: str, link: str, runs: pd.DataFrame, looks: Mapping[str, Look]) -> Plot:
    """One strategy on one link: single seeds as dots, their means joined."""
    figure, ax = axes(group_title(strategy, link=link), "world size W", "tokens/s of all ranks", left=0.85)
    worlds = np.array(sorted(runs["world_size"].unique()))
    base = runs[runs["compressor"] == BASELINE].groupby("world_size")["tokens_per_s"].mean()
    handles, labels = [], []
    tips: dict[str, str] = {}
    if len(base):
        smallest = base.index[0]
        handles += ax.plot(worlds, base.iloc[0] * worlds / smallest, color=MUTED, lw=1, ls=(0, (2, 2)))
        labels.append(f"linear from W = {smallest}")
    for label, found in runs.groupby("compressor", sort=False):
        look, means = looks[str(label)], found.groupby("world_size")["tokens_per_s"].mean()
        if 1 in base.index and 1 not in means.index:
            means = pd.concat([base.loc[[1]], means])
        ax.plot(found["world_size"], found["tokens_per_s"], ".", color=look.colour, ms=3, alpha=0.55, mew=0)
        (line,) = ax.plot(means.index, means, color=look.colour, ls=look.dash, marker=look.marker)
        line.set_gid(f"line{len(tips)}")
        tips[f"line{len(tips)}"] = f"{label}: " + ", ".join(f"W = {world}: {of:,.0f}" for world, of in means.items())
        handles.append(line)
        labels.append(str(label))
    ax.set_xscale("log", base=2)
    ax.set_ylim(bottom=0)
    ax.set_xticks(worlds, [str(world) for world in worlds])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    legend(figure, handles, labels)
    alt = f"Tokens per second over world sizes, {group_title(strategy, link=link)}: {', '.join(labels)}."
    return Plot(f"scaling-{slug(strategy)}-{slug(link)}", alt, figure, tips)
