"""The verb ``compare``: differences of cells between two experiments, paired by seed, with tests of significance."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.flags import output_folder
from gradwire.bench.config import Run
from gradwire.bench.report.rows.notes import machine
from gradwire.bench.report.rows.record import Result, run_of
from gradwire.bench.report.tables.columns import QUANTITIES, Column, compared
from gradwire.bench.report.tables.markdown import number

if TYPE_CHECKING:
    from gradwire.bench.report.page.data import Data
    from gradwire.bench.report.page.section import Section
    from gradwire.bench.report.tables.table import Table
    from gradwire.bench.statistics.seeds import Paired

SIGNIFICANT = 0.05
LEAST = 6  # cells; with fewer, a signed-rank test cannot reach p < 5 %


class Difference(NamedTuple):
    """One cell's difference.

    Attributes:
        cell: One of its runs; the seed does not matter.
        one: The first experiment's mean over the seeds that both have.
        other: The second one's.
        found: The difference, pair by pair.
        adjusted: Its p-value, adjusted for the number of cells.
    """

    cell: Run
    one: float
    other: float
    found: Paired
    adjusted: float

    @property
    def verdict(self) -> str:
        """The result of the test in words."""
        if self.found.n == 1:
            return "equal" if not self.found.mean else "one pair, no test"
        if not self.found.mean and self.found.p == 1:
            return "equal"
        if self.adjusted >= SIGNIFICANT:
            return "no difference shown"
        return "higher" if self.found.mean > 0 else "lower"

    def record(self) -> dict[str, Any]:
        """The row of a table, keyed by column fields."""
        return {
            **self.cell._asdict(),
            "pairs": self.found.n,
            "one": self.one,
            "other": self.other,
            "difference": self.found.mean,
            "difference_n": self.found.n,
            "difference_low": self.found.low,
            "difference_high": self.found.high,
            "sees": self.found.sees,
            "p": self.found.p,
            "adjusted": self.adjusted,
            "verdict": self.verdict,
        }


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("one", type=Path, metavar="A", help="the first experiment's folder, results/<name>")
    parser.add_argument("other", type=Path, metavar="B", help="the second one's: differences are of B from A")
    parser.add_argument(
        "--tables", type=output_folder, metavar="DIR", help="also write the tables there, as CSV, LaTeX and Markdown"
    )
    parser.add_argument("--json", action="store_true", help="print the differences of each quantity as JSON")


def main(args: Namespace) -> None:
    """Print the differences as Markdown or JSON."""
    from gradwire.bench.report.page.data import read

    one = read(args.one)
    if args.json:
        pairs = common(one.ok, read(args.other).ok)
        found = {quantity.field: [one.record() for one in differences(pairs, quantity)] for quantity in QUANTITIES}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    made = section(one, read(args.other))
    tables = [f"## {table.caption}\n\n{table.markdown()}" for table in made.tables]
    print("\n\n".join([f"# {args.other} against {args.one}", made.lead, *made.notes, *tables]))
    if args.tables is not None:
        for table in made.tables:
            table.save(args.tables)


def section(one: Data, other: Data) -> Section:
    """The page's section.

    Raises:
        BadInput: If the experiments share no run with a result.
    """
    from gradwire.bench.report.page.section import Section

    names = {"name": one.results_dir.as_posix(), "other": other.results_dir.as_posix()}
    pairs = common(one.ok, other.ok)
    if not pairs:
        raise BadInput(
            f"{names['name']} and {names['other']} share no run with a result: none has the same strategy, compressor, "
            "world size, link and seed in both."
        )
    made = Section.of("compare", **names)
    found = {quantity: differences(pairs, quantity) for quantity in QUANTITIES}
    notes = [note for quantity, of in found.items() for note in over_cells(quantity, of)]
    tables = [table(quantity, of) for quantity, of in found.items() if of]
    counts = f"{len(pairs)} runs are in both, {len(one.ok) - len(pairs)} in {names['name']} only, "
    notes = [f"{counts}{len(other.ok) - len(pairs)} in {names['other']} only.", *unlike(pairs), *notes]
    return replace(made, tables=tables, notes=notes)


def common(one: Sequence[Result], other: Sequence[Result]) -> dict[Run, tuple[Result, Result]]:
    """Runs of both experiments."""
    theirs = {run_of(row): row for row in other}
    return {run_of(row): (row, theirs[run_of(row)]) for row in one if run_of(row) in theirs}


def unlike(pairs: dict[Run, tuple[Result, Result]]) -> list[str]:
    """Describe how machines, versions, texts and settings differ."""
    machines = sorted({(machine(one), machine(other)) for one, other in pairs.values()})
    differing = "; ".join(f"{one} | {other}" for one, other in machines if one != other)
    lines = [f"Machines or versions differ, and times with them: {differing}."] if differing else []
    texts = dict.fromkeys((one.unigram_ppl, other.unigram_ppl) for one, other in pairs.values())
    shown = (" | ".join(number(ppl, "{:.8g}") for ppl in text) for text in texts if not same_text(*text))
    if differing := "; ".join(shown):
        lines.append(f"Texts or tokens differ, and perplexities with them (of a unigram model: {differing}).")
    fields = ("model", "dataset", "steps", "batch_size", "max_length", "precision", "optimizer", "compress_config")
    changed = [name for name in fields if any(getattr(a, name) != getattr(b, name) for a, b in pairs.values())]
    return [*lines, *([f"Settings differ: {', '.join(changed)}."] if changed else [])]


def same_text(one: float | None, other: float | None) -> bool:
    """Whether two perplexities of a unigram model are of one text in the same tokens.

    The perplexity depends on each token's count in both splits, so it identifies the text. It is a sum in float64,
    whose last bits depend on the processor.
    """
    return one == other or (one is not None and other is not None and isclose(one, other, rel_tol=1e-12))


def differences(pairs: dict[Run, tuple[Result, Result]], quantity: Column) -> list[Difference]:
    """Differences of the cells with positive numbers in both experiments, sorted by name."""
    from statistics import fmean

    from gradwire.bench.statistics.seeds import adjusted, paired

    values: defaultdict[Run, list[tuple[float, float]]] = defaultdict(list)
    for run, rows in sorted(pairs.items()):
        one, other = (getattr(row, quantity.field) for row in rows)
        if one and other:
            values[run._replace(seed=0)].append((float(one), float(other)))
    found = {cell: paired(*zip(*of, strict=True)) for cell, of in values.items()}
    corrected = adjusted([of.p for of in found.values()])
    return [
        Difference(cell, fmean(a for a, _ in values[cell]), fmean(b for _, b in values[cell]), found[cell], p)
        for cell, p in zip(found, corrected, strict=True)
    ]


def over_cells(quantity: Column, found: Sequence[Difference]) -> list[str]:
    """Describe all differences together, with a signed-rank test."""
    import numpy as np
    from scipy.stats import wilcoxon

    logs = np.log1p([one.found.mean / 100 for one in found])
    if not len(logs):
        return []
    median = 100 * np.expm1(np.median(logs))
    typical = f"Over {len(logs)} cells the median difference in {quantity.title} is {median:+.2f} %"
    if not logs.any():
        return [f"{quantity.title.capitalize()}: equal in all {len(logs)} cells."]
    if np.count_nonzero(logs) < LEAST:
        return [f"{typical}; too few cells differ for a test over all of them."]
    return [f"{typical} (Wilcoxon signed-rank test over cells, two-sided: p = {wilcoxon(logs).pvalue:.2g})."]


def table(quantity: Column, found: Sequence[Difference]) -> Table:
    """One quantity's table."""
    from gradwire.bench.report.tables.table import Table

    name = quantity.field.replace("_", "-")
    records = [one.record() for one in found]
    return Table.of(f"compare-{name}", f"Differences in {quantity.title}", records, compared(quantity))
