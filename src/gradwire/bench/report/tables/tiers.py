"""Speed-ups on slow links by loss of quality.

For experiments with links. Speeds are those of its own cells, qualities those of a `PerplexityReference`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import COMPRESSOR, SEEDS, WORSE
from gradwire.bench.report.tables.checks import Gate, listed
from gradwire.bench.report.tables.quality import Quality, cell_key
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import (
    MISSING,
    SPREAD,
    Column,
    markdown_of,
    milliseconds,
    spread,
)
from gradwire.bench.statistics.seeds import Estimate
from gradwire.comm.topology import between_islands, link_rate

TIERS = (1, 5, 20)  # percent of perplexity above that of fp32

TIER = (
    COMPRESSOR,
    SEEDS,
    WORSE.titled("ppl", form="{:+z.1f}", mark="ends"),
    Column("tier", "tier", "{:d}", " %"),
    Column("fastest", "fastest"),
    milliseconds("step ms", "step"),
    Column("speed-up", "speed_up", "{:.2f}", base=BASELINE),
    Column("ceiling", "ceiling", "{:.2f}", base=BASELINE),
    Column("of it", "of_ceiling", "{:.0f}", " %", base=BASELINE),
    milliseconds("transfer ms", "transfer"),
    Column("×", "shorter", "{:.2f}", base=BASELINE),
    Column("bytes ×", "fewer", "{:.2f}", base=BASELINE),
    Column("÷", "quotient", "{:.2f}", base=BASELINE),
)
TIER_DEFINITIONS = f"""\
Fastest first. `ppl`: perplexity above that of the same optimizer in every step (`{BASELINE}` for AdamW), paired by
seed, the mean over n seeds: {SPREAD}.
`tier`: the tightest of {", ".join(map(str, TIERS))} % that the mean is within, `fastest`: those in which it is the
fastest. `step ms`: the median. `transfer ms`: communication per step without waiting for late ranks.
Against the cell `{BASELINE}`, of the seeds of both: `×`, how many times shorter the transfer is; `bytes ×`, how many
times fewer bytes are sent (gradients and parameters, after the dense steps); `÷`, the first over the second;
`speed-up` of the step;
`ceiling` is Amdahl's, (1 + m) / (1 + m / r) with m = transfer ÷ compute of `{BASELINE}` and r = `bytes ×`; `of it`,
the share reached."""


Place = tuple[str, int, str, str]  # strategy, world size, link and machine


@dataclass(frozen=True)
class Gain:
    """A cell on a link, and its gains over the baseline there; NaN if unknown.

    Args:
        row: One of the cell's runs.
        step: Median milliseconds of a step, the mean over seeds; the median ignores occasional other load.
        transfer: Milliseconds of communication per step without waiting, the mean over seeds.
        compute: Milliseconds of computation per step, the mean over seeds.
        ratio: Float32 bytes over sent ones, gradients and parameters, after the dense steps.
        quality: Its perplexities.
        baseline: The baseline with the same seeds; None for itself.
    """

    row: Result
    step: float
    transfer: float
    compute: float
    ratio: float
    quality: Quality
    baseline: Gain | None = None

    @classmethod
    def of(cls, runs: Sequence[Result], quality: Quality) -> Gain:
        """Average runs that differ only in their seed."""
        return cls(
            runs[0],
            step=mean(row.typical_step_ms for row in runs),
            transfer=mean(row.transfer_time_ms for row in runs),
            compute=mean(row.compute_time_ms for row in runs),
            ratio=byte_ratio(runs[0]),
            quality=quality,
        )

    @classmethod
    def paired(cls, runs: Sequence[Result], baseline: Sequence[Result], quality: Quality) -> Gain | None:
        """Compare runs with the baseline's, of the seeds of both; None without one."""
        seeds = {row.seed for row in runs} & {row.seed for row in baseline}
        if not seeds:
            return None
        cell, base = (cls.of([row for row in rows if row.seed in seeds], quality) for rows in (runs, baseline))
        return replace(cell, baseline=base)

    @property
    def worse(self) -> Estimate:
        """Percent of perplexity above the same optimizer in every step."""
        return self.quality.difference

    @property
    def speed_up(self) -> float:
        """The baseline's step over this one's."""
        return quotient((self.baseline or self).step, self.step)

    def record(self, fastest: Sequence[int]) -> dict[str, Any]:
        """The row of a tier table, keyed by column fields.

        Args:
            fastest: The tiers in which it is the fastest.
        """
        base, worse = self.baseline or self, self.worse
        ends = spread(worse.n, worse.low, worse.high, "{:+z.1f}")
        shorter, fewer = quotient(base.transfer, self.transfer), quotient(self.ratio, base.ratio)
        m = quotient(base.transfer, base.compute)
        ceiling = (1 + m) / (1 + quotient(m, fewer))  # Amdahl: communication as much shorter as the bytes are fewer
        return {
            "compressor": self.row.compressor,
            "reference": self.quality.reference,
            "n": worse.n or None,
            "worse_percent": worse.mean,
            "ends": f", {ends}" if ends != MISSING else "",
            "tier": next((limit for limit in TIERS if worse.mean <= limit), None),
            "fastest": ", ".join(map(str, fastest)),
            "step": self.step,
            "speed_up": self.speed_up,
            "ceiling": ceiling,
            "of_ceiling": 100 * quotient(self.speed_up, ceiling),
            "transfer": self.transfer,
            "shorter": shorter,
            "fewer": fewer,
            "quotient": quotient(shorter, fewer),
        }


