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
from tabulate import tabulate

from gradwire.measurement.statistics import estimate
from gradwire.report.tiers import worse


def whole_ratio(record: dict[str, Any]) -> float:
    """float32 bytes over sent bytes, of gradients and gathered parameters together."""
    raw = record["bytes_raw_total"] + (record["bytes_parameters_raw_total"] or 0)
    return raw / (record["bytes_compressed_total"] + (record["bytes_parameters_total"] or 0))


def main(path: Path) -> None:
    """Print a row per strategy and compressor, the best first; differences are paired by seed."""
    found: defaultdict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["strategy"], record["compressor"]][record["seed"]] = record
    rows = []
    for (strategy, label), records in found.items():
        base = {seed: record["val_ppl"] for seed, record in found[strategy, "none"].items()}
        seeds = sorted(records.keys() & base.keys())
        percent = [100 * (records[seed]["val_ppl"] / base[seed] - 1) for seed in seeds]
        first = records[seeds[0]]
        ratios = first["compression_ratio"], first["compression_ratio_steady"], whole_ratio(first)
        ppl = ", ".join(f"{records[seed]['val_ppl']:.2f}" for seed in seeds)
        within = "–" if label == "none" else worse(estimate(percent))
        verdict = "yes" if np.mean(percent) <= 1 else "no"
        rows.append(((strategy, np.mean(percent)), [strategy, label, *ratios, ppl, within, verdict]))
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
