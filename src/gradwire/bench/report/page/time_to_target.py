"""Time to a target over the bandwidth of the links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial

from gradwire.bench.report.page.style import Drawing, Look, Plot, axes, group_title, legend, logarithmic
from gradwire.bench.report.tables.cells import slug
from gradwire.bench.report.tables.time_to_loss import Goal
from gradwire.comm.topology import link_rate

Seconds = Mapping[str, Mapping[str, float]]  # by label and link


def plots(found: Mapping[Goal, Seconds], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """A figure for each goal that was timed on links of two rates or more."""
    for goal, seconds in found.items():
        rates = {link_rate(link) for of in seconds.values() for link in of}
        if sum(map(math.isfinite, rates)) > 1:
            yield partial(draw, goal, seconds, looks)


def draw(goal: Goal, seconds: Seconds, looks: Mapping[str, Look]) -> Plot:
    """One goal: a line for each label that reaches it, the soonest on the slowest link first."""
    title = f"{group_title(goal.strategy, goal.world_size)}: to {goal.named}"
    figure, ax = axes(title, "Mbit/s of each link", "seconds to the target")
    lines = {}
    for label, of in seconds.items():
        points = sorted((link_rate(link) / 1e6, each) for link, each in of.items())
        lines[label] = [(rate, each) for rate, each in points if math.isfinite(rate) and math.isfinite(each)]
    reached = sorted((label for label in lines if lines[label]), key=lambda label: lines[label][0][1])
    tips, handles = {}, []
    for i, label in enumerate(reached):
        look = looks[label]
        (drawn,) = ax.plot(*zip(*lines[label], strict=True), color=look.colour, ls=look.dash, marker=look.marker, ms=4)
        drawn.set_gid(f"line{i}")
        tips[f"line{i}"] = f"{label}: " + ", ".join(f"{each:,.0f} s at {rate:g} Mbit/s" for rate, each in lines[label])
        handles.append(drawn)
    logarithmic(ax, "x")
    logarithmic(ax, "y")
    legend(figure, handles, reached)
    missed = [label for label in lines if not lines[label]]
    alt = f"Time to a target over bandwidth, {title}: {', '.join(reached)}."
    alt += f" Not reached: {', '.join(missed)}." if missed else ""
    return Plot(f"time-to-target-{slug(goal.target)}-{slug(goal.strategy)}-ws{goal.world_size}", alt, figure, tips)
