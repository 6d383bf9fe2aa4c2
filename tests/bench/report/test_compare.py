"""compare: differences paired by seed, their tests, and what cannot be tested.

Of `tables/comparison.py`.
"""

from __future__ import annotations

import math

import made_results
import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_rel

from gradwire.bench.report.tables.table import Table
from gradwire.bench.statistics.seeds import POWER, adjusted, detectable, paired
from gradwire.cli import main


def two(tmp_path, seeds=(0, 1, 2, 3), **changes):
    """Two experiments: the second is 10 % slower under int8, and has one seed more and one cell less."""
    a = made_results.rows(["none", "int8", "int4"], ["ddp"], [(2, "none")], seeds)
    b = made_results.rows(["none", "int8"], ["ddp"], [(2, "none")], [*seeds, 9])
    slower = {"none": 1.0, "int8": 1.1}
    b = [
        one.model_copy(
            update={
                "step_time_ms_mean": one.step_time_ms_mean * slower[one.compressor] * (1 + 0.001 * one.seed),
                **changes,
            }
        )
        for one in b
    ]
    return made_results.write(tmp_path / "a", a), made_results.write(tmp_path / "b", b)


def lines_of(text, title):
    section = text.split(f"## Differences in {title}\n\n")[1].split("\n\n")[0].strip()
    return {
        row.split("|")[1].strip(): [part.strip() for part in row.split("|")[5:-1]] for row in section.splitlines()[2:]
    }


def test_differences_are_paired_by_seed_and_tested(tmp_path, capsys):
    a, b = two(tmp_path)
    assert main(["compare", str(a), str(b), "--tables", str(tmp_path / "tables")]) == 0
    printed = capsys.readouterr().out
    assert "8 runs are in both, 4 in" in printed
    times = lines_of(printed, "step time, ms")
    assert set(times) == {"none", "int8"}
    pairs, one, other, difference, interval, *_, verdict = times["int8"]
    assert pairs == "4"
    assert float(other) / float(one) == pytest.approx(1.1017, rel=1e-3)
    assert float(difference.removesuffix(" %")) == pytest.approx(10.17, abs=0.02)
    assert interval == "+10.00 … +10.33", "four pairs have a range: the factors 1.1 and 1.1 × 1.003"
    assert "| range |" in " ".join(printed.split())
    assert verdict == "higher"
    assert [row[-1] for row in lines_of(printed, "perplexity").values()] == ["equal", "equal"]
    assert "Gradient bytes: equal in all 2 cells." in printed
    assert len(list((tmp_path / "tables").iterdir())) == 3 * 4


def test_one_pair_is_no_test(tmp_path, capsys):
    a, b = two(tmp_path, seeds=[1])
    assert main(["compare", str(a), str(b)]) == 0
    assert lines_of(capsys.readouterr().out, "step time, ms")["int8"][-4:] == ["–", "–", "–", "one pair, no test"]


def test_unlike_machines_and_settings_are_reported(tmp_path, capsys):
    a, b = two(tmp_path, steps=99, environment={"processor": "another"})
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "Machines or versions differ" in printed
    assert "another" in printed
    assert "Settings differ: steps." in printed
    assert "Texts" not in printed


@pytest.mark.parametrize(("unigram_ppl", "shown"), [(600.0012, "600.0012"), (None, "–")])
def test_other_texts_are_reported_though_their_source_has_the_same_name(unigram_ppl, shown, tmp_path, capsys):
    a, b = two(tmp_path, unigram_ppl=unigram_ppl)
    assert main(["compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert f"Texts or tokens differ, and perplexities with them (of a unigram model: 600 | {shown})." in printed
    assert "Settings differ" not in printed


@pytest.mark.parametrize("unigram_ppl", [600.0, math.nextafter(600.0, 700.0)])
def test_a_text_is_the_same_where_only_its_last_bit_differs(unigram_ppl, tmp_path, capsys):
    a, b = two(tmp_path, unigram_ppl=unigram_ppl)
    assert main(["compare", str(a), str(b)]) == 0
    assert "Texts" not in capsys.readouterr().out


def test_experiments_without_a_common_run_are_bad_input(tmp_path, capsys):
    a = made_results.write(tmp_path / "a", made_results.rows(["none"], ["ddp"], [(2, "none")]))
    b = made_results.write(tmp_path / "b", made_results.rows(["none"], ["fsdp2"], [(2, "none")]))
    assert main(["compare", str(a), str(b)]) == 2
    assert "share no run with a result" in capsys.readouterr().err
    assert main(["compare", str(a), str(tmp_path / "c")]) == 2


def test_the_page_has_the_comparison(tmp_path):
    a, b = two(tmp_path)
    assert main(["report", "--results_dir", str(a), "--compare_with", str(b)]) == 0
    page = (a / "report.html").read_text()
    assert 'id="table-compare-step-time-ms-mean"' in page
    assert "Holm" in page


@pytest.mark.parametrize("pairs", [4, 5])
def test_paired_differences_are_those_of_scipy(pairs):
    one, other = np.array([3.0, 5.0, 4.0, 7.0, 6.0])[:pairs], np.array([3.3, 5.1, 4.8, 7.1, 6.7])[:pairs]
    found, test = paired(one, other), ttest_rel(np.log(other), np.log(one))
    assert found.n == pairs
    assert found.mean == pytest.approx(100 * (math.prod(other / one) ** (1 / pairs) - 1))
    assert found.p == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    ends = (100 * (7.1 / 7 - 1), 20.0) if pairs < 5 else (100 * math.expm1(low), 100 * math.expm1(high))
    assert (found.low, found.high) == pytest.approx(ends)


def test_samples_without_spread_need_no_test():
    assert paired([2.0, 3.0], [2.0, 3.0])[1:] == (0.0, 0.0, 0.0, 1.0, 0.0)
    assert paired([1.0, 2.0], [2.0, 4.0]).p == 0.0
    assert math.isnan(paired([1.0], [2.0]).p)
    assert paired([], []).n == 0


def test_adjusted_p_values_are_holm_s():
    assert adjusted([0.01, math.nan, 0.04, 0.03]) == pytest.approx([0.03, math.nan, 0.06, 0.06], nan_ok=True)
    assert adjusted([0.5, 0.9, 0.2]) == pytest.approx([1.0, 1.0, 0.6])
    assert adjusted([]) == []


def test_holm_keeps_false_findings_in_a_table_below_5_percent():
    p = np.random.default_rng(3).uniform(size=(4000, 9))  # nine cells without a difference
    rate = np.mean([min(adjusted(row)) < 0.05 for row in p])
    assert 0.04 < rate < 0.06  # uncorrected: 37 %


@pytest.mark.parametrize("pairs", [3, 4, 8])
def test_a_detectable_difference_is_found_in_four_of_five_experiments(pairs):
    std = 0.006
    shift = detectable(pairs, std)
    draws = np.random.default_rng(pairs).normal(shift, std, (20_000, pairs))
    assert np.mean(ttest_1samp(draws, 0, axis=1).pvalue < 0.05) == pytest.approx(POWER, abs=0.01)


def test_the_spread_of_the_pairs_says_what_they_see():
    one, other = np.array([50.0, 51.0, 49.5, 50.3]), np.array([50.6, 51.2, 50.1, 50.2])
    found = paired(one, other)
    assert found.sees == pytest.approx(100 * math.expm1(detectable(4, np.std(np.log(other / one), ddof=1))))
    assert 0 < found.sees < paired(one[:3], one[:3] * [1, 1.02, 1]).sees < 12


def test_a_table_without_rows_is_written(tmp_path):
    Table.of("empty", "Nothing", [], {}).save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
