"""The page as one HTML file, its figures as SVG and PNG files for a paper and as SVG inside the page, its tables."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from gradwire import __version__
from gradwire.base.files import atomic_folder, write_text, write_with
from gradwire.bench.report.page.data import TEMPLATES, Data, Section
from gradwire.bench.report.page.style import COLOURS, GRID, INK, MUTED, NEUTRAL, PAPER, Drawing, Plot, styled
from gradwire.bench.report.tables.checks import SHOWN
from gradwire.bench.report.tables.headline import question

PNG: Any = {"format": "png", "dpi": 200, "pil_kwargs": {"compress_level": 1}}  # a sixth larger, sooner written
FIRST_LEVEL = 2  # figures of a question that are not folded
FEW = 4  # figures per process, below which another process does not pay off
PLACES = re.compile(r'\b(?:d|x|y|points|transform)="[^"]*"')  # to hundredths of a point
COLOURED = re.compile(r'\b(?:style|fill|stroke)="[^"]*"')
VARIABLES = {INK: "ink", MUTED: "muted", NEUTRAL: "neutral", GRID: "grid", PAPER: "paper"} | {
    colour: f"c{i}" for i, colour in enumerate(COLOURS)
}
_TAKEN: tuple[Sequence[Drawing], Path]


class Drawn(NamedTuple):
    """A figure's name and its SVG for the page."""

    name: str
    svg: str


def write(data: Data, sections: Sequence[Section]) -> int:
    """Write ``report.html``, ``figures/`` and ``tables/``, and return the number of figures."""
    with atomic_folder(data.results_dir / "tables") as folder:
        for table in (table for section in sections for table in section.tables):
            table.save(folder)
    with atomic_folder(data.results_dir / "figures") as folder:
        drawn = iter(save_all([plot for section in sections for plot in section.plots], folder))
    figures = {section.key: list(islice(drawn, len(section.plots))) for section in sections}
    write_text(data.results_dir / "report.html", render(data, sections, figures))
    return sum(map(len, figures.values()))


def render(data: Data, sections: Sequence[Section], figures: Mapping[str, Sequence[Drawn]]) -> str:
    """Render the page; all text from files is escaped.

    Args:
        data: The experiment.
        sections: The sections of the page.
        figures: The figures of each, by its key.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    present = [section for section in sections if not section.absent]
    return environment.get_template("page.html.j2").render(
        name=data.results_dir.resolve().name,
        question=question(data.results_dir, data.cells),
        version=__version__,
        first_level=FIRST_LEVEL,
        shown_runs=SHOWN,
        questions=[(name, list(of)) for name, of in groupby(present, lambda section: section.question)],
        absent=[section for section in sections if section.absent],
        notes=data.notes,
        drawn={key: [(name, Markup(svg)) for name, svg in of] for key, of in figures.items()},
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
    )


def save_all(drawings: Sequence[Drawing], folder: Path) -> list[Drawn]:
    """Draw all figures and write their files, on all cores: most of a report's time."""
    processes = min(len(os.sched_getaffinity(0)), len(drawings) // FEW)
    if processes < 2:
        return [save(drawing, folder) for drawing in drawings]
    fork = multiprocessing.get_context("fork")  # children inherit the drawings and the imports
    with fork.Pool(processes, _take, (drawings, folder)) as pool:
        return pool.map(_save, range(len(drawings)), chunksize=1)


def _take(drawings: Sequence[Drawing], folder: Path) -> None:
    """In a child process: draw figures until none is left."""
    global _TAKEN
    _TAKEN = drawings, folder
    gc.freeze()  # exclude the parent's objects from garbage collection


def _save(number: int) -> Drawn:
    drawings, folder = _TAKEN
    return save(drawings[number], folder)


def save(drawing: Drawing, folder: Path) -> Drawn:
    """Draw a figure and write ``folder/<name>.svg`` and ``.png``."""
    with styled():
        plot = drawing()
        text = svg(plot)
        write_with(folder / f"{plot.name}.png", lambda part: plot.figure.savefig(part, **PNG))
    write_text(folder / f"{plot.name}.svg", text)
    return Drawn(plot.name, inline(text, plot))


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
