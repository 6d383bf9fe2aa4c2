"""summarize: rows merged from what commands leave in run folders, statistics over seeds, failures with their reasons.

Of `rows/runs.py`, `summarize.py`, `tables/cells.py`, `tables/results.py`, `tables/summary.py`.
"""

from __future__ import annotations

import csv
import json
import math
import random
import re
import statistics

import made_results
import pytest
import torch

from gradwire.base.files import write_json
from gradwire.bench.config import Run
from gradwire.bench.report.page.sections import marks
from gradwire.bench.report.rows.record import RESULT_FIELDS
from gradwire.bench.report.rows.runs import unusable
from gradwire.bench.report.tables.across_runs import collect
from gradwire.bench.report.tables.checks import gates
from gradwire.bench.report.tables.results import Results
from gradwire.bench.training.environment import environment
from gradwire.cli import main
from gradwire.comm.collectives.world import World

REQUIRED = """
schema_version run_name compressor strategy backend link device status reason environment
world_size model dataset max_length batch_size compress_method compress_config optimizer steps seed
step_time_ms_mean step_time_ms_p50 step_time_ms_p90 step_time_ms_p95 tokens_per_s
comm_time_ms_total comm_ratio comm_time_ms_by_op bytes_raw_total bytes_compressed_total compression_ratio bytes_source
train_loss val_loss val_ppl quality_from
"""
OPTIONAL = """
compress_time_ms decompress_time_ms extra_collectives extra_collective_time_ms index_bytes index_share density sparsity
padding_bytes residual_norm grad_rel_error grad_rel_error_linf grad_cos_sim
mem_peak_alloc_gb mem_peak_reserved_gb mem_residual_gb time_to_target_ppl_s steps_to_target_ppl ppl_at_fixed_time
overlap_ratio exposed_comm_ms effective_bw_raw_gbps effective_bw_compressed_gbps scaling_efficiency
bytes_interface_total bytes_agreement_total bytes_parameters_raw_total bytes_parameters_total compression_ratio_steady
compression_ratio_bf16 exempt_fraction fallbacks nonfinite_steps clipped_steps epsilon delta noise_multiplier
clipped_fraction
"""


def record(run, ppl=300.0, sent=1_000_000, closed=None, **other):
    return {
        "schema_version": 1,
        "run_name": run.path,
        **run._asdict(),
        "backend": "gloo",
        "device": "cpu",
        "status": "ok",
        "reason": None,
        "environment": {"gradwire": "0.1.0", "packages": {"torch": "2.13.0"}, "python": "3.11.9", "cores": 2},
        "model": "tiny",
        "parameters": 123_456,
        "dataset": "pydocs",
        "max_length": 128,
        "batch_size": 8,
        "compress_method": run.compressor,
        "compress_config": {"method": run.compressor},
        "optimizer": "adamw",
        "steps": 60,
        "measured_steps": 50,
        "step_time_ms_mean": 200.0 + run.seed,
        "step_time_ms_p50": 199.0,
        "step_time_ms_p90": 210.5,
        "step_time_ms_p95": 220.25,
        "tokens_per_s": 5000.0,
        "bytes_raw_total": 2_000_000,
        "bytes_compressed_total": sent,
        "bytes_closed_form_total": sent if closed is None else closed,
        "bytes_agreement_total": 480,
        "compression_ratio": 2_000_000 / sent if sent else None,
        "compression_ratio_steady": 2_500_000 / sent if sent else None,
        "bytes_parameters_raw_total": 3_500_000,
        "bytes_parameters_total": 3_500_000,
        "bytes_source": "metered",
        "train_loss": 5.5,
        "val_loss": math.log(ppl),
        "val_ppl": ppl,
        "quality_from": "train",
        "unigram_ppl": 600.0,
        **other,
    }


PROFILE = {
    "schema_version": 1,
    "step_ms": 210.0,
    "comm_time_ms_per_step": 42.0,
    "comm_time_ms_by_op_per_step": {"all_gather": 12.0, "all_to_all": 30.5},
    "comm_ratio": 0.2,
    "compute_ms_per_step": 150.0,
    "encode_ms_per_step": 3.5,
    "decode_ms_per_step": 1.25,
    "exposed_comm_ms": 40.0,
    "overlap_ratio": 2 / 42,
}


