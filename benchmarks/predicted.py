"""Hold ``gradwire predict``'s descriptions against recorded steps on links: ``python benchmarks/predicted.py [--all]``.

A description has the model, its ranks, the link and float32's step without a link; nothing else of an experiment is
used. Codecs have the rates of ``codecs-cpu.json``. ``--all`` prints every cell.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gradwire.base.strict import checked
from gradwire.base.units import bits_per_second
from gradwire.bench.codecs.rates import read
from gradwire.bench.config import Cell
from gradwire.bench.report.predict import Options, shapes_of
from gradwire.bench.report.rows.record import read_results
from gradwire.bench.report.tables.table import markdown
from gradwire.bench.statistics.cost_model import Islands, Place
from gradwire.bench.statistics.description import CELLS, Description, Range

FOLDER = Path(__file__).parent
RATES = read(FOLDER / "codecs-cpu.json")
DESCRIBED = {"model": "tiny", "vocab_size": 1024, "world_size": 2, "bandwidth": "1gbit"}
TINY = shapes_of(checked(Options, DESCRIBED, "predict"), 128)
CELLS_OF_OVERLAP: dict[str, dict[str, Any]] = {
    "none": {"algorithm": "exchange"},
    "onebit": {"error_feedback": True},
    "topk": {"density": 0.01, "error_feedback": True},
    "powersgd": {"rank": 4, "error_feedback": True},
    "int4": {"method": "int8", "num_bits": 4, "block": 64},
    "onebit_adam": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 3},
}
BEFORE = ", before"  # the earlier of overlap.csv's two days
CLOSE = 1.05  # the measured step of the predicted first place over that of the measured one

# benchmarks/fsdp.md: mean steps of the seeds, in ms. Two flat ranks, whose float32 step without a link is that of
# overlap.csv; four ranks, flat and as two islands, which share two cores.
FSDP: dict[str, tuple[Any, float]] = {
    "int8-params8": ({"method": "int8", "param_compress": "int8"}, 188.0),
    "int4-diff-int8": ({"method": "int8", "param_compress": "int4-diff"}, 129.65),
    "int4-diff-int4": ({"method": "int8", "num_bits": 4, "param_compress": "int4-diff"}, 108.9),
    "none": ({}, 502.4),
}
FLAT: dict[str, tuple[Any, float]] = {
    "none": ({}, 715.95),
    "int8-params8": ({"method": "int8", "param_compress": "int8"}, 264.05),
}
HSDP: dict[str, tuple[Any, float]] = {
    "none": ({}, 352.2),
    "int4-ef": ({"method": "int8", "num_bits": 4, "block": 64, "error_feedback": True}, 224.8),
    "onebit-adam": ({"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 3}, 205.95),
    "diloco-5-onebit": (CELLS["diloco-5-onebit"], 188.75),
}


class Recorded(NamedTuple):
    """A recorded step.

    Attributes:
        source: The file, and what of it.
        strategy: The strategy.
        world: Number of ranks.
        link: A rate.
        label: The cell's name.
        cell: The cell.
        compute: Seconds of float32's step without a link.
        step: Seconds of the step.
        islands: Number of islands, with a cable of that rate each.
    """

    source: str
    strategy: str
    world: int
    link: str
    label: str
    cell: Any
    compute: float
    step: float
    islands: int = 1

    def described(self) -> tuple[Description, Cell]:
        """What a prediction knows of it."""
        place = Place(self.world, bits_per_second(self.link), 0.0, Islands(self.islands))
        return Description(*TINY, self.compute, self.strategy, place, RATES), Cell.parse(self.label, self.cell)

    def expected(self) -> Range:
        """Seconds of the step as predicted."""
        description, cell = self.described()
        (expected,) = description.expect([cell], [])
        return expected.step


def of_records(name: str) -> list[Recorded]:
    """The cells of a file of records: an optimizer's float32 step without a link is its computation."""
    rows, _ = read_results(FOLDER / f"{name}.jsonl")
    alone = {row.inner: (row.typical_step_ms or 0) / 1e3 for row in rows if row.link == "none" and row.averages}
    return [
        Recorded(
            f"{name}.jsonl", row.strategy, row.world_size, row.link, row.compressor, row.compress_config,
            alone[row.inner], (row.typical_step_ms or 0) / 1e3,
        )
        for row in rows
        if row.link != "none"
    ]  # fmt: skip


