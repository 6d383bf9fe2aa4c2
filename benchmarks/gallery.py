"""The gallery of the documentation's first page, from records: ``python benchmarks/gallery.py docs/images``.

``--record STORE`` first writes ``gallery.json``: a query of a merged store of gradients, and where the row that it
finds has been. It is of the default experiment (``make run``)::

    python benchmarks/gallery.py docs/images --record results/default/gradients/fsdp2/none/ws2/none/seed0/dim256
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import exp, log, log10
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pandas as pd

from gradwire.attribution.store.store import read_ids
from gradwire.base.files import write_json, write_text

HERE = Path(__file__).parent
QUERY = "Example (for a Turtle instance named turtle): turtle.forward(100)"
WIDTH = 580
STYLE = """
text { font: 14.5px system-ui, sans-serif; fill: #16191d } .small { font-size: 13px; fill: #5b6470 }
.head { font-weight: 600 } .mono { font: 13px ui-monospace, monospace } .end { text-anchor: end }
.middle { text-anchor: middle } .grid { stroke: #dfe3e8 } .band { fill: #eceff2 }
.box { fill: #f4f6f8; stroke: #c5ccd4 } .line { stroke: #5b6470; fill: none }
.ink { --c: #16191d } .sky { --c: #3aa0dd } .blue { --c: #0068a8 } .green { --c: #00916a } .red { --c: #d04a00 }
.pink { --c: #d06aa8 } .amber { --c: #b98200 } .violet { --c: #6a4fcf } .brown { --c: #8a5a44 }
.mark { fill: var(--c) } .range { stroke: var(--c); stroke-width: 1.5 } text.of { fill: var(--c) }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ed } .small { fill: #a8b0ba } .grid { stroke: #343b45 }
  .band { fill: #262c35 } .box { fill: #20262e; stroke: #4a535f } .line { stroke: #a8b0ba }
  .ink { --c: #f1f3f5 } .sky { --c: #7cc7f5 } .blue { --c: #4a9be8 } .green { --c: #2cc79a } .red { --c: #ff8a4c }
  .pink { --c: #f0a3d2 } .amber { --c: #e8b93c } .violet { --c: #a794ff } .brown { --c: #c99a80 }
}
"""


class Method(NamedTuple):
    """How a label of ``quality.jsonl`` is drawn: its name, colour and mark, and where its name stands."""

    label: str
    name: str
    colour: str
    mark: str
    against: str = "none"  # the same optimizer in every step
    side: str = "right"
    shift: float = 0.0  # pixels to the right, of points that would cover each other


METHODS = (
    Method("none", "float32", "ink", "circle", side="top"),
    Method("bf16-native", "bf16", "sky", "circle", side="top"),
    Method("int8", "int8", "blue", "circle", side="top"),
    Method("int4", "int8, 4 bits", "green", "circle", side="left"),
    Method("onebit_adam", "1-bit Adam", "red", "circle"),
    Method("diloco-5-onebit", "DiLoCo, H = 5", "pink", "square", shift=-4),
    Method("diloco-10-onebit", "DiLoCo, H = 10", "amber", "square", side="left", shift=-4),
    Method("muon-5-onebit", "Muon inside, H = 5", "violet", "diamond", "muon", shift=4),
    Method("muon-10-onebit", "Muon inside, H = 10", "brown", "diamond", "muon", shift=4),
)
STEPS = (("none", "float32"), ("bf16-native", "bf16"), ("int8", "int8"), ("onebit_adam", "1-bit Adam"))


def main(words: Sequence[str] | None = None) -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the SVG files go")
    parser.add_argument("--record", type=Path, metavar="STORE", help="write gallery.json from this store first")
    args = parser.parse_args(words)
    if args.record:
        write_json(HERE / "gallery.json", record(args.record))
    recorded = json.loads((HERE / "gallery.json").read_text(encoding="utf-8"))
    pictures = {
        "tradeoff": tradeoff(records("quality")),
        "steps": steps(records("time-to-loss")),
        "nearest": nearest(recorded["query"]),
        "provenance": provenance(recorded["row"]),
    }
    for name, picture in pictures.items():
        write_text(args.folder / f"{name}.svg", picture)


def records(name: str) -> list[dict[str, Any]]:
    """The records of an experiment."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def record(store: Path) -> dict[str, Any]:
    """A query of a store, and the places of the row that it finds first."""
    command = [sys.executable, "-m", "gradwire", "grads", "query", "--store", str(store), "--prompt", QUERY]
    printed = subprocess.run([*command, "--top_k", "4", "--json"], check=True, capture_output=True, text=True).stdout
    query = json.loads(printed)
    sample = query["top"][0]["sample_id"]
    root = store.parent
    places = {
        str(file.relative_to(root)): ids.index(sample)
        for file in sorted(root.glob(f"**/{store.name}/*ids*.pkl"))
        if sample in (ids := read_ids(file))
    }
    meta = pd.read_parquet(store / "all_meta.parquet").set_index("sample_id").loc[sample]
    checks = json.loads((root / "validation.json").read_text(encoding="utf-8"))["checks"]
    shown = ("loss", "n_targets", "norm", "digest")
    return {
        "query": {key: query[key] for key in ("prompt", "metric", "samples", "top")},
        "row": {
            "sample": sample,
            "places": places,
            "checks": len(checks),
            **{key: meta[key].item() if hasattr(meta[key], "item") else meta[key] for key in shown},
        },
    }


def tradeoff(rows: Sequence[Mapping[str, Any]]) -> str:
    """Perplexity over bytes: each method's difference from its optimizer in every step, with the range of the seeds."""
    by_label = {
        label: {row["seed"]: row for row in rows if (row["compressor"], row["world_size"]) == (label, 2)}
        for label in ("muon", *(method.label for method in METHODS))
    }
    left, right, top, bottom = 36, WIDTH - 30, 28, 338

    def x(megabytes: float) -> float:
        return left + (right - left) * (log10(megabytes) - log10(0.0018)) / (log10(2.4) - log10(0.0018))

    def y(percent: float) -> float:
        return top + (bottom - top) * (10.5 - percent) / 15.5

    parts = [f'<rect class="band" x="{left}" y="{y(1):.1f}" width="{right - left}" height="{y(-1) - y(1):.1f}"/>']
    for percent in range(-4, 11, 2):
        parts += [
            line(left, y(percent), right, y(percent), "grid"),
            text(left - 8, y(percent) + 5, signed(percent), "small end"),
        ]
    for megabytes in (0.01, 0.03, 0.1, 0.3, 1):
        parts += [
            line(x(megabytes), top, x(megabytes), bottom, "grid"),
            text(x(megabytes), bottom + 18, f"{megabytes:g}", "small middle"),
        ]
    parts += [
        text(right, bottom + 38, "gradient megabytes that a rank sends per step", "small end"),
        text(0, 14, "perplexity above that of the same optimizer in every step, % (shaded: ± 1 %)", "small"),
    ]
    for method in METHODS:
        cells, base = by_label[method.label], by_label[method.against]
        percents = [
            100 * (cells[seed]["val_ppl"] / base[seed]["val_ppl"] - 1) for seed in sorted(cells.keys() & base.keys())
        ]
        average = 100 * (exp(mean(log(1 + percent / 100) for percent in percents)) - 1)
        sent = next(iter(cells.values()))
        px = x(sent["bytes_compressed_total"] / sent["steps"] / sent["world_size"] / 1e6) + method.shift
        py = y(average)
        parts += [f'<g class="{method.colour}">', line(px, y(min(percents)), px, y(max(percents)), "range")]
        parts += [mark(method.mark, px, py), name_of(method, px, py), "</g>"]
    names = ", ".join(method.name for method in METHODS)
    return svg(
        bottom + 50, f"Perplexity above that of the same optimizer over megabytes per rank and step: {names}.", parts
    )


def name_of(method: Method, px: float, py: float) -> str:
    """The name of a method at its point."""
    if method.side == "top":
        return text(px, py - 12, method.name, "of middle")
    return (
        text(px + 11, py + 5, method.name, "of")
        if method.side == "right"
        else text(px - 11, py + 5, method.name, "of end")
    )


def steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """A step on a slow link as a timeline: computation above, communication below, as the profiler measured them."""
    on_link = {row["compressor"]: row for row in rows if row["link"] == "100mbit"}
    left, scale = 100, (WIDTH - 100 - 70) / on_link["none"]["step_time_ms_p50"]
    parts = [text(left, 18, "computation", "small"), f'<g class="red">{text(left + 96, 18, "communication", "of")}</g>']
    for number, (label, name) in enumerate(STEPS):
        row, y = on_link[label], 34 + 56 * number
        exposed = row["exposed_comm_ms"]
        communication = exposed / (1 - row["overlap_ratio"])
        start = row["compute_time_ms"] - (communication - exposed)
        step = row["step_time_ms_p50"]
        parts += [
            text(left - 12, y + 24, name, "head end"),
            bar(left, y, scale * row["compute_time_ms"], "ink"),
            bar(left + scale * start, y + 19, scale * communication, "red"),
            text(left + scale * max(step, start + communication) + 8, y + 22, f"{step:.0f} ms", "head"),
        ]
    height = 34 + 56 * len(STEPS) + 4
    said = ", ".join(f"{name} {on_link[label]['step_time_ms_p50']:.0f} ms" for label, name in STEPS)
    return svg(
        height, f"A step of DDP on two ranks with a link of 100 Mbit/s: {said}.", ['<g class="ink">', *parts, "</g>"]
    )


def nearest(query: Mapping[str, Any]) -> str:
    """The samples whose gradients are nearest to that of a text."""
    parts = [text(0, 18, f"“{query['prompt']}”", "head")]
    largest = query["top"][0]["score"]
    for number, sample in enumerate(query["top"]):
        y = 36 + 50 * number
        excerpt = " ".join(sample["text"].split())
        parts += [
            bar(0, y, 100 * sample["score"] / largest, "blue"),
            text(108, y + 12, f"{sample['score']:.2f}", "small"),
            text(146, y + 12, sample["sample_id"], "mono"),
            text(146, y + 31, excerpt if len(excerpt) < 58 else f"{excerpt[:56]}…", "small"),
        ]
    names = ", ".join(sample["sample_id"] for sample in query["top"])
    return svg(
        36 + 50 * len(query["top"]), f"Nearest of {query['samples']} samples by {query['metric']}: {names}.", parts
    )


def provenance(row: Mapping[str, Any]) -> str:
    """Where a row of a store comes from: its document, its sample, its rank's block, the merged matrix."""
    document, _, part = row["sample"].rpartition("#")
    (block, in_block), (of_rank, in_rank), (merged, in_merged) = by_depth(row["places"])
    stages = (
        ("document", document, "in corpus.json, with its own id"),
        (
            "sample",
            f"{document}#{part}",
            f"part {part} of its tokens, {row['n_targets']} targets: a batch carries the id along",
        ),
        (
            "rank",
            f"{gradients(block)}, row {in_block}",
            f"{gradients(of_rank)}, row {in_rank}; ids in {block}",
        ),
        (
            "store",
            f"{gradients(merged)}, row {in_merged}",
            f"loss {row['loss']:.2f}, norm {row['norm']:.2f}, SHA-256 {row['digest'][:12]}…",
        ),
        ("proof", "gradwire grads validate", f"{row['checks']} checks; rows are computed again from their ids"),
    )
    parts = []
    for number, (name, what, more) in enumerate(stages):
        y = 2 + 62 * number
        parts += [
            text(82, y + 28, name, "head end"),
            f'<rect class="box" x="94" y="{y}" width="{WIDTH - 96}" height="46" rx="6"/>',
            text(108, y + 20, what, "mono"),
            text(108, y + 38, more, "small"),
        ]
        if number:
            parts.append(f'<path class="line" d="M116 {y - 16} v13 m-4 -5 l4 5 l4 -5"/>')
    return svg(
        62 * len(stages) - 12, f"Row {in_merged} of {gradients(merged)} is the gradient of {row['sample']}.", parts
    )


def by_depth(places: Mapping[str, int]) -> list[tuple[str, int]]:
    """The files with a row's id: its block's, its rank's, the store's."""
    return sorted(places.items(), key=lambda place: (-place[0].count("/"), "all_" in place[0]))


def gradients(ids: str) -> str:
    """The file of rows that belongs to one of ids."""
    return ids.replace("all_ids.pkl", "all_orig.pt").replace("ids-", "grads-").replace(".pkl", ".pt")


def signed(percent: float) -> str:
    """A difference in percent."""
    return f"{percent:+g}".replace("-", "−") if percent else "0"


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def line(x0: float, y0: float, x1: float, y1: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{kind}"/>'


def bar(x: float, y: float, width: float, colour: str) -> str:
    """A horizontal bar."""
    return f'<g class="{colour}"><rect class="mark" x="{x:.1f}" y="{y}" width="{width:.1f}" height="15" rx="2"/></g>'


def mark(kind: str, x: float, y: float) -> str:
    """The mark of a point."""
    if kind == "circle":
        return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>'
    turned = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "diamond" else ""
    return f'<rect class="mark" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"{turned}/>'


def svg(height: float, title: str, parts: Iterable[str]) -> str:
    """A picture for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">\n'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
