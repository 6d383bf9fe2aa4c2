"""The headline: which compressor wins in which regime (strategy, world size, link), and what it costs.

A sentence for each regime. A perplexity is compared with that of the same optimizer in every step, so what a change of
the optimizer gains is not called a gain of compression: how the optimizers compare is a sentence apart.

A number is claimed if several seeds support it: the perplexities of all, and the times of those that are not shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.base.units import UNSHAPED, spoken
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import ADAMW, BF16
from gradwire.bench.report.tables.cells import WORSE_PERCENT, Group, groups
from gradwire.bench.report.tables.quality import perplexities
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import MISSING, number, spread
from gradwire.bench.report.tables.time_to_loss import Cell, Goal, Pair, is_perplexity, paired
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate, percent_worse, percents
from gradwire.comm.topology import between_islands

COMPRESSES = 1.01  # gradient bytes: a control such as `exchange` sends as many as the baseline
NAMED = 4  # compressors in the title
NAMES = {ADAMW: "AdamW", "muon": "Muon", "sgd": "SGD"}
COUNTED = dict(enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], start=1))


class Finding(NamedTuple):
    """The answer for one regime.

    Attributes:
        group: The regime.
        regime: Its name.
        number: The claim, such as ``1.31 times faster`` or ``50.3 times sooner``; empty if too few seeds support it.
        text: The whole finding.
        cost: What the compressor was chosen by: ``target``, or a key of `page.fronts.COSTS`.
        gain: How many times sooner or faster, at most 1 where it is not clear; 0 where nothing qualifies.
    """

    group: Group
    regime: str
    number: str
    text: str
    cost: str = "bytes"
    gain: float = 0.0


def timed(results: Results, group: Group) -> dict[str, Cell]:
    """The cells of a regime that have targets, by label; none if times are shared, as they are no finding then."""
    return {} if results.shared else {cell.compressor: cell for cell in results.times if cell.place == tuple(group)}


def findings(results: Results) -> list[Finding]:
    """The findings of all regimes with several ranks: claims first, then the largest speed-up.

    What holds on several links, such as that no compressor passes the quality gate, is one finding.
    """
    if results.cells is None:
        return []
    answers = [
        finding(group, of_group, results)
        for group, of_group in groups(results.cells)
        if group.world_size > 1 and BASELINE in set(of_group["compressor"]) and len(compressed(of_group))
    ]
    unique: dict[tuple[str, str], Finding] = {}
    for answer in sorted(answers, key=lambda answer: (not answer.number, -answer.gain)):
        unique.setdefault((answer.regime, answer.text), answer)
    return [*unique.values()]


def compressed(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that compress gradients, without the baselines."""
    return cells[(cells["compression_ratio"] > COMPRESSES) & ~cells["compressor"].isin((BASELINE, BF16))]


def finding(group: Group, cells: pd.DataFrame, results: Results) -> Finding:
    """The answer for a regime, of the compressors that pass the quality gate.

    The one that is the soonest at a target; else the fastest; if none is faster, the one of fewest bytes.
    """
    regime = f"{group.strategy}, {group.world_size} ranks"
    compressing = compressed(cells)
    valid = compressing[~compressing["gated"].astype(bool) & compressing["speed_up"].notna()]
    if valid.empty:
        return Finding(group, regime, "", none_passes(compressing))
    if valid["worse_percent"].notna().any():
        valid = valid[valid["worse_percent"].notna()]
    goal, verdict = None, ""
    if (soonest := sooner(group, valid, results)) is not None:
        goal, label, pair = soonest
        best, gain, cost = valid[valid["compressor"] == label].to_dict("records")[0], pair.gain, "target"
        number, timed = f"{gain:.3g} times sooner", min(pair.n, best["speed_up_n"])
        begin = f"{label} reaches {goal.named} in {pair.seconds:,.0f} s, {pair.reference} in {pair.usual:,.0f} s: "
        pace = f"steps {best['speed_up']:.2f} times as fast as those of {BASELINE}"
    elif len(faster := valid[valid["speed_up_low"].fillna(valid["speed_up"]) > 1]):
        best, cost = _best(faster, "speed_up"), "time"
        gain, begin, timed = best["speed_up"], f"{best['compressor']}: ", best["speed_up_n"]
        number = f"{gain:.2f} times faster"
        pace = f"{number} than {BASELINE}"
    else:
        best, cost = _best(valid, "saved"), "bytes"
        gain, begin, timed = min(best["speed_up"], 1), f"{best['compressor']}: ", 0
        number = fewer(best["saved"])
        pace = f"{best['speed_up']:.2f} times the speed of {BASELINE}"
        verdict = f": {'no clear gain' if best['speed_up'] > 1 else 'no faster'}"
    if cost != "bytes" and (timed < 2 or results.shared):  # its bytes need no seeds
        number = fewer(best["saved"])
    doubts = ["one seed"] * (best["speed_up_n"] < 2) + ["times shared"] * results.shared
    pace += f" {place(group.link)}{verdict}" + (f" ({', '.join(doubts)})" if doubts else "")
    number = number if best["worse_percent_n"] > 1 else ""
    return Finding(
        group, regime, number, f"{begin}{saving(best)}, {pace}{longer(group, best, goal, results)}.", cost, gain
    )


