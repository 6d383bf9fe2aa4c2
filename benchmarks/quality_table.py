"""The tables of ``quality.md`` from the records of ``configs/quality.yaml`` and ``configs/tuning.yaml``.

``python benchmarks/quality_table.py benchmarks/quality.jsonl``, and with ``--rates`` for ``benchmarks/tuning.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from gradwire.measurement.statistics import Paired, adjusted, paired
from gradwire.report.markdown import spread


def whole_ratio(record: dict[str, Any]) -> float:
    """float32 bytes over sent bytes, of gradients and gathered parameters together."""
    raw = record["bytes_raw_total"] + (record["bytes_parameters_raw_total"] or 0)
    return raw / (record["bytes_compressed_total"] + (record["bytes_parameters_total"] or 0))


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
    """A row per strategy and compressor, the best first; differences are paired by seed."""
    found: defaultdict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for record in lines:
        found[record["strategy"], record["compressor"]][record["seed"]] = record
    tests = {cell: against(records, found[cell[0], "none"]) for cell, records in found.items() if cell[1] != "none"}
    corrected = dict(zip(tests, adjusted([test.p for test in tests.values()]), strict=True))
    rows = []
    for cell, records in found.items():
        first = records[min(records)]
        ratios = first["compression_ratio"], first["compression_ratio_steady"], whole_ratio(first)
        ppl = ", ".join(f"{records[seed]['val_ppl']:.2f}" for seed in sorted(records))
        test = tests.get(cell, Paired(0, 0.0))
        ends = spread(test.n, test.low, test.high, "{:+.1f}")
        shown = (
            [f"{test.mean:+.1f} %, {ends}", f"{test.sees:.1f} %", f"{corrected[cell]:.2g}"]
            if cell in tests
            else ["–"] * 3
        )
        rows.append(
            ((cell[0], test.mean), [*cell, f"{first['lr']:g}", *ratios, ppl, *shown, "yes" if test.mean <= 1 else "no"])
        )
    headers = [
        "",
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
    return tabulate([row for _, row in sorted(rows)], headers, tablefmt="pipe", floatfmt=".2f", disable_numparse=[2])


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--rates", action="store_true", help="perplexity by learning rate")
    args = parser.parse_args()
    records = [json.loads(line) for line in args.records.read_text().splitlines()]
    print(by_rate(records) if args.rates else by_cell(records))


if __name__ == "__main__":
    main()
