"""Checks of a whole experiment: what a reader must know before its numbers count, as notes and as gates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from gradwire.base.errors import BadInput, listed
from gradwire.base.files import read_json
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.cells import BAD
from gradwire.bench.report.tables.results import Results
from gradwire.bench.statistics.seeds import LEAST

State = Literal["passed", "failed", "marked", "not checked"]
SHOWN = 12  # names in one sentence
EQUAL_LOSSES = "losses at every step are equal on all links"


def privacy(row: Result) -> str:
    """Describe a private run's guarantee and its settings; empty for other runs."""
    if row.sampling is None:
        return ""
    bound = "no bound: no noise" if row.epsilon is None else f"ε = {row.epsilon:.3g} at δ = {row.delta:.2g}"
    clipped = "" if row.clipped_fraction is None else f", {100 * row.clipped_fraction:.0f} % of the samples clipped"
    adjacency = f", {row.adjacency} adjacency" if row.adjacency else ""
    accountant = f", by {row.accountant.upper()} accountant" if row.accountant else ""
    return (
        f"{bound} (noise multiplier {row.noise_multiplier:g}, {row.sampling} sampling{adjacency}{clipped}{accountant})"
    )


def machines(ok: Iterable[Result]) -> list[str]:
    """List the cells of each machine; empty if all machines are alike."""
    cells: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in ok:
        cell, _, seed = row.run_name.rpartition("/seed")
        cells[row.machine][cell].append(seed)
    if len(cells) < 2:
        return []
    title = "runs of unlike machines: no speed-up is computed between them, and a mean over their seeds mixes them"
    named = {
        name: ", ".join(f"{cell} (seed {', '.join(numbers)})" for cell, numbers in of.items())
        for name, of in cells.items()
    }
    return [title, *(f"{name}: {text}" for name, text in named.items())]


def fallbacks(ok: Iterable[Result]) -> list[str]:
    """Describe how much compressors sent as float32, because encoding would not have made it shorter."""
    cells: defaultdict[str, list[Result]] = defaultdict(list)
    for row in ok:
        if row.fallbacks:
            cells[f"{row.strategy}/{row.compressor}/ws{row.world_size}"].append(row)
    shares = [
        f"{cell} {100 * max(row.fallback_fraction or 0 for row in rows):.2g} % of its elements "
        f"({max(row.fallbacks or 0 for row in rows):,} encodings)"
        for cell, rows in cells.items()
    ]
    return ["sent as float32, because encoding would not have made it shorter: " + "; ".join(shares)] if shares else []


def losses_over_links(ok: Iterable[Result]) -> list[str]:
    """Check that runs of as many steps which differ only in their link have equal losses at every step, by digests."""
    digests: defaultdict[tuple[str, int | None], dict[str, str]] = defaultdict(dict)
    for row in ok:
        if row.loss_digest is not None:
            run = f"{row.strategy}/{row.compressor}/ws{row.world_size}/seed{row.seed}"
            digests[run, row.steps][row.link] = row.loss_digest
    compared = {run: links for run, links in digests.items() if len(links) > 1}
    differ = []
    for (run, _), links in compared.items():
        alike = [[link for link in links if links[link] == digest] for digest in dict.fromkeys(links.values())]
        if len(alike) > 1:
            differ.append(f"losses differ between links: {run}: {' | '.join(map(', '.join, alike))}")
    counts = [f"{EQUAL_LOSSES}: {len(compared) - len(differ)} of {len(compared)}"] if compared else []
    return [*counts, *differ]


class Gate(NamedTuple):
    """One check.

    Attributes:
        name: The condition.
        state: ``failed``: some run is not valid; ``marked``: the named cells cannot head the table, or their numbers
            are less reliable; ``not checked``: nothing to check.
        text: The findings.
    """

    name: str
    state: State
    text: str


def gates(results: Results) -> list[Gate]:
    """All checks, the most important first."""
    ok, cells, results_dir, shared = results.ok, results.cells, results.results_dir, results.shared
    float32 = of_runs(
        "compressors encoded at least half of their elements",
        ok,
        lambda row: None if row.fallback_fraction is None else not row.mostly_float32,
    )
    unlike = machines(ok)
    others = "others may have run at the same time (no “timing: true”)" if shared else "one run at a time"
    return [
        finished(results.rows),
        quality(cells),
        of_runs(
            "bytes sent, as metered or traced, are those that the formula gives",
            ok,
            lambda row: row.as_computed,
            "failed",
        ),
        of_runs(
            "the meter and the profiler's trace of the same steps agree within 10 %", ok, lambda row: row.meter_agrees
        ),
        links(ok),
        of_runs(
            "no gradient was non-finite",
            ok,
            lambda row: None if row.nonfinite_steps is None else not row.nonfinite_steps,
        ),
        float32._replace(text="; ".join([float32.text, *fallbacks(ok)])),
        of_runs("every rank recorded its environment", ok, lambda row: _all_ranks(row, results_dir), "failed"),
        Gate(
            "all runs ran on like machines",
            "marked" if unlike else "passed",
            "; ".join(unlike[1:]) or "one kind of machine, one set of versions",
        ),
        Gate("runs did not share the machine", "not checked" if not ok else "marked" if shared else "passed", others),
        seeds(cells),
        stores(results_dir),
    ]


