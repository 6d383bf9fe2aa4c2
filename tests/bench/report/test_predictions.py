"""What an experiment's runs say of its model, and what `predict` prints of it; every number is computed by hand.

Of `report/predict.py`, `tables/predictions.py`.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from links_rows import PARAMETERS, experiment, islands_row, row
from made_results import as_read

from gradwire.bench.codecs.rates import Rate, Rates
from gradwire.bench.config import Cell
from gradwire.bench.report.tables.predictions import Experiment, fastest, place_of
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.time_to_loss import seconds_to
from gradwire.bench.statistics.cost_model import Islands, Place
from gradwire.bench.statistics.description import Description
from gradwire.cli import main

TARGET = "45"
ASKED = "--world_size 4 --bandwidth 100mbit"


def reached(label, seed, steps, **config):
    """A long run, and the steps it took to the target."""
    changes = {"val_ppl": 40.0 + seed, "steps_to_target": {TARGET: steps}}
    long = row("ddp", label, "none", seed=seed)
    return long.model_copy(update=changes | {"compress_config": (long.compress_config or {}) | config})


class Steps:
    """A predicted step of a label."""

    def __init__(self, label, seconds):
        self.cell, self.step = Cell.parse("cell", {"method": "none"}).model_copy(update={"label": label}), self
        self.typical = seconds


def test_a_target_is_reached_after_dense_steps_of_the_baseline_and_own_ones():
    """Two of three seeds of `int4` reach it in more steps, one of `powersgd` only; `exchange` has no perplexity."""
    runs = [
        *(reached("none", seed, 800) for seed in range(3)),
        *(reached("int8", seed, steps, dense_steps=100) for seed, steps in enumerate((820, 840, 850))),
        *(reached("int4", seed, steps) for seed, steps in enumerate((700, 1000, 1100))),
        *(reached("powersgd", seed, steps) for seed, steps in enumerate((300, None, None))),
    ]
    labels = ("none", "int8", "int4", "powersgd", "exchange")
    rows = [row("ddp", label, "1gbit") for label in labels]
    runs = Experiment(as_read(rows, PerplexityReference.of("long.jsonl", runs)), "ddp")
    steps = [Steps(label, of) for label, of in zip(labels, (0.3, 0.1, 0.08, 0.05, 0.01), strict=True)]
    assert runs.soonest(steps) == [f"ppl {TARGET}: `int4` in 80 s"]
    steps = [Steps("none", 0.3), Steps("int8", 0.01), Steps("int4", 0.08)]
    assert runs.soonest(steps) == [f"ppl {TARGET}: `int8` in 37 s"], "100 steps of 0.3 s, 740 of 0.01 s"


def test_a_seed_that_was_not_judged_by_the_target_is_no_miss():
    unjudged = reached("none", 3, None).model_copy(update={"steps_to_target": None})
    runs = [*(reached("none", seed, 100 * seed) for seed in (1, 2)), unjudged]
    assert seconds_to(TARGET, runs, 0.5, None) == 75.0
    assert seconds_to(TARGET, [*runs, reached("none", 4, None)], 0.5, None) == 100.0, "a miss counts"
    assert math.isnan(seconds_to(TARGET, [reached("none", 0, 9, dense_steps=5)], 0.5, None)), "no dense step"


def test_computation_is_a_step_of_the_same_optimizer_on_the_fastest_link():
    muon = {"method": "none", "inner": "muon"}
    times = [("none", "100mbit", 0, 90.0, {}), ("none", "none", 0, 60.0, {}), ("none", "none", 1, 64.0, {})]
    times += [("exchange", "none", 0, 71.0, muon), ("int8", "100mbit", 0, 99.0, {"method": "int8", "inner": "muon"})]
    rows = [
        row("ddp", label, link, seed=seed, step_time_ms_p50=ms, compress_config=config).model_copy(
            update={"compress_method": config.get("method", "none")}
        )
        for label, link, seed, ms, config in times
    ]
    rows.append(row("fsdp2", "none", "none", step_time_ms_p50=7.0))
    runs = Experiment(as_read(rows, PerplexityReference.of("these", rows)), "ddp")
    assert runs.flags == {"parameters": PARAMETERS, "step_ms": 62.0, "strategy": "ddp", "device": "cpu"}
    assert runs.own == pytest.approx({"none": 0.062, "exchange": 0.071, "int8": 0.071})
    assert (
        fastest([row.model_copy(update={"world_size": of}) for row, of in zip(rows[:3], (2, 4, 2), strict=True)]) == 64
    )


def test_an_own_computation_replaces_the_described_one():
    cells = [Cell.parse(label, {"method": "int8"}) for label in ("int8", "muon-int8")]
    rates = Rates("a device", "cpu", [("int8", {}, Rate(2e-7, 3e-7))])
    described = Description({(30, 7): 1}, 0, 0.011, "ddp", Place(4, 1e6, 0.0, Islands()), rates)
    plain, same = sorted(described.expect(cells, []), key=lambda row: row.cell.label)
    assert plain.step == same.step
    (own,) = replace(described, own={"muon-int8": 0.031}).expect(cells[1:], [])
    hidden = 0.35 * 2 / 3 * (0.031 - 0.011)
    assert own.step.typical - plain.step.typical == pytest.approx(0.02 - hidden, rel=1e-9)


def test_where_a_run_was():
    assert place_of("ddp", 4, 1, "100mbit") == Place(4, 1e8, 0.0, Islands())
    assert place_of("fsdp2", 6, 2, "between-100mbit") == Place(6, 1e8, 0.0, Islands(2))
    assert place_of("hsdp", 6, 2, "between-100mbit") == Place(6, 1e8, 0.0, Islands(2))
    assert place_of("hsdp", 6, 2, "100mbit") == Place(6, 3e8, 0.0, Islands(2, 1e8)), "three cables in one"


@pytest.fixture
def device(tmp_path):
    timed = {"error": None, "encode_ms": [1.0], "decode_ms": [2.0], "options": {}}
    records = [timed | {"method": method} for method in ("none", "int8", "bf16", "powersgd")]
    made = {"schema_version": 3, "environment": {"device": "a core", "kind": "cpu"}, "shape": [1000, 1000]}
    (tmp_path / "rates.json").write_text(json.dumps(made | {"records": records}))
    return ["--device", str(tmp_path / "rates.json")]


def write_rows(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in rows))
    return ["predict", "--results_dir", str(folder)]


def line_of(said, label, heading):
    """The cells of a label's line in the table that has a heading."""
    table = said[said.index(f"| {heading}") :]
    line = next(one for one in table.splitlines() if one.startswith(f"| {label} "))
    return [part.strip() for part in line.strip("|").split("|")]


