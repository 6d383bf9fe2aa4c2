"""The figure of time to a target over bandwidth."""

from __future__ import annotations

import pytest
from links_rows import row

from gradwire.bench.report.page.style import looks
from gradwire.bench.report.page.time_to_target import plots
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.tables.time_to_loss import Goal, by_goal, cells

STEPS = {"none": 500, "int8": 600, "int4": None, "powersgd": 900}
LINKS = ("none", "1gbit", "100mbit")


def rows(link, seeds=(0, 1, 2)):
    """Each seed takes ten steps more than the one before; int4 misses the target, and powersgd's last two seeds do."""
    for label, steps in STEPS.items():
        for seed in seeds:
            one = row("ddp", label, link, seed=seed)
            taken = None if steps is None or (label == "powersgd" and seed) else steps + 10 * seed
            time = None if taken is None else taken * one.step_time_ms_mean / 1e3
            yield one.model_copy(update={"steps_to_target": {"45": taken}, "time_to_target_s": {"45": time}})


def timed(*links):
    return cells([one for link in links for one in rows(link)], PerplexityReference.of("here", []))


def test_lines_are_medians_over_the_rates_and_misses_are_named():
    found = by_goal(timed(*LINKS))
    goal = Goal("45", "ddp", 2)
    assert list(found) == [goal]
    assert found[goal]["int8"]["100mbit"] == pytest.approx(0.61 * row("ddp", "int8", "100mbit").step_time_ms_mean)
    assert set(found[goal]["int4"].values()) == set(found[goal]["powersgd"].values()) == {float("inf")}
    (drawing,) = plots(found, looks(STEPS))
    plot = drawing()
    (axes,) = plot.figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[100, 1000]] * 2
    assert axes.lines[0].get_ydata().tolist() == [found[goal]["int8"][link] for link in ("100mbit", "1gbit")]
    assert plot.alt.endswith("to perplexity 45: int8, none. Not reached: int4, powersgd.")
    assert plot.name == "time-to-target-45-ddp-ws2"


def test_one_rate_is_no_figure_and_a_label_is_a_target_too():
    assert not list(plots(by_goal(timed("none", "1gbit")), looks(STEPS)))
    assert Goal("bf16-native", "ddp", 2).named == "the perplexity of bf16-native"
