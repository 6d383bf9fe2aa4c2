"""The figure of perplexity over world sizes: does a method cost more with more ranks?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import NullLocator

from gradwire.bench.report.page import style
from gradwire.bench.report.page.style import Look, Plot, axes, group_title, legend
from gradwire.bench.report.tables.cells import slug
from gradwire.bench.statistics.seeds import Estimate


def draw(strategy: str, costs: Mapping[str, Mapping[int, Estimate]], looks: Mapping[str, Look]) -> Plot:
    """Draw what each label costs over world sizes, with the spread of its seeds.

    Args:
        strategy: The strategy of all.
        costs: By label and world size, percent of perplexity above the same optimizer in every step.
        looks: How each label is drawn.
    """
    title = group_title(strategy)
    figure, ax = axes(title, "world size W", "perplexity above its optimizer\nin every step, %", left=0.85)
    ax.axhline(0, color=style.MUTED, lw=1, ls=(0, (2, 2)))
    handles: dict[str, Any] = {}
    tips: dict[str, str] = {}
    for label, of_label in costs.items():
        worlds = sorted(of_label)
        means = [of_label[world].mean for world in worlds]
        lows, highs = ([getattr(of_label[world], end) for world in worlds] for end in ("low", "high"))
        ax.vlines(worlds, lows, highs, color=looks[label].colour, lw=1, alpha=0.55)
        gid = f"line{len(tips)}"
        (handles[label],) = ax.plot(worlds, means, **looks[label].line, gid=gid)
        tips[gid] = f"{label}: " + ", ".join(
            f"W = {world}: {mean:+.1f} %" for world, mean in zip(worlds, means, strict=True)
        )
    worlds = sorted({world for of_label in costs.values() for world in of_label})
    ax.set_xscale("log", base=2)
    ax.set_xticks(worlds, [str(world) for world in worlds])
    ax.xaxis.set_minor_locator(NullLocator())
    legend(figure, [*handles.values()], [*handles])
    alt = f"Perplexity above the same optimizer in every step, over world sizes, {title}: {'; '.join(tips.values())}."
    return Plot(f"ranks-{slug(strategy)}", alt, figure, tips)
