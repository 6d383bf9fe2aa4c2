"""Figures: what they write is legible, in the made-up results and in the committed records.

Of `page/curves.py`, `page/fronts.py`, `page/speed.py`, `page/style.py`.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import made_results
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gradwire.bench.report.page.data import Data
from gradwire.bench.report.page.files import save
from gradwire.bench.report.page.sections import sections
from gradwire.bench.report.page.style import styled
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.across_runs import read_curves

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
    for section in sections(Data.read(made_results.write(tmp_path / "demo", rows))):
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


TIMELESS = ("pareto-bytes", "ranks", "loss-steps", "validation-loss", "gradient-error", "residual-norm")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs that shared the machine, with targets, on two links of a rate; their first steps compile for a minute."""
    places = [(1, "none"), (2, "none"), (2, "1gbit"), (2, "100mbit")]
    reached = {"steps_to_target": {"60": 30}, "time_to_target_s": {"60": 3.0}, "bytes_to_target": {"60": 9}}
    rows = [row.model_copy(update=reached) for row in made_results.rows(LABELS, ["ddp"], places, [0, 1])]
    folder = made_results.write(tmp_path_factory.mktemp("shared") / "demo", rows)
    listed = [{**row.run._asdict(), "excluded": None, "shared": True} for row in rows]
    (folder / "expected.json").write_text(json.dumps(listed))
    for path in (folder / "runs").rglob("steps.parquet"):
        table = pq.read_table(path)
        longer = pc.add(table["step_ms"], pc.multiply(60_000.0, pc.equal(table["step"], 0).cast("float64")))
        pq.write_table(table.set_column(table.column_names.index("step_ms"), "step_ms", longer), path)
    return Data.read(folder)


def test_every_figure_of_times_says_that_they_are_shared_and_no_other_does(shared):
    marked = {}
    with styled():
        for plot in (drawing() for section in sections(shared) for drawing in section.plots):
            marked[plot.name] = "times shared" in [text.get_text() for text in plot.figure.texts]
            assert marked[plot.name] == plot.alt.endswith("Times are shared with other runs."), plot.name
    timeless = {name for name in marked if name.startswith(TIMELESS)}
    kinds = ("pareto-time", "loss-seconds", "step-time", "scaling", "winners", "time-to-loss", "soonest")
    drawn = {*TIMELESS, *kinds, "headline"} - {"ranks"}  # one world size sends anything
    assert all(any(name.startswith(kind) for name in marked) for kind in drawn)
    assert {name for name, mark in marked.items() if not mark} == timeless


def test_what_the_first_step_compiles_is_in_no_curve_over_seconds(shared):
    (made,) = (section for section in sections(shared) if section.key == "loss")
    drawn = [plot for plot in (drawing() for drawing in made.plots) if plot.name.startswith("loss-seconds")]
    assert len(drawn) == 4
    for plot in drawn:
        for line in plot.figure.axes[0].lines:
            seconds = line.get_xdata()
            assert seconds[0] < 2 * (seconds[1] - seconds[0]) and seconds[-1] < 60


@pytest.mark.parametrize(("experiment", "figures"), [("quality", 7), ("time-to-loss", 10), ("ranks", 3)])
def test_no_two_texts_of_the_committed_records_figures_overlap(tmp_path, written, experiment, figures):
    data = Data.read(made_results.committed(tmp_path / experiment, experiment))
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


def test_what_more_ranks_cost_is_against_the_same_optimizer_in_every_step(tmp_path):
    folder = made_results.committed(tmp_path / "ranks", "ranks")
    (made,) = (section for section in sections(Data.read(folder)) if section.key == "ranks")
    (plot,) = (drawing() for drawing in made.plots)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    perplexities = {(row["compressor"], row["world_size"]): row["val_ppl"] for row in rows}
    lines = {line.get_gid(): line for line in plot.figure.axes[0].lines}
    drawn = {text.partition(":")[0]: lines[gid].get_xydata().tolist() for gid, text in plot.tips.items()}
    assert drawn.keys() == {"int4", "onebit_adam", "diloco-5-onebit", "muon-5-onebit"}
    for label, points in drawn.items():
        usual = "muon" if label.startswith("muon") else "none"
        costs = [(w, 100 * (perplexities[label, w] / perplexities[usual, w] - 1)) for w in (4, 8)]
        assert points == [pytest.approx(cost) for cost in costs], label


def test_runs_of_simulated_ranks_have_losses_over_steps_and_not_over_seconds(tmp_path):
    times = {name: None for name in Result.model_fields if "_ms" in name or name == "tokens_per_s"}
    rows = [
        row.model_copy(update=times | {"world": "simulated"})
        for row in made_results.rows(["none", "int8"], ["ddp"], [(8, "none")], [0, 1])
    ]
    folder = made_results.write(tmp_path / "demo", rows)
    paths = [*(folder / "runs").rglob("steps.parquet")]
    for path in paths:
        table = pq.read_table(path)
        untimed = pa.nulls(len(table), pa.float64())
        pq.write_table(table.set_column(table.column_names.index("step_ms"), "step_ms", untimed), path)
    data = Data.read(folder)
    (made,) = (section for section in sections(data) if section.key == "loss")
    drawn = {plot.name: plot.tips for plot in (drawing() for drawing in made.plots)}
    assert {name.partition("-ddp")[0] for name in drawn} == {"loss-steps", "validation-loss"}
    assert len(drawn["loss-steps-ddp-ws8-none"]) == 2 and data.notes == []
    assert read_curves(rows, folder) == {}

    table = pq.read_table(paths[0])
    some = pa.array([1.5, *[None] * (len(table) - 1)])
    pq.write_table(table.set_column(table.column_names.index("step_ms"), "step_ms", some), paths[0])
    data = Data.read(folder)
    assert len([*sections(data)]) and "step_ms is null" in data.notes[0]
