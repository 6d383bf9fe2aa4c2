"""Write the perplexities that ``gradwire predict`` knows: ``python benchmarks/evidence.py``.

Each is of a cell's runs in a file of records, against the same optimizer in every step in that file, paired by seed.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from gradwire.base.files import write_text
from gradwire.bench.report.rows.record import Result, read_results
from gradwire.bench.report.tables.described import RECORDS, options_of
from gradwire.bench.report.tables.quality import PerplexityReference

FOLDER = Path(__file__).parent
FILES = (
    "quality", "quality-small", "quality-llama", "quality-llama-small", "ranks",
    "many-ranks", "many-ranks-long", "many-ranks-local",
)  # fmt: skip


def records(name: str) -> list[dict[str, Any]]:
    """The differences of a file's cells that have one; of a cell at several learning rates that with the most seeds."""
    rows, _ = read_results(FOLDER / f"{name}.jsonl")
    reference = PerplexityReference.of(name, rows)
    cells: defaultdict[tuple[str, int], dict[int, Result]] = defaultdict(dict)
    for row in reference.rows:
        if row.status == "ok" and not row.averages:
            cells[row.compressor, row.world_size][row.seed] = row
    table: dict[str, tuple[int, float, dict[str, Any]]] = {}
    for (_, world), runs in cells.items():
        difference, first = reference.compared(runs).difference, next(iter(runs.values()))
        key = {"cell": options_of(first.compress_config or {}), "parameters": first.parameters, "world_size": world}
        ends = [difference.mean, difference.low, difference.high]
        percent = [None if math.isnan(value) else round(value, 2) for value in ends]
        record = {**key, "seeds": difference.n, "percent": percent, "source": f"benchmarks/{name}.jsonl"}
        place, rank = json.dumps(key, sort_keys=True), (-difference.n, difference.mean)
        if difference.n and rank < table.get(place, (0, 0.0))[:2]:
            table[place] = (*rank, record)
    return [record for *_, record in table.values()]


def main() -> None:
    """Write the file."""
    lines = ",\n ".join(json.dumps(record) for name in FILES for record in records(name))
    write_text(RECORDS, f"[{lines}]\n")


if __name__ == "__main__":
    main()
