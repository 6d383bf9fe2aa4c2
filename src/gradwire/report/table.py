"""The summary as Markdown that also reads well in a terminal: quality, bytes and times over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import pandas as pd
import tabulate

from gradwire.report.record import Result, Status

tabulate.MIN_PADDING = 0  # headers no wider than their words: a dozen columns have to fit a terminal

CELL = ["strategy", "world_size", "compressor", "link"]
NAMES = {"strategy": "strategy", "world_size": "W", "compressor": "compressor", "link": "link", "n": "n"}
STATUSES = get_args(Status)
BASELINE = "none"
TOLERANCE = 1.0  # percent of perplexity over the baseline's that is marked
MEASURED = [
    "val_ppl",
    "unigram_ppl",
    "compression_ratio",
    "bytes_compressed_total",
    "bytes_closed_form_total",
    "step_time_ms_mean",
    "tokens_per_s",
    "comm_time_ms_total",
    "measured_steps",
    "comm_ratio",
    "exposed_comm_ms",
    "compute_time_ms",
    "compress_time_ms",
    "decompress_time_ms",
]
WIDTH = 138
MISSING = "–"

DEFINITIONS = f"""\
- Mean ± sample standard deviation over n seeds. `vs {BASELINE}`: perplexity against that of `{BASELINE}` (fp32, the
  framework untouched) under the same strategy and world size W; `!` marks more than {TOLERANCE:g} % worse.
  `× unigram`: perplexity over that of a model that knows only how often each token occurs.
- Bytes of gradient reduction, summed over ranks and all steps; `ratio` is against a bandwidth-optimal float32
  collective; `MB closed form` is what the encoding's formula says: `=` equal to the byte, `≠` not.
- Step time and tokens/s leave out warm-up and profiled steps. The other times are of the mean profiled step:
  `comm` is the union of all collectives (parameters, control and waiting for other ranks included), `share` its part
  of the step, `exposed` what no computation of the same rank covers. Two ops may run at once."""


def summary(name: str, results: Sequence[Result]) -> str:
    """The whole page.

    Args:
        name: The experiment's name.
        results: Its rows, at least one.

    Returns:
        Markdown of at most about 140 columns, with a line break at the end.
    """
    ok = [row for row in results if row.status == "ok"]
    parts = [f"# {name}", header(results)]
    if ok:
        cells = over_seeds(ok)
        parts += ["## Quality and bytes", quality_table(cells), "## Time", time_table(cells)]
        if by_op := op_table(ok, cells):
            parts += ["## Communication by op, ms per step", by_op]
    if len(ok) < len(results):
        parts += ["## Runs without a result", complaints(row for row in results if row.status != "ok")]
    return "\n\n".join([*parts, "## What the columns mean", DEFINITIONS]) + "\n"


def header(results: Sequence[Result]) -> str:
    """What was run, on what, and how many runs have a result."""
    statuses = [row.status for row in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    measured = [row for row in results if row.status in ("ok", "diverged")]
    facts = [
        ("dataset", _distinct(row.dataset for row in measured)),
        ("model", _distinct(_model(row) for row in measured)),
        ("training", _distinct(_training(row) for row in measured)),
        ("device", _distinct(_device(row) for row in measured)),
        ("versions", _distinct(_versions(row) for row in measured)),
        ("unigram yardstick", _distinct(_number(row.unigram_ppl, "perplexity {:.1f}") for row in measured)),
    ]
    lines = [f"runs: {counts}", *(f"{fact}: {text}" for fact, text in facts if text)]
    return "\n".join(textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)


def over_seeds(ok: Sequence[Result]) -> pd.DataFrame:
    """One line per strategy, world size, compressor and link: means over seeds, and what is compared with them.

    Sorted by strategy, world size, then perplexity. Numbers that no seed has are NaN.
    """
    runs = pd.DataFrame([row.model_dump(include={*CELL, *MEASURED}) for row in ok])
    runs[MEASURED] = runs[MEASURED].astype(float)
    runs["comm_ms"] = runs["comm_time_ms_total"] / runs["measured_steps"]
    runs["over_unigram"] = runs["val_ppl"] / runs["unigram_ppl"]
    runs["as_computed"] = runs["bytes_compressed_total"] == runs["bytes_closed_form_total"]
    groups = runs.groupby(CELL)
    cells = groups[[*MEASURED, "comm_ms", "over_unigram"]].mean()
    cells["n"] = groups.size()
    cells["as_computed"] = groups["as_computed"].all()
    for column in ("val_ppl", "step_time_ms_mean"):
        cells[f"{column}_std"] = groups[column].std()
    cells = cells.reset_index()
    baseline = runs[runs["compressor"] == BASELINE].groupby(["strategy", "world_size"])["val_ppl"].mean()
    cells = cells.join(baseline.rename("baseline_ppl"), on=["strategy", "world_size"])
    cells["worse_percent"] = 100 * (cells["val_ppl"] / cells["baseline_ppl"] - 1)
    return cells.sort_values(["strategy", "world_size", "val_ppl", "compressor", "link"], ignore_index=True)


def quality_table(cells: pd.DataFrame) -> str:
    """Perplexity and bytes."""
    return _table(
        cells,
        {
            "val ppl": lambda cell: _spread(cell["val_ppl"], cell["val_ppl_std"], "{:,.2f}"),
            f"vs {BASELINE}": _against_baseline,
            "× unigram": lambda cell: _number(cell["over_unigram"], "{:.3f}"),
            "ratio": lambda cell: _number(cell["compression_ratio"], "{:.3f}"),
            "MB sent": lambda cell: _megabytes(cell["bytes_compressed_total"]),
            "MB closed form": _closed_form,
        },
    )


def time_table(cells: pd.DataFrame) -> str:
    """Step time and where it goes, in milliseconds."""
    columns = {
        "exposed": "exposed_comm_ms",
        "compute": "compute_time_ms",
        "encode": "compress_time_ms",
        "decode": "decompress_time_ms",
    }
    return _table(
        cells,
        {
            "step ms": lambda cell: _spread(cell["step_time_ms_mean"], cell["step_time_ms_mean_std"], "{:,.1f}"),
            "tokens/s": lambda cell: _number(cell["tokens_per_s"], "{:,.0f}"),
            "comm ms": lambda cell: _number(cell["comm_ms"], "{:,.1f}"),
            "share": lambda cell: _number(100 * cell["comm_ratio"], "{:.0f} %"),
            **{title: _milliseconds(column) for title, column in columns.items()},
        },
    )


def op_table(ok: Sequence[Result], cells: pd.DataFrame) -> str:
    """Communication by op in milliseconds per step, in the cells' order; empty where nothing was communicated."""
    times = pd.DataFrame(
        [
            row.model_dump(include={*CELL}) | {op: ms / row.measured_steps for op, ms in row.comm_time_ms_by_op.items()}
            for row in ok
            if row.comm_time_ms_by_op and row.measured_steps
        ]
    )
    if times.empty:
        return ""
    ops = sorted(set(times.columns) - set(CELL))
    means = times.fillna(dict.fromkeys(ops, 0.0)).groupby(CELL)[ops].mean().reset_index()
    return _table(cells[[*CELL, "n"]].merge(means, on=CELL), {op: _milliseconds(op) for op in ops})


