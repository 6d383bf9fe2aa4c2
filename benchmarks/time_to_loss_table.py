"""The tables of ``time-to-loss.md``: ``python benchmarks/time_to_loss_table.py benchmarks/time-to-loss.jsonl``.

``--figure docs/images/time-to-loss.svg`` draws its figure, the links side by side.

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

from matplotlib.figure import Figure
from tabulate import tabulate

from gradwire.base.files import write_text
from gradwire.base.units import UNSHAPED
from gradwire.bench.report.page.figures import curves, draw_lines, on_front
from gradwire.bench.report.page.render import svg
from gradwire.bench.report.page.style import BOTTOM, TOP, WIDTH, Chart, looks, styled
from gradwire.bench.report.rows.record import BF16, Result, read_results
from gradwire.bench.report.tables.quality import perplexity_reference
from gradwire.bench.report.tables.table import MISSING
from gradwire.bench.report.tables.time_to_loss import Cell, cells, loads, ordered

APART = 1.35  # from one row of the figure to the next, in heights of its axes
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


def save(known: Sequence[Cell], path: Path) -> None:
    """Draw the curves of all links, two in a row."""
    by_link = {link: [cell for cell in known if cell.link == link] for link in ordered(cell.link for cell in known)}
    looked = looks(sorted({label for of_link in by_link.values() for label in on_front(curves(of_link))}))
    rows = -(-len(by_link) // 2)
    height = 1 / (1 + APART * (rows - 1))
    with styled():
        chart = Chart(Figure(figsize=(WIDTH, TOP + 1.9 * rows + BOTTOM)))
        for number, (link, of_link) in enumerate(by_link.items()):
            row, column = divmod(number, 2)
            place = (0.12 + 0.48 * column, (rows - 1 - row) * APART * height, 0.36, height)
            ax = chart.figure.add_axes(place, title="no shaped link" if link == UNSHAPED else link)
            ax.set(xlabel="" if row + 1 < rows else "seconds of training", ylabel="" if column else "perplexity")
            draw_lines(chart, ax, of_link, looked)
        plot = chart.plot(path.stem, f"Perplexity over seconds, {', '.join(by_link)}: {', '.join(chart.handles)}.")
        write_text(path, svg(plot))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure there, as SVG")
    args = parser.parse_args()
    rows = [row for row in read_results(args.records)[0] if row.status == "ok" and row.world_size > 1]
    (source,) = {row.quality_from.partition(": ")[0] for row in rows if row.quality_from}
    known = cells(rows, perplexity_reference(Path(source))[0])
    if args.figure:
        save(known, args.figure)
    targets = known[0].targets
    found = costs(known, targets)
    print("\n\n".join([winners(known, found, targets), profile(found), *by_link(rows, found, targets)]))


if __name__ == "__main__":
    main()
