"""The command ``status``: the state of every run of an experiment, from the files in its folder, and the time left."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.base.flags import SECONDS
from gradwire.base.strict import Strict
from gradwire.base.units import amount
from gradwire.bench.config import Run
from gradwire.bench.report.rows.runs import EXPECTED, asked_for
from gradwire.bench.steps import PROGRESS, duration, progress_text

SILENT = 60.0  # seconds without progress after which a run counts as stopped
ORDER = ("running", "stopped", "failed", "diverged", "done", "waiting", "skipped")
CLEAR = "\033[H\033[2J"  # clears a terminal


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
        run: State("skipped", request.excluded) if request.excluded else state(results_dir / "runs" / run.path, now)
        for run, request in sorted(asked.items())
    }


def state(folder: Path, now: float) -> State:
    """Return the state of one run, from the files in its folder."""
    if (path := folder / "record.json").is_file():
        try:
            return ended(read_json(path))
        except BadInput as error:
            return State("failed", str(error))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return State("failed", f"{path.name} is unusable ({error!r})")
    if (path := folder / PROGRESS).is_file():
        progress, silent = read_json(path), now - path.stat().st_mtime
        text = progress_text(progress)
        if silent > SILENT + progress["step_ms"] / 1000:
            return State("stopped", f"{text}; nothing heard for {duration(silent)}")
        return State("running", f"{text}, {duration(progress['left_s'])} left", progress["left_s"])
    if paths := sorted(folder.glob("*.failed.json")):
        failure = read_json(paths[0])
        return State("failed", f"{paths[0].name.partition('.')[0]}, exit {failure['exit_code']}: {failure['reason']}")
    return State("waiting")


def ended(record: dict[str, Any]) -> State:
    """Return the state of a run from its record."""
    if record["status"] == "diverged":
        return State("diverged", record["reason"])
    quality = "not evaluated" if record["val_ppl"] is None else f"perplexity {record['val_ppl']:.2f}"
    mean = record.get("step_time_ms_mean")
    return State("done", quality if mean is None else f"{quality}, {mean:.1f} ms/step")


def records(states: dict[Run, State]) -> list[dict[str, Any]]:
    """The runs with their states, as JSON has them."""
    return [
        {**run._asdict(), "state": name, "text": text, "left_s": left} for run, (name, text, left) in states.items()
    ]


def overview(states: dict[Run, State], results_dir: Path, *, quiet: bool = False) -> str:
    """Format a line per run and a summary line."""
    width = max(len(run.path) for run in states)
    ordered = sorted(states.items(), key=lambda item: ORDER.index(item[1].name))
    lines = [] if quiet else [f"{state.name:<8}  {run.path:<{width}}  {state.text}".rstrip() for run, state in ordered]
    counts = Counter(state.name for state in states.values())
    sums = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    left = remaining(states, results_dir)
    return "\n".join(
        [*lines, f"{amount(len(states), 'run')}: {sums}" + (f"; about {duration(left)} left" if left else "")]
    )


def remaining(states: dict[Run, State], results_dir: Path) -> float | None:
    """Estimate the seconds until the last run ends from the pace since the workflow started; None without a pace."""
    to_come = sum(state.name in ("waiting", "running") for state in states.values())
    listed = results_dir / EXPECTED
    if not to_come or not listed.is_file():
        return None
    began = listed.stat().st_mtime
    records = (results_dir / "runs" / run.path / "record.json" for run, state in states.items() if state.name == "done")
    ends = [end for end in (record.stat().st_mtime for record in records) if end > began]
    return (max(ends) - began) / len(ends) * to_come if ends else None


class Options(Strict):
    """Flags of ``gradwire status``."""

    results_dir: Path = Field(description="the experiment's folder, results/<name>")
    watch: Annotated[float, SECONDS] | None = Field(
        None, description="seconds between updates of the view, until all runs have ended"
    )
    quiet: bool = Field(False, description="print the totals only")
    as_json: bool = Field(False, alias="json", description="print a list with an object per run")


def main(options: Options) -> None:
    """Print the state of every run, once or until all have ended.

    Raises:
        BadInput: If the folder holds no experiment.
    """
    if options.as_json:
        print(json.dumps(records(look(options.results_dir)), indent=2, ensure_ascii=False))
        return
    while True:
        states = look(options.results_dir)
        view = overview(states, options.results_dir, quiet=options.quiet)
        in_place = options.watch is not None and sys.stdout.isatty()
        print((CLEAR if in_place else "") + view, flush=True)
        if options.watch is None or not any(state.name in ("running", "waiting") for state in states.values()):
            return
        time.sleep(options.watch)
        if not in_place:
            print()
