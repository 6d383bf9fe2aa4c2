"""Time to loss: perplexity over seconds, a panel for each link; and the soonest label by link and target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.patches import Patch

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page import style
from gradwire.bench.report.page.fronts import front
from gradwire.bench.report.page.style import (
    Drawing,
    Look,
    Plot,
    axes,
    fills,
    group_title,
    heading,
    legend,
    logarithmic,
    panels,
)
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.cells import slug
from gradwire.bench.report.tables.time_to_loss import Cell, Goal, is_perplexity, loads, ordered

Points = list[tuple[float, float]]  # seconds and perplexity


def plots(cells: Sequence[Cell], looks: Mapping[str, Look]) -> Iterator[Drawing]:
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
    figure, all_axes = panels(len(links), "seconds of training", "validation perplexity")
    handles: dict[str, Any] = {}
    tips: dict[str, str] = {}
    m = loads(cells)
    for ax, link in zip(all_axes, links, strict=True):
        lines = on_front({label: points for label, points in curves(cells, link).items() if points})
        for label, points in lines.items():
            gid = f"line{len(tips)}"
            (handles[label],) = ax.plot(*zip(*points, strict=True), **looks[label].line, ms=4, gid=gid)
            tips[gid] = f"{label}, {named(link)}: " + ", ".join(f"{ppl:.4g} at {s:,.0f} s" for s, ppl in points)
        ax.set_title(named(link) + (f", m = {m[link]:.3g}" if link in m and link != UNSHAPED else ""))
        logarithmic(ax, "x")
    labels = [label for label in looks if label in handles]
    legend(figure, [handles[label] for label in labels], labels)
    heading(figure, group_title(*place))
    alt = f"Perplexity over seconds on each link, {group_title(*place)}: {', '.join(labels)}."
    return Plot(f"time-to-loss-{slug(place[0])}-ws{place[1]}", alt, figure, tips)


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
    figure, ax = axes(title, "", "perplexity", height=0.42 * len(targets), left=1.1)
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
    legend(figure, [Patch(**filled[label]) for label in labels], labels)
    alt = f"The soonest label at each target on each link, {group_title(*place)}: {'; '.join(answers)}."
    return Plot(f"soonest-{slug(place[0])}-ws{place[1]}", alt, figure, {})


def soonest(cells: Sequence[Cell], link: str, target: str) -> tuple[str, float] | None:
    """The label that reaches a target first on a link, and its seconds; None if none does."""
    times = [(cell.seconds(target), cell.compressor) for cell in cells if cell.link == link and target in cell.targets]
    best = min((time for time in times if math.isfinite(time[0])), default=None)
    return None if best is None else (best[1], best[0])


def named(link: str) -> str:
    """A link in words."""
    return "no shaped link" if link == UNSHAPED else link
