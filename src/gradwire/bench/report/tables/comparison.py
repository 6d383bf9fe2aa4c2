"""Differences of cells between two experiments, paired by seed, with tests of significance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isclose
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from gradwire.base.errors import BadInput, listed
from gradwire.base.units import plural
from gradwire.bench.config import Run
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import ALL_BYTES, NAMES, PERPLEXITY, STEP
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import SPREAD, Column, Table, number, text
from gradwire.bench.statistics.seeds import Paired, adjusted, paired

SIGNIFICANT = 0.05
LEAST = 6  # cells; with fewer, a signed-rank test cannot reach p < 5 %
BYTES = Column("gradient bytes", "bytes_compressed_total", "{:,.0f}")
QUANTITIES = (PERPLEXITY, STEP.titled("step time, ms"), BYTES, ALL_BYTES)
DIFFERENCES = f"""\
Cells that both experiments have, paired by seed. The difference is that of the second from the first in percent, the
mean of the ratios' logarithms over the pairs; {SPREAD}. p is that of a paired t-test on the logarithms (two-sided),
adjusted for the number of cells by Holm's procedure; “sees” is the increase that it finds with a probability of 80 %,
with as many pairs and as much spread. One pair gives no test."""
DIFFERENCE = Column("difference", "difference", "{:+z.2f}", " %")

Pairs = dict[Run, tuple[Result, Result]]


def compared(first: Results, second: Results) -> tuple[list[Table], list[str]]:
    """The differences of two experiments as tables, and what is said of all cells and of how the experiments differ.

    Raises:
        BadInput: If they share no run with a result.
    """
    name, other_name = first.results_dir.as_posix(), second.results_dir.as_posix()
    pairs = common(first.ok, second.ok)
    if not pairs:
        raise BadInput(
            f"{name} and {other_name} share no run with a result: none has the same strategy, compressor, "
            "world size, link and seed in both."
        )
    cells = {quantity: differences(pairs, quantity) for quantity in QUANTITIES}
    notes = [
        f"{len(pairs)} runs are in both, {len(first.ok) - len(pairs)} in {name} only, "
        f"{len(second.ok) - len(pairs)} in {other_name} only.",
        *unlike(pairs),
        *(note for quantity, of in cells.items() for note in over_cells(quantity, of)),
    ]
    return [table(quantity, of) for quantity, of in cells.items() if of], notes


class Difference(NamedTuple):
    """One cell's difference.

    Attributes:
        cell: One of its runs; its seed is 0.
        seeds: The seeds that both have.
        first: The first experiment's mean over the seeds that both have.
        second: The second one's.
        paired: The difference, pair by pair.
        adjusted: Its p-value, adjusted for the number of cells.
    """

    cell: Run
    seeds: tuple[int, ...]
    first: float
    second: float
    paired: Paired
    adjusted: float

    @property
    def verdict(self) -> str:
        """The result of the test in words."""
        if self.paired.n == 1:
            return "equal" if not self.paired.mean else "one pair, no test"
        if not self.paired.mean and self.paired.p == 1:
            return "equal"
        if self.adjusted >= SIGNIFICANT:
            return "no difference shown"
        return "higher" if self.paired.mean > 0 else "lower"

    def record(self) -> dict[str, Any]:
        """The row of a table, keyed by column fields."""
        return {
            **self.cell._asdict(),
            "pairs": self.paired.n,
            "one": self.first,
            "other": self.second,
            "difference": self.paired.mean,
            "difference_n": self.paired.n,
            "difference_low": self.paired.low,
            "difference_high": self.paired.high,
            "sees": self.paired.sees,
            "p": self.paired.p,
            "adjusted": self.adjusted,
            "verdict": self.verdict,
        }


def common(first: Sequence[Result], second: Sequence[Result]) -> Pairs:
    """Runs of both experiments."""
    others = {row.run: row for row in second}
    return {row.run: (row, others[row.run]) for row in first if row.run in others}


def unlike(pairs: Pairs) -> list[str]:
    """Describe how machines, versions, texts and settings differ."""
    machines = sorted({(first.machine, second.machine) for first, second in pairs.values()})
    differing = "; ".join(f"{first} | {second}" for first, second in machines if first != second)
    lines = [f"Machines or versions differ, and times with them: {differing}."] if differing else []
    texts = dict.fromkeys((first.unigram_ppl, second.unigram_ppl) for first, second in pairs.values())
    shown = (" | ".join(number(ppl, "{:.8g}") for ppl in text) for text in texts if not same_text(*text))
    if differing := "; ".join(shown):
        lines.append(f"Texts or tokens differ, and perplexities with them (of a unigram model: {differing}).")
    fields = ("model", "dataset", "steps", "batch_size", "max_length", "precision", "optimizer", "compress_config")
    changed = [name for name in fields if any(getattr(a, name) != getattr(b, name) for a, b in pairs.values())]
    return [*lines, *([f"Settings differ: {', '.join(changed)}."] if changed else [])]


def same_text(first: float | None, second: float | None) -> bool:
    """Whether two perplexities of a unigram model are of one text in the same tokens.

    The perplexity depends on each token's count in both splits, so it identifies the text. It is a sum in float64,
    whose last bits depend on the processor.
    """
    return first == second or (first is not None and second is not None and isclose(first, second, rel_tol=1e-12))


def differences(pairs: Pairs, quantity: Column) -> list[Difference]:
    """Differences of the cells with positive numbers in both experiments, sorted by name.

    A perplexity that a run takes from another one is compared there.
    """
    values: defaultdict[Run, dict[int, tuple[float, float]]] = defaultdict(dict)
    for run, rows in sorted(pairs.items()):
        first, second = (getattr(row, quantity.field) for row in rows)
        if first and second and (quantity != PERPLEXITY or all(row.own_quality for row in rows)):
            values[run._replace(seed=0)][run.seed] = float(first), float(second)
    samples = {cell: tuple(zip(*of.values(), strict=True)) for cell, of in values.items()}
    tests = {cell: paired(*of) for cell, of in samples.items()}
    corrected = adjusted([test.p for test in tests.values()])
    return [
        Difference(cell, tuple(values[cell]), fmean(samples[cell][0]), fmean(samples[cell][1]), test, p)
        for (cell, test), p in zip(tests.items(), corrected, strict=True)
    ]


def over_cells(quantity: Column, cells: Sequence[Difference]) -> list[str]:
    """Describe the differences of all cells with the same seeds together, with a signed-rank test."""
    by_seeds: defaultdict[tuple[int, ...], list[Difference]] = defaultdict(list)
    for cell in cells:
        by_seeds[cell.seeds].append(cell)
    several = len(by_seeds) > 1
    return [
        _over_cells(quantity, of, f" with {plural('seed', len(seeds))} {listed([*map(str, seeds)])}" * several)
        for seeds, of in by_seeds.items()
    ]


def _over_cells(quantity: Column, cells: Sequence[Difference], seeds: str) -> str:
    from scipy.stats import wilcoxon

    logs = np.log1p([cell.paired.mean / 100 for cell in cells])
    median = 100 * np.expm1(np.median(logs))
    typical = f"Over {len(logs)} cells{seeds} the median difference in {quantity.title} is {median:+.2f} %"
    if not logs.any():
        return f"{quantity.title.capitalize()}: equal in all {len(logs)} cells{seeds}."
    if np.count_nonzero(logs) < LEAST:
        return f"{typical}; too few cells differ for a test over all of them."
    return f"{typical} (Wilcoxon signed-rank test over cells, two-sided: p = {wilcoxon(logs).pvalue:.2g})."


def table(quantity: Column, cells: Sequence[Difference]) -> Table:
    """One quantity's table."""
    columns = (
        *NAMES,
        Column("pairs", "pairs", "{:d}"),
        quantity.titled("A", field="one"),
        quantity.titled("B", field="other"),
        DIFFERENCE,
        DIFFERENCE.spread("{spread}"),
        Column("sees", "sees", "{:.2g}", " %"),
        Column("p", "p", "{:.2g}"),
        Column("p adjusted", "adjusted", "{:.2g}"),
        text("B is", "verdict"),
    )
    name = quantity.field.replace("_", "-")
    return Table.of(f"compare-{name}", f"Differences in {quantity.title}", (cell.record() for cell in cells), columns)
