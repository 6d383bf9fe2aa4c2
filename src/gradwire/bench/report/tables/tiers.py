"""Speed-ups on slow links by loss of quality, and the bytes at the ranks' interfaces.

For experiments with links. Speeds are those of its own cells, qualities those of a `PerplexityReference`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.notes import machine
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.rows.record import Result, run_of
from gradwire.bench.report.rows.traffic import carriers, counted, sent_by_op
from gradwire.bench.report.tables import columns
from gradwire.bench.report.tables.markdown import MISSING, SPREAD, spread
from gradwire.bench.report.tables.table import Table
from gradwire.bench.statistics.seeds import Estimate, percents
from gradwire.comm.topology import between_islands, link_rate

TIERS = (1, 5, 20)  # percent of perplexity above that of fp32
WIDTH = 120

TIER_DEFINITIONS = f"""\
Fastest first. `ppl`: perplexity against that of `{BASELINE}` (fp32), paired by seed, the mean over n seeds:
{SPREAD}.
`tier`: the tightest of {", ".join(map(str, TIERS))} % that the mean is within, `fastest`: those in which it is the
fastest. `step ms`: the median. `transfer ms`: communication per step without waiting for late ranks.
Against the cell `{BASELINE}`: `×`, how many times shorter the transfer is; `bytes ×`, how many times fewer bytes are
sent (gradients and parameters, after the dense steps); `÷`, the first over the second; `speed-up` of the step;
`ceiling` is Amdahl's, (1 + m) / (1 + m / r) with m = transfer ÷ compute of `{BASELINE}` and r = `bytes ×`; `of it`,
the share reached."""

WIRE_DEFINITIONS = """\
`counted`: gradients, the flag of each step and parameters, as bandwidth-optimal collectives would send them for the
framework's own reduction. `interface`: what the ranks' own interfaces sent, protocol headers included. `quotient`:
the second over the first; `explained`: the quotient by the backend's factors; `rest`: the remaining factor."""

CABLE_DEFINITIONS = """\
`counted`: gradients between islands, which are counted apart under `hsdp` only. `interface`: what the islands'
interfaces sent, protocol headers and each step's scalars included. `quotient`: the second over the first."""


@dataclass(frozen=True)
class Timed:
    """One cell on one link, means over its seeds.

    Args:
        row: One of its runs.
        step: Median milliseconds of a step; the median ignores occasional other load of the machine.
        transfer: Milliseconds of communication per step without waiting, NaN if not measured.
        compute: Milliseconds of computation per step, NaN if not measured.
        ratio: Float32 bytes over sent ones, gradients and parameters, after the dense steps.
    """

    row: Result
    step: float
    transfer: float
    compute: float
    ratio: float

    @classmethod
    def of(cls, runs: Sequence[Result]) -> Timed:
        """Average runs that differ only in their seed."""
        return cls(
            runs[0],
            step=mean(row.typical_step_ms for row in runs),
            transfer=mean(row.transfer_time_ms for row in runs),
            compute=mean(row.compute_time_ms for row in runs),
            ratio=byte_ratio(runs[0]),
        )


@dataclass(frozen=True)
class Gain:
    """Gains of a cell over the baseline with the same link, strategy and world size; NaN if unknown."""

    cell: Timed
    baseline: Timed
    worse: Estimate

    @property
    def tier(self) -> int | None:
        """The tightest tier that the cell is within, or None."""
        return next((limit for limit in TIERS if self.worse.mean <= limit), None)

    @property
    def communication(self) -> float:
        """Communication time of the baseline over that of the cell, without waiting."""
        return quotient(self.baseline.transfer, self.cell.transfer)

    @property
    def bytes(self) -> float:
        """Bytes of the baseline over those of the cell."""
        return quotient(self.cell.ratio, self.baseline.ratio)

    @property
    def speed_up(self) -> float:
        """Step time of the baseline over that of the cell."""
        return quotient(self.baseline.step, self.cell.step)

    @property
    def ceiling(self) -> float:
        """The speed-up if communication shrank as much as the bytes and the rest stayed equal (Amdahl's law)."""
        m = quotient(self.baseline.transfer, self.baseline.compute)
        return (1 + m) / (1 + quotient(m, self.bytes))


