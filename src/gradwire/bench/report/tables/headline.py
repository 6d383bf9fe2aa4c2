"""The headline: which compressor wins in which regime (strategy, world size, link), and what it costs.

At most two sentences for each regime. What a change of the optimizer gains is not called a gain of compression: where a
cell's steps are not the baseline's, its perplexity is given against gradients averaged with the same optimizer too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.base.units import UNSHAPED, spoken
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.rows.record import BF16, Result
from gradwire.bench.report.tables.cells import WORSE_PERCENT, Group, groups
from gradwire.bench.report.tables.table import MISSING, number, spread
from gradwire.bench.report.tables.time_to_loss import Cell, Goal, is_perplexity
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate, percents
from gradwire.comm.communication import preset
from gradwire.comm.topology import between_islands

COMPRESSES = 1.01  # gradient bytes: a control such as `exchange` sends as many as the baseline
NAMED = 4  # compressors in the title
ADAMW = "adamw"
NAMES = {ADAMW: "AdamW", "muon": "Muon"}


class Finding(NamedTuple):
    """The answer for one regime.

    Attributes:
        group: The regime.
        regime: Its name.
        number: The number that counts most, such as ``1.31 times faster`` or ``50.3 times sooner``.
        text: The whole finding.
        cost: What the number is of: ``target``, or a key of `page.fronts.COSTS`.
        gain: How many times sooner or faster, at most 1 where it is not clear; 0 where nothing qualifies.
    """

    group: Group
    regime: str
    number: str
    text: str
    cost: str = "bytes"
    gain: float = 0.0


@dataclass(frozen=True)
class Known:
    """The runs that findings are made of.

    Args:
        rows: The runs with a result.
        quality: The runs whose perplexities count.
        times: The cells that have targets.
        shared: Whether other runs may have used the machine: then times to a target are no finding.
    """

    rows: Sequence[Result]
    quality: PerplexityReference
    times: Sequence[Cell] = ()
    shared: bool = False

    def timed(self, group: Group) -> dict[str, Cell]:
        """The cells of a regime that have targets, by label; none if times are shared."""
        return {} if self.shared else {cell.compressor: cell for cell in self.times if cell.place == tuple(group)}


def findings(cells: pd.DataFrame | None, known: Known) -> list[Finding]:
    """The findings of all regimes with several ranks, the largest speed-up first.

    Args:
        cells: Statistics over seeds (`bench.report.tables.cells.cells_of`).
        known: What else is known of the runs.
    """
    if cells is None:
        return []
    answers = [
        finding(group, of_group, known)
        for group, of_group in groups(cells)
        if group.world_size > 1 and BASELINE in set(of_group["compressor"]) and len(compressed(of_group))
    ]
    return sorted(answers, key=lambda answer: -answer.gain)


def compressed(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that compress gradients, without the baselines."""
    return cells[(cells["compression_ratio"] > COMPRESSES) & ~cells["compressor"].isin((BASELINE, BF16))]


def finding(group: Group, cells: pd.DataFrame, known: Known) -> Finding:
    """The answer for a regime, of the compressors that pass the quality gate.

    The one that is the soonest at a target; else the fastest; if none is faster, the one of fewest bytes.
    """
    regime = f"{group.strategy}, {group.world_size} ranks"
    compressing = compressed(cells)
    valid = compressing[~compressing["gated"].astype(bool) & compressing["speed_up"].notna()]
    if valid.empty:
        reason = f"no compressor stays within {TOLERANCE:g} % of {BASELINE}'s perplexity."
        return Finding(group, regime, MISSING, reason)
    goal, verdict = None, ""
    if (soonest := sooner(group, valid, known)) is not None:
        goal, label, seconds, reference, usual = soonest
        best, gain, cost = valid[valid["compressor"] == label].to_dict("records")[0], usual / seconds, "target"
        number = f"{gain:.3g} times sooner"
        begin = f"{label} reaches {goal.named} in {seconds:,.0f} s, {reference} in {usual:,.0f} s: "
        pace = f"steps {best['speed_up']:.2f} times as fast"
    elif len(faster := valid[valid["speed_up_low"].fillna(valid["speed_up"]) > 1]):
        best, cost = _best(faster, "speed_up"), "time"
        gain, begin = best["speed_up"], f"{best['compressor']}: "
        number = pace = f"{gain:.2f} times faster"
    else:
        best, cost = _best(valid, "all_bytes_ratio"), "bytes"
        gain, begin = min(best["speed_up"], 1), f"{best['compressor']}: "
        number = fewer(best["all_bytes_ratio"])
        pace = f"{best['speed_up']:.2f} times the speed of {BASELINE}"
        verdict = f": {'no clear gain' if best['speed_up'] > 1 else 'no faster'}"
    doubts = ["one seed"] * (best["n"] < 2) + ["times shared"] * known.shared
    pace += f" {place(group.link)}{verdict}" + (f" ({', '.join(doubts)})" if doubts else "")
    gradients = "" if best["strategy"] == "ddp" else f" ({best['compression_ratio']:.1f} for gradients)"
    worse = Estimate(*(best[column] for column in (WORSE_PERCENT[1], WORSE_PERCENT[0], *WORSE_PERCENT[2:])))
    saved = f"{fewer(best['all_bytes_ratio'])}{gradients}, {perplexity(worse)}"
    return Finding(group, regime, number, f"{begin}{saved}, {pace}.{steps(group, best, known, goal)}", cost, gain)


