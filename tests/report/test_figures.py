"""Figures: what they write is legible, in the made-up results and in the committed records."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import made_results
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gradwire.report.data import read
from gradwire.report.figures.files import save
from gradwire.report.figures.style import styled
from gradwire.report.sections import sections

LABELS = ["none", "bf16-native", "exchange", "int8", "powersgd"]


class Written(NamedTuple):
    """A text as drawn, its box and its figure's in pixels."""

    text: str
    box: Bbox
    figure: Figure
    whole: Bbox


@pytest.fixture
def written(monkeypatch) -> list[Written]:
    """The texts that are drawn from now on."""
    found = []
    draw = Text.draw

    def recorded(text, renderer, *args, **options):
        draw(text, renderer, *args, **options)
        if text.get_text() and text.get_visible():
            figure = text.get_figure(root=True)
            found.append(Written(text.get_text(), text.get_window_extent(renderer), figure, figure.bbox.frozen()))

    monkeypatch.setattr(Text, "draw", recorded)
    return found


def outside(written: list[Written]) -> list[str]:
    """Texts that leave their figure."""
    wholes = [(one, one.whole.padded(1)) for one in written]
    return [one.text for one, whole in wholes if not (whole.contains(*one.box.min) and whole.contains(*one.box.max))]


def strays(figure: Figure) -> None:
    """No point and no name of one lies outside its axes."""
    for ax in figure.axes:
        for line in ax.lines:
            if line.get_transform() == ax.transData:
                assert all(ax.viewLim.contains(*point) for point in line.get_xydata()), ax.get_title()
        for name in ax.texts:
            box = name.get_window_extent()
            assert ax.bbox.contains(*box.min) and ax.bbox.contains(*box.max), name.get_text()


def test_no_text_of_a_figure_holds_markup_or_lies_outside_of_it(tmp_path, written):
    """Each text as SVG and PNG draw it; one figure of each kind."""
    rows = made_results.rows(LABELS, ["ddp", "fsdp2"], [(1, "none"), (2, "none"), (2, "100mbit")], [0, 1, 2])
    kinds = {}
    for section in sections(read(made_results.write(tmp_path / "demo", rows))):
        for plot in section.plots[:: max(1, len(section.plots) - 1)]:
            kinds[section.key, id(plot)] = plot
    names = [save(plot, tmp_path).name for plot in kinds.values()]
    assert {name.split("-")[0] for name in names} >= {"headline", "pareto", "loss", "step", "scaling", "gradient"}
    assert len(written) > 40 * len(names) / 2
    assert outside(written) == []
    assert [one.text for one in written if re.search(r"[$\\^{}]", one.text)] == []
    for name in names:
        root = ET.parse(tmp_path / f"{name}.svg").getroot()
        texts = [element.text or "" for element in root.iter() if element.tag.endswith("}text")]
        assert texts and not [text for text in texts if re.search(r"[$\\^{}]", text)], name


@pytest.mark.parametrize(("experiment", "figures"), [("quality", 7), ("time-to-loss", 12)])
def test_no_two_texts_of_the_committed_records_figures_overlap(tmp_path, written, experiment, figures):
    data = read(made_results.committed(tmp_path / experiment, experiment))
    drawings = [plot for section in sections(data) for plot in section.plots]
    with styled():
        for drawing in drawings:
            figure = drawing().figure
            FigureCanvasAgg(figure).draw()
            strays(figure)
    texts = defaultdict(list)
    for one in written:
        texts[id(one.figure)].append((one.text, one.box.padded(-0.5)))
    assert len(texts) == len(drawings) >= figures
    assert outside(written) == []
    pairs = [pair for found in texts.values() for pair in combinations(found, 2)]
    assert [(one, other) for (one, box), (other, beside) in pairs if box.overlaps(beside)] == []
