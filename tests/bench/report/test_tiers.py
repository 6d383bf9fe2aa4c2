"""Quality from another experiment, and the tier table, on rows of a known law.

Of `tables/tiers.py`, `tables/quality.py`.
"""

from __future__ import annotations

import json
import math

import pytest
from links_rows import ALPHA, COMPUTE, LABELS, experiment, row
from made_results import as_read

from gradwire.base.errors import BadInput
from gradwire.base.files import write_json
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.across_runs import with_quality
from gradwire.bench.report.tables.quality import PerplexityReference, differences, perplexity_reference
from gradwire.bench.report.tables.summary import summary
from gradwire.bench.report.tables.tiers import ceilings, tiers
from gradwire.cli import main

WORSE = {"none": 0.0, "bf16-native": 0.1, "exchange": 0.0, "int8": 0.4, "int4": 3.2, "powersgd": 12.0}


def quality_rows(strategies=("ddp",), labels=WORSE, seeds=(0, 1, 2)):
    """A long experiment's rows: every label worse than `none` by its percentage, more or less by seed."""
    return [
        row(strategy, label, "none", seed=seed, val_ppl=ppl, val_loss=math.log(ppl))
        for strategy in strategies
        for label in labels
        for seed in seeds
        for ppl in [(50 + 3 * seed) * (1 + (WORSE[label] + (seed - 1) * 0.1 * (label != "none")) / 100)]
    ]


def write_rows(path, rows):
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return path


def tables(text):
    """Every table of a page as dicts, by the heading before it."""
    found = {}
    for section in text.split("\n#")[1:]:
        title, *lines = section.splitlines()
        rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        if rows:
            found[title.strip("# ")] = [dict(zip(rows[0], one, strict=True)) for one in rows[2:]]
    return found


def test_a_row_takes_its_label_s_perplexity_of_the_same_seed(tmp_path):
    path = write_rows(tmp_path / "quality.jsonl", quality_rows(("ddp", "fsdp2"), ("none", "int8")))
    timing = [row("fsdp2", "int8", "1gbit", seed=1), row("naive", "none", "1gbit"), row("ddp", "none", "none", seed=9)]
    own = row("ddp", "int8", "1gbit", val_ppl=77.5, quality_from="perplexity")
    found, complaints = perplexity_reference(path)
    assert complaints == []
    (sharded, other, lacking, kept), notes = with_quality([*timing, own], found)
    assert sharded.val_ppl == pytest.approx(53 * 1.004)
    assert sharded.val_loss == pytest.approx(math.log(53 * 1.004))
    assert sharded.quality_from == f"{path}: fsdp2/int8/ws2/none/seed1"
    assert other.quality_from == f"{path}: ddp/none/ws2/none/seed0"
    assert lacking.val_ppl is None
    assert lacking.quality_from is None
    assert notes == [f"ddp/none/ws2/none/seed9 has no perplexity: {path} has no seed 9 of ddp/none"]
    assert kept == own


def test_any_strategy_serves_where_ddp_has_none():
    found = PerplexityReference.of("Q", quality_rows(("naive",), ("int8",)))
    assert found.seeds(row("fsdp2", "int8", "1gbit"))[2].run_name == "naive/int8/ws2/none/seed2"


@pytest.mark.parametrize(
    ("fields", "differing"),
    [
        ({"compress_config": {"method": "int8", "dense_steps": 0}}, []),
        ({"compress_config": {"method": "int8", "lr": 0.1}, "lr": 0.1}, []),
        ({"compress_config": {"method": "int8", "beta2": 0.9}}, []),
        ({"steps": 900}, []),
        ({"compress_config": {"method": "int8", "block": 64}}, ["compress_config"]),
        ({"parameters": 17, "max_length": 3}, ["parameters", "max_length"]),
        ({"world_size": 4}, ["world_size"]),
    ],
)
def test_another_setting_s_perplexity_is_refused(fields, differing):
    of_long = {"compress_config": {"method": "int8", "dense_steps": 90}}
    long = row("ddp", "int8", "none", val_ppl=60.0).model_copy(update=of_long)
    short = row("ddp", "int8", "1gbit").model_copy(update=fields)
    assert differences(long, short) == differing
    found = PerplexityReference.of("Q", [long])
    if not differing:
        assert found.seeds(short) == {0: long}
        return
    with pytest.raises(BadInput, match=f"Q has int8 with another {', '.join(differing)} "):
        found.seeds(short)


