"""The results as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any


def report(result: dict[str, Any]) -> str:
    """The results as text: the machine, the table, and what failed."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in environment["packages"].items() if number)
    where = "one core" if environment["kind"] == "cpu" else f"CUDA {environment['cuda']}"
    rows, columns = result["shape"]
    lines = [
        f"{environment['device']}, {where}",
        f"{versions}, Python {environment['python']}",
        f"float32 [{rows}, {columns}], copied at {result['copy_bytes_per_s'] / 1e9:.1f} GB/s (read + written), "
        f"{result['product_flops_per_s'] / 1e9:.0f} GFLOP/s; medians of {result['repeats']} rounds",
        f"error: on {result['gradient_numel']:,} elements of the gradient of {result['gradient']}",
        "",
        table([line(record) for record in result["records"] if not record["error"]]),
    ]
    lines += [
        f"{record['method']}: encoding takes {record['encode_x_kept']:.1f} times as long as copying what is sent"
        for record in result["records"]
        if record["encode_x_kept"] is not None
    ]
    lines += [f"{record['method']}: {record['error']}" for record in result["records"] if record["error"]]
    return "\n".join(lines)


def line(record: dict[str, Any]) -> dict[str, str]:
    """One line of the table, by column."""
    target, peak, error = record["target"], record["encode_peak_bytes"], record["relative_error"]
    verdict = {True: "met", False: "missed", None: "–"}[record["met"]]
    return {
        "method": record["method"],
        "options": " ".join(f"{key}={value}" for key, value in record["options"].items()),
        "form": record["form"],
        "encode ms": f"{median(record['encode_ms']):.2f}",
        "decode ms": f"{median(record['decode_ms']):.2f}",
        "encode x floor": f"{record['encode_x_floor']:.2f}",
        "decode x floor": f"{record['decode_x_floor']:.2f}",
        "target": f"{target[0]:g} / {target[1]:g} {verdict}" if target else verdict,
        "bits": f"{record['bits_per_element']:.3f}",
        "bits, gradient": f"{record['gradient_bits_per_element']:.3f}",
        "error": "too large" if error is None else f"{error:.4f}",
        "peak MB": "–" if peak is None else f"{peak / 1e6:.1f}",
    }


def table(rows: Sequence[dict[str, str]]) -> str:
    """Rows as text; as JSON lines, with a note, where tabulate is not installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        print("gradwire bench compressors: tabulate is not installed: JSON lines instead of a table.", file=sys.stderr)
        return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    left = ("method", "options", "form", "target")
    align = ["left" if column in left else "right" for column in (rows[0] if rows else ())]
    return tabulate(rows, headers="keys", tablefmt="pipe", colalign=align, disable_numparse=True)
