"""The headline: the numbers of the fastest valid compressor of each regime.

Of `tables/headline.py`.
"""

from __future__ import annotations

import json
import re

import made_results
import pytest

from gradwire.bench.report.page.data import Data
from gradwire.bench.report.page.files import render
from gradwire.bench.report.page.sections import sections
from gradwire.bench.report.tables.headline import findings, of_optimizers, perplexity, question
from gradwire.bench.statistics.seeds import percents

LABELS = ["none", "bf16-native", "exchange", "int8", "powersgd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two strategies with and without a slow link, one rank alone; runs shared the machine."""
    rows = made_results.rows(LABELS, ["ddp", "fsdp2"], [(1, "none"), (2, "none"), (2, "100mbit")], [0, 1, 2])
    place = made_results.write(tmp_path_factory.mktemp("results") / "demo", rows)
    listed = [{**row.run._asdict(), "excluded": None, "shared": True} for row in rows]
    (place / "expected.json").write_text(json.dumps(listed))
    return place


def found_in(rows):
    """The findings of an experiment's rows."""
    return findings(made_results.as_read(rows))


def test_each_regime_has_its_fastest_valid_compressor(folder):
    data = Data.read(folder)
    found = {one.group: one for one in findings(data)}
    assert {(group.strategy, group.world_size, group.link) for group in found} == {
        (strategy, 2, link) for strategy in ("ddp", "fsdp2") for link in ("none", "100mbit")
    }
    for group, one in found.items():
        rows = {(row.compressor, row.seed): row for row in data.ok if (row.strategy, row.world_size, row.link) == group}
        int8 = [rows["int8", seed] for seed in (0, 1, 2)]
        speeds = [rows["none", row.seed].step_time_ms_mean / row.step_time_ms_mean for row in int8]
        assert one.text.startswith("int8: "), "powersgd is faster, and its perplexity is 14 % above"
        mean = sum(speeds) / 3
        faster = min(speeds) > 1
        assert one.gain == pytest.approx(mean if faster else min(mean, 1))
        assert f"{int8[0].all_bytes_ratio:.1f} times fewer bytes" in one.text
        of_gradients = f"({int8[0].compression_ratio:.1f} for gradients)"
        assert (of_gradients in one.text) == (group.strategy == "fsdp2")
        there = "at 100 Mbit/s" if group.link == "100mbit" else "without a slow link"
        assert (f"{mean:.2f} times faster than none {there}" in one.text) == faster
        assert (f"{mean:.2f} times the speed of none {there}: no " in one.text) == (not faster)
        assert one.number == f"{int8[0].all_bytes_ratio:.1f} times fewer bytes", "shared times are no claim"
        assert one.cost == ("time" if faster else "bytes")
        worse = [100 * (rows["int8", seed].val_ppl / rows["none", seed].val_ppl - 1) for seed in (0, 1, 2)]
        words = f"the same perplexity as none, {sum(worse) / 3:+z.1f} % ({min(worse):+z.1f} … {max(worse):+z.1f}), "
        assert words in one.text
        assert one.text.endswith("(times shared).")
    gains = [one.gain for one in findings(data)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1 > gains[-1]


@pytest.mark.parametrize(
    ("times", "chosen", "pace"),
    [
        ({"int8": (90, 95, 91), "signsgd": (99, 99, 99)}, "int8", "1.09 times faster"),
        (
            {"int8": (90, 102, 91), "signsgd": (80, 101, 99)},
            "signsgd",
            "1.08 times the speed of none, no clear gain",
        ),
        (
            {"int8": (110, 120, 125), "signsgd": (111, 130, 140)},
            "signsgd",
            "0.79 times the speed of none, no faster",
        ),
    ],
)
def test_what_is_not_clearly_faster_is_judged_by_its_bytes(times, chosen, pace):
    """Three seeds of 100 ms for none; signsgd sends 25 times fewer bytes, int8 4 times."""
    rows = made_results.rows(["none", "int8", "signsgd"], ["ddp"], [(2, "none")], [0, 1, 2])
    changed = []
    for row in rows:
        ms = times.get(row.compressor, (100, 100, 100))[row.seed]
        raw = row.bytes_raw_total
        ratio = {"none": 1, "int8": 4, "signsgd": 25}[row.compressor]
        sent = {"bytes_compressed_total": raw // ratio, "compression_ratio": float(ratio)}
        sent |= {"bytes_agreement_total": 0, "step_time_ms_mean": float(ms), "val_ppl": 50.0, "val_loss": 3.912}
        changed.append(row.model_copy(update=sent))
    (one,) = found_in(changed)
    assert one.text.startswith(f"{chosen}: ")
    assert all(part in one.text for part in pace.split(", "))
    assert one.cost == ("time" if "faster" in pace and "no" not in pace else "bytes")


def test_nothing_is_claimed_of_compressors_that_cost_quality():
    """The sentence is the same for both links, and is there once."""
    rows = made_results.rows(["none", "powersgd"], ["ddp"], [(2, "none"), (2, "100mbit")], [0, 1, 2])
    (one,) = found_in(rows)
    assert one.text.startswith("no compressor's mean perplexity is within 1 % of that of its optimizer in every step")
    assert "; the nearest is powersgd: 21.3 times fewer bytes, perplexity +14.0 % (" in one.text
    assert one.number == ""


def test_a_label_of_which_a_run_diverged_is_no_finding():
    rows = made_results.rows(["none", "int8", "int4"], ["ddp"], [(2, "none"), (2, "100mbit")], [0, 1, 2])
    lost = [row.compressor == "int4" and row.link == "none" and row.seed == 1 for row in rows]
    rows = [row.model_copy(update={"status": "diverged"} if one else {}) for row, one in zip(rows, lost, strict=True)]
    assert all(one.text.startswith("int8: ") for one in found_in(rows)), "int4 sends fewer bytes"
    made = made_results.as_read(rows).cells
    assert made[made["gated"].astype(bool)]["compressor"].tolist() == ["int4", "int4"], "on both links"


MUON = {"inner": "muon"}
LOCAL = {"comm_optimizer": "diloco", "H": 5, **MUON}


def with_optimizers(configs, ppls, targets=None, seconds=None):
    """Three seeds of int8 for each label, as fast as none in a step, with a configuration and perplexities."""
    rows = made_results.rows(["none", *configs], ["ddp"], [(2, "100mbit")], [0, 1, 2])
    return [
        row.model_copy(
            update={
                "compress_config": {"method": row.compress_method} | configs.get(row.compressor, {}),
                "compress_method": "none" if row.compressor in ("none", "muon") else "int8",
                "compression_ratio": 1.0 if row.compressor in ("none", "muon") else 4.0,
                "val_ppl": ppls[row.compressor][row.seed],
                "step_time_ms_mean": 100.0,
                "steps_to_target": targets and dict.fromkeys(targets, 9),
                "time_to_target_s": targets and {name: seconds[row.compressor][name] for name in targets},
            }
        )
        for row in rows
    ]


PPLS = {"none": (50, 50, 50), "muon": (40, 40, 44), "local": (40.2, 39.8, 44.2), "muon-int8": (40.1, 40.1, 44.1)}


def test_a_gain_of_the_optimizer_is_not_called_one_of_compression():
    rows = with_optimizers({"muon": MUON, "local": LOCAL}, PPLS)
    (one,) = found_in(rows)
    assert ", the same perplexity as muon, +0.2 % (-0.5 … +0.5), 1.00 times the speed of none " in one.text
    assert one.number.endswith(" times fewer bytes")
    assert of_optimizers(made_results.as_read(rows)) == [
        "ddp, 2 ranks: Muon instead of AdamW in every step, without compression (muon): perplexity -17.4 % "
        "(-20.0 … -12.0) against none."
    ]
    (alone,) = found_in(with_optimizers({"local": LOCAL}, PPLS))
    assert ", perplexity not compared, " in alone.text and alone.number == ""
    usual = with_optimizers({"local": {"comm_optimizer": "diloco", "H": 5}}, PPLS)
    assert " perplexity -17.3 % (-20.4 … -11.6) against none, " in found_in(usual)[0].text
    assert of_optimizers(made_results.as_read(usual)) == []


@pytest.mark.parametrize(
    ("worse", "words"),
    [
        ([0.2, -0.3, 0.1], "the same perplexity as muon, 0.0 % (-0.3 … +0.2)"),
        ([6.0, -4.5, 1.8], "perplexity not distinguishable from that of muon with three seeds, +1.0 % (-4.5 … +6.0)"),
        ([6.0, 4.5, 1.8], "perplexity +4.1 % (+1.8 … +6.0) against muon"),
        ([0.4], "perplexity +0.4 % (one seed) against muon"),
        ([], "perplexity not compared"),
    ],
)
def test_a_difference_is_said_as_far_as_its_seeds_show_it(worse, words):
    assert perplexity(percents([worse])[0], "muon").replace("+0.0", "0.0") == words


def test_one_seed_claims_nothing():
    """The speed-up of one seed is no claim, and neither are bytes at a perplexity of one seed."""
    rows = made_results.rows(["none", "int8"], ["ddp"], [(2, "none"), (2, "100mbit")], [0, 1, 2])
    short = [
        row.model_copy(update={"val_ppl": None, "quality_from": None, "bytes_compressed_total": 1, "steps": 9})
        for row in rows
        if row.link == "100mbit" and row.seed == 0
    ]
    several, single = ([row for row in rows if row.link == "none" and row.seed < count] for count in (3, 1))
    fast, _ = found_in([*several, *short])
    assert fast.group.link == "100mbit" and "times faster than none at 100 Mbit/s (one seed)" in fast.text
    assert fast.number == "3.9 times fewer bytes", "those of the runs with the perplexity"
    assert [one.number for one in found_in([*single, *short])] == ["", ""]


def test_time_to_a_target_leads_where_it_was_measured():
    """The target is the final perplexity of none; local is sooner than it, and muon sooner still."""
    seconds = {
        "none": {"45": 90.0, "none": 100.0},
        "muon": {"45": 5.0, "none": 10.0},
        "local": {"45": 30.0, "none": 40.0},
        "muon-int8": {"45": 20.0, "none": 50.0},
    }
    configs = {"muon": MUON, "local": LOCAL, "muon-int8": MUON}
    rows = with_optimizers(configs, PPLS, ("45", "none"), seconds)
    (one,) = found_in(rows)
    assert (one.number, one.cost, one.gain) == ("2.5 times sooner", "target", 2.5)
    assert one.text.startswith("local reaches the perplexity of none in 40 s, none in 100 s: ")
    assert one.text.endswith(
        "+0.5), steps 1.00 times as fast as those of none at 100 Mbit/s, in 4.00 times the time of muon."
    )
    rows = with_optimizers(configs, PPLS, ("45",), seconds)
    (numbered,) = found_in(rows)
    assert numbered.text.startswith("muon-int8 reaches perplexity 45 in 20 s, none in 90 s: "), "the goal is another"
    slow = {label: {"45": 90.0 + 10 * (label != "none")} for label in seconds}
    (late,) = found_in(with_optimizers(configs, PPLS, ("45",), slow))
    assert late.cost == "bytes" and "sooner" not in late.number
    shared = findings(made_results.as_read(rows, shared=True))
    assert shared[0].cost == "bytes" and "times shared" in shared[0].text


def test_the_page_begins_with_it(folder):
    data = Data.read(folder)
    made = list(sections(data))
    page = render(data, made, {section.key: [] for section in made})
    first = findings(data)[0]
    body = re.sub(r"<[^>]+>", " ", page.split("<main>")[1])
    assert re.match(r"\s+In short\s+" + re.escape(first.number), body)
    assert "<h1>What do int8 and powersgd save, and at what cost?</h1>" in page
    assert page.index(first.text.replace("'", "&#39;")) < page.index('id="validity"')
    table = page.split('<table id="table-cells">')[1].split("</table>")[0]
    assert table.count("times shared") == 2 * (table.count("<tr") - 1), "as text and as the value to sort by"


def test_the_title_is_the_experiments_question(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"question": "Is it <fast>?"}')
    assert question(tmp_path, None) == "Is it <fast>?"
    assert question(folder, Data.read(folder).cells) == "What do int8 and powersgd save, and at what cost?"
    assert question(tmp_path / "nowhere", None) == "nowhere"