def tiers(results: Results) -> str:
    """Format the sections on quality tiers as Markdown; empty without a shaped link."""
    sections = [section(*item) for item in gains(results).items()]
    return "\n\n".join(["## Quality tiers on links", TIER_DEFINITIONS, *sections]) if sections else ""


def gains(results: Results) -> dict[Place, list[Gain]]:
    """The timed cells on each shaped link, if they have a baseline; fast links and fast cells first."""
    runs: defaultdict[Place, defaultdict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for row in results.ok:
        if row.world_size > 1 and row.link != UNSHAPED and row.typical_step_ms is not None:
            runs[row.strategy, row.world_size, row.link, row.machine][row.compressor].append(row)
    ordered = sorted(runs.items(), key=lambda item: (*item[0][:2], -link_rate(item[0][2])))
    timed = {
        place: [Gain.paired(of, cells[BASELINE], results.judged[cell_key(of[0])]) for of in cells.values()]
        for place, cells in ordered
        if BASELINE in cells
    }
    return {
        place: sorted((cell for cell in cells if cell is not None), key=lambda cell: -cell.speed_up)
        for place, cells in timed.items()
    }


def section(place: Place, cells: Sequence[Gain]) -> str:
    """One strategy on one link: the fastest cell of each tier, and every cell."""
    strategy, world, link, _ = place
    fastest = {
        limit: next((cell.row.compressor for cell in cells if cell.worse.mean <= limit), None) for limit in TIERS
    }
    answers = "; ".join(f"within {limit} %: {f'`{label}`' if label else 'none'}" for limit, label in fastest.items())
    records = [cell.record([limit for limit in TIERS if fastest[limit] == cell.row.compressor]) for cell in cells]
    return f"### {strategy}, W = {world}, {link}\n\nFastest {answers}.\n\n{markdown_of(records, TIER)}"


def ceilings(results: Results) -> Gate:
    """Whether no cell on a link is faster than its bytes allow: a time of it or of its baseline is wrong then."""
    name = "no cell is faster than its ceiling on its link"
    reached = {
        f"{strategy}/{cell.row.compressor}/ws{world}/{link}": round(share)
        for (strategy, world, link, _), cells in gains(results).items()
        for cell in cells
        if not math.isnan(share := cell.record(())["of_ceiling"])
    }
    if not reached:
        return Gate(name, "not checked", f"no cell and {BASELINE} were timed and profiled on a link")
    above = [f"{cell} ({share} %)" for cell, share in reached.items() if share > 100]
    summary = f"{len(reached) - len(above)} of {len(reached)} cells"
    return Gate(name, "marked" if above else "passed", summary + (f"; above: {listed(above)}" if above else ""))


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


def mean(values: Iterable[float | None]) -> float:
    """The mean of the known values, NaN without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def quotient(dividend: float, divisor: float) -> float:
    """The quotient, NaN for a zero divisor."""
    return dividend / divisor if divisor else math.nan
