"""Simulate clusters that cannot be measured here: ``python benchmarks/scale.py`` (with ``pip install simpy``).

Writes ``scale.json`` and the figures of ``docs/explanation/scale.md``: the errors against recorded runs, the method to
take for ranks and a bandwidth, compute utilisation beside a published simulation, and goodput when machines are lost.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import predicted
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from simulated_cluster import Machines, seconds_per_step, slowest, work_of

from gradwire.base.files import write_text
from gradwire.base.units import bits_per_second, rate_text
from gradwire.bench.codecs.rates import RECORDED, read
from gradwire.bench.config import Cell
from gradwire.bench.report.page.render import svg
from gradwire.bench.report.page.style import BOTTOM, PAPER, TOP, WIDTH, Chart, axes, logarithmic, looks, styled
from gradwire.bench.report.predict import NVLINK
from gradwire.bench.statistics import description
from gradwire.bench.statistics.cost_model import NO_ISLANDS, Islands, Place
from gradwire.bench.statistics.description import BACKENDS, CELLS, Constants, Description, shapes_of_size

FOLDER = Path(__file__).parent
RATES = read(RECORDED)  # of an H200
TYPICAL = BACKENDS["cuda"][0]
FLOPS = 0.4 * 989e12  # of an H100: an assumed share of its bf16 peak
TOKENS = 16_384  # of a rank in a step
SIGMA = 0.05  # of the logarithm of a machine's step
RACK, SITE, INSIDE, FAST = 50e-6, 20e-3, 10e-6, 10e9  # latencies; the rate from which links are those of a rack
CLOSE = 1.05  # a step that long over the fastest is as good
RANKS = [16, 64, 256, 1024, 4096]
BANDWIDTHS = [1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 4e11]
EVERY = ("none", "bf16-native", "int8", "int4", "onebit_adam", "powersgd")  # from what changes training least
ROUNDS = ("diloco-5-onebit", "streaming-15-onebit", "diloco-30-int4", "diloco-30-onebit", "diloco-100-int4")


class Setup(NamedTuple):
    """A model that the ranks of an island hold in shards."""

    numel: float
    ranks: int

    @property
    def compute(self) -> float:
        """Seconds of a step's passes."""
        return 6 * self.numel * TOKENS / FLOPS

    def described(self, world: int, bandwidth: float) -> Description:
        """What is known of it with so many ranks, and so many bits per second between islands."""
        islands = Islands(world // self.ranks, bits_per_second(NVLINK), INSIDE)
        place = Place(world, bandwidth, RACK if bandwidth >= FAST else SITE, islands)
        return Description(shapes_of_size(round(self.numel)), 0, self.compute, "hsdp", place, RATES)


SEVEN = Setup(7e9, 8)
SETUPS = {
    "0.1 B, islands of 8": Setup(1e8, 8),
    "1 B, islands of 8": Setup(1e9, 8),
    "7 B, islands of 8": SEVEN,
    "70 B, islands of 32": Setup(7e10, 32),
}


# Against recorded runs


def errors() -> dict[str, list[float]]:
    """Relative errors of simulated steps by source: their number, median and largest."""
    sizes: defaultdict[str, list[float]] = defaultdict(list)
    for run in predicted.recorded():
        step = seconds_per_step(work_of(*run.described(), BACKENDS["cpu"][0]))
        for source in (run.source.removesuffix(predicted.BEFORE), "all"):
            sizes[source].append(abs(step / run.step - 1))
    return {source: [len(each), median(each), max(each)] for source, each in sizes.items()}


GROUPS, HEARTBEAT = 4, 5.0  # of the runs of elastic.jsonl; seconds of their lighthouse
HALF = 0.5  # of its round, after which a group is killed: the records have the round alone


def losses() -> dict[str, Any]:
    """Runs whose group was killed: recorded and simulated seconds, and rounds of four and of three groups."""
    runs = [json.loads(line) for line in (FOLDER / "elastic.jsonl").read_text("utf-8").splitlines()]
    seconds = {run["compressor"]: run["training_s"] for run in runs}
    rows = {}
    for run in runs:
        faults, rounds = run["compress_config"]["faults"], run["steps"] // run["compress_config"]["H"]
        if "kill" in faults:
            ((kill,), each) = faults["kill"], seconds[run["compressor"].split("-")[0]] / rounds / GROUPS
            away = HEARTBEAT + (faults.get("rejoin_after", math.inf) - 1 - HALF) * (GROUPS - 1) * each
            killed = (kill["round"] + HALF) * GROUPS * each
            lives = {kill["rank"]: [killed]}.get
            machines = Machines(GROUPS, lives, each.__mul__, away, detect=HEARTBEAT)
            ended = machines.in_rounds(rounds)
            means = [machines.means.count(groups) for groups in (GROUPS, GROUPS - 1)]
            rows[run["compressor"]] = {"recorded": run["training_s"], "simulated": ended, "rounds": means}
    return rows


# The method to take


def to_take(setup: Setup) -> Iterator[list[tuple[str, float] | None]]:
    """For each number of ranks and bandwidth the method in every step, and how many times faster local updates are.

    The method is the first of `EVERY` whose step is as good as the fastest one's.
    """
    for world in RANKS:
        machines = world // setup.ranks
        cells = [Cell.parse(label, CELLS[label]) for label in EVERY + ROUNDS]
        sent = [setup.described(world, FAST).traffic(cell) for cell in cells if machines > 1]
        row: list[tuple[str, float] | None] = []
        for here in (setup.described(world, bandwidth) for bandwidth in BANDWIDTHS if sent):
            works = {
                cell.label: work_of(here, cell, TYPICAL, traffic) for cell, traffic in zip(cells, sent, strict=True)
            }
            steps = {label: seconds_per_step(work, machines, SIGMA) for label, work in works.items()}
            fastest = min(steps[label] for label in EVERY)
            taken = next(label for label in EVERY if steps[label] <= CLOSE * fastest)
            row.append((taken, steps[taken] / min(steps[label] for label in ROUNDS)))
        yield row or [None] * len(BANDWIDTHS)


# Beside a published simulation: Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv:2501.18512,
# 2025), table 4: Gbit/s for a compute utilisation in percent, with fragments of three layers.

PUBLISHED = [*csv.DictReader((FOLDER / "published-utilisation.csv").open(encoding="utf-8"))]
LEVELS = ("50", "80", "90", "95", "99")
BF16 = {"method": "bf16", "error_feedback": False}
HUNDRED = {**description.LOCAL, "H": 100, "algorithm": "exchange"}
IDEAL = Constants(0.0, 0.0, description.factors(1, 1, 1, 1), 0.0, 0.0)  # no overheads and free codecs, as theirs


def utilisation(row: Mapping[str, str], bandwidth: float, constants: Constants, method: str = "") -> float:
    """The compute utilisation of two workers with the method of a published row, or another one on its model."""
    name, compute = method or row["method"], float(row["step"])
    options = CELLS.get(name, {**BF16, "algorithm": "native"})
    if name.startswith("H = 100"):
        streaming = {"streaming": {"fragments": int(row["layers"]) // 3, "delay": 1}} if "streaming" in name else {}
        options = {**(description.FOUR_BITS if "4 bits" in name else BF16), **HUNDRED, **streaming}
    shapes, place = shapes_of_size(int(row["model"].split()[0]) * 10**9), Place(2, bandwidth, 0.0, NO_ISLANDS)
    workers = Description(shapes, 0, compute, "ddp", place, RATES)
    return compute / seconds_per_step(work_of(workers, Cell.parse("published", options), constants))


def needed(row: Mapping[str, str], level: float) -> float:
    """Gbit/s for a compute utilisation in percent on links without overheads."""
    low, high = -2.0, 4.0  # powers of ten
    while high - low > 0.01:
        middle = (low + high) / 2
        enough = 100 * utilisation(row, 1e9 * 10**middle, IDEAL) >= level
        low, high = (low, middle) if enough else (middle, high)
    return 10**high


# Lost machines

HOURS = [10, 30, 100, 300, 1000, 3000, 10000]  # between the losses of a machine
AWAY, CHECKPOINT = 600.0, 10.0  # seconds until a machine is back, and of writing a checkpoint
STATE = 12  # bytes of a parameter for a machine that joins: its anchor, AdamW's moments
STEPS, WEEK = 100, 7 * 24 * 3600.0  # of a round; seconds
PLACES = {"64 sites, 500 Mbit/s": (64, 500e6), "512 machines, 10 Gbit/s": (512, 10e9)}


def goodput(kind: str, number: int, bandwidth: float, hours: float) -> float:
    """The share of a week's computation that is in the model, in rounds or from checkpoints."""
    draw, loss, state = random.Random(7), 3600 * hours, 8 * STATE * SEVEN.numel / bandwidth

    def lives(machine: int) -> Iterator[float]:
        while True:
            yield draw.expovariate(1 / loss)

    if kind == "rounds":
        each = STEPS * SEVEN.compute
        machines = Machines(number, lives, lambda groups: each, AWAY, state, HEARTBEAT)
        seconds = machines.in_rounds(round(WEEK / each))
        return each * sum(machines.means) / number / seconds
    # Young, "A first order approximation to the optimum checkpoint interval", 1974
    between = math.sqrt(2 * CHECKPOINT * loss / number)
    return Machines(number, lives, lambda groups: between, AWAY, state).from_checkpoints(WEEK, CHECKPOINT) / WEEK


# The file and the figures


def simulated() -> dict[str, Any]:
    """All that the page shows."""
    gbit = [10 ** (power / 6) for power in range(-6, 19)]
    ten = [row for row in PUBLISHED if row["model"] == "10 B"]
    shown = [*(row["method"] for row in ten), "int4", "onebit_adam"]
    return {
        "errors": errors(),
        "losses": losses(),
        "stragglers": {str(steps): slowest(0.5, RANKS[-1], steps, SIGMA) for steps in (1, 30)},
        "methods": {name: [*to_take(setup)] for name, setup in SETUPS.items()},
        "needed": [[needed(row, float(level)) for level in LEVELS] for row in PUBLISHED],
        "gbit": gbit,
        "utilisation": {name: [utilisation(ten[0], 1e9 * rate, TYPICAL, name) for rate in gbit] for name in shown},
        "goodput": {
            f"{kind}: {name}": [goodput(kind, *place, hours) for hours in HOURS]
            for name, place in PLACES.items()
            for kind in ("rounds", "checkpoints")
        },
    }


def maps(methods: Mapping[str, Sequence[Sequence[tuple[str, float] | None]]]) -> str:
    """A map of ranks over bandwidth for each model."""
    looked, apart, rows = looks(EVERY), 1.35, len(methods) // 2
    height = 1 / (1 + apart * (rows - 1))
    with styled():
        chart = Chart(Figure(figsize=(WIDTH, TOP + 2 * rows + BOTTOM)))
        for number, (name, table) in enumerate(methods.items()):
            row, column = divmod(number, 2)
            place = (0.12 + 0.47 * column, (rows - 1 - row) * apart * height, 0.4, height)
            ax = chart.figure.add_axes(place, title=name, xlim=(0, len(BANDWIDTHS)), ylim=(0, len(RANKS)))
            for y, of_ranks in enumerate(table):
                for x, field in enumerate(each for each in of_ranks if each):
                    chart.handles[field[0]] = Patch(color=looked[field[0]].colour)
                    ax.add_patch(Rectangle((x, y), 1, 1, color=looked[field[0]].colour, lw=0))
                    ax.text(x + 0.5, y + 0.35, f"{field[1]:.2g}", ha="center", fontsize=5, color=PAPER)
            ticks = range(0, len(BANDWIDTHS), 2)
            ax.set_xticks([tick + 0.5 for tick in ticks], [rate_text(BANDWIDTHS[tick])[:-3] for tick in ticks])
            ax.set_yticks([y + 0.5 for y in range(len(RANKS))], [*map(str, RANKS)] if not column else [""] * len(RANKS))
            ax.set(xlabel="bit/s" if row + 1 == rows else "", ylabel="" if column else "ranks")
            ax.grid(visible=False)
        return svg(chart.plot("scale-methods", "The method to take in every step, and the gain of local updates."))


def lines(labels: Sequence[str], x: Sequence[float], curves: Mapping[str, Sequence[float]], mark: str = "") -> str:
    """Curves of percentages, and with them the published points of their methods on 10 B."""
    looked, published = looks(curves), {row["method"]: row for row in PUBLISHED if row["model"] == "10 B"}
    with styled():
        chart, ax = axes(*labels)
        for label, shares in curves.items():
            style = looked[label].line
            (chart.handles[label],) = ax.plot(x, [100 * share for share in shares], **(style | {"marker": mark}))
            if label in published:
                points = [float(published[label][level]) for level in LEVELS]
                ax.plot(points, [*map(int, LEVELS)], **(style | {"ls": ""}))
        logarithmic(ax, "x")
        ax.set_ylim(0, 102)
        return svg(chart.plot(labels[2].split()[0], f"{labels[2]} over {labels[1]}."))


def main() -> None:
    """Simulate, write the file and the figures, and print the errors."""
    made = json.loads(json.dumps(simulated()), parse_float=lambda number: float(f"{float(number):.4g}"))
    write_text(FOLDER / "scale.json", json.dumps(made) + "\n")
    two = "10 B parameters, 0.8 s per step, two workers", "Gbit/s", "compute utilisation, %"
    week = "7 B parameters, a week", "hours between the losses of a machine", "goodput, %"
    images = FOLDER.parent / "docs" / "images"
    write_text(images / "scale-methods.svg", maps(made["methods"]))
    write_text(images / "scale-utilisation.svg", lines(two, made["gbit"], made["utilisation"]))
    write_text(images / "scale-goodput.svg", lines(week, HOURS, made["goodput"], "o"))
    print(json.dumps({key: made[key] for key in ("errors", "losses", "stragglers", "needed")}))


if __name__ == "__main__":
    main()
