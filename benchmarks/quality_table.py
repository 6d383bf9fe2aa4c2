"""The tables of ``quality.md`` from the records of ``configs/quality.yaml`` and ``configs/tuning.yaml``.

``python benchmarks/quality_table.py benchmarks/quality.jsonl``, with ``--rates`` for ``benchmarks/tuning.jsonl``, and
with ``--ranked_by benchmarks/quality.jsonl`` for another experiment's records.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr
from tabulate import tabulate

from gradwire.measurement.statistics import Paired, adjusted, paired
from gradwire.report.markdown import MISSING, number, spread


def whole_ratio(record: dict[str, Any]) -> float | None:
    """float32 bytes over sent bytes, of gradients and gathered parameters together; None if nothing was sent."""
    raw = record["bytes_raw_total"] + (record["bytes_parameters_raw_total"] or 0)
    sent = record["bytes_compressed_total"] + (record["bytes_parameters_total"] or 0)
    return raw / sent if sent else None


def against(records: dict[int, Any], base: dict[int, Any]) -> Paired:
    """Perplexity against that of `none`, paired by seed."""
    seeds = sorted(records.keys() & base.keys())
    return paired(*([each[seed]["val_ppl"] for seed in seeds] for each in (base, records)))


def by_rate(records: list[dict[str, Any]]) -> str:
    """A row per method with its perplexity at each learning rate; labels are ``METHOD-RATE``."""
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        found[record["compressor"].removesuffix(f"-{record['lr']}")][record["lr"]] = record["val_ppl"]
    rates = sorted({rate for each in found.values() for rate in each}, reverse=True)
    rows = [
        [method, *(each.get(rate) for rate in rates), min(each, key=each.__getitem__)] for method, each in found.items()
    ]
    headers = ["compressor", *(f"{rate:g}" for rate in rates), "best"]
    formats = ["", *[".2f"] * len(rates), "g"]
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=formats)


def by_cell(lines: list[dict[str, Any]]) -> str:
    """A row per strategy, world size and compressor, the best first; differences are paired by seed."""
    found: defaultdict[tuple[str, int, str], dict[int, Any]] = defaultdict(dict)
    for record in lines:
        found[record["strategy"], record["world_size"], record["compressor"]][record["seed"]] = record
    tests = {cell: against(runs, found[*cell[:2], "none"]) for cell, runs in found.items() if cell[2] != "none"}
    corrected = dict(zip(tests, adjusted([test.p for test in tests.values()]), strict=True))
    rows = []
    for cell, records in found.items():
        first = records[min(records)]
        ratios = [
            number(ratio, "{:.2f}")
            for ratio in (first["compression_ratio"], first["compression_ratio_steady"], whole_ratio(first))
        ]
        ppl = ", ".join(f"{records[seed]['val_ppl']:.2f}" for seed in sorted(records))
        test = tests.get(cell, Paired(0, 0.0))
        ends = f", {spread(test.n, test.low, test.high, '{:+.1f}')}" if test.n > 1 else ""
        shown = (
            [f"{test.mean:+.1f} %{ends}", number(test.sees, "{:.1f} %"), number(corrected[cell], "{:.2g}")]
            if cell in tests
            else [MISSING] * 3
        )
        within = "yes" if test.mean <= 1 else "no"
        rows.append(((*cell[:2], test.mean), [*cell, f"{first['lr']:g}", *ratios, ppl, *shown, within]))
    headers = [
        "",
        "W",
        "compressor",
        "rate",
        "ratio",
        "steady",
        "with parameters",
        "perplexity by seed",
        "against none",
        "sees",
        "p (Holm)",
        "within 1 %",
    ]
    aligned = ["left", "right", "left", *["right"] * 4, *["left"] * 5]
    return tabulate([row for _, row in sorted(rows)], headers, tablefmt="pipe", disable_numparse=True, colalign=aligned)


def ranks(lines: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """Differences from `none` in two experiments, and Spearman's rank correlation; two ranks, labels of both."""
    first, second = differences(lines), differences(other)
    labels = sorted(first.keys() & second.keys(), key=first.__getitem__)
    rho = spearmanr([first[label] for label in labels], [second[label] for label in labels]).statistic
    rows = [[label, f"{first[label]:+.1f} %", f"{second[label]:+.1f} %"] for label in labels]
    table = tabulate(rows, ["compressor", "here", "there"], tablefmt="pipe", colalign=["left", "right", "right"])
    return f"{table}\n\nSpearman's rank correlation of {len(labels)} labels: {rho:.2f}"


def differences(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Percent above `none`, paired by seed, of each label with two ranks."""
    found: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for record in lines:
        if record["world_size"] == 2:
            found[record["compressor"]][record["seed"]] = record
    tests = {label: against(runs, found["none"]) for label, runs in found.items() if label != "none"}
    return {label: test.mean for label, test in tests.items() if test.n}


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Print one of the three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--rates", action="store_true", help="perplexity by learning rate")
    parser.add_argument("--ranked_by", type=Path, metavar="RECORDS", help="differences beside those of other records")
    args = parser.parse_args()
    records = read(args.records)
    if args.ranked_by:
        print(ranks(records, read(args.ranked_by)))
    else:
        print(by_rate(records) if args.rates else by_cell(records))


if __name__ == "__main__":
    main()
