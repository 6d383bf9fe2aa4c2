"""report: the numbers on the page are those of results.csv, and bad input is reported, not hidden.

Of `page/figures.py`, `page/render.py`, `page/sections.py`, `tables/checks.py`.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import made_results
import numpy as np
import pandas as pd
import pytest

from gradwire.bench.report.page.sections import marks
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.checks import gates
from gradwire.cli import main

LABELS = ["none", "bf16-native", "int8", "powersgd"]
CELL = ["compressor", "strategy", "world_size", "link"]


def report(folder: Path, *flags: str) -> str:
    assert main(["report", "--results_dir", str(folder), *flags]) == 0
    return (folder / "report.html").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole experiment with its report: one strategy, two links, three seeds, and a failed and a skipped run."""
    results = made_results.rows(LABELS, ["ddp"], [(2, "none"), (2, "100mbit")])
    results[4] = results[4].model_copy(update={"meter_agrees": False})
    results[7] = results[7].model_copy(update={"fallback_fraction": 0.5001, "fallbacks": 7, "nonfinite_steps": 2})
    lost = made_results.row("ddp", "int8", 4, "none", 0)
    for status, reason in (
        ("failed", "train failed after step 7 (exit 3): rank 1 was killed"),
        ("skipped", "too <large>"),
    ):
        kept = {name: getattr(lost, name) for name in ("compressor", "strategy", "link", "seed")}
        name = f"ddp/int8/ws{len(status)}/none/seed0"
        made = {**kept, "world_size": len(status), "run_name": name, "status": status, "reason": reason}
        results.append(type(lost)(**made))
    place = made_results.write(tmp_path_factory.mktemp("results") / "demo", results)
    report(place)
    return place


@pytest.fixture(scope="module")
def page(folder) -> str:
    return (folder / "report.html").read_text()


def shown(page: str, table: str = "cells") -> pd.DataFrame:
    """A table of the page: its texts, and the values it sorts by."""
    markup = page[page.index(f'<table id="table-{table}">') :].split("</table>")[0]
    titles = [html.unescape(title) for title in re.findall(r"<button[^>]*>([^<]*)</button></th>", markup)]
    lines = []
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", markup.split("<tbody>")[1], re.DOTALL):
        entries = re.findall(r'data-value="([^"]*)">(.*?)</t[hd]>', row, re.DOTALL)
        values = [html.unescape(re.sub("<[^>]+>", "", value)) for entry in entries for value in entry]
        lines.append(values)
    columns = [name for title in titles for name in (f"{title} value", title)]
    return pd.DataFrame(lines, columns=columns)


def test_numbers_on_the_page_are_those_of_the_csv(folder, page):
    runs = pd.read_csv(folder / "results.csv", keep_default_na=False, na_values=[""])
    runs = runs[runs["status"] == "ok"]
    table = shown(page)
    assert len(table) == len(runs.groupby(CELL))
    for cell in table.to_dict("records"):
        of = [cell["compressor"], cell["strategy"], int(cell["W"]), cell["link"]]
        mine = runs[(runs[CELL] == of).all(axis=1)].sort_values("seed")
        base = runs[(runs[CELL] == ["none", *of[1:]]).all(axis=1)].sort_values("seed")
        bf16 = runs[(runs[CELL] == ["bf16-native", *of[1:]]).all(axis=1)].sort_values("seed")
        assert int(cell["n"]) == len(mine) == 3
        step = mine["step_time_ms_mean"].to_numpy()
        expected = {
            "perplexity": mine["val_ppl"].mean(),
            "all bytes ×": mine["all_bytes_ratio"].mean(),
            "gradients ×": mine["compression_ratio"].mean(),
            "gradients × bf16": mine["compression_ratio_bf16"].mean(),
            "step ms": step.mean(),
            "step sd": step.std(ddof=1),
            "tokens/s": mine["tokens_per_s"].mean(),
        }
        if of[0] != "none":
            ratios = mine["val_ppl"].to_numpy() / base["val_ppl"].to_numpy()
            expected["ppl"] = 100 * (np.prod(ratios) ** (1 / 3) - 1)
            expected["speed × fp32"] = (base["step_time_ms_mean"].to_numpy() / step).mean()
        if of[0] != "bf16-native":
            expected["speed × bf16"] = (bf16["step_time_ms_mean"].to_numpy() / step).mean()
        for title, value in expected.items():
            assert float(cell[f"{title} value"]) == pytest.approx(value, rel=1e-12), title
            read = float(cell[title].replace(",", "").removesuffix(" %"))
            assert read == pytest.approx(value, rel=0.01, abs=0.006), title
        assert cell["step range"] == f"{step.min():,.1f} … {step.max():,.1f}"