def none_passes(cells: pd.DataFrame) -> str:
    """That no compressor passes the quality gate, and which is the nearest."""
    known = cells.dropna(subset="worse_percent")
    sentence = f"no compressor's mean perplexity is within {TOLERANCE:g} % of that of its optimizer in every step"
    if known.empty:
        return f"{sentence}."
    nearest = _best(known.assign(order=-known["worse_percent"]), "order")
    diverged = f", {nearest['diverged']} of its runs diverged" if nearest["diverged"] else ""
    return f"{sentence}; the nearest is {nearest['compressor']}: {saving(nearest)}{diverged}."


def saving(cell: Mapping[Any, Any]) -> str:
    """The bytes that a cell saves, and at which perplexity."""
    gradients = "" if cell["strategy"] == "ddp" else f" ({cell['saved_gradients']:.1f} for gradients)"
    return f"{fewer(cell['saved'])}{gradients}, {perplexity(difference(cell), cell['reference'])}"


def difference(cell: Mapping[Any, Any]) -> Estimate:
    """A cell's perplexity against its reference's."""
    mean, *others = (cell[column] for column in WORSE_PERCENT)
    return Estimate(others[0], mean, *others[1:])


def fewer(ratio: float) -> str:
    """How many times fewer bytes."""
    return f"{ratio:.1f} times fewer bytes"


def place(link: str) -> str:
    """Where a step was timed: ``at 20 Mbit/s``."""
    if link == UNSHAPED:
        return "without a slow link"
    return f"at {spoken(link.rpartition('-')[2])}" + (" between islands" if between_islands(link) else "")


def perplexity(difference: Estimate, reference: str) -> str:
    """A perplexity against its reference's in words."""
    low, high = difference.low, difference.high
    if not difference.n:
        return "perplexity not compared"
    if max(abs(low), abs(high)) <= TOLERANCE:
        return f"the same perplexity as {reference}, {percent(difference)}"
    if low <= 0 <= high:
        return (
            f"perplexity not distinguishable from that of {reference} with {seeds(difference.n)}, {percent(difference)}"
        )
    return f"perplexity {percent(difference)} against {reference}"


def seeds(n: int) -> str:
    """A number of seeds in words."""
    return f"{COUNTED.get(n, n)} seed{'s' * (n > 1)}"


def sooner(group: Group, valid: pd.DataFrame, results: Results) -> tuple[Goal, str, Pair] | None:
    """The goal, the label that reaches it the most times sooner than the label compared with, and both times.

    The goal is the final perplexity of a label, compared with that label; else the lowest perplexity that the baseline
    reaches. None if times are shared or no compressor is sooner.
    """
    cells = timed(results, group)
    targets = dict.fromkeys(target for cell in cells.values() for target in cell.targets)
    for target in sorted(targets, key=lambda target: (is_perplexity(target), len(target), target)):
        reference = BASELINE if is_perplexity(target) else target
        if reference not in cells:
            continue
        pairs = {
            label: paired(cells[label], cells[reference], target) for label in valid["compressor"] if label in cells
        }
        reached = {label: pair for label, pair in pairs.items() if pair.gain > 1}
        if reached:
            label = max(reached, key=lambda label: reached[label].gain)
            return Goal(target, group.strategy, group.world_size), label, reached[label]
    return None


def percent(difference: Estimate) -> str:
    """A difference in percent with its spread over seeds."""
    ends = spread(difference.n, difference.low, difference.high, "{:+z.1f}").replace(MISSING, "one seed")
    return number(difference.mean, "{:+z.1f} % ") + (ends if ends.startswith("[") else f"({ends})")


def longer(group: Group, cell: Mapping[Any, Any], goal: Goal | None, results: Results) -> str:
    """How much longer a cell takes to the goal than its own optimizer in every step, if both were timed; else nothing.

    Nothing is added for the baseline's optimizer, with which the goal's times are compared.
    """
    cells, reference = timed(results, group), cell["reference"]
    if goal is None or reference == BASELINE or reference not in cells:
        return ""
    gain = paired(cells[cell["compressor"]], cells[reference], goal.target).gain
    return f", in {1 / gain:.2f} times the time of {reference}" if 0 < gain < math.inf else ""


def of_optimizers(results: Results) -> list[str]:
    """A sentence for each optimizer but the baseline's: how it compares when it averages every step's gradients."""
    runs = {(*key[:2], of.reference): of for key, of in results.judged.items() if of.reference == key[2]}
    sentences = []
    for (strategy, world_size, label), of in runs.items():
        base = runs.get((strategy, world_size, BASELINE))
        if base is None or label == BASELINE or world_size == 1:
            continue
        worse = percent_worse(perplexities(of.runs), perplexities(base.runs))
        optimizer, usual = (next(iter(each.runs.values())).inner for each in (of, base))
        if worse:
            sentences.append(
                f"{strategy}, {world_size} ranks: {NAMES[optimizer]} instead of {NAMES[usual]} in every step, "
                f"without compression ({label}): {perplexity(percents([[*worse.values()]])[0], BASELINE)}."
            )
    return sentences


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
