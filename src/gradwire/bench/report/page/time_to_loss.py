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
from gradwire.bench.report.page.fronts import front
from gradwire.bench.report.page.style import (
    INK,
    PAPER,
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


def plots(found: Sequence[Cell], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """Curves and a map for each strategy and world size that has targets on two links or more."""
    for place in dict.fromkeys((cell.strategy, cell.world_size) for cell in found):
        own = [cell for cell in found if (cell.strategy, cell.world_size) == place]
        if len(ordered(cell.link for cell in own)) > 1:
            yield partial(draw_curves, own, looks)
            yield partial(draw_map, own, looks)


def draw_curves(found: Sequence[Cell], looks: Mapping[str, Look]) -> Plot:
    """One strategy and world size: on each link the baselines and the labels on the front."""
    place = found[0].strategy, found[0].world_size
    links = ordered(cell.link for cell in found)
    figure, each = panels(len(links), "seconds of training", "validation perplexity")
    handles: dict[str, Any] = {}
    tips: dict[str, str] = {}
    m = loads(found)
    for ax, link in zip(each, links, strict=False):
        lines = on_front({label: points for label, points in curves(found, link).items() if points})
        for label, points in lines.items():
            look, gid = looks[label], f"line{len(tips)}"
            style: dict[str, Any] = {"color": look.colour, "ls": look.dash, "marker": look.marker, "ms": 4}
            (handles[label],) = ax.plot(*zip(*points, strict=True), gid=gid, **style)
            tips[gid] = f"{label}, {named(link)}: " + ", ".join(f"{ppl:.4g} at {s:,.0f} s" for s, ppl in points)
        ax.set_title(named(link) + (f", m = {m[link]:.3g}" if link in m and link != UNSHAPED else ""))
        logarithmic(ax, "x")
    labels = [label for label in looks if label in handles]
    legend(figure, [handles[label] for label in labels], labels)
    heading(figure, group_title(*place))
    alt = f"Perplexity over seconds on each link, {group_title(*place)}: {', '.join(labels)}."
    return Plot(f"time-to-loss-{slug(place[0])}-ws{place[1]}", alt, figure, tips)


def curves(found: Sequence[Cell], link: str) -> dict[str, Points]:
    """Seconds and perplexity at each target that a label reaches on a link, and at the end of its runs."""
    mine = [cell for cell in found if cell.link == link]
    last = {cell.compressor: cell.end()[1] for cell in mine}
    lines = {}
    for cell in mine:
        points = {(cell.seconds(target), _perplexity(target, last)) for target in cell.targets} | {cell.end()}
        lines[cell.compressor] = sorted((s, ppl) for s, ppl in points if math.isfinite(s) and math.isfinite(ppl))
    return lines


def _perplexity(target: str, last: Mapping[str, float]) -> float:
    """The perplexity of a target: a number, or the final one of a label."""
    return float(target) if is_perplexity(target) else last.get(target, math.nan)


def on_front(lines: Mapping[str, Points]) -> dict[str, Points]:
    """The baselines, and the labels with a point that no other is both as soon and as good as."""
    points = [(label, *point) for label, of in lines.items() for point in of]
    best = front(np.array([s for _, s, _ in points]), np.array([ppl for *_, ppl in points]))
    kept = {points[i][0] for i in best} | {BASELINE, BF16}
    return {label: of for label, of in lines.items() if label in kept}


def draw_map(found: Sequence[Cell], looks: Mapping[str, Look]) -> Plot:
    """One strategy and world size: the soonest label at each target on each link, with its seconds."""
    place = found[0].strategy, found[0].world_size
    links = ordered(cell.link for cell in found)
    targets = list(dict.fromkeys(target for cell in found for target in cell.targets))
    m = loads(found)
    title = f"{group_title(*place)}: the soonest at each target"
    figure, ax = axes(title, "", "perplexity", height=0.42 * len(targets), left=1.1)
    ax.grid(visible=False)
    won = {
        (row, column): soonest(found, link, target)
        for row, target in enumerate(targets)
        for column, link in enumerate(links)
    }
    known = {at: best for at, best in won.items() if best is not None}
    labels = [label for label in looks if label in {label for label, _ in known.values()}]
    filled = fills(labels, looks)
    box = {"fc": PAPER, "ec": "none", "pad": 2, "alpha": 0.9}
    for (row, column), (label, seconds) in known.items():
        ax.broken_barh([(column - 0.5, 1)], (row - 0.5, 1), **(filled[label] | {"lw": 1.5}))
        ax.text(column, row, f"{seconds:,.0f} s", ha="center", va="center", color=INK, bbox=box)
    ax.set_xlim(-0.5, len(links) - 0.5)
    ax.set_ylim(len(targets) - 0.5, -0.5)
    names = [link if link != UNSHAPED else "no limit" for link in links]
    loaded = [f"{name}\nm = {m[link]:.3g}" if link in m else name for name, link in zip(names, links, strict=True)]
    ax.set_xticks(range(len(links)), loaded)
    ax.set_yticks(range(len(targets)), targets)
    legend(figure, [Patch(**filled[label]) for label in labels], labels)
    answers = [
        f"{Goal(targets[row], *place).named} on {named(links[column])}: {label}, {seconds:,.0f} s"
        for (row, column), (label, seconds) in known.items()
    ]
    alt = f"The soonest label at each target on each link, {group_title(*place)}: {'; '.join(answers)}."
    return Plot(f"soonest-{slug(place[0])}-ws{place[1]}", alt, figure, {})


def soonest(found: Sequence[Cell], link: str, target: str) -> tuple[str, float] | None:
    """The label that reaches a target first on a link, and its seconds; None if none does."""
    times = [(cell.seconds(target), cell.compressor) for cell in found if cell.link == link and target in cell.targets]
    best = min((time for time in times if math.isfinite(time[0])), default=None)
    return None if best is None else (best[1], best[0])


def named(link: str) -> str:
    """A link in words."""
    return "no shaped link" if link == UNSHAPED else link
