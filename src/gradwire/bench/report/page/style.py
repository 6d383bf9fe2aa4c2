"""Styles of figures: one per label, for light, dark and print, distinguished by more than colour.

Colours are those of Okabe and Ito ("Color Universal Design", 2008) without yellow and black, and an indigo; labels
beyond them differ in dashes and markers too. The baseline has the colour of the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from gradwire.bench.config import BASELINE

INK, MUTED, NEUTRAL, GRID, PAPER = "#16191d", "#5b6470", "#9aa3ae", "#dfe3e8", "#fefefe"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b5549a", "#c98a00", "#2b95d6", "#5a4fcf")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))
MARKERS = "os^DvPX*<>"
HATCHES = ("", "///", "---", "xxx", "|||", "+++")  # lines only: dots make an SVG a hundred times larger
SMALL = 8.5  # points: legends and labels of single points
WIDTH = 4.9  # inches: a column of a paper, readable on a phone
TICKS = ((1.5, (1, 2, 5)), (0.95, (1, 3)))  # of each decade, if it has more inches than this
TOP, RIGHT, BOTTOM, LINE = 0.32, 0.25, 0.5, 0.18  # inches around the axes; of a legend's line
LABEL_BOX: Any = {"fc": PAPER, "ec": "none", "pad": 2, "alpha": 0.9}
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


Drawing = Callable[[], Plot]  # draws a figure when called, so that all cores can be used


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """A style for each label, in the given order; the baseline always has the same."""
    styles = {BASELINE: Look(INK, "-", "o")}
    others = [label for label in dict.fromkeys(labels) if label != BASELINE]
    for i, label in enumerate(others):
        dash = DASHES[(i // len(COLOURS)) % len(DASHES)]
        styles[label] = Look(COLOURS[i % len(COLOURS)], dash, MARKERS[(i + 1) % len(MARKERS)])
    return styles


def fills(labels: Iterable[str], looks: Mapping[str, Look]) -> dict[str, dict[str, Any]]:
    """How areas of labels are filled: in their colours, or in free ones where labels of a figure have the same."""
    styles: dict[str, dict[str, Any]] = {}
    for order, label in enumerate(labels):
        taken = [style["fc"] for style in styles.values()]
        colour = next(
            (colour for colour in (looks[label].colour, *COLOURS) if colour not in taken), looks[label].colour
        )
        styles[label] = {"fc": colour, "ec": PAPER, "hatch": HATCHES[order % len(HATCHES)], "lw": 0}
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
        x: What the x axis shows, with its unit.
        y: What the y axis shows, with its unit.
        height: Of the axes, in inches.
        left: Room for the y axis's labels, in inches.
    """
    figure = Figure(figsize=(WIDTH, TOP + height + BOTTOM))
    ax = figure.add_axes((left / WIDTH, 0.0, 1 - (left + RIGHT) / WIDTH, 1.0))  # `Chart.plot` settles the heights
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.tick_params(length=3)
    return Chart(figure), ax


def panels(number: int, x: str, y: str) -> tuple[Chart, list[Axes]]:
    """A chart with small panels, two in a row, that share their axes; `heading` writes its title.

    Args:
        number: Of panels.
        x: What the x axes show, with its unit.
        y: What the y axes show, with its unit.
    """
    rows, left, gap, height, above = -(-number // 2), 0.62, 0.16, 1.4, 0.3
    whole = rows * (height + above)  # each panel has its title above it
    width = (WIDTH - left - RIGHT - gap) / 2
    figure = Figure(figsize=(WIDTH, TOP + whole + BOTTOM))
    all_axes: list[Axes] = []
    for i in range(number):
        row, column = divmod(i, 2)
        x0, y0 = left + column * (width + gap), whole - (row + 1) * (height + above)
        shared = {"sharex": all_axes[0], "sharey": all_axes[0]} if all_axes else {}
        box = x0 / WIDTH, y0 / whole, width / WIDTH, height / whole
        ax = figure.add_axes(box, **shared)  # type: ignore[call-overload]
        ax.tick_params(length=3, labelbottom=i + 2 >= number, labelleft=not column)
        ax.set(xlabel=x if i + 2 >= number else "", ylabel="" if column else y)
        all_axes.append(ax)
    return Chart(figure), all_axes


def heading(figure: Figure, title: str) -> None:
    """Write the title of a figure with panels; call it after `Chart.plot`, which settles the height."""
    left = figure.axes[0].get_position().x0
    size, weight = mpl.rcParams["axes.titlesize"], "bold"
    figure.text(left, 1 - 0.12 / figure.get_figheight(), title, va="top", fontsize=size, fontweight=weight)


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

    def marked() -> Plot:
        plot = drawing()
        plot.figure.text(0.99, 0.995, "times shared", ha="right", va="top", fontsize=SMALL, color=MUTED)
        return plot._replace(alt=f"{plot.alt} Times are shared with other runs.")

    return marked if shared else drawing


def group_title(strategy: str, world: int | None = None, link: str | None = None) -> str:
    """``fsdp2, W = 2, 100mbit``."""
    parts = [strategy, None if world is None else f"W = {world}"]
    return ", ".join(text for text in [*parts, None if link in (None, "none") else link] if text)
