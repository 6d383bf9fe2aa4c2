"""The benchmark that shapes links starts, and prints its table; the tables of quality are right."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from gradwire.bench.launch import links

ROOT = Path(__file__).parents[1]
OVERLAP = "--links 100mbit --strategies ddp --cells int8 onebit_adam --rounds 2"


@pytest.mark.full
@pytest.mark.skipif(links.probe().options is None, reason="needs network namespaces")
def test_the_benchmark_on_links_prints_its_table():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks/bench_overlap.py"), *OVERLAP.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) >= 3, done.stdout


@pytest.mark.full
def test_the_benchmark_of_stacks_prints_its_table():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks/bench_stacks.py"), "--stacks", "DDP", "FSDP2", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:] if line.startswith("|")]
    assert [row[2] for row in rows] == ["0 · 100.0% · ="] * 2, done.stdout
    assert "≠" not in done.stdout
    assert "1. parameters is 'int4-diff', but DistributedDataParallel sends none" in done.stdout


def records(path: Path, perplexities: dict[str, dict[int, float]], lr: float = 0.01, unigram: float = 9.5) -> Path:
    """Records of two ranks and one text, by label and seed."""
    sent = {"bytes_raw_total": 8, "bytes_parameters_raw_total": None, "bytes_compressed_total": 2}
    sent |= {"bytes_parameters_total": None, "compression_ratio": 4.0, "compression_ratio_steady": 4.0}
    cell = {"strategy": "ddp", "world_size": 2, "lr": lr, "unigram_ppl": unigram, **sent}
    runs = [(label, seed, ppl) for label, seeds in perplexities.items() for seed, ppl in seeds.items()]
    rows = [
        {"run_name": f"{label}-{seed}", "compressor": label, "seed": seed, "val_ppl": ppl} for label, seed, ppl in runs
    ]
    path.write_text("".join(json.dumps({**cell, **row}) + "\n" for row in rows))
    return path


def run_table(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the script in this process: twenty new ones would each import SciPy."""
    command = ["quality_table.py", *map(str, words)]
    code: int | str | None = 0
    with patch.object(sys, "argv", command), redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
        try:
            runpy.run_path(str(ROOT / "benchmarks" / command[0]), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(command, int(code or 0), out.getvalue(), errors.getvalue())


def quality_table(*words: object) -> str:
    done = run_table(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [(), ("--rates",)])
def test_runs_of_different_texts_are_refused(words, tmp_path):
    one = records(tmp_path / "one", {"none": {0: 10.0}})
    other = records(tmp_path / "other", {"int8": {0: 11.0}}, unigram=9.25)
    both = tmp_path / "both"
    both.write_text(one.read_text() + other.read_text())
    done = run_table(both, *words)
    assert done.returncode == 2
    assert "none-0 (9.5), int8-0 (9.25)" in done.stderr


def test_seeds_may_have_different_texts(tmp_path):
    one = records(tmp_path / "one", {"none": {0: 10.0}, "int8": {0: 11.0}})
    other = records(tmp_path / "other", {"none": {1: 20.0}, "int8": {1: 22.0}}, unigram=9.25)
    both = tmp_path / "both"
    both.write_text(one.read_text() + other.read_text())
    assert "+10.0 %, +10.0 … +10.0" in quality_table(both)


def test_a_cell_of_two_rates_is_refused(tmp_path):
    one = records(tmp_path / "one", {"none": {0: 10.0, 1: 20.0}, "muon": {0: 8.0}})
    other = records(tmp_path / "other", {"muon": {1: 12.0}}, lr=0.02)
    both = tmp_path / "both"
    both.write_text(one.read_text() + other.read_text())
    done = run_table(both)
    assert done.returncode == 2
    assert "runs of 'muon' have different learning rates: [0.01, 0.02]" in done.stderr


def test_seeds_that_none_lacks_are_left_out(tmp_path):
    given = {"none": {0: 10.0, 1: 20.0}, "int8": {0: 11.0, 1: 22.0, 9: 5.0}, "none-0.012": {9: 15.0}}
    rows = [line.split("|") for line in quality_table(records(tmp_path / "a.jsonl", given)).splitlines()[2:]]
    assert [[row[n].strip() for n in (3, 8, 9)] for row in rows] == [
        ["none", "10.00, 20.00", "–"],
        ["int8", "11.00, 22.00", "+10.0 %, +10.0 … +10.0"],
    ]


def test_another_label_than_none_can_be_compared_with(tmp_path):
    given = {"none": {0: 12.0, 1: 10.0}, "muon": {0: 8.0, 2: 4.0}, "muon-int4": {0: 10.0, 1: 1.0, 2: 6.0}}
    path = records(tmp_path / "a", given)
    rows = [line.split("|") for line in quality_table(path, "--against", "muon").splitlines()]
    assert rows[0][9].strip() == "against muon"
    assert [[row[n].strip() for n in (3, 8, 9)] for row in rows[2:]] == [
        ["muon", "8.00, 4.00", "–"],
        ["muon-int4", "10.00, 6.00", "+36.9 %, +25.0 … +50.0"],
        ["none", "12.00", "+50.0 %"],
    ]
    done = run_table(path, "--against", "mu")
    assert done.returncode == 2
    assert "no run of 'mu'; labels: muon, muon-int4, none" in done.stderr
    done = run_table(path, "--against", "muon", "--rates")
    assert done.returncode == 2
    assert "--rates: not allowed with argument --against" in done.stderr


def test_rounds_are_shown_by_length_and_codec(tmp_path):
    given = {"none": {0: 9.0}, "diloco-15-int4": {0: 12.5, 1: 1.0}, "diloco-5": {0: 11.0}, "diloco-15": {0: 12.0}}
    given["diloco-5-int4-beta2"] = {0: 10.0}
    rows = [line.split("|")[1:-1] for line in quality_table(records(tmp_path / "a", given), "--rounds").splitlines()]
    shown = [[field.strip() for field in row] for row in rows]
    assert shown[0] == ["H", "float32", "int4"]
    assert shown[2:] == [["5", "11.00 (4.0×)", "–"], ["15", "12.00 (4.0×)", "12.50 (4.0×)"]]


def test_ranks_of_two_experiments_are_compared_with_every_order(tmp_path):
    """Of 120 orders, 1, 4 and 3 have a sum of squared differences of 0, 2 and 4 from one, so 8 have rho >= 0.8."""
    here = {"none": {0: 10.0}, "a": {0: 11.0}, "b": {0: 12.0}, "c": {0: 13.0}, "d": {0: 14.0}, "e": {0: 15.0}}
    there = {"none": {0: 10.0}, "b": {0: 30.0}, "a": {0: 40.0}, "c": {0: 50.0}, "e": {0: 60.0}, "d": {0: 70.0}}
    paths = records(tmp_path / "here", here | {"f": {0: 9.0}}), records(tmp_path / "there", there | {"a-0.1": {9: 9.0}})
    rows = quality_table(paths[0], "--ranked_by", paths[1]).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:7]] == ["a", "b", "c", "d", "e"]
    said = "Spearman's rank correlation of 5 labels: 0.80, p = 0.067 (one-sided, all 120 orders of the labels)"
    assert rows[-1] == said
    few = records(tmp_path / "few", {"none": {0: 1.0}, "a": {0: 2.0}, "b": {0: 3.0}})
    assert quality_table(few, "--ranked_by", few).endswith("2 labels of both are too few for a rank correlation\n")


