"""The first screen, in a terminal and on the page: verdicts at their edges, the one claim, the doubts, what fits.

Of `statistics/seeds.py`, `tables/glance.py`.
"""

from __future__ import annotations

import math

import made_results
import pytest

from gradwire.bench.report.tables.glance import answer, doubts, glance, of_optimizers, question, size, terminal
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.summary import header
from gradwire.bench.statistics.seeds import VERDICTS, Estimate, percents, verdict

LABELS = ["none", "bf16-native", "exchange", "int8", "powersgd"]


def with_ppls(ppls, links=("none",), seeds=(0, 1, 2), **changes):
    """Rows of ddp whose perplexities are these by label, one for each seed; ``changes`` by label."""
    rows = made_results.rows(ppls, ["ddp"], [(2, link) for link in links], seeds)
    return [
        row.model_copy(update={"val_ppl": float(ppls[row.compressor][row.seed]), **changes.get(row.compressor, {})})
        for row in rows
    ]


def as_read(rows, **more):
    return made_results.as_read(rows, **more)


def verdicts(results):
    """The verdict of each method."""
    table = glance(results)
    return {row[0].text: row[-1].text for row in table.rows}


@pytest.mark.parametrize(
    ("worse", "word"),
    [
        ([], "not compared"),
        ([0.0], "one seed"),
        ([-1.0, 1.0], "same"),
        ([-1.0, 1.001], "not distinguishable"),
        ([-1.001, 1.0], "not distinguishable"),
        ([0.0, 1.001], "not distinguishable"),
        ([0.001, 1.0], "same"),
        ([0.001, 1.001], "worse"),
        ([-1.001, -0.001], "better"),
        ([-1.001, 0.0], "not distinguishable"),
    ],
)
def test_a_verdict_is_by_the_ends_of_the_spread(worse, word):
    ends = (min(worse), max(worse)) if len(worse) > 1 else (math.nan, math.nan)
    difference = Estimate(len(worse), sum(worse) / len(worse) if worse else math.nan, 0.0, *ends)
    assert verdict(difference) == word and word in VERDICTS
    assert verdict(difference, diverged=True) == "diverged"


def test_five_seeds_are_judged_by_their_interval_and_not_by_their_range():
    wide = [-1.2, 0.1, 0.0, 0.2, 0.1]  # the range leaves ±1 %, the interval of the mean does not
    assert verdict(percents([wide])[0]) == "same" and verdict(percents([wide[:4]])[0]) == "not distinguishable"


def test_the_default_experiments_page_has_the_screen_that_its_records_print(tmp_path):
    folder = made_results.committed(tmp_path / "default", "default")
    screen = terminal(Results.read(folder)).replace(str(folder), "results/default")
    page = (made_results.ROOT / "docs" / "default-experiment.md").read_text(encoding="utf-8")
    assert f"```text\n{screen}\n```" in page
    assert len(screen.splitlines()) < 24 and max(map(len, screen.splitlines())) <= 80


def test_each_method_has_a_line_also_without_a_result():
    rows = made_results.rows(["none", "int8", "int4", "powersgd"], ["ddp"], [(1, "none"), (2, "none")], [0, 1, 2])
    lost = {("int4", 1): "diverged", **{("powersgd", seed): "failed" for seed in range(3)}}
    reasons = ["out of memory", "out of memory", "disk full"]
    rows = [
        row.model_copy(update={"status": lost.get((row.compressor, row.seed), "ok"), "reason": reasons[row.seed]})
        for row in rows
        if row.world_size == 2
    ]
    results = as_read(rows)
    assert verdicts(results) == {"none": "baseline", "int8": "same", "int4": "diverged", "powersgd": "failed"}
    printed = terminal(results)
    assert printed.startswith("diverged: out of memory: ddp/int4/ws2/none/seed1\nfailed: out of memory: ddp/powersgd")
    assert "\nand 1 more reason\n" in printed
    assert glance(results).fails == [False, False, True, True]


def test_a_method_without_a_result_keeps_its_line_where_a_link_is_skipped():
    rows = made_results.rows(["none", "int8"], ["ddp"], [(2, "none"), (2, "100mbit")], [0, 1])
    of_status = {
        row.run_name: ("diverged", "failed")[row.seed] if row.link == "none" else "skipped"
        for row in rows
        if row.compressor == "int8"
    }
    rows = [row.model_copy(update={"status": of_status.get(row.run_name, "ok"), "reason": "x"}) for row in rows]
    assert verdicts(as_read(rows)) == {"none": "baseline", "int8": "diverged"}


