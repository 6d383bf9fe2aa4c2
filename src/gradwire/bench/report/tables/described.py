"""Predictions of a description as text: a ranked table, the quality that records know, and the line to type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any, NamedTuple

from gradwire.base.files import parse_json
from gradwire.base.units import rate_text
from gradwire.bench.config import BASELINE, Cell
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables.quality import FREE
from gradwire.bench.report.tables.table import MISSING, markdown, number
from gradwire.bench.statistics.description import Description, Expected, Range
from gradwire.bench.statistics.seeds import TOLERANCE

RECORDS = Path(__file__).with_name("evidence.json")  # written by benchmarks/evidence.py
FAR = 10  # times another size
WIDTH = 98  # of a line to type
GAINS = ["method", "× none", "range", "× bf16", "N/(1+α)", "pays below", "range", "MB", "GB"]
UNKNOWN = """\
Ranges are between favourable and unfavourable constants of the backend. Not known: stragglers
and lost machines; other traffic on a link; a latency counts once per collective and step, not
per bucket or block. `sent`: by a rank per step; `between`: what of it leaves its island. `MB`:
of residuals, replicas and anchors on a rank, without the optimizer's moments. `N/(1+α)`: the
speed-up over one rank, where α is the time of a step outside computation over that of
computation. `GB`: peak memory on a rank, from the measured one."""


class Evidence(NamedTuple):
    """A recorded difference in perplexity from the same optimizer in every step.

    Attributes:
        cell: The cell's options, without those of `FREE`.
        parameters: The model's.
        world_size: Number of ranks.
        seeds: Number of seeds.
        percent: Percent of perplexity above: mean, and the lower and upper end of its spread (None with one seed).
        source: The file of its records.
    """

    cell: Mapping[str, Any]
    parameters: int
    world_size: int
    seeds: int
    percent: tuple[float, float | None, float | None]
    source: str

    def __str__(self) -> str:
        mean, low, high = (None if end is None else round(end, 1) + 0.0 for end in self.percent)  # + 0.0: no -0.0
        ends = "" if low is None or high is None else f" [{low:+.1f}, {high:+.1f}]"
        seeds = f"{self.seeds} seeds" if self.seeds > 1 else "one seed"
        return f"{mean:+.1f} %{ends}, {seeds}, {count(self.parameters)}, W = {self.world_size}"

    def distance(self, parameters: float, world: int) -> float:
        """How far its model and number of ranks are from others, as a product of quotients' logarithms."""
        return abs(math.log(self.parameters / parameters)) + abs(math.log(self.world_size / world))


def evidence() -> list[Evidence]:
    """The recorded differences that the package has."""
    return [Evidence(**record) for record in parse_json(RECORDS.read_text("utf-8"))]


def options_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's options that a record must have as well."""
    return {key: value for key, value in flat.items() if key not in FREE}


def nearest(cell: Cell, parameters: float, world: int, known: Sequence[Evidence]) -> Evidence | None:
    """The record of a cell whose model and number of ranks are nearest; None without any."""
    alike = [record for record in known if record.cell == options_of(cell.flat())]
    return min(alike, key=lambda record: (record.distance(parameters, world), -record.seeds), default=None)


def qualities(
    expected: Sequence[Expected], description: Description, measured: Mapping[str, Evidence] = MappingProxyType({})
) -> dict[str, Evidence | None]:
    """What an experiment measured of each cell, else its nearest record, by label."""
    known, numel, world = evidence(), description.numel, description.place.world
    cells = [row.cell for row in expected]
    return {cell.label: measured.get(cell.label) or nearest(cell, numel, world, known) for cell in cells}