def test_a_broken_line_and_another_version_are_named_by_line_and_the_rest_is_read(tmp_path):
    lines = [one.model_dump_json() for one in quality_rows(labels=("none", "int8"), seeds=(0, 1))]
    other = json.dumps(json.loads(lines[2]) | {"schema_version": 7})
    wrong = json.dumps(json.loads(lines[0]) | {"val_ppl": "low"})
    path = tmp_path / "quality.jsonl"
    path.write_text("\n".join([lines[0], lines[1][:40], other, lines[3], "", wrong, "[]"]))
    found, complaints = perplexity_reference(path)
    assert [(one.compressor, one.seed) for one in found.rows] == [("none", 0), ("int8", 1)]
    begin = [f"{path}: line {number} is left out: " for number in (2, 3, 6, 7)]
    assert [complaint.startswith(start) for complaint, start in zip(complaints, begin, strict=True)] == [True] * 4
    reasons = "not valid JSON", "version is 7, not 1", "val_ppl", "version is null"
    assert [reason in complaint for complaint, reason in zip(complaints, reasons, strict=True)] == [True] * 4


@pytest.fixture(scope="module")
def page():
    """The summary of an experiment with links, its quality from another."""
    found = PerplexityReference.of("Q", quality_rows())
    rows, _ = with_quality(experiment(), found)
    return summary(as_read(rows, found))


def test_a_cell_that_is_faster_than_its_bytes_allow_is_named():
    found = PerplexityReference.of("Q", quality_rows())
    none, int8, int4 = (row("ddp", label, "100mbit") for label in ("none", "int8", "int4"))
    m = none.transfer_time_ms / (1e3 * COMPUTE)
    least = none.step_time_ms_p50 * (1 + m / 3.94) / (1 + m)
    at, above = (int8.model_copy(update={"step_time_ms_p50": least / share}) for share in (1, 1.17))
    assert ceilings(as_read([none, int4, at], found))[1:] == ("passed", "3 of 3 cells")
    assert ceilings(as_read([none, int4, above], found))[1:] == (
        "marked",
        "2 of 3 cells; above: ddp/int8/ws2/100mbit (117 %)",
    )
    assert ceilings(as_read([int4, above], found)).state == "not checked"


def test_the_tier_table_has_the_law_s_gains(page):
    cells = {one["compressor"]: one for one in tables(page)["ddp, W = 2, 100mbit"]}
    assert "Fastest within 1 %: `int8`; within 5 %: `int4`; within 20 %: `powersgd`." in page
    steps = [float(one["step ms"]) for one in cells.values()]
    assert steps == sorted(steps)
    none, int8 = (row("ddp", label, "100mbit") for label in ("none", "int8"))
    gain = none.transfer_time_ms / int8.transfer_time_ms
    m = none.transfer_time_ms / (1e3 * COMPUTE)
    ceiling = (1 + m) / (1 + m / 3.94)
    speed_up = none.step_time_ms_p50 / int8.step_time_ms_p50
    assert cells["int8"] == {
        "compressor": "int8",
        "n": "3",
        "ppl": "+0.4 %, +0.3 … +0.5",
        "tier": "1 %",
        "fastest": "1",
        "step ms": f"{int8.step_time_ms_p50:.1f}",
        "speed-up": f"{speed_up:.2f}",
        "ceiling": f"{ceiling:.2f}",
        "of it": f"{100 * speed_up / ceiling:.0f} %",
        "transfer ms": f"{int8.transfer_time_ms:.1f}",
        "×": f"{gain:.2f}",
        "bytes ×": "3.94",
        "÷": f"{gain / 3.94:.2f}",
    }
    assert cells["int4"]["tier"] == "5 %"
    assert cells["powersgd"]["fastest"] == "20"
    assert cells["none"]["speed-up"] == "–"


def test_gains_are_of_the_seeds_of_both():
    """Seed 1 of the baseline is slow, and int8 was not timed with it."""
    slow = row("ddp", "none", "100mbit", seed=1)
    slow = slow.model_copy(update={"step_time_ms_p50": 5e3, "transfer_time_ms": 4e3})
    timed = [*experiment(("ddp",), ("100mbit",)), slow]
    found = tables("\n" + tiers(as_read(timed, PerplexityReference.of("Q", quality_rows()))))["ddp, W = 2, 100mbit"]
    once = tables("\n" + tiers(as_read(timed[:-1], PerplexityReference.of("Q", quality_rows()))))["ddp, W = 2, 100mbit"]
    assert [one for one in found if one["compressor"] != "none"] == [one for one in once if one["compressor"] != "none"]
    both = (5e3 + row("ddp", "none", "100mbit").step_time_ms_p50) / 2
    assert [one["step ms"] for one in found if one["compressor"] == "none"] == [f"{both:,.1f}"]


