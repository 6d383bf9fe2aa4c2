"""The verb ``status``: which runs of an experiment are done, running, failed or pending, and the time left."""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.base.flags import SECONDS
from gradwire.bench.config import Run
from gradwire.bench.report.rows.runs import EXPECTED, asked_for

PROGRESS = "progress.json"  # in the folder of a running run; written by training.progress, which imports torch
CLEAR = "\033[H\033[2J"  # clears a terminal
SILENT = 60.0  # seconds without progress after which a run counts as stopped
ORDER = ("running", "stopped", "failed", "diverged", "done", "waiting", "skipped")


class State(NamedTuple):
    """The state of a run.

    Attributes:
        name: One of ``ORDER``.
        text: A description.
        left: Estimated seconds left; None if unknown.
    """

    name: str
    text: str = ""
    left: float | None = None


def arguments(parser: ArgumentParser) -> None:
    """Declare the verb's flags."""
    parser.add_argument("--results_dir", type=Path, help="the experiment's folder; default: all of results/, in short")
    parser.add_argument(
        "--watch",
        type=SECONDS,
        metavar="SECONDS",
        help="update the view every SECONDS until all runs have ended",
    )
    parser.add_argument("--quiet", action="store_true", help="print the totals only")
    parser.add_argument("--json", action="store_true", help="print a list with an object per run")


def main(args: Namespace) -> None:
    """Print the state of every run, once or until all have ended.

    Raises:
        BadInput: If the folder holds no experiment.
    """
    if args.results_dir is None:
        print(listing(Path("results"), as_json=args.json))
        return
    if args.json:
        print(json.dumps(records(look(args.results_dir)), indent=2, ensure_ascii=False))
        return
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
    """Return the state of every requested run.

    Args:
        results_dir: The experiment's folder.
        now: Seconds since the epoch; by default the clock's.

    Raises:
        BadInput: If the folder holds no experiment.
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
    """Return the state of one run, from the files in its folder."""
    if (record := folder / "record.json").is_file():
        found = read_json(record)
        if found["status"] == "diverged":
            return State("diverged", found["reason"])
        quality = "not evaluated" if found["val_ppl"] is None else f"perplexity {found['val_ppl']:.2f}"
        mean = found.get("step_time_ms_mean")
        return State("done", quality if mean is None else f"{quality}, {mean:.1f} ms/step")
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


def listing(folder: Path, *, as_json: bool) -> str:
    """A line for every experiment in ``folder``, or JSON with the states of its runs.

    Raises:
        BadInput: If there is none.
    """
    found = {path.parent.name: look(path.parent) for path in sorted(folder.glob(f"*/{EXPECTED}"))}
    if not found:
        raise BadInput(f"there is no experiment in {folder}/; `gradwire init` and `gradwire run` make one.")
    if as_json:
        return json.dumps({name: records(states) for name, states in found.items()}, indent=2, ensure_ascii=False)
    width = max(map(len, found))
    return "\n".join(f"{name:<{width}}  {overview(of, folder / name, quiet=True)}" for name, of in found.items())


def records(states: dict[Run, State]) -> list[dict[str, Any]]:
    """The runs with their states, as JSON has them."""
    return [
        {**run._asdict(), "state": name, "text": text, "left_s": left} for run, (name, text, left) in states.items()
    ]


def overview(states: dict[Run, State], results_dir: Path, *, quiet: bool = False) -> str:
    """Format a line per run and a summary line."""
    width = max(len(run.path) for run in states)
    ordered = sorted(states.items(), key=lambda item: ORDER.index(item[1].name))
    lines = [] if quiet else [f"{one.name:<8}  {run.path:<{width}}  {one.text}".rstrip() for run, one in ordered]
    counts = Counter(one.name for one in states.values())
    sums = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    left = remaining(states, results_dir)
    return "\n".join([*lines, f"{len(states)} runs: {sums}" + (f"; about {duration(left)} left" if left else "")])


def remaining(states: dict[Run, State], results_dir: Path) -> float | None:
    """Estimate the seconds until the last run ends from the pace since the workflow started; None without a pace."""
    to_come = sum(one.name in ("waiting", "running") for one in states.values())
    listed = results_dir / EXPECTED
    if not to_come or not listed.is_file():
        return None
    began = listed.stat().st_mtime
    records = (results_dir / "runs" / run.path / "record.json" for run, one in states.items() if one.name == "done")
    ends = [end for end in (record.stat().st_mtime for record in records) if end > began]
    return (max(ends) - began) / len(ends) * to_come if ends else None


def duration(seconds: float) -> str:
    """Format seconds: ``1 h 05 min``, ``3 min``, ``12 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
