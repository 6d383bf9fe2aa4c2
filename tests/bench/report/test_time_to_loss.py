"""Time to loss: times composed by hand of steps and step times, their table and curves.

Of `tables/time_to_loss.py`.
"""

from __future__ import annotations

import math

import pytest
from links_rows import row

from gradwire.bench.report.page.figures import curves, on_front, time_to_loss
from gradwire.bench.report.page.style import looks, styled
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.time_to_loss import by_target, cells, loads

STEPS = {  # to a perplexity of 60, and to the final one of bf16-native, by seed; seed 3 was not judged by targets
    "none": [(50, None), (60, None), (70, 100), None],
    "bf16-native": [(51, 100), (61, 100), (71, 100), None],
    "int8": [(40, 90), (30, 80), (20, 70), None],
    "int4": [(10, None), (None, None), (None, None), None],
}
FINAL = {"none": (50.0, 52.0, 51.0, 40.0), "bf16-native": (49.0, 48.0, 47.0, 46.0), "int8": (44.0, 45.0, 46.0, 47.0)}
MS = {"none": (100, 900), "bf16-native": (70, 500), "int8": (110, 300), "int4": (120, 130)}  # unshaped, at 100 Mbit/s
LABELS = list(STEPS)


def long_run(label, seed):
    """A run of 100 steps whose perplexity counts; of int8 the first ten steps are dense."""
    targets = STEPS[label][seed]
    made = row("ddp", label, "none", seed=seed)
    dense = {"dense_steps": 10} if label == "int8" else {}
    return made.model_copy(
        update={
            "steps": 100,
            "val_ppl": FINAL.get(label, (80.0, 81.0, 82.0, 83.0))[seed],
            "quality_from": "train",
            "compress_config": (made.compress_config or {}) | dense,
            "steps_to_target": None if targets is None else dict(zip(("60", "bf16-native"), targets, strict=True)),
        }
    )


LONG = PerplexityReference.of("long", [long_run(label, seed) for label in LABELS for seed in range(4)])


def short_run(label, link):
    """A short run on a link: one seed, its mean step longer than its median, which counts."""
    ms = float(MS[label][link != "none"])
    source = {"quality_from": f"long: ddp/{label}/ws2/none/seed0", "steps_to_target": {"60": 1, "bf16-native": 1}}
    return row("ddp", label, link).model_copy(
        update={"step_time_ms_p50": ms, "step_time_ms_mean": 2 * ms, "time_to_target_s": {}, "val_ppl": 1.0, **source}
    )


@pytest.fixture
def found():
    return cells([short_run(label, link) for label in LABELS for link in ("none", "100mbit")], LONG)


def test_times_are_the_steps_of_all_judged_seeds_at_the_link_s_typical_step(found):
    times = {(cell.compressor, cell.link): [cell.seconds("60"), cell.seconds("bf16-native")] for cell in found}
    approx = pytest.approx
    assert times["none", "100mbit"] == approx([60 * 0.9, math.inf])
    assert times["bf16-native", "none"] == approx([61 * 0.07, 100 * 0.07])
    assert times["int8", "100mbit"] == approx([10 * 0.9 + 20 * 0.3, 10 * 0.9 + 70 * 0.3]), "dense steps as none's"
    assert times["int4", "none"] == [math.inf, math.inf], "one of three seeds gets there"
    assert all(math.isnan(cell.seconds("55")) for cell in found), "a target of other cells"
    ends = {(cell.compressor, cell.link): cell.end() for cell in found}
    assert ends["int8", "none"] == approx((10 * 0.1 + 90 * 0.11, 45.5))
    assert loads(found) == approx({"none": 0.0, "100mbit": 8.0})
    table = by_target(found)
    assert [column.title for column in table.columns][-2:] == ["seconds", "seconds 100mbit"]
    lines = [[entry.text for entry in row] for row in table.rows if row[0].text == "60"]
    assert [line[3] for line in lines] == ["int8", "bf16-native", "none", "int4"], (
        "the soonest on the slowest link first"
    )
    assert lines[0][4:] == ["3", "3 of 3", "30", "–", "3.2", "15.0"] and lines[-1][-1] == "∞"


def test_runs_of_their_own_have_the_times_that_they_took():
    rows = [long_run("int8", seed).model_copy(update={"link": "100mbit"}) for seed in range(3)]
    times = [{"60": 7.0, "bf16-native": None}, {"60": 9.0, "bf16-native": 20.0}, {"60": 8.5, "bf16-native": None}]
    own = [
        one.model_copy(update={"time_to_target_s": each, "step_time_ms_mean": 250.0})
        for one, each in zip(rows, times, strict=True)
    ]
    (cell,) = cells(own, PerplexityReference.of("here", own))
    assert (cell.seconds("60"), cell.seconds("bf16-native")) == (8.5, math.inf)
    assert math.isnan(cell.seconds("55")), "a target of other cells"
    assert cell.end() == (25.0, 45.0)


def close(points):
    """The points that a curve must have, to rounding."""
    return [pytest.approx(point) for point in points]


def test_curves_join_the_targets_and_the_end_of_the_runs(found):
    slow = curves([cell for cell in found if cell.link == "100mbit"])
    bf16 = 47.5  # the median of its final perplexities
    assert slow["none"] == close([(54.0, 60.0), (90.0, 50.5)]), "it misses the second target"
    assert slow["bf16-native"] == close([(30.5, 60.0), (50.0, bf16)])
    assert slow["int8"] == close([(15.0, 60.0), (30.0, bf16), (36.0, 45.5)])
    assert slow["int4"] == close([(13.0, 81.5)])
    assert set(on_front(slow)) == {"none", "bf16-native", "int8", "int4"}, "int4 ends first"
    assert set(on_front(slow | {"int4": [(16.0, 81.5)]})) == {"none", "bf16-native", "int8"}


def test_a_figure_of_each_link_shows_these_numbers(found):
    looked = looks(LABELS)
    with styled():
        drawn, fast = (drawing() for drawing in time_to_loss(found, looked))
    (ax,) = drawn.figure.axes
    assert ax.get_title(loc="left") == "ddp, W = 2, 100mbit" and fast.name == "time-to-loss-ddp-W-2"
    assert "int8: 60 at 15 s, 47.5 at 30 s, 45.5 at 36 s" in drawn.tips.values()
    lines = {line.get_color(): line.get_xydata() for line in ax.lines}
    for label, points in curves([cell for cell in found if cell.link == "100mbit"]).items():
        assert [tuple(point) for point in lines[looked[label].colour]] == close(points)
