"""The tables of ``time-to-loss.md``: ``python benchmarks/time_to_loss_table.py benchmarks/time-to-loss.jsonl``.

``--figures docs/images`` writes its figures, as a report draws them.

The records are those of ``configs/time-to-loss.yaml``; the steps to each target are those of all seeds of the runs that
it takes its perplexities from.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from tabulate import tabulate

from gradwire.base.files import write_text
from gradwire.base.units import UNSHAPED
from gradwire.bench.report.page.figures import time_to_loss
from gradwire.bench.report.page.render import svg
from gradwire.bench.report.page.style import looks, styled
from gradwire.bench.report.rows.record import BF16, Result, read_results
from gradwire.bench.report.tables.quality import perplexity_reference
from gradwire.bench.report.tables.table import MISSING
from gradwire.bench.report.tables.time_to_loss import Cell, cells, loads, ordered

WITHIN = (1.1, 1.5, 2, 5, 20)  # times the soonest label's time

Costs = Mapping[str, float]  # seconds to a target, by label


def costs(known: Sequence[Cell], targets: Sequence[str]) -> dict[tuple[str, str], Costs]:
    """Seconds to each target, by link and target; labels that miss it in the median over seeds are infinite."""
    return {
        (link, target): {cell.compressor: cell.seconds(target) for cell in known if cell.link == link}
        for link in ordered(cell.link for cell in known)
        for target in targets
    }


def by_link(rows: Sequence[Result], found: Mapping[tuple[str, str], Costs], targets: Sequence[str]) -> Iterable[str]:
    """A table per link, the soonest at the last target first."""
    for link in dict.fromkeys(link for link, _ in found):
        steps = {row.compressor: row.typical_step_ms or math.nan for row in rows if row.link == link}
        last = found[link, targets[-1]]
        lines = []
        for label in sorted(steps, key=lambda label: (last.get(label, math.inf), steps[label])):
            each = [found[link, target].get(label, math.nan) for target in targets]
            gain = last.get(BF16, math.nan) / each[-1]
            lines.append([label, f"{steps[label]:,.1f}", *map(_seconds, each), f"{gain:.2f}" if gain > 0 else MISSING])
        yield f"### {'No shaped link' if link == UNSHAPED else link}"
        headers = ["label", "step ms", *(f"{target}, s" for target in targets), f"× sooner than {BF16}"]
        yield tabulate(
            lines, headers, tablefmt="pipe", disable_numparse=True, colalign=["left", *["right"] * (len(headers) - 1)]
        )


def _seconds(value: float) -> str:
    return MISSING if math.isnan(value) else "∞" if math.isinf(value) else f"{value:,.0f}"


def profile(found: Mapping[tuple[str, str], Costs]) -> str:
    """A performance profile: in which share of the links and targets a label is within a factor of the soonest."""
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for by_label in found.values():
        best = min(by_label.values())
        if math.isfinite(best):
            for label, cost in by_label.items():
                ratios[label].append(cost / best)
    order = sorted(ratios, key=lambda label: (median(ratios[label]), -sum(1 / ratio for ratio in ratios[label])))
    lines = [
        [label, len(ratios[label]), *(f"{mean(ratio <= within for ratio in ratios[label]):.0%}" for within in WITHIN)]
        for label in order
    ]
    return tabulate(lines, ["label", "cases", *(f"within {within:g} ×" for within in WITHIN)], tablefmt="pipe")


def winners(known: Sequence[Cell], found: Mapping[tuple[str, str], Costs], targets: Sequence[str]) -> str:
    """The soonest label of each link and target, and the link's m: communication over computation of float32."""
    m = loads(known)
    lines = []
    for link in dict.fromkeys(link for link, _ in found):
        best = [min(found[link, target].items(), key=lambda item: item[1]) for target in targets]
        named = [f"{label}, {seconds:,.0f} s" if math.isfinite(seconds) else MISSING for label, seconds in best]
        lines.append([link, f"{m[link]:.1f}", *named])
    return tabulate(lines, ["link", "m", *targets], tablefmt="pipe", disable_numparse=True)


def save(known: Sequence[Cell], folder: Path) -> None:
    """Write the curves of each link."""
    with styled():
        for drawing in time_to_loss(known, looks(sorted({cell.compressor for cell in known}))):
            plot = drawing()
            write_text(folder / f"{plot.name}.svg", svg(plot))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--figures", type=Path, metavar="DIR", help="write the figures there as SVG")
    args = parser.parse_args()
    rows = [row for row in read_results(args.records)[0] if row.status == "ok" and row.world_size > 1]
    (source,) = {row.quality_from.partition(": ")[0] for row in rows if row.quality_from}
    known = cells(rows, perplexity_reference(Path(source))[0])
    if args.figures:
        save(known, args.figures)
    targets = known[0].targets
    found = costs(known, targets)
    print("\n\n".join([winners(known, found, targets), profile(found), *by_link(rows, found, targets)]))


if __name__ == "__main__":
    main()
