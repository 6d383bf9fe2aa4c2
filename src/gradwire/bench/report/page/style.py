"""Styles of figures: one per label, for light, dark and print, distinguished by more than colour.

Any two of the nine colours and the text's, which is the baseline's, differ by 24 or more in CIELAB for normal,
deuteranope and protanope vision (Machado et al. 2009), in light and dark; labels beyond them differ in dashes and
markers too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from matplotlib.transforms import Bbox

from gradwire.bench.config import BASELINE
from gradwire.bench.statistics.seeds import Estimate

INK, MUTED, NEUTRAL, GRID, PAPER = "#16191d", "#5b6470", "#9aa3ae", "#dfe3e8", "#fefefe"
COLOURS = ("#0072b2", "#d55e00", "#332288", "#4d908e", "#0ead69", "#8338ec", "#7f3b08", "#1b4965", "#3a5a40")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
MARKERS = "os^DvPX*<>"
SMALL = 8.5  # points: legends and labels of single points
WIDTH = 4.9  # inches: a column of a paper, readable on a phone
TICKS = ((1.5, (1, 2, 5)), (0.95, (1, 3)))  # of each decade, if it has more inches than this
TOP, RIGHT, BOTTOM, LINE = 0.32, 0.25, 0.5, 0.18  # inches around the axes; of a legend's line
CHARACTER, HIGH = 0.073, 0.14  # inches of a name: each character, and its height
LEGEND: Any = {"handlelength": 2.2, "columnspacing": 1.2, "borderaxespad": 0.3, "labelspacing": 0.35}
SETTINGS: Any = {
    "svg.fonttype": "none",  # keep text as text
    "text.parse_math": False,  # a label may contain a dollar sign
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.5,
    "hatch.linewidth": 0.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


class Look(NamedTuple):
    """The style of one label."""

    colour: str
    dash: Any
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """The properties of a line with markers."""
        return {"color": self.colour, "ls": self.dash, "marker": self.marker}


class Plot(NamedTuple):
    """A figure with the name of its files and a description.

    ``tips`` are tooltips of single artists, by gid.
    """

    name: str
    alt: str
    figure: Figure
    tips: dict[str, str]


Drawing = Callable[[], Plot]  # draws a figure when called; can be pickled, so that all cores draw


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A style for each label, in the given order; the baseline always has the same."""
    styles = {BASELINE: Look(INK, "-", "o")}
    others = [label for label in dict.fromkeys(labels) if label != BASELINE]
    for i, label in enumerate(others):
        dash = DASHES[(i // len(COLOURS)) % len(DASHES)]
        styles[label] = Look(COLOURS[i % len(COLOURS)], dash, MARKERS[(i + 1) % len(MARKERS)])
    return styles


@contextmanager
def styled() -> Iterator[None]:
    """Apply matplotlib settings while drawing or saving."""
    with mpl.rc_context(SETTINGS):
        yield


class Chart:
    """A figure that is being drawn.

    Args:
        figure: The figure.

    Attributes:
        handles: Artists of the legend, by their text there.
        tips: Tooltips of single artists, by gid.
    """

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        self.handles: dict[str, Any] = {}
        self.tips: dict[str, str] = {}

    def tip(self, artist: Artist, text: str) -> None:
        """Give an artist a tooltip."""
        gid = f"tip{len(self.tips)}"
        artist.set_gid(gid)
        self.tips[gid] = text

    def name(self, ax: Axes, points: Mapping[str, tuple[float, float, Estimate]]) -> None:
        """Name points where that covers no other name, point or spread, and take these names out of the legend.

        Args:
            ax: Axes, whose limits are set.
            points: By name: x, y, and the spread of y.
        """
        width, height = WIDTH * ax.get_position().width, self.figure.get_figheight() - TOP - BOTTOM  # inches
        to_axes = ax.transScale + ax.transLimits

        def place(x: float, y: float) -> tuple[float, float]:
            inside = to_axes.transform((x, y))
            return inside[0] * width, inside[1] * height

        places = {name: place(x, y) for name, (x, y, _) in points.items()}
        taken = [Bbox.from_bounds(x - 0.05, y - 0.05, 0.1, 0.1) for x, y in places.values()]
        for x, _, of in points.values():
            if of.n > 1:
                (left, low), (_, high) = place(x, of.low), place(x, of.high)
                taken.append(Bbox.from_extents(left - 0.01, low, left + 0.01, high))
        axes_box = Bbox.from_bounds(0, 0, width, height)
        for name, (x, y) in sorted(places.items(), key=lambda place: place[1][1]):
            long = CHARACTER * (len(name) + 1)
            rows = (0.03, -0.03 - HIGH, 0.09, -0.09 - HIGH)
            corners = [(dx, dy) for dy in rows for dx in (0.06, -0.06 - long)]
            sides = [(-long / 2, 0.08), (-long / 2, -0.08 - HIGH), (0.09, -HIGH / 2), (-0.09 - long, -HIGH / 2)]
            boxes = (Bbox.from_bounds(x + dx, y + dy, long, HIGH) for dx, dy in (*corners[:4], *sides, *corners[4:]))
            inside = (box for box in boxes if axes_box.contains(*box.min) and axes_box.contains(*box.max))
            box = next((box for box in inside if not any(map(box.overlaps, taken))), None)
            if box is not None:
                taken.append(box)
                del self.handles[name]
                ax.text(box.x0 / width, box.y0 / height, name, transform=ax.transAxes, fontsize=SMALL, va="bottom")

    def plot(self, name: str, alt: str) -> Plot:
        """Add the legend below the axes, in as many columns as fit, and return the figure."""
        labels = [*self.handles]
        columns = max(1, min(4, len(labels), int((WIDTH - 0.2) / (0.5 + 0.075 * max(map(len, labels), default=1)))))
        below = BOTTOM + LINE * -(-len(labels) // columns)
        height = self.figure.get_figheight() - TOP - BOTTOM
        total = TOP + height + below
        self.figure.set_figheight(total)
        for ax in self.figure.axes:
            box = ax.get_position()
            ax.set_position((box.x0, (below + box.y0 * height) / total, box.width, box.height * height / total))
        if labels:
            place: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.0)}
            self.figure.legend([*self.handles.values()], labels, ncols=columns, **place, **LEGEND)
        return Plot(name, alt, self.figure, self.tips)


def axes(title: str, x: str, y: str, height: float = 2.6, left: float = 0.72) -> tuple[Chart, Axes]:
    """A chart with one pair of axes.

    Args:
        title: Its title.
        x: The label of the x axis, with its unit.
        y: The label of the y axis, with its unit.
        height: Of the axes, in inches.
        left: Room for the y axis's labels, in inches.
    """
    figure = Figure(figsize=(WIDTH, TOP + height + BOTTOM))
    ax = figure.add_axes((left / WIDTH, 0.0, 1 - (left + RIGHT) / WIDTH, 1.0))  # `Chart.plot` settles the heights
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.tick_params(length=3)
    return Chart(figure), ax


def over_worlds(ax: Axes, worlds: Iterable[int]) -> None:
    """Make the x axis one of world sizes."""
    ax.set_xscale("log", base=2)
    ax.set_xticks([*worlds], [str(world) for world in worlds])
    ax.xaxis.set_minor_locator(NullLocator())


class Decades(LogLocator):
    """Ticks at 1, 2 and 5 of each decade, or at fewer where their labels have no room."""

    def __init__(self, ax: Axes, which: Literal["x", "y"]) -> None:
        super().__init__(numticks=9)
        self.ax, self.which = ax, which

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """The ticks between two values."""
        inches = self.ax.get_window_extent().transformed(self.ax.figure.dpi_scale_trans.inverted())
        room = inches.width if self.which == "x" else 3 * inches.height  # a label is wider than high
        inches_per_decade = room / math.log10(vmax / vmin)
        self.set_params(subs=next((subs for least, subs in TICKS if inches_per_decade > least), (1,)))
        return super().tick_values(vmin, vmax)


def logarithmic(ax: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks as plain numbers: mathtext is switched off."""
    axis: Axis = getattr(ax, f"{which}axis")
    getattr(ax, f"set_{which}scale")("log")
    axis.set_major_locator(Decades(ax, which))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def timed(drawing: Drawing, shared: bool) -> Drawing:
    """A drawing of times; they are marked if other runs may have used the machine."""
    return partial(marked, drawing) if shared else drawing


def marked(drawing: Drawing) -> Plot:
    """Draw, and say on the figure that its times are shared."""
    plot = drawing()
    plot.figure.text(0.99, 0.995, "times shared", ha="right", va="top", fontsize=SMALL, color=MUTED)
    return plot._replace(alt=f"{plot.alt} Times are shared with other runs.")


def group_title(strategy: str, world: int | None = None, link: str | None = None) -> str:
    """``fsdp2, W = 2, 100mbit``."""
    parts = [strategy, None if world is None else f"W = {world}"]
    return ", ".join(text for text in [*parts, None if link in (None, "none") else link] if text)
