"""A part of the GPU check: its rows, its targets and its time, written to a JSON file after every row.

``python -m gpu.part environment`` and ``summary PART ...`` begin and end the script; ``merge PAGE`` puts the summary
into a page.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

DEVICE = os.environ.get("DEVICE", "cuda")
SMALL = os.environ.get("SIZE") == "small"
OUT = Path(os.environ.get("OUT", "results/gpu"))
NEEDED = ("torch", "triton", "transformers", "numba", "numpy", "pydantic")
Row = dict[str, Any]


class Part:
    """Runs pieces of work one after another; one that fails is recorded, and the others run all the same.

    Args:
        name: The part's name, also that of its files.

    No piece starts later than the variable LIMIT says, in seconds. A file of an earlier call that did not finish is
    continued: what succeeded is not repeated.
    """

    def __init__(self, name: str) -> None:
        self.name, self.began = name, time.monotonic()
        self.seconds = float(os.environ.get("LIMIT", 600))
        self.file = OUT / f"{name}.json"
        self.rows: list[Row] = []
        self.targets: list[Row] = []
        self.skipped: list[str] = []
        OUT.mkdir(parents=True, exist_ok=True)
        if self.file.exists() and not os.environ.get("FRESH"):
            before = json.loads(self.file.read_text())
            self.rows = [row for row in before["rows"] if not failed(row)]

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def at_most(self, seconds: float) -> float:
        """Seconds for a piece of work that may take so many, but may not end much later than the part."""
        return min(seconds, max(10.0, self.left + 5))

    def row(self, name: str) -> Row | None:
        """The row of a piece of work, if it succeeded."""
        return next((row for row in self.rows if row["name"] == name and "error" not in row), None)

    def measure(self, name: str, work: Callable[[], Row], *, optional: bool = False) -> Row | None:
        """Do a piece of work; its row, or None if it failed or there was no time for it.

        A failure of ``optional`` work, such as what PyTorch itself may refuse, is noted, and the part does not fail.
        """
        if (known := self.row(name)) is not None:
            return known
        if self.left <= 0:
            self.skip(name)
            return None
        began = time.monotonic()
        try:
            found = work()
        except Exception as error:
            found = {"note" if optional else "error": message_of(error)}
        return self.record(name, found | {"took_s": round(time.monotonic() - began, 2)})

    def record(self, name: str, found: Row) -> Row | None:
        """Add a row, print it and write the file."""
        row = {"name": name, **found}
        self.rows.append(row)
        print(f"{name}: " + ", ".join(f"{key} {short(value)}" for key, value in found.items()), flush=True)
        self.write(finished=False)
        return None if {"error", "note"} & row.keys() else row

    def skip(self, name: str) -> None:
        """Note that there was no time for a piece of work."""
        self.skipped.append(name)
        print(f"{name}: no time left", flush=True)

    def target(self, name: str, value: float | None, limit: float, *, at_least: bool = False) -> None:
        """Hold a value against its target; None is missed."""
        met = value is not None and (value >= limit if at_least else value <= limit)
        self.targets.append({"name": name, "value": value, "limit": limit, "at_least": at_least, "met": met})

    def write(self, finished: bool) -> None:
        """Write the file."""
        found = {
            "part": self.name,
            "device": DEVICE,
            "small": SMALL,
            "finished": finished,
            "took_s": round(time.monotonic() - self.began, 1),
            "failed": [row["name"] for row in self.rows if failed(row)],
            "skipped": self.skipped,
            "targets": self.targets,
            "rows": self.rows,
        }
        whole = self.file.with_suffix(".part")
        whole.write_text(json.dumps(found, indent=1, default=str))
        whole.replace(self.file)

    def finish(self, columns: list[str] | None = None) -> int:
        """Write the file and its tables for the last time; the exit code, 1 if anything failed."""
        wrong = [row for row in self.rows if failed(row)]
        rows = [{key: short(row[key]) for key in ["name", *(columns or [])] if key in row} for row in self.rows]
        text = [table([row for row in rows if len(row) > 1]), table([verdict(target) for target in self.targets])]
        text += [f"FAILED {row['name']}: {row.get('error') or row['wrong']}" for row in wrong]
        page = "\n\n".join(filter(None, text))
        self.file.with_suffix(".md").write_text(f"## {self.name}\n\n{page}\n")
        print("\n" + page)
        self.write(finished=not self.skipped and not wrong)
        return 1 if wrong else 0


def summary(parts: list[str]) -> int:
    """Print the machine, a line for each part, and the tables of all.

    Returns:
        The exit code, 1 if a part failed or did not finish.
    """
    machine = json.loads((OUT / "environment.json").read_text())
    lines, pages = [], []
    for part in parts:
        file = OUT / f"{part}.json"
        result = json.loads(file.read_text()) if file.exists() else {"finished": False, "failed": [], "rows": []}
        outcome = "failed" if result["failed"] else "ok" if result["finished"] else "not finished"
        missed = [target["name"] for target in result.get("targets", []) if not target["met"]]
        cells = {"part": part, "outcome": outcome, "rows": len(result["rows"]), "failed": result["failed"]}
        cells |= {"no time for": len(result.get("skipped", [])), "targets missed": len(missed)}
        lines.append({key: short(value) for key, value in cells.items()})
        if file.with_suffix(".md").exists():
            pages.append(file.with_suffix(".md").read_text())
    print("\n\n".join([f"# {machine.pop('card')}", ", ".join(machine.values()), table(lines), *pages]))
    return 0 if all(line["outcome"] == "ok" for line in lines) else 1


def environment() -> int:
    """Print the machine and the versions; 2 where nothing can run."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        print(f"gpu.sh: {sys.executable} has no {', '.join(absent)}; put it on PYTHONPATH", file=sys.stderr)
        return 2
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("gpu.sh: torch sees no GPU; DEVICE=cpu tries the script without one", file=sys.stderr)
        return 2
    import triton

    machine = {
        "card": "CPU",
        "torch": f"torch {torch.__version__}",
        "triton": f"Triton {triton.__version__}",
        "python": f"Python {platform.python_version()}",
        "cores": f"{os.cpu_count()} cores",
        "date": time.strftime("%-d %B %Y"),
    }
    if DEVICE == "cuda":
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
        machine |= {"card": torch.cuda.get_device_name(), "driver": f"driver {driver or 'unknown'}"}
        machine["cuda"] = f"CUDA {torch.version.cuda}"
    print(", ".join(machine.values()))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "environment.json").write_text(json.dumps(machine, indent=1))
    return 0


