"""The headline: the numbers of the fastest valid compressor of each regime."""

from __future__ import annotations

import json
import re

import made_results
import pytest

from gradwire.report.cells import cells_of
from gradwire.report.data import read
from gradwire.report.headline import findings, question
from gradwire.report.page import render
from gradwire.report.quality import PerplexityReference
from gradwire.report.record import run_of
from gradwire.report.sections import sections

LABELS = ["none", "bf16-native", "exchange", "int8", "powersgd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two strategies with and without a slow link, one rank alone; runs shared the machine."""
    rows = made_results.rows(LABELS, ["ddp", "fsdp2"], [(1, "none"), (2, "none"), (2, "100mbit")], [0, 1, 2])
    place = made_results.write(tmp_path_factory.mktemp("results") / "demo", rows)
    listed = [{**run_of(row)._asdict(), "excluded": None, "shared": True} for row in rows]
    (place / "expected.json").write_text(json.dumps(listed))
    return place


def test_each_regime_has_its_fastest_valid_compressor(folder):
    data = read(folder)
    found = {one.group: one for one in findings(data.cells)}
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
        assert f"{int8[0].compression_ratio:.1f} × fewer gradient bytes" in one.text
        assert f"{int8[0].all_bytes_ratio:.1f} × fewer in all" in one.text
        assert (f"{mean:.2f} × faster" in one.text) == faster
        assert (f"{mean:.2f} × the speed of none: no " in one.text) == (not faster)
        assert one.number.endswith("faster" if faster else "fewer bytes")
        assert one.cost == ("time" if faster else "bytes")
    gains = [one.gain for one in findings(data.cells)]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1 > gains[-1]


@pytest.mark.parametrize(
    ("times", "chosen", "pace"),
    [
        ({"int8": (90, 95, 91), "signsgd": (99, 99, 99)}, "int8", "1.09 × faster"),
        ({"int8": (90, 102, 91), "signsgd": (80, 101, 99)}, "signsgd", "1.08 × the speed of none: no clear gain"),
        ({"int8": (110, 120, 125), "signsgd": (111, 130, 140)}, "signsgd", "0.79 × the speed of none: no faster"),
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
    (one,) = findings(cells_of(changed, PerplexityReference.of("here", changed)))
    assert one.text.startswith(f"{chosen}: ") and pace in one.text
    assert one.cost == ("time" if "faster" in pace and "no" not in pace else "bytes")


def test_nothing_is_claimed_of_compressors_that_cost_quality():
    rows = made_results.rows(["none", "powersgd"], ["ddp"], [(2, "100mbit")], [0, 1, 2])
    (one,) = findings(cells_of(rows, PerplexityReference.of("here", rows)))
    assert one.text == "no compressor stays within 1 % of none's perplexity." and one.number == "–"


def test_the_page_begins_with_it(folder):
    data = read(folder)
    made = list(sections(data))
    page = render(data, made, {section.key: [] for section in made})
    first = findings(data.cells)[0]
    body = re.sub(r"<[^>]+>", " ", page.split("<main>")[1])
    assert re.match(r"\s+In short\s+" + re.escape(first.number), body)
    assert "<h1>What do int8 and powersgd save, and at what cost?</h1>" in page
    assert page.index(first.text.replace("'", "&#39;")) < page.index('id="validity"')
    table = page.split('<table id="table-cells">')[1].split("</table>")[0]
    assert table.count("times shared") == 2 * (table.count("<tr") - 1), "as text and as the value to sort by"


def test_the_title_is_the_experiments_question(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"question": "Is it <fast>?"}')
    assert question(tmp_path, None) == "Is it <fast>?"
    assert question(folder, read(folder).cells) == "What do int8 and powersgd save, and at what cost?"
    assert question(tmp_path / "nowhere", None) == "nowhere"