def complaints(rows: Iterable[Result]) -> str:
    """Failed, skipped and diverged runs with their reasons, as a list."""
    return "\n".join(
        textwrap.fill(
            f"{row.status}: {row.run_name}: {row.reason or 'no reason was given'}",
            WIDTH,
            initial_indent="- ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for row in rows
    )


def _table(cells: pd.DataFrame, columns: dict[str, Callable[[Any], str]]) -> str:
    """The cells' names and the given columns, numbers to the right."""
    rows = [
        [*(cell[name] for name in NAMES), *(text(cell) for text in columns.values())]
        for cell in cells.to_dict("records")
    ]
    align = ("left", "right", "left", "left", *["right"] * (1 + len(columns)))
    return tabulate.tabulate(rows, [*NAMES.values(), *columns], tablefmt="pipe", colalign=align, disable_numparse=True)


def _number(value: Any, form: str) -> str:
    return MISSING if pd.isna(value) else form.format(value)


def _spread(mean: float, std: float, form: str) -> str:
    return _number(mean, form) if pd.isna(std) else f"{form.format(mean)} ± {form.format(std)}"


def _milliseconds(column: str) -> Callable[[Any], str]:
    return lambda cell: _number(cell[column], "{:,.1f}")


def _megabytes(value: float) -> str:
    return _number(value / 1e6, "{:,.3f}")


def _closed_form(cell: Any) -> str:
    text = _megabytes(cell["bytes_closed_form_total"])
    return text if text == MISSING else f"{text} {'=' if cell['as_computed'] else '≠'}"


def _against_baseline(cell: Any) -> str:
    if cell["compressor"] == BASELINE:
        return MISSING
    mark = " !" if cell["worse_percent"] > TOLERANCE else ""
    return _number(cell["worse_percent"], "{:+z.2f} %") + mark


def _distinct(texts: Iterable[Any]) -> str:
    """The different texts among them, in order."""
    return "; ".join(dict.fromkeys(str(text) for text in texts if text and text != MISSING))


def _model(row: Result) -> str:
    size = _number(row.parameters, ", {:,} parameters").removeprefix(MISSING)
    return f"{row.model}{size}"


def _training(row: Result) -> str:
    return (
        f"{row.steps} steps of {row.batch_size} samples per rank, at most {row.max_length} tokens each, {row.optimizer}"
    )


def _device(row: Result) -> str:
    environment = row.environment or {}
    return (
        f"{row.device} ({environment.get('device', 'unknown')}, {environment.get('cores', '?')} cores), {row.backend}"
    )


def _versions(row: Result) -> str:
    environment = row.environment or {}
    packages = environment.get("packages", {})
    versions = {"gradwire": environment.get("gradwire"), **packages, "Python": environment.get("python")}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
