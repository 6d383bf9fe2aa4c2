"""The label that predictions choose; every number is computed by hand."""

from __future__ import annotations

import math

import pytest
from links_rows import experiment, row
from made_results import as_read

from gradwire.bench.report.tables.measurements import of_common_seeds
from gradwire.bench.report.tables.predictions import Qualities, compute_seconds, scaling
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.time_to_loss import seconds_to
from gradwire.cli import main

TARGET = "45"
SEEDS = {"none": (0, 1, 2), "int8": (0, 2, 3), "int4": (3,)}


def reached(label, seed, steps, **config):
    """A long run, and the steps it took to the target."""
    changes = {"val_ppl": 40.0 + seed, "steps_to_target": {TARGET: steps}}
    long = row("ddp", label, "none", seed=seed)
    return long.model_copy(update=changes | {"compress_config": (long.compress_config or {}) | config})


def test_a_target_is_reached_after_dense_steps_of_the_baseline_and_own_ones():
    """Two of three seeds of `int4` reach it in more steps, one of `powersgd` only; `exchange` is not judged."""
    runs = [
        *(reached("none", seed, 800) for seed in range(3)),
        *(reached("int8", seed, steps, dense_steps=100) for seed, steps in enumerate((820, 840, 850))),
        *(reached("int4", seed, steps) for seed, steps in enumerate((700, 1000, 1100))),
        *(reached("powersgd", seed, steps) for seed, steps in enumerate((300, None, None))),
        *(reached("exchange", seed, 10, dense_rounds=5) for seed in range(3)),
    ]
    labels = ("none", "int8", "int4", "powersgd", "exchange")
    rows = [row("ddp", label, "1gbit") for label in labels]
    rows = [one.model_copy(update={"world_size": 2}) for one in rows]
    found = Qualities({}, Qualities.of(rows, as_read(rows, PerplexityReference.of("long.jsonl", runs))).runs)
    costs = found.costs(dict(zip(labels, (0.3, 0.1, 0.08, 0.05, 0.01), strict=True)))
    assert costs == {f"ppl {TARGET}": pytest.approx({"none": 240.0, "int8": 100 * 0.3 + 740 * 0.1, "int4": 80.0})}
    faster = found.costs({"none": 0.3, "int8": 0.01, "int4": 0.08})[f"ppl {TARGET}"]
    assert min(faster, key=faster.get) == "int8"
    assert math.isclose(faster["int8"], 30 + 7.4)


def test_no_speed_up_is_larger_than_the_number_of_ranks():
    """A profiled step is longer than others: its computation counts as a share of it."""
    profiled = {"step_time_ms_p50": 60.0, "compute_time_ms": 90.0, "comm_time_ms_total": 9 * 30.0, "comm_ratio": 0.25}
    none = row("ddp", "none", "none", **profiled)
    other = row("ddp", "none", "100mbit", **profiled | {"compute_time_ms": 120.0})
    assert compute_seconds([none, other]) == pytest.approx(0.045), "on the fastest link, 90 of 120 ms of 60 ms"
    assert scaling(4, 0.045, 0.06) == ("0.33", "3.00")
    assert scaling(4, 0.045, 0.0449) == scaling(4, None, 0.06) == ("–", "–")


def test_the_fit_takes_the_seeds_that_all_labels_have_on_a_link():
    rows = [row("ddp", label, "1gbit", seed=seed) for label, seeds in SEEDS.items() for seed in seeds]
    kept = {(one.compressor, one.seed) for one in of_common_seeds(rows)}
    assert kept == {("none", 0), ("none", 2), ("int8", 0), ("int8", 2)}, "int4 has no seed of the baseline"


def test_a_seed_that_was_not_judged_by_the_target_is_no_miss():
    unjudged = reached("none", 3, None).model_copy(update={"steps_to_target": None})
    runs = [*(reached("none", seed, 100 * seed) for seed in (1, 2)), unjudged]
    assert seconds_to(TARGET, runs, 0.5, None) == 75.0
    assert seconds_to(TARGET, [*runs, reached("none", 4, None)], 0.5, None) == 100.0, "a miss counts"
    assert math.isnan(seconds_to(TARGET, [reached("none", 0, 9, dense_rounds=5)], 0.5, None))


def test_predict_names_the_soonest(tmp_path, capsys):
    rows = experiment(("ddp",), val_ppl=50.0)
    steps = {"none": 500, "int8": 600, "int4": 2_000, "powersgd": None}
    rows = [
        one.model_copy(update={"steps_to_target": {TARGET: steps[one.compressor]}}) if one.compressor in steps else one
        for one in rows
    ]
    (tmp_path / "results.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in rows))
    words = ["predict", "--results_dir", str(tmp_path), "--world_size", "2", "--latency", "0s", "--bandwidth"]
    assert main([*words, "100mbit"]) == 0
    said = capsys.readouterr().out
    step = row("ddp", "int8", "100mbit").step_time_ms_p50
    assert f"ppl {TARGET}: `int8` in {600 * step / 1e3:,.0f} s." in said
    assert main([*words, "10gbit"]) == 0
    assert f"ppl {TARGET}: `none` in " in capsys.readouterr().out