def test_sharded_gradients_and_parameters_count_together(page):
    cells = {one["compressor"]: one for one in tables(page)["fsdp2, W = 2, 1gbit"]}
    assert float(cells["int8"]["bytes ×"]) == pytest.approx((4 + 7) / (4 / 3.94 + 7), abs=0.006)


def test_a_tier_nobody_is_in_and_a_quality_nobody_knows_are_said(page):
    rows = experiment(("ddp",), ("100mbit",))
    text = tiers(as_read(rows, PerplexityReference.of("Q", quality_rows(labels=("none", "powersgd")))))
    assert "Fastest within 1 %: `none`; within 5 %: `none`; within 20 %: `powersgd`." in text
    unknown = {one["compressor"]: one for one in tables("\n" + text)["ddp, W = 2, 100mbit"]}["int8"]
    assert (unknown["n"], unknown["ppl"], unknown["tier"], unknown["fastest"]) == ("–", "–", "–", "")
    assert "Fastest within 1 %: none; within 5 %: none" in tiers(as_read(rows, PerplexityReference.of("Q", [])))


def test_without_a_shaped_link_there_is_no_tier_table():
    assert tiers(as_read(experiment(links=("none",)), PerplexityReference.of("Q", quality_rows()))) == ""


def test_the_ceiling_of_hsdp_is_by_the_bytes_between_islands_and_that_of_flat_shards_by_all():
    cables = {"link": "between-100mbit", "islands": 2, "bytes_interface_total": None}
    hsdp = cables | {"strategy": "hsdp", "bytes_between_total": 2_000_000}
    rows = []
    for label, ratio in (("none", 1.0), ("int8", 3.5)):
        made = row("fsdp2", label, "100mbit")
        rows.append(made.model_copy(update=cables))
        rows.append(made.model_copy(update=hsdp | {"compression_ratio_between_steady": ratio}))
    fewer = {
        name: one["bytes ×"]
        for name, of in tables(tiers(as_read(rows, PerplexityReference.of("Q", [])))).items()
        for one in of
        if one["compressor"] == "int8"
    }
    assert fewer["hsdp, W = 2, between-100mbit"] == "3.50"
    assert 1 < float(fewer["fsdp2, W = 2, between-100mbit"]) < 1.5


def test_the_page_is_narrow(page):
    assert max(map(len, page.splitlines())) <= 140


def test_summarize_joins_the_quality_file_that_the_list_of_runs_names(tmp_path, capsys):
    file = write_rows(tmp_path / "quality.jsonl", quality_rows())
    with file.open("a") as lines:
        lines.write("{broken\n")
    rows = experiment(("ddp",), ("none", "100mbit"))
    asked = []
    for one in rows:
        write_json(tmp_path / "links/runs" / one.run_name / "record.json", one.model_dump())
        run = {name: getattr(one, name) for name in ("strategy", "compressor", "world_size", "link", "seed")}
        asked.append({**run, "excluded": None, "quality_from": str(file)})
    write_json(tmp_path / "links/expected.json", asked)
    words = ["summarize", "--results_dir", str(tmp_path / "links")]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "Fastest within 1 %: `int8`" in said.out
    for text in (said.err, " ".join(said.out.split())):
        assert "line 19 is left out: it is not valid JSON" in text
    written = [Result.model_validate_json(line) for line in (tmp_path / "links/results.jsonl").open()]
    assert {one.quality_from for one in written if one.compressor == "int4"} == {f"{file}: ddp/int4/ws2/none/seed0"}
    (tmp_path / "links/expected.json").unlink()
    for more, fastest in ((["--print_only"], "none"), (["--print_only", "--quality_from", str(file)], "`int8`")):
        assert main([*words, *more]) == 0
        assert f"Fastest within 1 %: {fastest};" in capsys.readouterr().out


def test_a_quality_file_that_is_not_there_is_bad_input(tmp_path, capsys):
    one = row("ddp", "none", "none")
    write_json(tmp_path / "links/runs" / one.run_name / "record.json", one.model_dump())
    words = ["summarize", "--results_dir", str(tmp_path / "links"), "--quality_from", str(tmp_path / "lost.jsonl")]
    assert main(words) == 2
    assert "lost.jsonl: no results can be read there" in capsys.readouterr().err


def test_the_law_is_the_one_that_is_written_down():
    """One number by hand: int8 under ddp at 100 Mbit/s."""
    smaller = LABELS["int8"][0]
    each = 4 * 500_003 / smaller
    expected = ALPHA["all_gather"] + each * math.hypot(4e-9, 8 * 1.05 / 1e8)
    assert row("ddp", "int8", "100mbit").comm_time_ms_total / 9e3 == pytest.approx(expected, rel=1e-6)
