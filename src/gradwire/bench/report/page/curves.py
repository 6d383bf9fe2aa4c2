"""Line plots: loss over steps and over seconds, validation loss, gradient error and residual norm over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from matplotlib.ticker import MaxNLocator

from gradwire.bench.report.page.style import Drawing, Look, Plot, axes, group_title, legend, logarithmic
from gradwire.bench.report.rows.curves import Line
from gradwire.bench.report.tables.cells import Group

Lines = Mapping[str, Line]  # by label


class Kind(NamedTuple):
    """One way to draw curves."""

    name: str
    along: str  # a field of Line
    x: str
    y: str
    log: bool = False
    dots: bool = False  # sampled at few steps


LOSS_STEPS = Kind("loss-steps", "steps", "optimizer step", "training loss, nats per token")
LOSS_SECONDS = Kind("loss-seconds", "seconds", "seconds of training", "training loss, nats per token")
VALIDATION = Kind("validation-loss", "steps", "optimizer step", "validation loss, nats per token", dots=True)
GRADIENT_ERROR = Kind("gradient-error", "steps", "optimizer step", "relative error of the gradient", True, True)
RESIDUAL = Kind("residual-norm", "steps", "optimizer step", "norm of the residual", dots=True)


def plots(kind: Kind, found: Mapping[Group, Lines], looks: Mapping[str, Look]) -> Iterator[Drawing]:
    """A figure for each group."""
    for group, lines in found.items():
        if lines:
            yield partial(draw, kind, group, lines, looks)


def draw(kind: Kind, group: Group, lines: Lines, looks: Mapping[str, Look]) -> Plot:
    """One group: a line for each label's mean over seeds, a band from the lowest seed to the highest."""
    figure, ax = axes(group_title(*group), kind.x, kind.y)
    tips, handles = {}, []
    for i, (label, line) in enumerate(lines.items()):
        look, x = looks[label], getattr(line, kind.along)
        if (line.high > line.low).any():
            ax.fill_between(x, line.low, line.high, color=look.colour, alpha=0.15, lw=0)
        (drawn,) = ax.plot(
            x,
            line.mean,
            color=look.colour,
            ls=look.dash,
            marker=look.marker,
            markevery=1 if kind.dots else (i % 5 + 2, max(len(x) // 6, 1)),
            ms=4,
        )
        drawn.set_gid(f"line{i}")
        tips[f"line{i}"] = f"{label}: {line.mean[-1]:.4g} at {kind.x} {x[-1]:,.4g}"
        handles.append(drawn)
    if kind.along == "steps":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if kind.log:
        logarithmic(ax, "y")
    legend(figure, handles, list(lines))
    alt = f"{kind.y} over {kind.x}, {group_title(*group)}: {', '.join(lines)}."
    return Plot(f"{kind.name}-{group.slug}", alt, figure, tips)