def test_the_table_is_ordered_by_verdict_then_speed_and_marks_what_fails(page):
    table = shown(page)
    for _, cells in table.groupby(["strategy", "W", "link"]):
        worse = cells["marks"].str.contains("worse than none").to_numpy()
        assert worse.tolist() == sorted(worse)
        assert cells.loc[worse, "compressor"].tolist() == ["powersgd"]
        speed = cells.loc[~worse & (cells["compressor"] != "none"), "step ms value"].astype(float)
        assert speed.is_monotonic_increasing
    metered = table[table["marks"].str.contains("meter")]
    assert len(metered) == 1
    dense = table[table["marks"].str.contains("mostly float32")]
    assert dense["compressor"].tolist() == ["int8"] and "non-finite" in dense["marks"].item()


@pytest.mark.parametrize(
    ("verdict", "worse", "mark"),
    [
        ("not distinguishable", 1.001, "mean more than 1 % above none"),
        ("not distinguishable", 1.0, ""),
        ("worse", 14.0, "worse than none"),
        ("one seed", 14.0, "mean more than 1 % above none"),
    ],
)
def test_a_mean_beyond_the_tolerance_is_marked_though_seeds_do_not_show_it(verdict, worse, mark):
    cell = {"verdict": verdict, "worse_percent": worse, "reference": "none", "val_ppl": 1.0, "n": 2}
    assert marks(cell | {"diverged": 0, "failed": 0}, []) == mark


def test_failed_runs_are_first_and_skipped_ones_have_their_reasons(page):
    section = page.split('<section id="valid"')[1].split("</section>")[0]
    assert "24 ok, 1 failed, 1 skipped" in section
    assert "too &lt;large&gt;" in section
    first = re.sub(r"<[^>]+>", " ", page.split("<main>")[1])
    lost = "failed train failed after step 7 (exit 3): rank 1 was killed: ddp/int8/ws6/none/seed0"
    assert re.match(r"\s+" + r"\s+".join(map(re.escape, lost.split())), first)
    states = dict(re.findall(r'<li class="([a-z-]+)">.*?<strong>(.*?)</strong>', section, re.DOTALL))
    assert states["failed"] == "every requested run has a result"


def test_the_first_screen_has_the_question_the_claim_the_table_and_a_figure(page):
    first = page.split('<section id="cost"')[0]
    assert "<h1>What do int8 and powersgd save, and at what cost?</h1>" in first
    assert "demo: 25 runs, 1 failed, 1 left out, 3 seeds, 7 ranks" in first
    claim = re.search(r'<p class="answer"><strong>(.*?)</strong>', first)[1]
    assert claim.startswith("int8") and page.count(claim) == 1, "a finding stands once"
    table = shown(page, "glance").set_index("method")
    words = [table["verdict"][f"{label} W = 2"] for label in ("none", "int8", "powersgd")]
    assert words == ["baseline", "same", "worse"]
    assert re.findall(r'<figure id="figure-([^"]+)">', first) == ["quality-time-ddp-ws2-100mbit"]
    assert first.count('class="tip"') == len(LABELS), "each point has its numbers"