KEPT = ("none", "int8", "powersgd")  # whose labels are methods


def test_predict_ranks_the_cells_of_an_experiment_and_holds_them_against_its_steps(tmp_path, device, capsys):
    rows = [one for one in experiment(("ddp", "fsdp2"), val_ppl=50.0) if one.compressor in KEPT]
    rows = [one.model_copy(update={"val_ppl": 60.0}) if one.compressor == "powersgd" else one for one in rows]
    steps = {"none": 500, "int8": 600, "powersgd": None}
    rows = [one.model_copy(update={"steps_to_target": {TARGET: steps[one.compressor]}}) for one in rows]
    words = write_rows(tmp_path / "links", rows)
    with (tmp_path / "links/results.jsonl").open("a") as file:
        file.write("{cut off\n")
    assert main([*words, *ASKED.split(), *device]) == 0
    said = capsys.readouterr()
    assert f"line {len(rows) + 1} is left out" in said.err
    ddp, fsdp2 = said.out.split("# 0.5 M parameters, ")[1:]
    assert ddp.startswith(
        f"ddp, W = 4, 100mbit and 50us per message as {tmp_path / 'links/results.jsonl'} describes it"
    )
    assert fsdp2.startswith("fsdp2, ")
    assert line_of(ddp, "int8", "method   | perplexity")[1].startswith("+0.0 %, one seed, 0.5 M, W = 2")
    assert line_of(ddp, "powersgd", "method   | perplexity")[1].startswith("+20.0 %, one seed")
    assert f"ppl {TARGET}: `int8` in " in ddp
    measured = line_of(ddp, "int8", "compressor")
    seconds = row("ddp", "int8", "1gbit").step_time_ms_p50 / 1e3
    assert measured[1:4] == ["2", "1gbit", f"{1e3 * seconds:.1f}"]
    compute = row("ddp", "none", "none").step_time_ms_p50 / 1e3
    assert float(measured[-1]) == pytest.approx(2 * compute / seconds, abs=0.005)
    assert float(measured[-2].removesuffix(" %")) == pytest.approx(
        100 * (float(measured[4]) / 1e3 / seconds - 1), abs=0.6
    )
    assert "Measured steps, predicted with a median error of " in ddp
    sharded = f"{0.5 - 16 * PARAMETERS / 1e9 * (1 / 2 - 1 / 4):.3f}"
    assert [line_of(of, "none", "method   | × none")[-1] for of in (ddp, fsdp2)] == ["0.500", sharded]
    assert max(len(line) for line in said.out.splitlines() if "rates.json" not in line and "# " not in line) <= 110
    assert main([*words, *ASKED.split(), *device, "--strategy", "fsdp2"]) == 2
    assert "--results_dir describes a model itself" in capsys.readouterr().err


