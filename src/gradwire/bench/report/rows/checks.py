"""Checks of a whole experiment that must pass before its numbers count, each with its findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.notes import fallbacks, losses_over_links, machines, mostly_float32
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.rows.traffic import as_computed
from gradwire.bench.statistics.seeds import LEAST, TOLERANCE

State = Literal["passed", "failed", "marked", "not checked"]
SHOWN = 12  # names in one sentence


class Gate(NamedTuple):
    """One check.

    Attributes:
        name: The condition.
        state: ``failed``: some run is not valid; ``marked``: the named cells cannot head the table, or their numbers
            are less reliable; ``not checked``: nothing to check.
        found: The findings.
    """

    name: str
    state: State
    found: str


def gates(results: Sequence[Result], cells: pd.DataFrame | None, results_dir: Path, shared: bool) -> list[Gate]:
    """All checks, the most important first."""
    ok = [row for row in results if row.status == "ok"]
    return [
        finished(results),
        quality(cells),
        of_runs("bytes sent, as metered or traced, are those that the formula gives", ok, as_computed, "failed"),
        of_runs(
            "the meter and the profiler's trace of the same steps agree within 10 %",
            ok,
            lambda row: row.meter_agrees,
            "marked",
        ),
        links(ok),
        of_runs("no gradient was non-finite", ok, _finite, "marked"),
        shortened(ok),
        of_runs("every rank recorded its environment", ok, lambda row: _ranks(row, results_dir), "failed"),
        one_machine(ok),
        alone(ok, shared),
        seeds(cells),
        stores(results_dir),
    ]


def finished(results: Sequence[Result]) -> Gate:
    """Whether every run has a result."""
    counts = pd.Series([row.status for row in results]).value_counts()
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    lost = counts.get("failed", 0)
    state: State = "failed" if lost else "marked" if counts.get("ok", 0) < len(results) else "passed"
    return Gate("every requested run has a result", state, summary)


def quality(cells: pd.DataFrame | None) -> Gate:
    """Whether cells pass the quality gate."""
    name = f"mean perplexity at most {TOLERANCE:g} % above that of {BASELINE} (fp32)"
    known = pd.DataFrame() if cells is None else cells[cells["worse_percent"].notna()]
    if known.empty:
        return Gate(name, "not checked", f"no cell has a perplexity and a cell {BASELINE} to compare with")
    bad = known[known["gated"]]
    named = [f"{cell.strategy}/{cell.compressor}/ws{cell.world_size}/{cell.link}" for cell in bad.itertuples()]
    unknown = 0 if cells is None else len(cells) - len(known)
    summary = f"{len(known) - len(bad)} of {len(known)} cells pass" + (
        f", {unknown} without a comparison" * bool(unknown)
    )
    return Gate(name, "marked" if named else "passed", summary + (f"; above: {listed(named)}" if named else ""))


def of_runs(name: str, ok: Iterable[Result], holds: Callable[[Result], bool | None], bad: State) -> Gate:
    """Check a condition for each run; ``holds`` returns None where it does not apply."""
    found = {row.run_name: holds(row) for row in ok}
    known = {run: one for run, one in found.items() if one is not None}
    if not known:
        return Gate(name, "not checked", "no run has data for it")
    wrong = [run for run, one in known.items() if not one]
    summary = f"{len(known) - len(wrong)} of {len(known)} runs"
    return Gate(name, bad if wrong else "passed", summary + (f"; not: {listed(wrong)}" if wrong else ""))


def shortened(ok: Sequence[Result]) -> Gate:
    """Whether compressors encoded their input; some send small tensors as float32."""
    gate = of_runs(
        "compressors encoded at least half of their elements",
        ok,
        lambda row: None if row.fallback_fraction is None else not mostly_float32(row),
        "marked",
    )
    return gate._replace(found="; ".join([gate.found, *fallbacks(ok)]))


def links(ok: Iterable[Result]) -> Gate:
    """Whether losses are independent of the link, as they must be."""
    name = "losses at every step are equal on all links"
    found = losses_over_links(ok)
    if not found:
        return Gate(name, "not checked", "no cell ran on two links")
    return Gate(name, "failed" if len(found) > 1 else "passed", "; ".join(found).removeprefix(f"{name}: "))


def one_machine(ok: Iterable[Result]) -> Gate:
    """Whether times are comparable."""
    found = machines(ok)
    summary = "; ".join(found[1:]) if found else "one kind of machine, one set of versions"
    return Gate("all runs ran on like machines", "marked" if found else "passed", summary)


def alone(ok: Sequence[Result], shared: bool) -> Gate:
    """Whether runs shared the machine."""
    summary = "others may have run at the same time (no “timing: true”)" if shared else "one run at a time"
    state: State = "not checked" if not ok else "marked" if shared else "passed"
    return Gate("runs did not share the machine", state, summary)


def seeds(cells: pd.DataFrame | None) -> Gate:
    """Whether cells have ranges or intervals."""
    name = "every cell has several seeds, and so a range or an interval"
    if cells is None or cells.empty:
        return Gate(name, "not checked", "no cell has a result")
    single = int((cells["n"] < 2).sum())
    summary = f"{single} of {len(cells)} cells have one seed and neither"
    enough = f"{int(cells['n'].min())} seeds or more (from {LEAST} on an interval)"
    return Gate(name, "marked" if single else "passed", summary if single else enough)


def stores(results_dir: Path) -> Gate:
    """Whether the stores of per-sample gradients were validated."""
    name = "stores of per-sample gradients: row i belongs to id i"
    found = validations(results_dir)
    if not found:
        return Gate(name, "not checked", "no gradients were collected")
    wrong = [run for run, checks in found.items() if not all(check["passed"] for check in checks)]
    count = sum(map(len, found.values()))
    summary = f"{len(found) - len(wrong)} of {len(found)} stores pass {count} checks"
    return Gate(name, "failed" if wrong else "passed", summary + (f"; not: {listed(wrong)}" if wrong else ""))


def validations(results_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The checks of each gradient store by run; an unreadable file is a failed check."""
    found = {}
    for path in sorted((results_dir / "gradients").glob("*/*/*/*/*/validation.json")):
        try:
            checks = read_json(path)["checks"]
        except (BadInput, KeyError, TypeError) as error:
            checks = [{"name": "validation.json can be read", "passed": False, "detail": str(error)}]
        found[path.parent.relative_to(results_dir / "gradients").as_posix()] = checks
    return found


def listed(names: Sequence[str]) -> str:
    """List names in a sentence, at most `SHOWN`."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _finite(row: Result) -> bool | None:
    return None if row.nonfinite_steps is None else not row.nonfinite_steps


def _ranks(row: Result, results_dir: Path) -> bool | None:
    folder = results_dir / "runs" / row.run_name / "environment"
    return len(list(folder.glob("rank*.json"))) == row.world_size if folder.is_dir() else None
