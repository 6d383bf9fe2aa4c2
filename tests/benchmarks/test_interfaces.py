"""The bytes at the interfaces, on rows of a known law."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from links_rows import FACTOR, experiment, row

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
interfaces = importlib.import_module("interfaces")


def table(text):
    """The rows of a Markdown table by column."""
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], each, strict=True)) for each in rows[2:]]


def test_the_backend_s_factors_are_found_and_explain_the_interface_bytes():
    rows = [each for each in experiment() if each.bytes_interface_total]
    assert interfaces.backend_factors(rows) == pytest.approx(FACTOR, rel=1e-4)
    odd = rows[0].model_copy(update={"bytes_interface_total": 3 * rows[0].bytes_interface_total})
    assert interfaces.backend_factors([odd, *rows[1:]]) == pytest.approx(FACTOR, rel=0.02)
    shown = table(interfaces.report(experiment()))
    assert len(shown) == len(rows)
    assert {each["rest"].lstrip("+-") for each in shown} == {"0.0 %"}
    scattered = next(each for each in shown if (each["strategy"], each["compressor"]) == ("fsdp2", "none"))
    assert scattered["sent by"] == "reduce_scatter + all_gather"
    assert float(scattered["quotient"]) == pytest.approx((4 * 2.07 + 7 * 1.05) / 11, abs=6e-4)


def test_cables_between_islands_have_a_separate_table():
    cables = {"link": "between-100mbit", "islands": 2, "bytes_interface_total": None}
    flat = cables | {"bytes_interface_between_total": 7_000_001}
    hsdp = cables | {"strategy": "hsdp", "bytes_between_total": 2_000_000, "bytes_interface_between_total": 2_050_000}
    made = row("fsdp2", "none", "100mbit")
    sharded, islands = table(interfaces.report([made.model_copy(update=each) for each in (flat, hsdp)]))
    assert (sharded["strategy"], sharded["islands"], sharded["MB counted"], sharded["MB interface"]) == (
        *("fsdp2", "2", "–", "7.000"),
    )
    assert (islands["strategy"], islands["MB counted"], islands["quotient"]) == ("hsdp", "2.000", "1.025")
