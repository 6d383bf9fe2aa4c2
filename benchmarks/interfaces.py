"""Bytes at the interfaces against the counted ones: ``python benchmarks/interfaces.py results/links/results.jsonl``.

``counted``: gradients, the flag of each step and parameters, as bandwidth-optimal collectives would send them for the
framework's own reduction. ``interface``: what the ranks' own interfaces sent, protocol headers included. ``quotient``:
the second over the first; ``explained``: the quotient by the backend's factors; ``rest``: the remaining factor.

Where only cables between islands are limited, ``counted`` has the gradients between islands, which are counted apart
under `hsdp` only, and ``interface`` what the islands' interfaces sent, with each step's scalars.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gradwire.base.errors import BadInput
from gradwire.bench.report.rows.record import Result, read_results
from gradwire.bench.report.tables.cells import COMPRESSOR, LINK, STRATEGY, WORLD
from gradwire.bench.report.tables.table import Column, Table, megabytes, text
from gradwire.comm.topology import link_rate

SEED = Column("seed", "seed", "{:d}")
SEEN = (megabytes("MB counted", "counted"), megabytes("MB interface", "seen"), Column("quotient", "quotient", "{:.3f}"))
INTERFACES = (
    *(STRATEGY, WORLD, COMPRESSOR, LINK, SEED, text("sent by", "carriers"), *SEEN),
    Column("explained", "explained", "{:.3f}"),
    Column("rest", "rest_percent", "{:+.1f}", " %"),
)
CARRIERS = {"exchange": "all_to_all", "gather": "all_gather"}  # else the framework's own collective
CABLES = (STRATEGY, WORLD, Column("islands", "islands", "{:d}"), COMPRESSOR, LINK, SEED, *SEEN)


def carrier(row: Result) -> str:
    """Return the collective that carries the gradients of a row without bytes by collective."""
    native = "reduce_scatter" if row.sharded else "all_reduce"
    return CARRIERS.get(row.algorithm or "", native) if row.hooked else native


def gathering(row: Result) -> str:
    """Return the collective that gathers FSDP's parameters."""
    compressed = (row.compress_config or {}).get("param_compress", "none") != "none"
    return "all_to_all" if compressed else "all_gather"


def counted(row: Result) -> dict[str, int]:
    """Return the counted bytes of all ranks by collective: gradients, parameters, and the flag of each step."""
    gradients = row.bytes_by_op or {carrier(row): row.bytes_compressed_total or 0}
    flows = [
        *gradients.items(),
        ("all_reduce", row.bytes_agreement_total),
        (gathering(row), row.bytes_parameters_total),
    ]
    totals: defaultdict[str, int] = defaultdict(int)
    for op, sent in flows:
        if sent:
            totals[op] += sent
    return dict(totals)


def backend_factors(rows: Sequence[Result]) -> dict[str, float]:
    """Fit the bytes that interfaces send per counted byte of a collective: the cost of the backend's algorithm.

    For example, gloo's reduce-scatter is an all-reduce and sends twice the necessary bytes. The fit is robust and
    uses relative errors, so that a single outlier does not distort it.
    """
    sent = [counted(row) for row in rows]
    seen = np.array([row.bytes_interface_total for row in rows], dtype=np.float64)
    ops = sorted({op for by_op in sent for op in by_op})
    shares = np.array([[by_op.get(op, 0) for op in ops] for by_op in sent]) / seen[:, None]
    carried = shares.max(0) > 0.01  # below 1 % of the bytes everywhere, a factor cannot be determined
    fitted = least_squares(
        lambda factors: shares[:, carried] @ factors + shares[:, ~carried].sum(1) - 1,
        np.ones(carried.sum()),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=0.01,
    )
    return dict.fromkeys(ops, 1.0) | dict(zip(np.array(ops)[carried].tolist(), fitted.x.tolist(), strict=True))


def table(records: Iterable[Mapping[str, Any]], columns: Iterable[Column]) -> str:
    """Format records as Markdown."""
    return Table.of("", "", records, columns).markdown()


def interfaces(rows: Sequence[Result]) -> str:
    """Format the backend's factors on each link, as packets share headers on a fast one, and the table of bytes."""
    by_link: defaultdict[str, list[Result]] = defaultdict(list)
    for row in rows:
        by_link[row.link].append(row)
    links = sorted(by_link, key=link_rate, reverse=True)
    factors = {link: backend_factors(by_link[link]) for link in links}
    ratios = "; ".join(
        f"{link}: " + ", ".join(f"{op} {factor:.3f}" for op, factor in sorted(factors[link].items())) for link in links
    )
    records = []
    for row in rows:
        by_op, seen = counted(row), row.bytes_interface_total or 0
        sent = sum(by_op.values())
        explained = sum(factors[row.link][op] * of for op, of in by_op.items()) / sent
        gathers = [gathering(row)] if row.bytes_parameters_total else []
        carriers = " + ".join([*(row.bytes_by_op or [carrier(row)]), *gathers])
        of_row = {"counted": sent, "seen": seen, "quotient": seen / sent, "explained": explained}
        rest = {"rest_percent": 100 * (seen / sent / explained - 1)}
        records.append({**row.run._asdict(), "carriers": carriers, **of_row, **rest})
    return f"Interface over counted bytes by collective, headers included: {ratios}.\n\n" + table(records, INTERFACES)


def cables(rows: Sequence[Result]) -> str:
    """Format the table of bytes between islands."""
    records = []
    for row in rows:
        seen, sent = row.bytes_interface_between_total or 0, row.bytes_between_total
        of_row = {"counted": sent, "seen": seen, "quotient": seen / sent if sent else None}
        records.append({**row.run._asdict(), **of_row})
    return table(records, CABLES)


def report(results: Sequence[Result]) -> str:
    """Format the tables that the results have rows for."""
    ok = [row for row in results if row.status == "ok" and row.world_size > 1]
    ok.sort(key=lambda row: (row.strategy, row.world_size, -link_rate(row.link), row.compressor, row.seed, row.islands))
    at_ranks = [row for row in ok if row.bytes_interface_total is not None and counted(row)]
    between = [row for row in ok if row.bytes_interface_between_total is not None]
    parts = ([interfaces(at_ranks)] if at_ranks else []) + ([cables(between)] if between else [])
    return "\n\n".join(parts) or "no run on a shaped link"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="a results.jsonl, or the folder of one")
    try:
        print(report(read_results(parser.parse_args().results)[0]))
    except BadInput as error:
        parser.error(str(error))
