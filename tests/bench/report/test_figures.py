"""Figures: what they write is legible, in the made-up results and in the committed records.

Of `page/curves.py`, `page/style.py`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import combinations
from typing import NamedTuple

import made_results
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gradwire.bench.report.page.figures import quality
from gradwire.bench.report.page.sections import Data, sections
from gradwire.bench.report.page.style import COLOURS, looks, styled
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
    """No point and no name of one is outside its axes."""
    for ax in figure.axes:
        for line in ax.lines:
            if line.get_transform() == ax.transData:
                assert all(ax.viewLim.contains(*point) for point in line.get_xydata()), ax.get_title()
        for name in ax.texts:
            box = name.get_window_extent()
            assert ax.bbox.contains(*box.min) and ax.bbox.contains(*box.max), name.get_text()


def all_plots(data: Data) -> list:
    """The figures of the page: the first, and those of the sections."""
    first = data.figure(data.first[1], data.first[0])
    return [plot for plot in [first, *(plot for section in sections(data) for plot in section.plots)] if plot]


TIMELESS = ("quality-bytes", "ranks", "loss-steps", "validation-loss", "gradient-error", "residual-norm")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs that shared the machine, with targets, on two links of a rate; their first steps compile for a minute."""
    places = [(1, "none"), (2, "none"), (2, "100mbit")]
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
        for plot in (drawing() for drawing in all_plots(shared)):
            marked[plot.name] = "times shared" in [text.get_text() for text in plot.figure.texts]
            assert marked[plot.name] == plot.alt.endswith("Times are shared with other runs."), plot.name
    timeless = {name for name in marked if name.startswith(TIMELESS)}
    kinds = ("quality-time", "loss-seconds", "step-time", "scaling", "time-to-loss")
    drawn = {*TIMELESS, *kinds} - {"ranks"}  # one world size sends anything
    assert all(any(name.startswith(kind) for name in marked) for kind in drawn)
    assert {name for name, mark in marked.items() if not mark} == timeless


def test_what_the_first_step_compiles_is_in_no_curve_over_seconds(shared):
    (made,) = (section for section in sections(shared) if section.key == "save")
    drawn = [plot for plot in (drawing() for drawing in made.plots) if plot.name.startswith("loss-seconds")]
    assert len(drawn) == 3
    for plot in drawn:
        for line in plot.figure.axes[0].lines:
            seconds = line.get_xdata()
            assert seconds[0] < 2 * (seconds[1] - seconds[0]) and seconds[-1] < 60


@pytest.mark.parametrize(("experiment", "figures"), [("quality", 2), ("time-to-loss", 5), ("ranks", 3)])
def test_no_two_texts_of_the_committed_records_figures_overlap(tmp_path, written, experiment, figures):
    data = Data.read(made_results.committed(tmp_path / experiment, experiment))
    drawings = all_plots(data)[:6]  # the rest are of the same kinds
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
    assert [(one, other) for (one, box), (other, other_box) in pairs if box.overlaps(other_box)] == []
    assert [one.text for one in written if re.search(r"[$\\^{}]", one.text)] == []


def test_a_point_has_a_dot_for_each_seed_and_says_their_number():
    data = made_results.as_read(made_results.rows(["none", "int8"], ["ddp"], [(2, "none")], [0, 1, 2]))
    drawing = quality("time", data.groups[0], data.cells, data.runs, looks(["none", "int8"]))
    plot = drawing()
    of_label = {text.partition(":")[0]: text for text in plot.tips.values()}
    assert all("n = 3" in text for text in of_label.values()) and of_label.keys() == {"none", "int8"}
    (dots,) = (each for each in plot.figure.axes[0].collections if isinstance(each, PathCollection))
    assert np.asarray(dots.get_offsets()) == pytest.approx(data.runs[["step_time_ms_mean", "worse_percent"]].to_numpy())
    colours = [looks(["none", "int8"])[label].colour for label in data.runs["compressor"]]
    assert [to_hex(colour) for colour in dots.get_facecolors()] == colours and len(set(colours)) == 2


def test_a_point_without_room_for_its_name_is_in_the_legend():
    labels = [f"method-{i}" for i in range(20)]  # all of them in about the same place
    data = made_results.as_read(made_results.rows(["none", *labels], ["ddp"], [(2, "none")], [0, 1, 2]))
    with styled():
        figure = quality("bytes", data.groups[0], data.cells, data.runs, looks(["none", *labels]))().figure
    beside = {text.get_text() for text in figure.axes[0].texts}
    listed = {text.get_text() for text in figure.legends[0].get_texts()}
    assert beside | listed == {"baseline", *labels} and beside and len(listed) > 8


def test_what_more_ranks_cost_is_against_the_same_optimizer_in_every_step(tmp_path):
    folder = made_results.committed(tmp_path / "ranks", "ranks")
    (made,) = (section for section in sections(Data.read(folder)) if section.key == "cost")
    (plot,) = (plot for plot in (drawing() for drawing in made.plots) if plot.name.startswith("ranks"))
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
    drawn = {plot.name: plot.tips for plot in (drawing() for drawing in all_plots(data))}
    kinds = {"quality-bytes", "loss-steps", "validation-loss", "step-time", "gradient-error", "residual-norm"}
    assert {name.partition("-ddp")[0] for name in drawn} == kinds
    assert len(drawn["loss-steps-ddp-ws8-none"]) == 2 and data.notes == []
    assert read_curves(rows, folder) == {}

    table = pq.read_table(paths[0])
    some = pa.array([1.5, *[None] * (len(table) - 1)])
    pq.write_table(table.set_column(table.column_names.index("step_ms"), "step_ms", some), paths[0])
    data = Data.read(folder)
    assert len([*sections(data)]) and "step_ms is null" in data.notes[0]


def test_nine_methods_and_the_baseline_have_colours_that_colour_blind_readers_tell_apart():
    """CIELAB distances for normal vision, and by Machado et al. (2009) without green or red cones."""
    seen_by = [
        np.eye(3),
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    ]
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    to_lab = np.array([[0, 116, 0], [500, -500, 0], [0, 200, -200]])
    used = [look.colour for look in looks(f"label{i}" for i in range(9)).values()]
    assert len({*used}) == 10 and {*COLOURS} <= {*used}
    rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in used])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for seen in seen_by:
        xyz = np.clip(linear @ seen.T, 0, 1) @ to_xyz.T / [0.9505, 1, 1.089]
        lab = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116) @ to_lab.T
        assert min(np.linalg.norm(one - other) for one, other in combinations(lab, 2)) > 20
