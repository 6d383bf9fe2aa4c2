"""The file of simulated clusters against a simulation."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))
scale = importlib.import_module("scale")


def test_the_file_is_of_this_simulation():
    made = json.loads((FOLDER / "scale.json").read_text("utf-8"))
    for run, row in scale.losses().items():
        assert made["losses"][run]["rounds"] == row["rounds"]
        assert made["losses"][run]["simulated"] == pytest.approx(row["simulated"], rel=1e-3)
    place = scale.PLACES["64 sites, 500 Mbit/s"]
    goodput = scale.goodput("rounds", *place, scale.HOURS[4])
    assert made["goodput"]["rounds: 64 sites, 500 Mbit/s"][4] == pytest.approx(goodput, rel=1e-3)
    row = scale.PUBLISHED[-3]
    assert made["needed"][-3][2] == pytest.approx(scale.needed(row, 90), rel=1e-3)