def finished(results: Sequence[Result]) -> Gate:
    """Whether every run has a result."""
    counts = Counter(row.status for row in results)
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    state: State = "failed" if counts["failed"] else "marked" if counts["ok"] < len(results) else "passed"
    return Gate("every requested run has a result", state, summary)


def quality(cells: pd.DataFrame | None) -> Gate:
    """Whether compression costs perplexity somewhere."""
    name = "no run diverged, and no perplexity is shown to be worse than its optimizer's in every step"
    known = None if cells is None else cells[cells["worse_percent"].notna() | (cells["diverged"] > 0)]
    if cells is None or known is None or known.empty:
        return Gate(name, "not checked", "no cell has a perplexity and one of its optimizer in every step")
    bad = known[known["verdict"].isin(BAD)]
    named = [f"{cell.strategy}/{cell.compressor}/ws{cell.world_size}/{cell.link}" for cell in bad.itertuples()]
    unknown = len(cells) - len(known)
    summary = f"{len(known) - len(bad)} of {len(known)} cells"
    summary += f", {unknown} without a comparison" if unknown else ""
    return Gate(name, "marked" if named else "passed", summary + (f"; not: {listed(named, SHOWN)}" if named else ""))


def of_runs(
    name: str, ok: Iterable[Result], holds: Callable[[Result], bool | None], otherwise: State = "marked"
) -> Gate:
    """Check a condition for each run; ``holds`` returns None where it does not apply."""
    known = {row.run_name: answer for row in ok if (answer := holds(row)) is not None}
    if not known:
        return Gate(name, "not checked", "no run has data for it")
    wrong = [run for run, answer in known.items() if not answer]
    summary = f"{len(known) - len(wrong)} of {len(known)} runs"
    return Gate(name, otherwise if wrong else "passed", summary + (f"; not: {listed(wrong, SHOWN)}" if wrong else ""))


def links(ok: Iterable[Result]) -> Gate:
    """Whether losses are independent of the link, as they must be."""
    ok = list(ok)
    notes = losses_over_links(ok)
    if not notes:
        links: defaultdict[tuple[str, str, int], set[str]] = defaultdict(set)
        for row in ok:
            if row.loss_digest is not None:
                links[row.strategy, row.compressor, row.world_size].add(row.link)
        several = sum(len(of) > 1 for of in links.values())
        steps = f"{several} cells ran on several links, but with another number of steps or other seeds on each"
        return Gate(EQUAL_LOSSES, "not checked", steps if several else "no cell ran on two links")
    state: State = "failed" if len(notes) > 1 else "passed"
    return Gate(EQUAL_LOSSES, state, "; ".join(notes).removeprefix(f"{EQUAL_LOSSES}: "))


def seeds(cells: pd.DataFrame | None) -> Gate:
    """Whether cells have ranges or intervals."""
    name = "every cell has several seeds, and so a range or an interval"
    if cells is None:
        return Gate(name, "not checked", "no cell has a result")
    if single := int((cells["n"] < 2).sum()):
        return Gate(name, "marked", f"{single} of {len(cells)} cells have one seed and neither")
    return Gate(name, "passed", f"{int(cells['n'].min())} seeds or more (from {LEAST} on an interval)")


def stores(results_dir: Path) -> Gate:
    """Whether the stores of per-sample gradients were validated."""
    name = "stores of per-sample gradients: row i belongs to id i"
    checks = validations(results_dir)
    if not checks:
        return Gate(name, "not checked", "no gradients were collected")
    wrong = [run for run, of in checks.items() if not all(check["passed"] for check in of)]
    summary = f"{len(checks) - len(wrong)} of {len(checks)} stores pass {sum(map(len, checks.values()))} checks"
    return Gate(name, "failed" if wrong else "passed", summary + (f"; not: {listed(wrong, SHOWN)}" if wrong else ""))


def validations(results_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """The checks of each gradient store by run; an unreadable file is a failed check."""
    by_run = {}
    for path in sorted((results_dir / "gradients").glob("*/*/*/*/*/validation.json")):
        try:
            checks = read_json(path)["checks"]
        except (BadInput, KeyError, TypeError) as error:
            checks = [{"name": "validation.json can be read", "passed": False, "detail": str(error)}]
        by_run[path.parent.relative_to(results_dir / "gradients").as_posix()] = checks
    return by_run


def _all_ranks(row: Result, results_dir: Path) -> bool | None:
    """Whether every rank of a run recorded its environment; None if none did."""
    folder = results_dir / "runs" / row.run_name / "environment"
    return len(list(folder.glob("rank*.json"))) == row.world_size if folder.is_dir() else None
