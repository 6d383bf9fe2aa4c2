"""The verb ``status``: which runs of an experiment are done, running, failed or still to come, and how long is left."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from gradwire.config import Run
from gradwire.errors import BadInput
from gradwire.files import read_json
from gradwire.flags import SECONDS
from gradwire.report.summarize import EXPECTED, asked_for

PROGRESS = "progress.json"  # of a run that goes on, in its folder (training.progress; this room imports no torch)
CLEAR = "\033[H\033[2J"  # a terminal: what comes next stands alone, from the top
SILENT = 60.0  # seconds without a word, after which a run counts as stopped
ORDER = ("running", "stopped", "failed", "diverged", "done", "waiting", "skipped")


class State(NamedTuple):
    """How a run stands.

    Attributes:
        name: One of ``ORDER``.
        text: What is to be said of it.
        left: Seconds that it will still take; None where that is not known.
    """

    name: str
    text: str = ""
    left: float | None = None


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, required=True, help="the experiment's folder, results/<name>")
    parser.add_argument(
        "--watch",
        type=SECONDS,
        metavar="SECONDS",
        help="a view that renews itself until all runs ended; plain lines where nobody sits at a terminal",
    )
    parser.add_argument("--quiet", action="store_true", help="the sums only, not every run")


def main(args: Namespace) -> None:
    """Tell how every run stands, once or until all have ended.

    Raises:
        BadInput: If there is no experiment.
    """
    while True:
        states = look(args.results_dir)
        view = overview(states, args.results_dir, quiet=args.quiet)
        in_place = args.watch is not None and sys.stdout.isatty()
        print((CLEAR if in_place else "") + view, flush=True)
        if args.watch is None or not any(state.name in ("running", "waiting") for state in states.values()):
            return
        time.sleep(args.watch)
        if not in_place:
            print()


def look(results_dir: Path, now: float | None = None) -> dict[Run, State]:
    """How every run stands that the experiment asks for.

    Args:
        results_dir: The experiment's folder.
        now: Seconds since the epoch; by default the clock's.

    Raises:
        BadInput: If there is no experiment.
    """
    asked = asked_for(results_dir)
    if not asked:
        raise BadInput(f"{results_dir} holds no experiment: no {EXPECTED}, and no run. `make run` writes them.")
    now = time.time() if now is None else now
    return {
        run: State("skipped", one.excluded) if one.excluded else state(results_dir / "runs" / run.path, now)
        for run, one in sorted(asked.items())
    }


def state(folder: Path, now: float) -> State:
    """How one run stands, by what is in its folder."""
    if (record := folder / "record.json").is_file():
        found = read_json(record)
        if found["status"] == "diverged":
            return State("diverged", found["reason"])
        quality = "not evaluated" if found["val_ppl"] is None else f"perplexity {found['val_ppl']:.2f}"
        return State("done", quality)
    if (progress := folder / PROGRESS).is_file():
        found, heard = read_json(progress), progress.stat().st_mtime
        loss = "-" if found["loss"] is None else f"{found['loss']:.3f}"
        ratio = "" if found["ratio"] is None else f", ratio {found['ratio']:.2f}"
        text = f"step {found['step']}/{found['steps']}, loss {loss}, {found['step_ms']:.0f} ms/step{ratio}"
        silent = now - heard
        if silent > SILENT + found["step_ms"] / 1000:
            return State("stopped", f"{text}; nothing heard for {duration(silent)}")
        return State("running", f"{text}, {duration(found['left_s'])} left", found["left_s"])
    failures = sorted(folder.glob("*.failed.json"))
    if failures:
        found = read_json(failures[0])
        return State("failed", f"{failures[0].name.partition('.')[0]}, exit {found['exit_code']}: {found['reason']}")
    return State("waiting")


def overview(states: dict[Run, State], results_dir: Path, *, quiet: bool = False) -> str:
    """A line for every run, and one that sums them up."""
    width = max(len(run.path) for run in states)
    ordered = sorted(states.items(), key=lambda item: ORDER.index(item[1].name))
    lines = [] if quiet else [f"{one.name:<8}  {run.path:<{width}}  {one.text}".rstrip() for run, one in ordered]
    counts = Counter(one.name for one in states.values())
    sums = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    left = remaining(states, results_dir)
    return "\n".join([*lines, f"{len(states)} runs: {sums}" + (f"; about {duration(left)} left" if left else "")])


def remaining(states: dict[Run, State], results_dir: Path) -> float | None:
    """Seconds until the last run ends, at the pace since the workflow was called last; None if it has no pace yet."""
    to_come = sum(one.name in ("waiting", "running") for one in states.values())
    listed = results_dir / EXPECTED
    if not to_come or not listed.is_file():
        return None
    began = listed.stat().st_mtime
    records = (results_dir / "runs" / run.path / "record.json" for run, one in states.items() if one.name == "done")
    ends = [end for end in (record.stat().st_mtime for record in records) if end > began]
    return (max(ends) - began) / len(ends) * to_come if ends else None


def duration(seconds: float) -> str:
    """``1 h 05 min``, ``3 min``, ``12 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
