"""The table of ``attribution.md``: ``python benchmarks/attribution_table.py benchmarks/attribution.jsonl``.

The records are one ``lds.json`` and one ``recall.json`` of `grads lds` and `grads recall`, a line each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gradwire.bench.judge import lds, recall
from gradwire.bench.judge.methods import table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    judged, recalled = map(json.loads, parser.parse_args().records.read_text().splitlines())
    found = {one["method"]: recall.shown_row(one) for one in recalled["methods"]}
    rows = [(lds.shown_row(one), found[one["method"]]) for one in judged["methods"]]
    print(table([own | planted | own for own, planted in rows]))  # the costs are those of `grads lds`


if __name__ == "__main__":
    main()