def tiers(results: Sequence[Result], quality: PerplexityReference) -> str:
    """The sections on quality tiers and interface bytes as Markdown; empty without a shaped link."""
    ok = [row for row in results if row.status == "ok" and row.world_size > 1]
    parts = []
    timed = groups(ok)
    baselines = {key: next(cell for cell in cells if cell.row.compressor == BASELINE) for key, cells in timed.items()}
    pairs = [(cell, baselines[key]) for key, cells in timed.items() for cell in cells]
    found = iter(percents([quality.percent_worse(cell.row, baseline.row) for cell, baseline in pairs]))
    gains = {key: [Gain(cell, baselines[key], next(found)) for cell in cells] for key, cells in timed.items()}
    if sections := [section(*group) for group in gains.items()]:
        parts += ["## Quality tiers on links", TIER_DEFINITIONS, *sections]
    if rows := [row for row in ok if row.bytes_interface_total is not None and counted(row)]:
        parts += ["## Bytes at the interfaces", WIRE_DEFINITIONS, *wire(rows)]
    if rows := [row for row in ok if row.bytes_interface_between_total is not None]:
        parts += ["## Bytes between islands", CABLE_DEFINITIONS, cables(rows)]
    return "\n\n".join(parts)


def groups(ok: Iterable[Result]) -> dict[tuple[str, int, str, str], list[Timed]]:
    """Timed cells by strategy, world size, shaped link and machine, if they have a baseline; fast links first."""
    runs: defaultdict[tuple[str, int, str, str], defaultdict[str, list[Result]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in ok:
        if row.link != UNSHAPED and row.typical_step_ms is not None:
            runs[row.strategy, row.world_size, row.link, machine(row)][row.compressor].append(row)
    ordered = sorted(runs.items(), key=lambda item: (*item[0][:2], -link_rate(item[0][2])))
    return {key: [Timed.of(cell) for cell in cells.values()] for key, cells in ordered if BASELINE in cells}


def section(key: tuple[str, int, str, str], cells: Sequence[Gain]) -> str:
    """One strategy on one link: the fastest cell of each tier, and every cell."""
    strategy, world, link, _ = key
    gains = sorted(cells, key=lambda gain: gain.cell.step)
    fastest = {
        limit: next((gain.cell.row.compressor for gain in gains if gain.worse.mean <= limit), None) for limit in TIERS
    }
    tiers = "; ".join(f"within {limit} %: {f'`{label}`' if label else 'none'}" for limit, label in fastest.items())
    rows = [
        line(gain, [limit for limit, label in fastest.items() if label == gain.cell.row.compressor]) for gain in gains
    ]
    return "\n\n".join(
        [
            f"### {strategy}, W = {world}, {link}",
            f"Fastest {tiers}.",
            Table.of("", "", rows, columns.TIER).markdown(),
        ]
    )


def line(gain: Gain, fastest: Sequence[int]) -> dict[str, Any]:
    """One row of a tier table, keyed by column fields."""
    worse = gain.worse
    ends = spread(worse.n, worse.low, worse.high, "{:+.1f}")
    return {
        "compressor": gain.cell.row.compressor,
        "n": worse.n or None,
        "worse_percent": worse.mean,
        "ends": f", {ends}" if ends != MISSING else "",
        "tier": gain.tier,
        "fastest": ", ".join(map(str, fastest)),
        "step": gain.cell.step,
        "speed_up": gain.speed_up,
        "ceiling": gain.ceiling,
        "of_ceiling": 100 * quotient(gain.speed_up, gain.ceiling),
        "transfer": gain.cell.transfer,
        "shorter": gain.communication,
        "fewer": gain.bytes,
        "quotient": quotient(gain.communication, gain.bytes),
    }


def byte_ratio(row: Result) -> float:
    """Float32 bytes of gradients and parameters over those sent, after the dense steps.

    Under hsdp on cables between islands, those of the gradients between them: nothing else is limited.
    """
    if row.strategy == "hsdp" and between_islands(row.link):
        return row.compression_ratio_between_steady or row.compression_ratio_between or math.nan
    gradients, parameters = row.bytes_raw_total or 0, row.bytes_parameters_raw_total or 0
    ratio = row.compression_ratio_steady or row.compression_ratio
    sent = gradients / ratio if ratio else math.nan
    return quotient(gradients + parameters, sent + (row.bytes_parameters_total or 0))


def wire(rows: Sequence[Result]) -> list[str]:
    """The backend's factors, and the table of counted and interface bytes.

    Factors are per link: on a fast link, packets that leave together share headers until they are sent.
    """
    of_link: defaultdict[str, list[Result]] = defaultdict(list)
    for row in rows:
        of_link[row.link].append(row)
    factors = {
        link: backend_factors(alike) for link, alike in sorted(of_link.items(), key=lambda item: -link_rate(item[0]))
    }
    ratios = "; ".join(
        f"{link}: " + ", ".join(f"{op} {factor:.3f}" for op, factor in sorted(found.items()))
        for link, found in factors.items()
    )
    lines = []
    for row in sorted(rows, key=shown_order):
        sent, seen = counted(row), row.bytes_interface_total or 0
        explained = sum(factors[row.link][op] * of for op, of in sent_by_op(row).items()) / sent
        found = {"carriers": " + ".join(carriers(row)), "counted": sent, "seen": seen, "quotient": seen / sent}
        rest = {"explained": explained, "rest_percent": 100 * (seen / sent / explained - 1)}
        lines.append({**run_of(row)._asdict(), **found, **rest})
    return [
        fill(f"Interface over counted bytes by collective, fitted to these cells, headers included: {ratios}.", WIDTH),
        Table.of("", "", lines, columns.WIRE).markdown(),
    ]


def cables(rows: Iterable[Result]) -> str:
    """The table of counted and interface bytes between islands."""
    lines = []
    for row in sorted(rows, key=lambda row: (*shown_order(row), row.islands)):
        seen, sent = row.bytes_interface_between_total or 0, row.bytes_between_total
        lines.append({**run_of(row)._asdict(), "counted": sent, "seen": seen, "quotient": quotient(seen, sent or 0)})
    return Table.of("", "", lines, columns.CABLES).markdown()


def shown_order(row: Result) -> tuple[str, int, float, str, int]:
    """The order of runs in a table of bytes."""
    return row.strategy, row.world_size, -link_rate(row.link), row.compressor, row.seed


def backend_factors(rows: Sequence[Result]) -> dict[str, float]:
    """Fit the bytes that interfaces send per counted byte of a collective: the cost of the backend's algorithm.

    For example, gloo's reduce-scatter is an all-reduce and sends twice the necessary bytes. The fit is robust and
    uses relative errors, so that a single outlier does not distort it.
    """
    from scipy.optimize import least_squares

    sent = [sent_by_op(row) for row in rows]
    seen = np.array([row.bytes_interface_total for row in rows], dtype=np.float64)
    ops = sorted({op for one in sent for op in one})
    shares = np.array([[one.get(op, 0) for op in ops] for one in sent]) / seen[:, None]
    carried = shares.max(0) > 0.01  # below 1 % of the bytes everywhere, a factor cannot be determined
    fitted = least_squares(
        lambda factors: shares[:, carried] @ factors + shares[:, ~carried].sum(1) - 1,
        np.ones(carried.sum()),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=0.01,
    )
    return dict.fromkeys(ops, 1.0) | dict(zip(np.array(ops)[carried].tolist(), fitted.x.tolist(), strict=True))


def mean(values: Iterable[float | None]) -> float:
    """The mean of the known values, NaN without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def quotient(one: float, other: float) -> float:
    """``one / other``, NaN for a zero divisor."""
    return one / other if other else math.nan