def of_overlap() -> list[Recorded]:
    """The overlapped cells of `tiny` in overlap.csv, and float32's step."""
    rows = [row for row in csv.DictReader((FOLDER / "overlap.csv").open()) if row["model"] == "tiny"]
    alone = {row["strategy"]: row for row in rows if row["link"] == "none" and row["cell"] == "float32"}
    cells = []
    for row in rows:
        if row["link"] == "none" or row["reductions"] == "synchronous":
            continue
        cell = {} if row["cell"] == "float32" else CELLS_OF_OVERLAP.get(row["cell"], {})
        label = {"float32": "none", "none": "exchange"}.get(row["cell"], row["cell"])
        cell = {"method": "none", **cell} if label in ("none", "exchange") else cell
        source = "overlap.csv" + BEFORE * row["measured"].startswith("before")
        compute = float(alone[row["strategy"]]["step"]) / 1e3
        cells.append(Recorded(source, row["strategy"], 2, row["link"], label, cell, compute, float(row["step"]) / 1e3))
    return cells


def of_fsdp() -> list[Recorded]:
    """The cells of fsdp.md."""
    flat = [
        Recorded("fsdp.md", "fsdp2", 2, "100mbit", label, cell, 89.7e-3, 1e-3 * step)
        for label, (cell, step) in FSDP.items()
    ]
    flat += [
        Recorded("fsdp.md", "fsdp2", 4, "100mbit", label, cell, 192.85e-3, 1e-3 * step, 2)
        for label, (cell, step) in FLAT.items()
    ]
    return flat + [
        Recorded("fsdp.md", "hsdp", 4, "100mbit", label, cell, 184.35e-3, 1e-3 * step, 2)
        for label, (cell, step) in HSDP.items()
    ]


def recorded() -> list[Recorded]:
    """All recorded cells."""
    return [*of_overlap(), *of_records("time-to-loss"), *of_records("many-ranks-links"), *of_fsdp()]


def main() -> None:
    """Print the errors of each source, the first places, and perhaps every cell."""
    by_source: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    places: defaultdict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    lines = []
    for cell in recorded():
        typical, low, high = cell.expected()
        error, inside = typical / cell.step - 1, low <= cell.step <= high
        file = cell.source.removesuffix(BEFORE)
        for source in (file, "all but overlap.csv") if file != "overlap.csv" else (file,):
            by_source[source].append((error, inside))
        places[cell.source, cell.strategy, cell.world, cell.link].append((typical, cell.step))
        shown = [f"{1e3 * seconds:,.0f}" for seconds in (cell.step, typical, low, high)]
        lines.append(
            [cell.source, cell.strategy, str(cell.world), cell.link, cell.label, *shown, f"{100 * error:+.0f} %"]
        )
    if "--all" in sys.argv:
        headers = ["source", "strategy", "W", "link", "cell", "measured", "predicted", "low", "high", "off"]
        print(markdown(lines, headers, left=(0, 1, 3, 4)) + "\n")
    rows = []
    for source, errors in by_source.items():
        sizes = sorted(abs(error) for error, _ in errors)
        within = [sum(size <= limit for size in sizes) / len(sizes) for limit in (0.1, 0.25)]
        shares = [median(sizes), sizes[-1], *within, sum(inside for _, inside in errors) / len(errors)]
        rows.append([source, str(len(sizes)), *(f"{100 * share:.0f} %" for share in shares)])
    print(markdown(rows, ["source", "cells", "median", "worst", "within 10 %", "within 25 %", "in the range"]))
    several = {place: pairs for place, pairs in places.items() if len(pairs) > 1}
    regrets = {place: min(pairs)[1] / min(step for _, step in pairs) for place, pairs in several.items()}
    right = sum(regret <= CLOSE for regret in regrets.values())
    print(f"\nThe predicted first place is the measured one, or within 5 % of it, in {right} of {len(regrets)} places.")
    for place, regret in regrets.items():
        if regret > CLOSE:
            print(f"{', '.join(map(str, place))}: {100 * (regret - 1):.0f} % longer than the measured first place")


if __name__ == "__main__":
    main()
