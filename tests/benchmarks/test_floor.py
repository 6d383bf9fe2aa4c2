"""The floor of a step against computations by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
floor = importlib.import_module("floor")

RATE = 8e6  # bits per second: a byte takes a microsecond
BURST = 16_000e-6  # seconds of what passes at once
READY = {"last": 0.5, "first": 0.1, "second": 0.3}


def seconds(nbytes):
    return 1514 / 1448 * nbytes / 1e6 - BURST


@pytest.mark.parametrize(
    ("sent", "from_it_on"),
    [
        ({"first": 700_000.0, "second": 110_000.0, "last": 90_000.0}, (0.1, 900_000)),
        ({"first": 100_000.0, "second": 510_000.0, "last": 290_000.0}, (0.3, 800_000)),
        ({"first": 100_000.0, "second": 110_000.0, "last": 690_000.0}, (0.5, 690_000)),
    ],
)
def test_a_step_waits_for_what_is_ready_late(sent, from_it_on):
    when, nbytes = from_it_on
    bounds = floor.least(READY, sent, 50_000.0, (0.07, 0.013), RATE)
    assert bounds == pytest.approx((0.5 + 0.07 + 0.013, seconds(950_000) + 0.013, when + seconds(nbytes) + 0.013))


def test_a_fast_link_leaves_the_processor():
    bounds = floor.least(READY, dict.fromkeys(READY, 100.0), 0.0, (0.07, 0.013), 1e9)
    assert bounds == pytest.approx((0.583, 0.013, 0.513)), "all bytes pass at once"
