"""The tables of ``quality.md`` from the records of ``configs/quality.yaml`` and ``configs/tuning.yaml``.

``python benchmarks/quality_table.py benchmarks/quality.jsonl``, with ``--rounds`` for local updates by length and
codec, with ``--against muon`` for differences from another label than ``none``, with ``--rates`` for
``benchmarks/tuning.jsonl``, and with ``--ranked_by benchmarks/quality.jsonl`` for another experiment's records. Where
one file has both, ``--rates --seed 9`` reads the records that chose the rates.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from math import factorial
from pathlib import Path
from typing import Any

from scipy.stats import permutation_test, rankdata, spearmanr
from tabulate import tabulate

from gradwire.bench.report.tables.comparison import same_text
from gradwire.bench.report.tables.table import MISSING, number, spread
from gradwire.bench.statistics.seeds import Paired, adjusted, paired

ORDERS = 100_000  # of labels that are tried; all of them for up to 8 labels


def whole_ratio(record: dict[str, Any]) -> float | None:
    """float32 bytes over sent bytes, of gradients and gathered parameters together; None if nothing was sent."""
    raw = record["bytes_raw_total"] + (record["bytes_parameters_raw_total"] or 0)
    sent = record["bytes_compressed_total"] + (record["bytes_parameters_total"] or 0)
    return raw / sent if sent else None


def check_text(records: Sequence[dict[str, Any]]) -> None:
    """Check that all records are of one text in the same tokens, which a unigram model's perplexity identifies.

    Raises:
        ValueError: If they are not.
    """
    found = {record["unigram_ppl"]: record["run_name"] for record in records}
    if not all(same_text(ppl, next(iter(found))) for ppl in found):
        runs = ", ".join(f"{name} ({ppl})" for ppl, name in found.items())
        raise ValueError(
            f"runs of different texts or tokens do not compare: {runs}; in brackets a unigram model's perplexity"
        )


def against(records: dict[int, Any], base: dict[int, Any]) -> Paired:
    """Perplexity against that of ``base``, paired by seed.

    Seeds may have different texts, as the two runs of a pair have the same.
    """
    seeds = sorted(records.keys() & base.keys())
    for seed in seeds:
        check_text([base[seed], records[seed]])
    return paired(*([each[seed]["val_ppl"] for seed in seeds] for each in (base, records)))


def by_rate(records: list[dict[str, Any]]) -> str:
    """A row per method with its perplexity at each learning rate; labels are ``METHOD-RATE``."""
    check_text(records)
    found: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for record in records:
        found[record["compressor"].removesuffix(f"-{record['lr']}")][record["lr"]] = record["val_ppl"]
    rates = sorted({rate for each in found.values() for rate in each}, reverse=True)
    rows = [
        [method, *(each.get(rate) for rate in rates), min(each, key=each.__getitem__)]
        for method, each in sorted(found.items())
    ]
    headers = ["compressor", *(f"{rate:g}" for rate in rates), "best"]
    formats = ["", *[".2f"] * len(rates), "g"]
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=formats)


def by_round(lines: list[dict[str, Any]], seed: int = 0) -> str:
    """Perplexity and times fewer bytes over the run of ``diloco-H`` and ``diloco-H-CODEC``: a row per H."""
    found: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for record in lines:
        name, _, rest = record["compressor"].partition("-")
        if name == "diloco" and (record["world_size"], record["seed"]) == (2, seed):
            length, _, codec = rest.partition("-")
            if "-" in codec:  # another option than those of the table
                continue
            found[int(length)][codec or "float32"] = f"{record['val_ppl']:.2f} ({record['compression_ratio']:.1f}×)"
    codecs = sorted({codec for row in found.values() for codec in row})
    rows = [[length, *(row.get(codec) for codec in codecs)] for length, row in sorted(found.items())]
    return tabulate(rows, ["H", *codecs], tablefmt="pipe", missingval=MISSING, stralign="right")


def by_cell(lines: list[dict[str, Any]], base: str = "none") -> str:
    """A row per strategy, world size and compressor, the best first; differences are from ``base``, paired by seed.

    Only seeds of ``base`` count: a cell without one, such as one of a learning rate that was tried, has no row.

    Raises:
        ValueError: If no run has the label ``base``, a cell's runs have different learning rates, or a pair's two
            runs different texts.
    """
    labels = {record["compressor"] for record in lines}
    if base not in labels:
        raise ValueError(f"no run of {base!r}; labels: {', '.join(sorted(labels))}")
    found: defaultdict[tuple[str, int, str], dict[int, Any]] = defaultdict(dict)
    for record in lines:
        found[record["strategy"], record["world_size"], record["compressor"]][record["seed"]] = record
    tests = {cell: against(runs, found.get((*cell[:2], base), {})) for cell, runs in found.items()}
    tests = {cell: test for cell, test in tests.items() if test.n}
    others = [cell for cell in tests if cell[2] != base]
    corrected = dict(zip(others, adjusted([tests[cell].p for cell in others]), strict=True))
    rows = []
    for cell, test in tests.items():
        records = found[cell]
        first = records[min(records)]
        if len(rates := {record["lr"] for record in records.values()}) > 1:
            raise ValueError(f"runs of {cell[2]!r} have different learning rates: {sorted(rates)}")
        ratios = [
            number(ratio, "{:.2f}")
            for ratio in (first["compression_ratio"], first["compression_ratio_steady"], whole_ratio(first))
        ]
        shared = sorted(records.keys() & found[(*cell[:2], base)].keys())
        ppl = ", ".join(f"{records[seed]['val_ppl']:.2f}" for seed in shared)
        ends = f", {spread(test.n, test.low, test.high, '{:+.1f}')}" if test.n > 1 else ""
        shown = (
            [f"{test.mean:+.1f} %{ends}", number(test.sees, "{:.1f} %"), number(corrected[cell], "{:.2g}")]
            if cell in corrected
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
        f"against {base}",
        "sees",
        "p (Holm)",
        "within 1 %",
    ]
    aligned = ["left", "right", "left", *["right"] * 4, *["left"] * 5]
    return tabulate([row for _, row in sorted(rows)], headers, tablefmt="pipe", disable_numparse=True, colalign=aligned)


def ranks(lines: list[dict[str, Any]], other: list[dict[str, Any]], only: Sequence[str] | None = None) -> str:
    """Differences from `none` in two experiments, and Spearman's rank correlation; two ranks, labels of both.

    The p-value is one-sided, as the question is whether the order holds. ``only`` restricts the labels, for example to
    methods without their controls.

    Raises:
        ValueError: If a label of ``only`` is not in both experiments.
    """
    first, second = differences(lines), differences(other)
    both = first.keys() & second.keys()
    if missing := set(only or ()) - both:
        raise ValueError(f"labels {sorted(missing)} are not in both experiments; those of both: {sorted(both)}")
    labels = sorted(set(only or both), key=first.__getitem__)
    rows = [[label, f"{first[label]:+.1f} %", f"{second[label]:+.1f} %"] for label in labels]
    table = tabulate(rows, ["compressor", "here", "there"], tablefmt="pipe", colalign=["left", "right", "right"])
    if len(labels) < 3:
        return f"{table}\n\n{len(labels)} labels of both are too few for a rank correlation"
    pairs = [first[label] for label in labels], [second[label] for label in labels]
    orders = factorial(len(labels))
    tried = f"all {orders:,}" if orders <= ORDERS else f"{ORDERS:,} random"
    return (
        f"{table}\n\nSpearman's rank correlation of {len(labels)} labels: {spearmanr(*pairs).statistic:.2f}, "
        f"p = {by_chance(*pairs):.2g} (one-sided, {tried} orders of the labels)"
    )


def by_chance(one: Sequence[float], other: Sequence[float]) -> float:
    """The share of orders of ``one`` whose rank correlation with ``other`` is at least that of the given order."""
    fixed = rankdata(other)
    found = permutation_test(
        (rankdata(one),),
        lambda order, axis: (order * fixed).sum(axis),  # grows with the correlation
        permutation_type="pairings",
        alternative="greater",
        vectorized=True,
        n_resamples=ORDERS,
        rng=0,
    )
    return float(found.pvalue)


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
    """Print one of the four tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--rates", action="store_true", help="perplexity by learning rate")
    table.add_argument("--rounds", action="store_true", help="local updates by length of a round and codec")
    table.add_argument("--against", default="none", metavar="LABEL", help="the label compared with (default: none)")
    table.add_argument("--ranked_by", type=Path, metavar="RECORDS", help="differences next to those of other records")
    parser.add_argument("--labels", nargs="+", metavar="LABEL", help="rank these only (default: all of both)")
    parser.add_argument("--seed", type=int, metavar="N", help="read the records of this seed only")
    args = parser.parse_args()
    records = [record for record in read(args.records) if args.seed in (None, record["seed"])]
    try:
        if args.ranked_by:
            print(ranks(records, read(args.ranked_by), args.labels))
        elif args.rounds:
            print(by_round(records))
        else:
            print(by_rate(records) if args.rates else by_cell(records, args.against))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