def fewer(ratio: float) -> str:
    """How many times fewer bytes."""
    return f"{ratio:.1f} times fewer bytes"


def place(link: str) -> str:
    """Where a step was timed: ``at 20 Mbit/s``."""
    if link == UNSHAPED:
        return "without a slow link"
    return f"at {spoken(link.rpartition('-')[2])}" + (" between islands" if between_islands(link) else "")


def perplexity(difference: Estimate) -> str:
    """A perplexity against the baseline's in words: the same within the tolerance."""
    same = abs(difference.mean) <= TOLERANCE
    return f"{'the same perplexity,' if same else 'perplexity'} {percent(difference)}"


def sooner(group: Group, valid: pd.DataFrame, known: Known) -> tuple[Goal, str, float, str, float] | None:
    """The goal, the label that reaches it first, its seconds, what it is compared with, and the seconds of that.

    The goal is the final perplexity of a label, compared with that label; else the lowest perplexity that the baseline
    reaches. None if times are shared or no compressor is sooner.
    """
    timed = known.timed(group)
    targets = dict.fromkeys(target for cell in timed.values() for target in cell.targets)
    for target in sorted(targets, key=lambda target: (is_perplexity(target), len(target), target)):
        reference = BASELINE if is_perplexity(target) else target
        times = {label: cell.seconds(target) for label, cell in timed.items()}
        usual = times.get(reference, math.inf)
        reached = {label: times[label] for label in valid["compressor"] if times.get(label, math.inf) < usual}
        if reached and math.isfinite(usual):
            label = min(reached, key=reached.__getitem__)
            return Goal(target, group.strategy, group.world_size), label, reached[label], reference, usual
    return None


def percent(difference: Estimate) -> str:
    """A difference in percent with its spread over seeds."""
    ends = spread(difference.n, difference.low, difference.high, "{:+.1f}")
    within = "" if ends == MISSING else f" {ends}" if ends.startswith("[") else f" ({ends})"
    return number(difference.mean, "{:+.1f} %") + within


def steps(group: Group, cell: Mapping[Any, Any], known: Known, goal: Goal | None) -> str:
    """A sentence on what a cell costs against its own optimizer, if its steps are not the baseline's; else nothing."""
    rows = {row.compressor: row for row in reversed(group.rows(known.rows))}
    row = rows[cell["compressor"]]
    optimizer, usual = inner(row), inner(rows[BASELINE])
    if optimizer == usual:
        return ""
    begin = f" Its steps are {NAMES[optimizer]}'s, those of {BASELINE} {NAMES[usual]}'s: "
    reference, worse = against_its_optimizer(row, known.quality)
    if reference is None:
        return f"{begin}no cell averages gradients with {NAMES[optimizer]} in every step."
    against = f"{reference.compressor}, which averages {NAMES[optimizer]}'s gradients in every step"
    ratio = longer(group, cell, reference, goal, known)
    return f"{begin}against {against}, its perplexity is {percent(percents([worse])[0])}{ratio}."


def against_its_optimizer(row: Result, quality: PerplexityReference) -> tuple[Result | None, list[float]]:
    """The run that averages the gradients of every step for the same optimizer and ranks, or None.

    With it, by how many percent a run's perplexity is above that one's, by seed.
    """
    for reference in quality.rows:
        alike = averages(reference) and (inner(reference), reference.world_size) == (inner(row), row.world_size)
        if alike and (worse := quality.percent_worse(row, reference)):
            return reference, worse
    return None, []


def longer(group: Group, cell: Mapping[Any, Any], reference: Result, goal: Goal | None, known: Known) -> str:
    """How much longer a cell takes to the goal than another label, if both were timed; else nothing."""
    timed = known.timed(group)
    if goal is None or reference.compressor not in timed:
        return ""
    ratio = timed[cell["compressor"]].seconds(goal.target) / timed[reference.compressor].seconds(goal.target)
    return f", its time {ratio:.2f} ×" if ratio > 0 else ""


def inner(row: Result) -> str:
    """The optimizer that takes a run's steps."""
    config = row.compress_config or {}
    return str(config.get("inner") or preset(config.get("comm_optimizer")).options.get("inner") or ADAMW)


def averages(row: Result) -> bool:
    """Whether a run averages every step's gradients as they are."""
    return row.compress_method == BASELINE and "comm_optimizer" not in (row.compress_config or {})


def question(results_dir: Path, cells: pd.DataFrame | None) -> str:
    """The experiment's question: that of its configuration, else one made of what it compares."""
    try:
        given = read_json(results_dir / "config.json").get("question")
    except (BadInput, AttributeError):
        given = None
    if given:
        return str(given)
    labels = [] if cells is None else list(dict.fromkeys(compressed(cells)["compressor"]))
    if not labels:
        return results_dir.resolve().name
    *others, last = labels
    names = (
        f"{len(labels)} compressors" if len(labels) > NAMED else f"{', '.join(others)} and {last}" if others else last
    )
    return f"What {'do' if others else 'does'} {names} save, and at what cost?"


def _best(cells: pd.DataFrame, column: str) -> dict[Any, Any]:
    """The cell with the largest value of a column."""
    return cells.sort_values(column).to_dict("records")[-1]