def test_what_fell_back_to_float32_is_reported_and_marked_only_where_it_was_most(folder, page):
    rows = [Result(**json.loads(line)) for line in (folder / "results.jsonl").read_text().splitlines()]
    found = {gate.name: gate for gate in gates(made_results.as_read(rows, results_dir=folder))}
    finite = found["no gradient was non-finite"]
    assert (finite.state, finite.text) == ("marked", "23 of 24 runs; not: ddp/int8/ws2/none/seed1")
    encoded = found["compressors encoded at least half of their elements"]
    assert encoded.state == "marked"
    printed = "ddp/int8/ws2 50 % of its elements (7 encodings); ddp/powersgd/ws2 0.9 %"
    assert (
        encoded.text.startswith("23 of 24 runs; not: ddp/int8/ws2/none/seed1; sent as float32")
        and printed in encoded.text
    )
    others = [row for row in rows if row.compressor != "int8"]
    encoded = {gate.name: gate for gate in gates(made_results.as_read(others, results_dir=folder))}[encoded.name]
    assert encoded.state == "passed" and "ddp/powersgd/ws2 0.9 %" in encoded.text


def test_each_row_has_a_command_that_repeats_its_runs(folder, page):
    table = shown(page)
    commands = [shlex.split(html.unescape(found)) for found in re.findall(r"<code>(gradwire run .*?)</code>", page)]
    assert len(commands) == len(table)
    for cell, words in zip(table.to_dict("records"), commands, strict=True):
        assert words[:4] == ["gradwire", "run", "results/demo/config.json", "--"]
        run = f"results/demo/runs/{cell['strategy']}/{cell['compressor']}/ws{cell['W']}/{cell['link']}"
        assert words[words.index("--force") + 1 :] == [f"{run}/seed{seed}/record.json" for seed in (0, 1, 2)]


def test_each_question_has_one_open_figure_and_the_figures_are_files(folder, page):
    assert re.findall(r'<section id="([a-z-]+)"', page) == ["answer", "cost", "save", "time", "valid"]
    names = re.findall(r'<figure id="figure-([^"]+)">', page)
    assert {name.split("-ddp")[0] for name in names} == {
        *("quality-bytes", "quality-time", "loss-steps", "loss-seconds", "step-time", "gradient-error"),
        *("validation-loss", "residual-norm"),
    }
    for question in page.split("<section ")[1:5]:
        assert re.sub(r"<details.*?</details>", "", question, flags=re.DOTALL).count("<figure") == 1
    for name in names:
        assert ET.parse(folder / "figures" / f"{name}.svg").getroot().tag.endswith("svg")
    assert {path.stem for path in (folder / "figures").iterdir()} == set(names)


def test_tables_are_written_as_csv_latex_and_markdown(folder, page):
    table, read = shown(page), pd.read_csv(folder / "tables/cells.csv", keep_default_na=False)
    assert read["step ms"].tolist() == table["step ms value"].astype(float).tolist()
    assert read["compressor"].tolist() == table["compressor"].tolist()
    latex = (folder / "tables/cells.tex").read_text()
    assert all(label in latex for label in LABELS) and r"\begin{longtable}" in latex
    assert len((folder / "tables/cells.md").read_text().splitlines()) == len(table) + 2


def test_parts_of_a_step_add_up_to_it(folder):
    read = pd.read_csv(folder / "tables/step-time.csv", keep_default_na=False)
    for cell in read.to_dict("records"):
        run = folder / f"runs/{cell['strategy']}/{cell['compressor']}/ws{cell['W']}/{cell['link']}"
        profiles = [json.loads((run / f"seed{seed}/profile.json").read_text()) for seed in (0, 1, 2)]
        whole = [sum(v for k, v in one.items() if k not in ("steps", "overlap_ms_per_step")) for one in profiles]
        assert sum(v for k, v in cell.items() if k.endswith("ms")) == pytest.approx(np.mean(whole))