METHODS = ["muon", "muon-5-onebit", "onebit_adam", "int4", "topk-ef", "diloco-5-onebit"]


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["quality"], 16),
        (["tuning", "--rates"], 5),
        (["quality-small", "--ranked_by", "quality", "--labels", *METHODS], 6),
        (["quality-llama-small", "--ranked_by", "quality-small", "--labels", *METHODS], 6),
    ],
    ids=str,
)
def test_the_page_has_rows_of_the_tables_of_its_records(words, rows):
    """The page shows the main rows of a table, each as it is printed."""
    files = {path.stem: path for path in (ROOT / "benchmarks").glob("*.jsonl")}
    head, line, *printed = quality_table(*(files.get(word, word) for word in words)).split("\n\n")[0].splitlines()
    page = (ROOT / "benchmarks" / "quality.md").read_text()
    tables = [each.split("\n\n")[0].splitlines() for each in page.split(f"{head}\n{line}\n")[1:]]
    assert any(len(table) == rows and set(table) <= set(printed) for table in tables)


def test_the_page_has_the_records_of_up_to_64_ranks():
    """Rounds of many ranks, each against its optimizer in every step."""
    files = [ROOT / "benchmarks" / f"{name}.jsonl" for name in ("many-ranks", "many-ranks-to-64")]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = sorted((row for row in rows if row["seed"] == 0), key=lambda row: row["world_size"])
    inside = {"none": ("diloco", "AdamW"), "muon": ("muon", "Muon")}
    printed = []
    for base, (prefix, name) in inside.items():
        (every_step,) = [row["val_ppl"] for row in rows if row["compressor"] == base]
        for suffix, embeddings in (("", "as all else"), ("-replay", "replayed, 4 bits")):
            printed += [
                f"| {name} | {embeddings} | {row['world_size']} | {row['compression_ratio']:.1f} × | "
                f"{row['val_ppl']:.2f} | {100 * (row['val_ppl'] / every_step - 1):+.1f} % |"
                for row in rows
                if row["compressor"] == f"{prefix}-5-onebit{suffix}"
            ]
    assert any("| 64 |" in row for row in printed)
    assert "\n".join(printed) in (ROOT / "benchmarks" / "quality.md").read_text()


def test_the_pages_have_the_outer_rate_of_short_rounds_first():
    """Seeds of the library, against AdamW in every step."""

    def perplexities(name: str, label: str, ranks: int) -> dict[int, float]:
        rows = map(json.loads, (ROOT / "benchmarks" / f"{name}.jsonl").read_text().splitlines())
        return {row["seed"]: row["val_ppl"] for row in rows if (row["compressor"], row["world_size"]) == (label, ranks)}

    base, label = perplexities("quality", "none", 2), "diloco-grow-onebit-replay"
    plain, outer = (perplexities("many-ranks-local", name, 8) for name in (label, f"{label}-outer"))
    percent = {seed: f"{100 * (ppl / base[seed] - 1):+.1f} %" for seed, ppl in outer.items()}
    page = " ".join((ROOT / "docs/explanation/local-updates.md").read_text().split())
    assert f"from {100 * (plain[0] / base[0] - 1):.1f} to {percent[0].lstrip('+')}" in page
    quoted = ", ".join(f"{ppl:.2f}" for ppl in outer.values())
    assert f"| {quoted} | {', '.join(percent.values())} |" in (ROOT / "benchmarks" / "quality.md").read_text()