@pytest.fixture
def results(tmp_path):
    """An experiment's folder, and a function that puts a finished run into it."""
    folder = tmp_path / "demo"

    def add(run, profile=PROFILE, perplexity=None, **fields):
        place = folder / "runs" / run.path
        write_json(place / "record.json", record(run, **fields))
        if profile:
            write_json(place / "profile.json", profile)
        if perplexity:
            write_json(place / "perplexity.json", {"avg_loss": math.log(perplexity), "ppl": perplexity})
        return place

    folder.mkdir()
    add.folder = folder
    return add


def summarized(folder):
    """The summary that `gradwire summarize` writes."""
    assert main(["summarize", "--results_dir", str(folder)]) == 0
    return (folder / "summary.md").read_text()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def cells(text, title):
    """A table of the page: the columns of each row, by strategy and compressor, in the page's order."""
    section = text.split(f"## {title}")[1].split("##")[0]
    rows = [[column.strip() for column in line.strip("|").split("|")] for line in section.strip().splitlines()[2:]]
    return {(row[0], row[2]): row[3:] for row in rows}


def test_a_row_has_the_contract_s_fields_in_order():
    contract = REQUIRED.split() + OPTIONAL.split()
    assert list(RESULT_FIELDS[: len(contract)]) == contract


def test_a_row_merges_record_profile_and_perplexity(results, capsys):
    run = Run("fsdp2", "int8", 2, "none", 1)
    results(run, perplexity=290.5)
    results(run._replace(seed=2), profile=None)
    results(run._replace(seed=3), profile={**PROFILE, "encode_ms_per_step": 0.0})
    assert main(["summarize", "--results_dir", str(results.folder)]) == 0
    merged, alone, unhooked = rows_of(results.folder)
    assert list(merged) == list(RESULT_FIELDS)
    assert merged["comm_time_ms_total"] == 42.0 * 50
    assert merged["comm_time_ms_by_op"] == {"all_gather": 600.0, "all_to_all": 1525.0}
    assert (merged["compress_time_ms"], merged["decompress_time_ms"], merged["comm_ratio"]) == (3.5, 1.25, 0.2)
    assert (merged["val_ppl"], merged["quality_from"]) == (290.5, "perplexity")
    assert merged["val_loss"] == pytest.approx(math.log(290.5))
    assert (alone["val_ppl"], alone["quality_from"], alone["comm_time_ms_total"]) == (300.0, "train", None)
    assert unhooked["compress_time_ms"] is None
    with (results.folder / "results.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [row["seed"] for row in read] == ["1", "2", "3"]
    assert json.loads(read[0]["comm_time_ms_by_op"]) == merged["comm_time_ms_by_op"]
    assert capsys.readouterr().out.splitlines()[-2] == f"all tables: {results.folder}/summary.md"


@pytest.mark.parametrize(("seeds", "title"), [(3, "range"), (5, "95 %")])
def test_statistics_over_seeds_match_the_statistics_module(results, seeds, title):
    def spread(values, form, back=float):
        ends = min(values), max(values)
        if seeds == 3:
            return " … ".join(form.format(back(end)) for end in ends)
        half = 2.7764451 * statistics.stdev(values) / math.sqrt(5)  # Student's t, 4 degrees of freedom
        return f"[{', '.join(form.format(back(statistics.mean(values) + sign * half)) for sign in (-1, 1))}]"

    def percent(log):
        return 100 * math.expm1(log)

    draw = random.Random(3)
    perplexities = {"none": [], "int8": [], "bad": []}
    for compressor, factor in (("none", 1.0), ("int8", 1.004), ("bad", 1.5)):
        for seed in range(seeds):
            ppl = factor * draw.uniform(298, 302)
            perplexities[compressor].append(ppl)
            closed = 999_999 if compressor == "bad" and seed == 2 else 1_000_000
            results(Run("fsdp2", compressor, 2, "none", seed), ppl=ppl, closed=closed)
    results(Run("ddp", "none", 1, "none", 0), ppl=310.0, sent=0, profile=None)
    text = summarized(results.folder)
    means = {name: statistics.mean(values) for name, values in perplexities.items()}
    titles = "Quality", "Bytes", "Step time", "Where a step's time goes"
    quality, sent, step, time = (cells(text, title) for title in titles)
    by_op = cells(text, "Communication by op")["fsdp2", "int8"]
    assert [*by_op[:2], *by_op[-2:]] == ["none", str(seeds), "12.0", "30.5"]
    for name, values in perplexities.items():
        paired = [math.log(own / base) for own, base in zip(values, perplexities["none"], strict=True)]
        worse = [f"{percent(statistics.mean(paired)):+.2f} %", spread(paired, "{:+.2f}", percent)]
        against = ["–", "–"] if name == "none" else worse
        own = [f"{means[name]:.2f}", f"{statistics.stdev(values):.2f}", spread(values, "{:.2f}")]
        assert quality["fsdp2", name] == [str(seeds), *own, *against, "none", f"{means[name] / 600:.3f}"]
        equal = "≠" if name == "bad" else "="
        assert sent["fsdp2", name] == [str(seeds), "1.222", "2.000", "2.500", "1.000", f"1.000 {equal}", "3.500"]
        steps = [200.0 + seed for seed in range(seeds)]
        ends = spread(steps, "{:.1f}")
        mean = f"{statistics.mean(steps):.1f} {ends if seeds == 5 else f'({ends})'}"
        assert step["fsdp2", name] == [mean, "–" if name == "none" else "1.00"]
        assert time["fsdp2", name] == ["42.0", "40.0", "150.0", "3.5", "1.2"]
    assert quality["ddp", "none"] == ["1", "310.00", *["–"] * 4, "none", "0.517"]
    assert sent["ddp", "none"] == ["1", "–", "–", "–", "0.000", "0.000", "3.500"], (
        "one rank sends nothing to be compared"
    )
    assert step["ddp", "none"] == ["200.0", "–"]
    assert time["ddp", "none"] == ["–"] * 5
    order = [("ddp", "none"), ("fsdp2", "none"), ("fsdp2", "int8"), ("fsdp2", "bad")]
    assert list(quality) == list(step) == order, "the best verdict first"
    assert f" {title} |" in text and f" {title} of it |" in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize(
    ("traced", "sign", "mark", "state"),
    [
        ((20_000, 20_000), " =", "valid", "passed"),
        ((20_000, 20_004), " ≠", "bytes ≠ formula", "failed"),
        ((20_000, None), " =", "valid", "passed"),
        ((None, None), "", "valid", "not checked"),
    ],
)
def test_a_framework_s_bytes_have_a_sign_only_where_its_traces_have_them(results, traced, sign, mark, state):
    for seed, bytes_per_step in enumerate(traced):
        profile = {**PROFILE, "reduced_bytes_per_step": bytes_per_step}
        results(Run("ddp", "none", 2, "none", seed), profile, sent=1_200_000, bytes_source="closed_form")
    assert cells(summarized(results.folder), "Bytes")["ddp", "none"][5] == f"1.200{sign}"
    rows = collect(results.folder)
    assert [row.bytes_traced_total for row in rows] == [one and 60 * one for one in traced]
    cell = {"verdict": "same", "reference": "none", "val_ppl": 1.0, "worse_percent": 0.0, "n": 2}
    assert marks(cell | {"diverged": 0, "failed": 0}, rows) == mark.removeprefix("valid")
    found = {gate.name: gate.state for gate in gates(made_results.as_read(rows, results_dir=results.folder))}
    assert found["bytes sent, as metered or traced, are those that the formula gives"] == state


def test_what_is_worse_does_not_head_the_table_however_fast_it_is(results):
    """One seed shows nothing, but a method that is beyond 1 % with it comes after one that is within."""
    for label, step, ppl in (("none", 200.0, 300.0), ("int8", 150.0, 302.9), ("zero", 10.0, 303.1), ("new", 9.0, None)):
        for seed in (0, 1):
            loss = None if ppl is None else math.log(ppl)
            run, known = Run("ddp", label, 2, "none", seed), seed == 0 or label == "none"
            results(run, step_time_ms_mean=step, val_ppl=ppl if known else None, val_loss=loss if known else None)
    for seed in (0, 1):
        results(Run("ddp", "bad", 2, "none", seed), step_time_ms_mean=1.0, ppl=304.0)
    text = summarized(results.folder)
    quality, speed = cells(text, "Quality"), cells(text, "Step time")
    assert [label for _, label in speed] == ["none", "int8", "new", "zero", "bad"]
    assert quality["ddp", "zero"][4] == "+1.03 %" and "| worse" in text.split("## Quality")[0]
    assert speed["ddp", "int8"][1] == "1.33"


def test_a_cell_that_is_timed_with_one_seed_moves_no_verdict(results):
    """On the link there is seed 0 only, whose perplexity is the lowest by far; no mean over cells takes it twice."""
    perplexities = {"none": (237.0, 261.0, 305.0), "int8": (237.1, 261.1, 305.2), "muon": (130.0, 131.0, 133.0)}
    perplexities["local"] = tuple(1.02 * ppl for ppl in perplexities["muon"])
    config = {"muon": {"inner": "muon"}, "local": {"method": "onebit", "comm_optimizer": "diloco", "inner": "muon"}}
    for label, ppls in perplexities.items():
        fields = {"compress_config": config.get(label), "compress_method": "none" if label == "muon" else label}
        for seed, ppl in enumerate(ppls):
            results(Run("ddp", label, 2, "none", seed), ppl=ppl, **fields)
        unknown = {"val_ppl": None, "val_loss": None, "quality_from": None, "steps": 9}
        results(Run("ddp", label, 2, "20mbit", 0), step_time_ms_mean=900.0, **unknown, **fields)
    text = summarized(results.folder)
    against = {label: row[4:7] for (_, label), row in cells(text, "Quality").items()}
    assert against == {
        "none": ["–", "–", "none"],
        "int8": ["+0.05 %", "+0.04 … +0.07", "none"],
        "muon": ["–", "–", "muon"],
        "local": ["+2.00 %", "+2.00 … +2.00", "muon"],
    }
    made = Results.read(results.folder)
    assert made.cells is not None
    table = made.cells.set_index(["compressor", "link"])
    for label, ppls in perplexities.items():
        for link, n in (("none", 3), ("20mbit", 1)):
            cell = table.loc[label, link]
            word = {"none": "baseline", "muon": "baseline", "int8": "same", "local": "worse"}[label]
            assert (cell["n"], cell["quality_n"], cell["verdict"]) == (n, 3, word)
            assert cell["val_ppl"] == pytest.approx(statistics.mean(ppls))
    states = {gate.name: gate for gate in gates(made)}
    assert "6 of 8 cells; not: ddp/local/ws2/none, ddp/local/ws2/20mbit" in (gate.text for gate in states.values())
    moved = results.folder.rename(results.folder.with_name("moved"))
    assert Results.read(moved).quality.rows == made.quality.rows, (
        "of the folder that is read, not of the one that was written"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"cores": 64},
        {"processor": "Another CPU"},
        {"device": "Another GPU"},
        {"threads": 63},
        {"cpu_capability": "Another vector unit"},
        {"preloaded": "libanother.so"},
    ],
    ids=str,
)
def test_unlike_machines_are_named_and_not_compared(results, other):
    here = environment(World(0, 0, 1, "gloo", torch.device("cpu")))  # what a rank really writes
    for seed in range(2):
        results(Run("ddp", "none", 2, "none", seed), environment=here)
        results(Run("ddp", "int8", 2, "none", seed), environment=here | other if seed else here)
    text = summarized(results.folder)
    notes = " ".join(text.split("## Notes")[1].split("##")[0].split())
    assert "runs of unlike machines" in notes
    there, both = (
        notes.index("ddp/int8/ws2/none (seed 1)"),
        notes.index("ddp/int8/ws2/none (seed 0), ddp/none/ws2/none"),
    )
    assert notes.index(str(next(iter(other.values()))), both) < there
    assert cells(text, "Step time")["ddp", "int8"][1] == "1.00"  # of the one seed that has a baseline


