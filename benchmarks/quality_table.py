"""The table of ``quality.md`` from the records of ``configs/quality.yaml``.

``python benchmarks/quality_table.py benchmarks/quality.jsonl``
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tabulate import tabulate


def interval(values: list[float]) -> str:
    """Mean and 95 % interval of a mean, from Student's t."""
    mean, half = float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return f"{mean:+.1f} % [{mean - half:+.1f}, {mean + half:+.1f}]"


def whole_ratio(record: dict[str, Any]) -> float:
    """float32 bytes over those sent, gradients and gathered parameters together."""
    raw = record["bytes_raw_total"] + (record["bytes_parameters_raw_total"] or 0)
    return raw / (record["bytes_compressed_total"] + (record["bytes_parameters_total"] or 0))


def main(path: Path) -> None:
    """Print a row per strategy and compressor, the least harmful first; differences are paired by seed."""
    found: defaultdict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["strategy"], record["compressor"]][record["seed"]] = record
    rows = []
    for (strategy, label), records in found.items():
        base = {seed: record["val_ppl"] for seed, record in found[strategy, "none"].items()}
        seeds = sorted(records.keys() & base.keys())
        worse = [100 * (records[seed]["val_ppl"] / base[seed] - 1) for seed in seeds]
        first = records[seeds[0]]
        ratios = first["compression_ratio"], first["compression_ratio_steady"], whole_ratio(first)
        ppl = ", ".join(f"{records[seed]['val_ppl']:.2f}" for seed in seeds)
        within = "–" if label == "none" else interval(worse) if len(worse) > 1 else f"{worse[0]:+.1f} %"
        verdict = "yes" if np.mean(worse) <= 1 else "no"
        rows.append(((strategy, np.mean(worse)), [strategy, label, *ratios, ppl, within, verdict]))
    headers = [
        "",
        "compressor",
        "ratio",
        "steady",
        "with parameters",
        "perplexity by seed",
        "against none",
        "within 1 %",
    ]
    print(tabulate([row for _, row in sorted(rows)], headers, tablefmt="pipe", floatfmt=".2f"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
