"""The page as one HTML file, its figures as SVG and PNG files for a paper and as SVG inside the page, its tables."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gradwire import __version__
from gradwire.base.files import whole_folder, write_text, write_with
from gradwire.bench.report.page.data import TEMPLATES, Data, Section
from gradwire.bench.report.page.style import COLOURS, GRID, INK, MUTED, NEUTRAL, PAPER, Drawing, Plot, styled
from gradwire.bench.report.tables.checks import SHOWN
from gradwire.bench.report.tables.headline import question

PNG: Any = {"format": "png", "dpi": 200, "pil_kwargs": {"compress_level": 1}}  # a sixth larger, sooner written
FIRST_LEVEL = 2  # figures of a question that are not folded
FEW = 4  # figures per process, below which another process does not pay off
SVG = "http://www.w3.org/2000/svg"
HREF = "{http://www.w3.org/1999/xlink}href"
VARIABLES = {INK: "ink", MUTED: "muted", NEUTRAL: "neutral", GRID: "grid", PAPER: "paper"} | {
    colour: f"c{i}" for i, colour in enumerate(COLOURS)
}
_TAKEN: tuple[Sequence[Drawing], Path]
ET.register_namespace("", SVG)
ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")


class Drawn(NamedTuple):
    """A figure's name and its SVG for the page."""

    name: str
    svg: str


def write(data: Data, sections: Sequence[Section]) -> int:
    """Write ``report.html``, ``figures/`` and ``tables/``, and return the number of figures."""
    with whole_folder(data.results_dir / "tables") as folder:
        for table in (table for section in sections for table in section.tables):
            table.save(folder)
    with whole_folder(data.results_dir / "figures") as folder:
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
    """The figure as SVG; call it within `styled`."""
    text = io.StringIO()
    plot.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": plot.alt})
    return text.getvalue()


def inline(text: str, plot: Plot) -> str:
    """Prepare an SVG for the page: scalable, with unique ids, the page's colours, and tips for artists."""
    root = ET.fromstring(text)
    for attribute in ("width", "height"):
        root.attrib.pop(attribute, None)
    root.attrib.update({"role": "img", "aria-label": plot.alt})
    for parent in root.iter():
        for child in [child for child in parent if child.tag == f"{{{SVG}}}metadata"]:
            parent.remove(child)
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        name = element.get("id")
        if name in plot.tips:
            tip = ET.Element(f"{{{SVG}}}title")
            tip.text = plot.tips[name]
            element.insert(0, tip)
            element.set("class", "tip")
        if name in used:
            element.set("id", f"{plot.name}-{name}")
        elif name:
            del element.attrib["id"]
        for attribute, value in element.attrib.items():
            element.set(attribute, _rewritten(attribute, value, f"#{plot.name}-"))
    return ET.tostring(root, encoding="unicode")


def _rewritten(attribute: str, value: str, prefix: str) -> str:
    """Rewrite an attribute's value for the page."""
    if attribute == HREF:
        return value.replace("#", prefix, 1)
    if attribute in ("d", "x", "y", "points", "transform"):
        return re.sub(r"(\d+\.\d{2})\d+", r"\1", value)  # hundredths of a point are enough
    if attribute in ("style", "fill", "stroke"):
        value = re.sub(r"#[0-9a-f]{6}\b", lambda match: _variable(match[0]), value)
    return value.replace("url(#", f"url({prefix}")


def _references(element: ET.Element) -> list[str]:
    return re.findall(r"#([^)\s\"]+)", " ".join(v for k, v in element.attrib.items() if k == HREF or "url(#" in v))


def _variable(colour: str) -> str:
    return f"var(--{VARIABLES[colour]})" if colour in VARIABLES else colour
