"""Perplexities from another experiment, on rows of a known law.

Of `tables/quality.py`.
"""

from __future__ import annotations

import json
import math

import pytest
from links_rows import ALPHA, LABELS, experiment, row

from gradwire.base.errors import BadInput
from gradwire.base.files import write_json
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.across_runs import with_quality
from gradwire.bench.report.tables.quality import PerplexityReference, differences, perplexity_reference
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
    summary = " ".join((tmp_path / "links/summary.md").read_text().split())
    assert "int8: 3.9 times fewer bytes, same perplexity" in summary
    for text in (said.err, summary):
        assert "line 19 is left out: it is not valid JSON" in text
    written = [Result.model_validate_json(line) for line in (tmp_path / "links/results.jsonl").open()]
    assert {one.quality_from for one in written if one.compressor == "int4"} == {f"{file}: ddp/int4/ws2/none/seed0"}
    (tmp_path / "links/expected.json").unlink()
    for more, kept in (([], False), (["--quality_from", str(file)], True)):
        assert main([*words, *more]) == 0
        assert ("int8: 3.9 times fewer bytes" in capsys.readouterr().out) is kept


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