def test_no_results_yet_is_bad_input(tmp_path, capsys):
    assert main(["report", "--results_dir", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "results.jsonl").write_text("")
    assert main(["report", "--results_dir", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "run the experiment" in printed
    assert "holds no result yet" in printed
    assert not (tmp_path / "report.html").exists()


def test_only_failed_cells_make_a_page_that_says_so(tmp_path):
    results = [
        type(one)(
            **{name: getattr(one, name) for name in ("compressor", "strategy", "link", "seed", "world_size")},
            run_name=one.run_name,
            status="failed",
            reason="rank 0: no space left",
        )
        for one in made_results.rows(["none", "int8"], ["ddp"], [(2, "none")], [0])
    ]
    page = report(made_results.write(tmp_path / "demo", results))
    assert page.count("rank 0: no space left") == 1, "runs that failed alike are one line"
    assert page.index("rank 0: no space left") < page.index("ddp/none/ws2/none/seed0") < page.index("ddp/int8/ws2")
    assert re.findall(r'<section id="([a-z-]+)"', page) == ["answer", "valid"], "empty sections are not there"
    assert "<figure" not in page


PRIVATE = {
    "epsilon": 1.7113,
    "delta": 1e-5,
    "noise_multiplier": 0.6,
    "clipped_fraction": 0.875,
    "sampling": "poisson",
    "adjacency": "zero-out",
    "accountant": "prv",
}
MARKUP = "<script>alert('x')</script>&$a_b$|\"q\""


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """One seed, private training, markup in a name, another schema version's line, a broken file, an old figure."""
    results = [
        one.model_copy(update={"run_name": one.run_name.replace(MARKUP, "odd"), **PRIVATE})
        for one in made_results.rows(["none", MARKUP], ["ddp"], [(2, "none")], [0])
    ]
    folder = made_results.write(tmp_path_factory.mktemp("odd") / "demo", results)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps({**results[0].model_dump(), "schema_version": 2, "seed": 1}) + "\n")
    (folder / "runs" / results[0].run_name / "steps.parquet").write_bytes(b"no parquet")
    (folder / "figures").mkdir()
    (folder / "figures/old.svg").write_text("old")
    report(folder)
    return folder


@pytest.fixture(scope="module")
def odd_page(odd) -> str:
    return (odd / "report.html").read_text()


def test_one_seed_has_no_range_and_the_page_says_so(odd_page):
    table = shown(odd_page)
    assert not [title for title in table.columns if "range" in title or "95 %" in title], "empty columns are left out"
    assert "2 of 2 cells have one seed" in odd_page


def test_a_private_run_s_guarantee_is_reported(odd_page, page):
    printed = (
        "ε = 1.71 at δ = 1e-05 (noise multiplier 0.6, poisson sampling, zero-out adjacency, "
        "88 % of the samples clipped, by PRV accountant)"
    )
    assert odd_page.count(printed) == 1
    assert "δ" not in page


def test_markup_in_a_compressor_s_name_stays_text(odd, odd_page):
    assert "<script>alert" not in odd_page
    assert odd_page.count("<script>") == 1
    assert MARKUP in set(shown(odd_page)["compressor"])
    svg = ET.parse(next((odd / "figures").glob("quality-*.svg")))
    assert MARKUP in {element.text for element in svg.iter() if element.tag.endswith("text")}
    assert "\\|" in (odd / "tables/cells.md").read_text()


def test_rows_of_another_schema_version_are_left_out_and_reported(odd_page, odd, tmp_path, capsys):
    assert "line 3 is left out: its schema version is 2, not 1" in odd_page
    assert shown(odd_page)["n"].tolist() == ["1", "1"]
    (tmp_path / "results.jsonl").write_text((odd / "results.jsonl").read_text().splitlines()[-1])
    assert main(["report", "--results_dir", str(tmp_path)]) == 2
    assert "schema version is 2" in capsys.readouterr().err


def test_a_broken_steps_parquet_is_reported_and_the_rest_is_shown(odd_page):
    assert "steps.parquet is unusable" in odd_page
    assert 'id="figure-loss-steps-ddp-ws2-none"' in odd_page


def test_a_second_report_leaves_no_stale_figure(odd):
    assert not (odd / "figures/old.svg").exists()
