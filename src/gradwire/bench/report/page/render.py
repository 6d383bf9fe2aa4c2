"""The page as one HTML file, its figures as SVG files and inside the page, its tables."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradwire import __version__
from gradwire.base.files import atomic_folder, write_text
from gradwire.bench.config import BASELINE
from gradwire.bench.report.page.curves import WINDOWS
from gradwire.bench.report.page.sections import Data, Section
from gradwire.bench.report.page.style import COLOURS, GRID, INK, MUTED, NEUTRAL, PAPER, Drawing, Plot, styled
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.checks import SHOWN, finished, gates
from gradwire.bench.report.tables.glance import answer, doubts, glance, lost, of_optimizers, question, size
from gradwire.bench.report.tables.table import SPREAD
from gradwire.bench.statistics.seeds import LEAST

TEMPLATES = Path(__file__).with_name("templates")
PLACES = re.compile(r'\b(?:d|x|y|points|transform)="[^"]*"')  # to hundredths of a point
COLOURED = re.compile(r'\b(?:style|fill|stroke)="[^"]*"')
VARIABLES = {INK: "ink", MUTED: "muted", NEUTRAL: "neutral", GRID: "grid", PAPER: "paper"} | {
    colour: f"c{i}" for i, colour in enumerate(COLOURS)
}


class Drawn(NamedTuple):
    """A figure's name and its SVG for the page."""

    name: str
    svg: str


def write(data: Data, made: Sequence[Section]) -> int:
    """Write ``report.html``, ``figures/`` and ``tables/``, and return the number of figures."""
    table = glance(data)
    with atomic_folder(data.results_dir / "tables") as folder:
        for each in (table, *(table for section in made for table in section.tables)):
            each.save(folder)
    first = None if data.first is None else data.figure(data.first[1], data.first[0])
    shown = [[first] if first else [], *(section.plots for section in made)]
    workers = max(1, min(len(os.sched_getaffinity(0)), sum(map(len, shown))))
    with (
        atomic_folder(data.results_dir / "figures") as folder,
        ProcessPoolExecutor(workers, get_context("fork")) as pool,  # figures are most of a page's time
    ):
        drawn = [list(figures) for figures in [pool.map(partial(draw, folder=folder), plots) for plots in shown]]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.j2").render(
        name=data.results_dir.resolve().name,
        version=__version__,
        size=size(data),
        question=question(data),
        answer=answer(data),
        doubts=doubts(data),
        asides=of_optimizers(data),
        glance=table,
        lost=lost(data.rows, "failed", "diverged"),
        skipped=lost(data.rows, "skipped"),
        broken=[gate for gate in gates(data) if gate.state == "failed" and gate != finished(data.rows)],
        notes=data.notes,
        first=drawn[0],
        sections=[*zip(made, drawn[1:], strict=True)],
        shown_runs=SHOWN,
        terms={"baseline": BASELINE, "bf16": BF16, "least": LEAST, "windows": WINDOWS, "spread": SPREAD},
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
    )
    write_text(data.results_dir / "report.html", page)
    return sum(map(len, drawn))


def draw(drawing: Drawing, folder: Path) -> Drawn:
    """Draw a figure and write ``folder/<name>.svg``."""
    with styled():
        plot = drawing()
        text = svg(plot)
    write_text(folder / f"{plot.name}.svg", text)
    return Drawn(plot.name, Markup(inline(text, plot)))


def svg(plot: Plot) -> str:
    """The figure as SVG, with ids that no other figure has; call it within `styled`."""
    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": plot.name}):
        plot.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": plot.alt})
    return text.getvalue()


def inline(text: str, plot: Plot) -> str:
    """Prepare an SVG for the page: scalable, with ids that are used, the page's colours, and tips for artists."""
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(plot.alt)}"', 1)
    for gid, tip in plot.tips.items():
        text = text.replace(f'<g id="{gid}">', f'<g class="tip"><title>{escape(tip)}</title>', 1)
    used = set(re.findall(r"#([^)\s\"]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    text = PLACES.sub(lambda match: re.sub(r"(\d+\.\d{2})\d+", r"\1", match[0]), text)
    return COLOURED.sub(lambda match: re.sub(r"#[0-9a-f]{6}\b", _variable, match[0]), text)


def _variable(colour: re.Match[str]) -> str:
    return f"var(--{VARIABLES[colour[0]]})" if colour[0] in VARIABLES else colour[0]