def described(
    expected: Sequence[Expected],
    description: Description,
    quality: Mapping[str, Evidence | None],
    peaks: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """Format predictions as Markdown.

    Args:
        expected: The predicted cells, fastest first.
        description: The description.
        quality: What is known of each cell's perplexity.
        peaks: Predicted peak memory of a rank in GB, by label.
    """
    numel = description.numel
    known = {label: record for label, record in quality.items() if record}
    within = [label for label, record in known.items() if record.percent[0] <= TOLERANCE]
    first = f"Fastest: `{expected[0].cell.label}`"
    first += f"; with at most {TOLERANCE:g} % more perplexity in its nearest record: `{within[0]}`." if within else "."
    near = any(max(record.parameters / numel, numel / record.parameters) <= FAR for record in known.values())
    size = "" if near else f"\nNo record is within a factor of {FAR} of this model's size."
    sent = "between" if description.islands > 1 else "sent"
    steps, gains, records, lines = list[list[str]](), list[list[str]](), list[list[str]](), list[str]()
    for row in expected:
        label, none, below = row.cell.label, row.gains[BASELINE], row.below[BASELINE]
        pays, record = (
            [crossover_text(below.typical), interval_text(below.low, below.high)],
            str(quality[label] or "none"),
        )
        if label == BASELINE:
            pays, record = [MISSING, MISSING], MISSING
        share = description.computed(label) / row.step.typical
        against = [f"{none.typical:.3g}", ends(none, "{:.3g}"), f"{row.gains[BF16].typical:.3g}"]
        steps.append([label, bytes_text(row.between), *ranged(row.exposed), *ranged(row.step), f"{100 * share:.0f} %"])
        peak = [number(peaks.get(label), "{:.3f}")] if peaks else []
        speed_up = f"{description.place.world * share:,.3g}"
        gains.append([label, *against, speed_up, *pays, f"{row.memory / 1e6:,.0f}", *peak])
        records.append([label, record])
        lines.append(fill(f"{label}: {line_of(row.cell)}", WIDTH, subsequent_indent="    "))
    parts = [
        f"Ceiling: the {duration(description.compute)} that a step computes. Codecs: {description.rates.device}.",
        fill(first, WIDTH),
        markdown(steps, ["method", sent, "exposed", "range", "step", "range", "ceiling"]),
        markdown(gains, GAINS if peaks else GAINS[:-1]),
        UNKNOWN,
        markdown(records, ["method", "perplexity, nearest record"], left=(0, 1)),
        f"Perplexity: percent above the same optimizer in every step.{size}",
        "\n".join(["```text", *lines, "```"]),
    ]
    return "\n\n".join(parts)


def crossover_text(rate: float) -> str:
    """A crossover bandwidth in words, also if there is none."""
    return "never" if rate == 0 else "always" if math.isinf(rate) else rate_text(rate)


def interval_text(low: float, high: float) -> str:
    """The interval of a crossover in words."""
    ends = crossover_text(low), crossover_text(high)
    return ends[0] if ends[0] == ends[1] else f"[{ends[0]}, {ends[1]}]"


def ranged(time: Range) -> list[str]:
    """A time, and its range in the same unit."""
    scale = 1e3 if time.typical < 1 else 1
    return [duration(time.typical), ends(Range(*(scale * value for value in time)), "{:,.4g}")]


def ends(value: Range, form: str) -> str:
    """The range of a number."""
    return f"{form.format(value.low)} … {form.format(value.high)}"


def duration(seconds: float) -> str:
    """A time with three digits."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{float(f'{seconds:.3g}'):,g} s"


def bytes_text(nbytes: float) -> str:
    """Bytes with three digits."""
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if nbytes < 999.5 * size:
            return f"{nbytes / size:,.3g} {unit}"
    return f"{nbytes / 1e9:,.3g} GB"


def count(number: float) -> str:
    """A number of parameters with two digits."""
    return f"{float(f'{number / 1e6:.2g}'):,g} M" if number < 999.5e6 else f"{number / 1e9:,.2g} B"


def line_of(cell: Cell) -> str:
    """The call that uses a cell; the cell itself, for ``compressors:``, if the call is of an optimizer."""
    if not cell.hooked and cell.param_compress == "none":
        return "as it is"
    if not cell.communication.averages_gradients:
        return "{" + ", ".join(f"{key}: {text_of(value)}" for key, value in cell.flat().items()) + "}"
    compressor = {"method": cell.method, **cell.options} if cell.options else cell.method
    options = cell.reduction.model_dump(mode="json", exclude_unset=True)
    options |= {} if cell.param_compress == "none" else {"parameters": cell.param_compress}
    given = "".join(f", {key}={text_of(value)}" for key, value in options.items())
    return f"gw.compress_gradients(model, {text_of(compressor)}{given})"


def text_of(value: Any) -> str:
    """A value in Python and in YAML's flow style."""
    return json.dumps(value) if isinstance(value, str | dict) else str(value)


def records_of(
    expected: Sequence[Expected], description: Description, quality: Mapping[str, Evidence | None]
) -> list[dict[str, Any]]:
    """The predictions for JSON and for a frame; times are in milliseconds, rates in bits per second."""
    table = []
    for row in expected:
        names = {"strategy": description.strategy, "compressor": row.cell.label}
        record: dict[str, Any] = {**names, "bytes": row.bytes, "bytes_between": row.between}
        ranges = {
            "exposed_ms": row.exposed,
            "step_ms": row.step,
            "times_none": row.gains[BASELINE],
            "times_bf16": row.gains[BF16],
            "pays_below": row.below[BASELINE],
        }
        for name, value in ranges.items():
            scale = 1e3 if name.endswith("_ms") else 1
            record |= {name + end: scale * number for end, number in zip(("", "_low", "_high"), value, strict=True)}
        nearest_record = quality[row.cell.label]
        table.append(
            record
            | {
                "share_of_ceiling": description.computed(row.cell.label) / row.step.typical,
                "memory_bytes": row.memory,
                "perplexity": str(nearest_record) if nearest_record else None,
                "line": line_of(row.cell),
            }
        )
    return table