def merge(page: Path) -> int:
    """Put the summary into a page, in place of an earlier one of the same card; 2 if it is not of a GPU."""
    summarized = OUT / "summary.md"
    text = summarized.read_text() if summarized.exists() else ""
    title, _, tables = text.removeprefix("# ").partition("\n")
    if title in ("", "CPU"):
        print(f"gpu.sh: {summarized} has no tables of a GPU; run benchmarks/gpu.sh on one", file=sys.stderr)
        return 2
    heading = f"## Tables of {title}\n"
    section = heading + re.sub(r"^## ", "### ", tables, flags=re.MULTILINE)
    before, _, rest = page.read_text().partition(heading)
    after = rest[rest.find("\n## ") :].lstrip("\n") if "\n## " in rest else ""
    page.write_text("\n\n".join(filter(None, [before.rstrip("\n"), section.rstrip("\n"), after.rstrip("\n")])) + "\n")
    return 0


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if DEVICE == "cuda":
        torch.cuda.synchronize()


def host_waits(action: Callable[[], Any]) -> int:
    """How often the host waits for the GPU in some work."""
    import torch

    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            action()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def milliseconds(action: Callable[[], Any], steps: int, warmup: int = 2) -> float:
    """The median of several runs."""
    times = []
    for turn in range(warmup + steps):
        synchronize()
        began = time.perf_counter()
        action()
        synchronize()
        if turn >= warmup:
            times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def failed(row: Row) -> bool:
    """Whether a piece of work raised an error or found something wrong."""
    return "error" in row or bool(row.get("wrong"))


def verdict(target: Row) -> dict[str, str]:
    """A target as a line of a table."""
    sign = "≥" if target["at_least"] else "≤"
    met = "met" if target["met"] else "missed"
    return {"target": target["name"], "value": short(target["value"]), "limit": f"{sign} {target['limit']:g}", "": met}


def message_of(error: BaseException) -> str:
    """An error in a few lines: its kind and message, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:600]} [{where}]"


def short(value: Any) -> str:
    """A value for a table."""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(short, value[:6])) + (", ..." if len(value) > 6 else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {short(item)}" for key, item in value.items())
    return str(value)


def table(rows: list[dict[str, str]]) -> str:
    """Rows as a Markdown table; a cell that a row lacks is empty."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([row.get(column, "") for column in columns] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def run(main: Callable[[], int]) -> None:
    """Exit with the code of a part's main function."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["summary", *names]:
            sys.exit(summary(names))
        case ["merge", path]:
            sys.exit(merge(Path(path)))
        case _:
            sys.exit(environment())