def test_losses_that_depend_on_the_link_are_named(results):
    for label, digests in (("none", "aaa"), ("int8", "bbc"), ("alone", "d")):
        for link, digest in zip(("none", "1gbit", "100mbit"), digests, strict=False):
            results(Run("ddp", label, 2, link, 0), loss_digest=digest)
    notes = " ".join(summarized(results.folder).split("## Notes")[1].split("##")[0].split())
    assert notes.startswith("- losses at every step are equal on all links: 1 of 2 - losses differ between links: ")
    assert notes.endswith("ddp/int8/ws2/seed0: 100mbit | 1gbit, none")
    rows = [row.model_copy(update={"steps": 60 + len(row.link)}) for row in collect(results.folder)]
    for of, said in (
        (rows, "2 cells ran on several links, but with another number"),
        (rows[-1:], "no cell ran on two"),
    ):
        assert [
            gate.state
            for gate in gates(made_results.as_read(of, results_dir=results.folder))
            if gate.text.startswith(said)
        ] == ["not checked"]


def test_failed_skipped_diverged_and_missing_runs_have_their_reasons(results, capsys):
    runs = {label: Run("ddp", label, 2, "none", 0) for label in ("none", "oom", "lost", "left", "nan", "untraced")}
    results(runs["none"], perplexity=250.0)
    write_json(
        results.folder / "runs" / runs["oom"].path / "train.failed.json",
        {"verb": "train", "reason": "rank 1 was killed", "exit_code": 3, "last_step": 17, "time": 1.0},
    )
    results(runs["nan"], status="diverged", reason="the loss is nan", val_ppl=None, val_loss=None, profile=None)
    place = results(runs["untraced"])
    write_json(
        place / "trace.failed.json",
        {"verb": "trace", "reason": "rank0 is truncated", "exit_code": 2, "last_step": None, "time": 1.0},
    )
    results(runs["none"]._replace(seed=9))  # of an earlier configuration
    write_json(
        results.folder / "expected.json",
        [
            {
                **run._asdict(),
                "path": f"runs/{run.path}",
                "excluded": "ddp has no such hook" if label == "left" else None,
            }
            for label, run in runs.items()
        ],
    )
    assert main(["summarize", "--results_dir", str(results.folder)]) == 0
    printed = capsys.readouterr()
    rows = {row["compressor"]: row for row in rows_of(results.folder)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "none": "ok", "oom": "failed", "lost": "failed", "left": "skipped", "nan": "diverged", "untraced": "failed",
    }  # fmt: skip
    assert rows["oom"]["reason"] == "train failed after step 17 (exit 3): rank 1 was killed"
    assert rows["lost"]["reason"].startswith("did not run")
    assert rows["left"]["reason"] == "ddp has no such hook"
    assert rows["nan"]["val_ppl"] is None
    assert rows["untraced"]["reason"] == "trace failed (exit 2): rank0 is truncated"
    assert {rows["untraced"][name] for name in ("steps", "val_ppl", "step_time_ms_mean", "bytes_raw_total")} == {None}
    text = (results.folder / "summary.md").read_text()
    assert "runs: 1 ok, 3 failed, 1 skipped, 1 diverged\n" in text
    for name in ("oom", "lost", "left", "nan", "untraced"):
        assert f"- {rows[name]['status']}: {rows[name]['reason']}: {rows[name]['run_name']}" in text
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles[0] == "Failed and diverged runs" and titles[-2:] == ["Runs left out", "What the columns mean"]
    assert "left out: ddp/none/ws2/none/seed9" in printed.err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("record.json", '{"schema_version": 1,', "not valid JSON"),
        ("record.json", "[]", "unusable"),
        ("record.json", json.dumps({**record(Run("ddp", "x", 2, "none", 0)), "val_ppl": "low"}), "val_ppl"),
        ("record.json", json.dumps({**record(Run("ddp", "x", 2, "none", 0)), "val_ppl": math.nan}), "val_ppl"),
        ("record.json", json.dumps({**record(Run("ddp", "x", 2, "none", 0)), "schema_version": 9}), "schema version 9"),
        ("record.json", json.dumps(record(Run("ddp", "x", 2, "none", 1))), "another run"),
        ("profile.json", '{"comm_ratio": 0.5}', "comm_time_ms_per_step"),
        ("perplexity.json", "\x80", "perplexity.json"),
    ],
)
def test_an_unusable_file_is_one_failed_row(results, file, content, words):
    good, bad = Run("ddp", "none", 2, "none", 0), Run("ddp", "x", 2, "none", 0)
    results(good)
    (results(bad) / file).write_text(content)
    ok, failed = collect(results.folder)
    assert ok.status == "ok"
    assert failed.status == "failed"
    assert words in failed.reason
    assert failed.steps is None
    repaired = [path.name for path, _ in unusable(results.folder)]
    assert repaired == ([] if words in ("schema version 9", "another run") else [file])


def test_nothing_to_summarize_is_bad_input(tmp_path, capsys):
    assert main(["summarize", "--results_dir", str(tmp_path / "mistyped")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert not (tmp_path / "mistyped").exists()


def test_all_runs_missing_is_still_a_table(results):
    run = Run("fsdp2", "int8", 2, "none", 0)
    write_json(results.folder / "expected.json", [{**run._asdict(), "path": "", "excluded": None}])
    assert "runs: 1 failed" in summarized(results.folder)


def test_a_list_that_is_no_list_of_runs_is_bad_input(results, capsys):
    results(Run("ddp", "none", 2, "none", 0))
    write_json(results.folder / "expected.json", [{"strategy": "ddp"}])
    assert main(["summarize", "--results_dir", str(results.folder)]) == 2
    assert "compressor" in capsys.readouterr().err
    assert not (results.folder / "summary.md").exists()


@pytest.mark.parametrize("shared", [True, False])
def test_times_of_runs_that_may_share_the_machine_are_marked(results, shared):
    run = Run("ddp", "none", 2, "none", 0)
    results(run)
    write_json(results.folder / "expected.json", [{**run._asdict(), "excluded": None, "shared": shared}])
    assert ("times are shared" in summarized(results.folder)) is shared
