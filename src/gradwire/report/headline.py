"""The headline: which compressor wins in which regime (strategy, world size, link), and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gradwire.config import BASELINE
from gradwire.errors import BadInput
from gradwire.files import read_json
from gradwire.measurement.statistics import TOLERANCE
from gradwire.report.cells import Group, groups
from gradwire.report.markdown import MISSING, number
from gradwire.report.record import BF16

COMPRESSES = 1.01  # gradient bytes: a control such as `exchange` sends as many as the baseline
NAMED = 4  # compressors in the title
SHOWN = 6  # regimes


class Finding(NamedTuple):
    """The answer for one regime.

    Attributes:
        group: The regime.
        regime: Its name.
        number: The number that counts most, such as ``1.31 × faster``.
        text: The whole finding.
        cost: What the number is of, a key of `figures.pareto.COSTS`.
        gain: The speed-up, at most 1 where it is not clear; 0 where nothing qualifies.
    """

    group: Group
    regime: str
    number: str
    text: str
    cost: str = "bytes"
    gain: float = 0.0


def findings(cells: pd.DataFrame | None) -> list[Finding]:
    """The findings of all regimes with several ranks, the largest speed-up first.

    Args:
        cells: Statistics over seeds (`report.table.over_seeds`).
    """
    if cells is None:
        return []
    found = [
        finding(group, of)
        for group, of in groups(cells)
        if group.world_size > 1 and BASELINE in set(of["compressor"]) and len(compressed(of))
    ]
    return sorted(found, key=lambda one: -one.gain)


def compressed(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that compress gradients, without the baselines."""
    return cells[(cells["compression_ratio"] > COMPRESSES) & ~cells["compressor"].isin((BASELINE, BF16))]


def finding(group: Group, cells: pd.DataFrame) -> Finding:
    """The fastest compressor of a regime that passes the quality gate; if none is faster, the one of fewest bytes."""
    regime = f"{group.strategy}, {group.world_size} ranks, " + (
        "no shaped link" if group.link == "none" else f"{group.link} links"
    )
    compressing = compressed(cells)
    valid = compressing[~compressing["gated"].astype(bool) & compressing["speed_up"].notna()]
    if valid.empty:
        return Finding(
            group, regime, MISSING, f"no compressor stays within {TOLERANCE:g} % of {BASELINE}'s perplexity."
        )
    faster = valid[valid["speed_up_low"].fillna(valid["speed_up"]) > 1]
    if len(faster):
        best = _best(faster, "speed_up")
        pace = f"{best['speed_up']:.2f} × faster"
        return Finding(group, regime, pace, described(best, pace), "time", best["speed_up"])
    best = _best(valid, "all_bytes_ratio")
    gain = "no clear gain" if best["speed_up"] > 1 else "no faster"
    text = described(best, f"{best['speed_up']:.2f} × the speed of {BASELINE}: {gain}")
    return Finding(
        group, regime, f"{best['all_bytes_ratio']:.1f} × fewer bytes", text, "bytes", min(best["speed_up"], 1)
    )


def described(cell: Mapping[Any, Any], pace: str) -> str:
    """What a cell saves and costs, in a sentence."""
    return (
        f"{cell['compressor']}: {cell['compression_ratio']:.1f} × fewer gradient bytes, "
        f"{cell['all_bytes_ratio']:.1f} × fewer in all, perplexity {number(cell['worse_percent'], '{:+.1f} %')}, {pace}"
        f"{' (one seed)' if cell['n'] < 2 else ''}."
    )


def question(results_dir: Path, cells: pd.DataFrame | None) -> str:
    """The experiment's question: that of its configuration, else one made of what it compares."""
    try:
        given = read_json(results_dir / "config.json").get("question")
    except (BadInput, AttributeError):
        given = None
    if given:
        return str(given)
    labels: Sequence[str] = []
    if cells is not None:
        labels = list(dict.fromkeys(compressed(cells)["compressor"]))
    if not labels:
        return results_dir.resolve().name
    names = f"{len(labels)} compressors" if len(labels) > NAMED else _listed(labels)
    return f"What {'does' if len(labels) == 1 else 'do'} {names} save, and at what cost?"


def _best(cells: pd.DataFrame, column: str) -> dict[Any, Any]:
    """The cell with the largest value of a column."""
    return cells.sort_values(column).to_dict("records")[-1]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