def test_the_claim_is_of_the_best_method_with_the_same_optimizer_whose_seeds_support_it():
    """powersgd saves more and is worse, local saves more and keeps Muon's perplexity, wide spreads too far.

    The fastest is local. fsdp2 has one seed, with which Muon is not compared a second time.
    """
    ppls = {"none": (50, 51, 52), "int8": (50.1, 51.1, 52.1), "bf16-native": (50, 51, 52), "wide": (49, 52, 53)}
    ppls |= {"powersgd": (60, 61, 62), "muon": (40, 41, 42), "local": (40, 41, 42)}
    many = {"bytes_compressed_total": 1000, "compression_ratio": 50.0}
    none = {"compress_method": "none", "compression_ratio": 1.0}
    changes = {"wide": many, "muon": none | {"compress_config": {"inner": "muon"}}}
    changes["local"] = many | {"compress_config": {"comm_optimizer": "diloco", "inner": "muon"}}
    changes["local"] |= {"step_time_ms_mean": 10.0}
    rows = with_ppls(ppls, ("none", "100mbit"), **changes)
    once = [row for row in rows if (row.compressor, row.seed) in (("none", 0), ("muon", 0))]
    rows += [
        row.model_copy(update={"strategy": "fsdp2", "run_name": row.run_name.replace("ddp", "fsdp2")}) for row in once
    ]
    results = as_read(rows)
    claim, rest = answer(results)
    assert claim == "int8 under ddp: 3.9 times fewer bytes, same perplexity, 2.0 times faster at 100 Mbit/s"
    assert rest == "" and len(str(answer(results)).split()) <= 25
    words = verdicts(as_read(rows[: -len(once)]))
    assert (words["wide"], words["powersgd"], words["local"]) == ("not distinguishable", "worse", "same")
    assert doubts(results) == "Not shown: the perplexity of wide (seeds spread too far)."
    assert of_optimizers(results) == [
        "Muon instead of AdamW in every step, without compression (muon, ddp, 2 ranks): perplexity -19.6 % "
        "(-20.0 … -19.2)."
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_times_of_one_seed_or_a_shared_machine_are_no_claim(shared):
    ppls = {"none": (50, 51, 52), "int8": (50.1, 51.1, 52.1)}
    rows = [*with_ppls(ppls), *with_ppls(ppls, ("100mbit",), range(3) if shared else (0,))]
    claim, rest = answer(as_read(rows, shared=shared))
    assert claim == "int8: 3.9 times fewer bytes, same perplexity"
    doubt = "times shared" if shared else "one seed"
    assert rest == f"2.0 times faster at 100 Mbit/s ({doubt})"
    said = "step times (other runs may have used the machine)" if shared else "the step at 100 Mbit/s (one seed)"
    assert doubts(as_read(rows, shared=shared)) == f"Not shown: {said}."


def test_a_method_that_seeds_show_to_be_faster_precedes_one_of_fewer_bytes():
    """Steps of both: twice as fast on average; those of int8 with a seed that is slower than the baseline."""
    ppls = {"none": (50, 51, 52), "bf16-native": (50, 51, 52), "int8": (50, 51, 52)}
    steps = {"none": (60, 60, 60), "bf16-native": (30, 29, 31), "int8": (20, 20, 70)}
    rows = [
        row.model_copy(update={"step_time_ms_mean": steps[row.compressor][row.seed]})
        for row in with_ppls(ppls, ("100mbit",))
    ]
    claim, rest = answer(as_read(rows))
    assert claim == "bf16-native: 2.0 times fewer bytes, same perplexity, 2.0 times faster at 100 Mbit/s" and not rest
    alone = [row for row in rows if row.compressor != "bf16-native"]
    claim, rest = answer(as_read(alone))
    assert claim == "int8: 3.9 times fewer bytes, same perplexity"
    assert rest == "2.3 times faster at 100 Mbit/s (seeds spread too far)"


def test_where_nothing_is_supported_nothing_is_claimed():
    ppls = {"none": (50, 51, 52), "int8": (50.1, 51.1, 52.1), "powersgd": (60, 61, 62)}
    one = as_read(with_ppls(ppls, seeds=(0,)))
    assert answer(one) == ("", "No method is shown to keep the perplexity: 2 with one seed")
    assert "the perplexity of int8, powersgd (one seed)" in doubts(one)
    bad = as_read(with_ppls({label: ppls[label] for label in ("none", "powersgd")}))
    assert answer(bad) == ("", "No method is shown to keep the perplexity: 1 worse")
    assert answer(as_read(with_ppls({"none": (50, 51, 52)}))) == ("", "No method was compared")
    lone = as_read(with_ppls({label: ppls[label] for label in ("int8", "powersgd")}))
    assert answer(lone) == ("", "No method is shown to keep the perplexity: 2 not compared")
    why = "no seed has it and that of its optimizer in every step"
    assert doubts(lone) == f"Not shown: the perplexity of powersgd, int8 ({why})."
    sharded = made_results.rows(["none", "int8"], ["fsdp2"], [(2, "none")], (0, 1, 2))
    both = as_read([*sharded, *made_results.rows(["int8"], ["ddp"], [(2, "none")], (0, 1, 2))])
    assert doubts(both) == f"Not shown: the perplexity of int8 under ddp ({why})."


@pytest.mark.parametrize(
    ("statuses", "outcome", "listed"),
    [
        ({}, "all 6 runs succeeded", "6 ok, none failed"),
        ({0: "skipped"}, "all 5 runs succeeded, 1 left out", "5 ok, 1 skipped, none failed"),
        ({0: "diverged", 2: "failed", 3: "failed"}, "6 runs, 2 failed, 1 diverged", "3 ok, 2 failed, 1 diverged"),
        ({1: "skipped", 4: "failed"}, "5 runs, 1 failed, 1 left out", "4 ok, 1 failed, 1 skipped"),
    ],
)
def test_how_many_runs_failed_is_said_also_where_none_did(statuses, outcome, listed):
    rows = made_results.rows(["none", "int8"], ["ddp"], [(2, "none")], (0, 1, 2))
    rows = [
        row.model_copy(update={"status": statuses.get(at, "ok"), "reason": statuses.get(at) and "why"})
        for at, row in enumerate(rows)
    ]
    assert size(as_read(rows)) == f"{outcome}, 3 seeds, 2 ranks"
    assert f"({outcome}, 3 seeds, 2 ranks)" in " ".join(terminal(as_read(rows)).split())
    assert header(rows).startswith(f"- runs: {listed}\n")
    (last,) = [row for row in rows if row.status == "ok"][-1:]
    assert size(as_read([last])) == "the run succeeded, 1 seed, 2 ranks"


STATES = {
    "three links": made_results.rows(seeds=(0, 1)),
    "many methods": made_results.rows([f"a-method-of-a-long-name-{i}" for i in range(20)], seeds=(0,)),
    "many links": [
        row.model_copy(update={"link": f"{rate}mbit"})
        for rate in (1000, 200, 50, 20, 10)
        for row in made_results.rows(LABELS, ["ddp"], [(2, "100mbit")], (0, 1))
    ],
    "one long group": made_results.rows([f"method-{i}" for i in range(20)], ["ddp"], [(2, "none")])
    + made_results.rows(["none", "int8"], ["fsdp2"], [(2, "none")]),
    "one seed": made_results.rows(["none", "int8"], ["ddp"], [(2, "none")], [0]),
    "one rank": made_results.rows(["none", "int8"], ["ddp"], [(1, "none")]),
    "failed": [row.model_copy(update={"status": "failed", "reason": "x " * 200}) for row in made_results.rows()],
}


@pytest.mark.parametrize("name", STATES)
def test_the_terminal_s_screen_has_80_columns_and_24_lines(name):
    lines = terminal(as_read(STATES[name])).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 24
    assert lines[-2:] == ["all tables: here/summary.md", "page: here/report.html"]
    assert any("verdict" in line for line in lines) == (name != "one rank"), "a table without lines is left out"
    if name == "many links":
        assert "10mbit" in next(line for line in lines if "verdict" in line), "the slowest link is the last to go"
    if name == "one long group":
        assert len(lines) >= 23, "the lines that a short group leaves are the long one's"


def test_the_question_is_the_experiment_s_or_one_of_what_it_compares(tmp_path):
    results = as_read(made_results.rows(LABELS, ["ddp"], [(2, "none")], [0]), results_dir=tmp_path)
    assert question(results) == "What do int8 and powersgd save, and at what cost?"
    (tmp_path / "config.json").write_text('{"question": "Is it <fast>?"}')
    assert question(results) == "Is it <fast>?"
    assert question(as_read(made_results.rows(["none"], ["ddp"], [(2, "none")], [0]))) == "here"