def test_without_links_nothing_shows_how_far_off_it_is(tmp_path, device, capsys):
    rows = [one for one in experiment(("ddp",), links=("none",)) if one.compressor in KEPT]
    config = {"method": "threshold", "threshold": 0.1}
    rows.append(
        rows[0].model_copy(update={"compressor": "some", "compress_config": config, "compress_method": "threshold"})
    )
    assert main([*write_rows(tmp_path / "flat", rows), *ASKED.split(), *device]) == 0
    said = capsys.readouterr()
    assert "No cell was measured on a link with a rate" in said.out
    assert "| powersgd " in said.out and "| int4 " not in said.out, "the cells of the experiment"
    assert "left out some: " in said.err


def test_anchors_are_divided_as_parameters_are(tmp_path, device, capsys):
    rows = [islands_row(label, link) for label in ("none", "int8") for link in ("between-1gbit", "between-100mbit")]
    rows = [one.model_copy(update={"mem_outer_gb": 0.06}) for one in rows]
    words = [*write_rows(tmp_path / "links", [*rows, *experiment(("ddp",), links=("none",))[:1]]), *device]
    asked = "--bandwidth 200mbit --world_size 12 --islands 4 --inside 2gbit --latency_inside 10us"
    assert main([*words, *asked.split()]) == 0
    said = capsys.readouterr()
    assert "W = 12, 200mbit and 50us per message between 4 islands, 2gbit and 10us inside" in said.out
    parameters = 16 * PARAMETERS / 1e9 * (1 / 3 - 1 / 2)
    assert line_of(said.out, "none", "method | × none")[-1] == f"{0.5 + parameters + 0.06 * (2 / 3 - 1):.3f}"
    assert main([*words, *ASKED.split()]) == 0
    said = capsys.readouterr()
    assert said.err == "gradwire predict: left out hsdp: it has islands: add --islands N.\n"
    assert "hsdp" not in said.out


def test_a_named_cell_is_predicted_for_the_strategies_that_ran_it(tmp_path, device, capsys):
    rows = [row("ddp", "none", "none"), row("ddp", "int8", "none"), row("fsdp2", "none", "none")]
    config = {"method": "int8", "param_compress": "int8"}
    rows.append(row("fsdp2", "int8", "none", compress_config=config).model_copy(update={"compressor": "small"}))
    words = [*write_rows(tmp_path / "links", rows), *ASKED.split(), *device, "--json", "--cells"]

    def predicted(*cells):
        assert main([*words, *cells]) == 0
        return sorted((one["strategy"], one["compressor"]) for one in json.loads(capsys.readouterr().out))

    assert predicted("small") == [("fsdp2", "small")]
    both = [("ddp", "int8"), ("ddp", "powersgd"), ("fsdp2", "powersgd"), ("fsdp2", "small")]
    assert predicted("small", "int8", "powersgd") == both, "a method that none has run is for all"


def test_codecs_are_those_of_the_runs_device(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = [*write_rows(tmp_path / "links", changed(device="cuda")), *ASKED.split(), "--cells", "none"]
    assert main(words) == 0
    assert "Codecs: NVIDIA H200, recorded" in capsys.readouterr().out


SHARDED_WITHOUT_BASELINE = [*experiment(("ddp",)), row("fsdp2", "int8", "none")]


def changed(**fields):
    """Rows of an experiment, changed."""
    return [one.model_copy(update=fields) for one in experiment(("ddp",))]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (experiment(("ddp",)), "1gbit --world_size 4 --islands 3", "3 islands do not divide 4 ranks"),
        (experiment(("ddp",)), "1gbit --world_size 4 --latency_inside 1us", "add --islands N"),
        (experiment(), "1gbit --world_size 4 --islands 2 --inside fast", "'fast'"),
        (experiment(), "1gbit --world_size 4 --islands 2 --latency_inside soon", "'soon'"),
        (None, "1gbit --world_size 4", "results.jsonl does not exist: first run an experiment by `gradwire run FILE`"),
        (experiment(("ddp",))[3:], "1gbit --world_size 4", "no finished run of `none` under ddp"),
        (experiment(("ddp",)), "fast --world_size 4", "invalid rate 'fast'"),
        (experiment(("ddp",)), "1gbit --world_size 4 --latency soon", "invalid time 'soon'"),
        (experiment(("ddp",)), "1gbit --world_size 1", "for 2 to 4096 ranks"),
        (SHARDED_WITHOUT_BASELINE, "1gbit --world_size 4", "no finished run of `none` under fsdp2"),
        (changed(world_size=1), "1gbit --world_size 4", "no finished run of several ranks"),
        (changed(status="failed"), "1gbit --world_size 4", "no finished run of several ranks"),
        ([*changed(), *changed(device="cuda")], "1gbit --world_size 4", "runs under ddp were on cpu and cuda"),
        ([islands_row("none", "between-1gbit")], "1gbit --world_size 4", "strategy hsdp has islands of several ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_bad_input(tmp_path, device, capsys, rows, words, message):
    given = write_rows(tmp_path / "links", rows or [])
    if rows is None:
        (tmp_path / "links/results.jsonl").unlink()
    assert main([*given, "--bandwidth", *words.split(), *device]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and not said.out
