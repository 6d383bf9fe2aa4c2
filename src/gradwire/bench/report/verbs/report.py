"""The verb ``report``: one self-contained page of results, with its figures and tables as files."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire import __version__
from gradwire.base.files import sha256_file, whole_folder, write_text

if TYPE_CHECKING:
    from gradwire.bench.report.page.data import Data
    from gradwire.bench.report.page.files import Drawn
    from gradwire.bench.report.page.section import Section

TEMPLATES = Path(__file__).parents[1] / "page" / "templates"


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, required=True, help="the experiment's folder, results/<name>")
    parser.add_argument(
        "--compare_with", type=Path, metavar="DIR", help="another experiment's folder: adds a section of differences"
    )


def beside(args: Namespace) -> Path | None:
    """The experiment's folder, or None if it does not exist."""
    return args.results_dir if args.results_dir.is_dir() else None


def main(args: Namespace) -> None:
    """Write ``report.html``, ``figures/`` and ``tables/``, and print the page's path."""
    from gradwire.bench.report.page.data import read
    from gradwire.bench.report.page.sections import sections

    data = read(args.results_dir)
    made = list(sections(data))
    if args.compare_with is not None:
        from gradwire.bench.report.tables.comparison import section

        made.append(section(data, read(args.compare_with)))
    page = args.results_dir / "report.html"
    drawn = save(made, args.results_dir)
    write_text(page, render(data, made, drawn))
    for note in data.notes:
        print(f"gradwire report: {note}", file=sys.stderr)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB, {sum(map(len, drawn.values()))} figures)")


def save(made: Sequence[Section], results_dir: Path) -> dict[str, list[Drawn]]:
    """Write the files of figures and tables.

    Returns:
        The figures for the page, by section key.
    """
    from gradwire.bench.report.page.files import save_all

    with whole_folder(results_dir / "tables") as folder:
        for table in (table for section in made for table in section.tables):
            table.save(folder)
    with whole_folder(results_dir / "figures") as folder:
        drawn = iter(save_all([plot for section in made for plot in section.plots], folder))
    return {section.key: list(islice(drawn, len(section.plots))) for section in made}


def render(data: Data, made: Sequence[Section], drawn: Mapping[str, Sequence[Drawn]]) -> str:
    """Render the page; all text from files is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from gradwire.bench.report.tables.headline import question

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        name=data.results_dir.resolve().name,
        question=question(data.results_dir, data.cells),
        version=__version__,
        sections=made,
        notes=data.notes,
        drawn={key: [(name, Markup(svg)) for name, svg in found] for key, found in drawn.items()},
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
    )


def template_digests() -> dict[str, str]:
    """The templates' SHA-256 by name; the workflow writes the page again when one changes."""
    return {path.name: sha256_file(path) for path in sorted(TEMPLATES.iterdir())}
