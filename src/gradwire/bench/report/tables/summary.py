"""The summary as Markdown that is readable in a terminal: quality, bytes and times over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd

from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.notes import fallbacks, losses_over_links, machine, machines, privacy
from gradwire.bench.report.rows.record import BF16, Result, Status
from gradwire.bench.report.rows.traffic import as_computed
from gradwire.bench.report.tables import columns
from gradwire.bench.report.tables.columns import Column
from gradwire.bench.report.tables.markdown import MISSING, SPREAD, number
from gradwire.bench.report.tables.table import Table
from gradwire.bench.statistics.seeds import estimates, gated, percents
from gradwire.comm.topology import link_rate

CELL = ["strategy", "world_size", "compressor", "link"]
STATUSES = get_args(Status)
MEASURED = [
    "val_ppl",
    "unigram_ppl",
    "all_bytes_ratio",
    "compression_ratio",
    "compression_ratio_steady",
    "compression_ratio_bf16",
    "bytes_compressed_total",
    "bytes_closed_form_total",
    "bytes_parameters_total",
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
ESTIMATED = ["val_ppl", "worse_percent", "step_time_ms_mean", "speed_up", "speed_up_bf16", "sent_mb"]
PARTS = {
    "": "mean",
    "_n": "n",
    "_std": "std",
    "_low": "low",
    "_high": "high",
}  # of an estimate, by column suffix
SIGNS = {None: "", True: " =", False: " ≠"}  # bytes against their closed form; the worst sorts last
WIDTH = 138

TIME_TO_TARGET = (
    "Medians over seeds until the first evaluation that is as good; ∞: more than half of the seeds never are."
)

DEFINITIONS = f"""\
- n seeds; sd: sample standard deviation over them; range or 95 % interval of the column before it:
  {SPREAD}.
- `vs {BASELINE}`: against `{BASELINE}` (fp32, the framework's own reduction) with the same strategy and world size W,
  paired by seed: perplexity in percent, step time as a speed-up (on the same link and machine only). `!` marks a mean
  perplexity more than 1 % above that of `{BASELINE}`: such a cell is listed below all others, however fast it is.
  `× unigram`: perplexity over that of a model that knows only how often each token occurs.
- `all bytes ×`: how many times fewer bytes a run sends than with float32: gradients, the parameters that FSDP gathers
  and the flags of each step. The other columns are of gradient reduction, summed over ranks and all steps:
  `gradients ×` is against a bandwidth-optimal float32 collective, `steady` that after the dense steps;
  `MB closed form` is what the formula says: `=` what was measured is equal to the byte, `≠` it is not, no sign:
  nothing was measured. A reducer's messages are metered; where the framework reduces, `MB sent` is the formula's, and
  the sign is of the profiled steps, by their traces.
  `MB parameters`: what FSDP's gathers of parameters send, by formula unless `param_compress` encodes them.
- Step time and tokens/s leave out warm-up and profiled steps. The other times are of the mean profiled step:
  `comm` is the union of all collectives (parameters, control and waiting for other ranks included), `share` its part
  of the step, `exposed` what no computation of the same rank covers. Two ops may run at once."""


def summary(
    name: str,
    results: Sequence[Result],
    tiers: str = "",
    notes: Sequence[str] = (),
    answers: Sequence[str] = (),
    reached: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Format the whole summary.

    Args:
        name: The experiment's name.
        results: Its rows, at least one.
        tiers: Sections on quality tiers and links, if any.
        notes: Further notes.
        answers: Which compressor wins in which regime (`bench.report.tables.headline`).
        reached: What it took to reach each target (`bench.report.tables.time_to_loss.records`).

    Returns:
        Markdown of at most about 140 columns, with a line break at the end.
    """
    ok = [row for row in results if row.status == "ok"]
    parts = [f"# {name}", header(results)]
    if ok:
        cells = over_seeds(ok)
        parts += ["## In short", "\n".join(map(_item, answers))] if answers else []
        by_speed = cells.sort_values(["strategy", "world_size", "rate", "standing", "step_time_ms_mean"])
        parts += ["## Quality", _table(cells, columns.QUALITY), "## Bytes", _table(cells, columns.SENT)]
        parts += [
            "## Step time",
            _table(by_speed, columns.STEPS),
            "## Where a step's time goes",
            _table(by_speed, columns.TIMES),
        ]
        if by_op := op_table(ok, by_speed):
            parts += ["## Communication by op, ms per step", by_op]
        parts += [tiers] if tiers else []
    if reached:
        parts += ["## Time to target", Table.of("", "", reached, columns.TARGETS).markdown(), TIME_TO_TARGET]
    if notes := [*machines(ok), *losses_over_links(ok), *fallbacks(ok), *notes]:
        parts += ["## Notes", "\n".join(_item(note) for note in notes)]
    if len(ok) < len(results):
        parts += ["## Runs without a result", complaints(row for row in results if row.status != "ok")]
    return "\n\n".join([*parts, "## What the columns mean", DEFINITIONS]) + "\n"


def header(results: Sequence[Result]) -> str:
    """Describe the experiment, its machines and how many runs have a result."""
    statuses = [row.status for row in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    measured = [row for row in results if row.status in ("ok", "diverged")]
    properties = [
        ("dataset", _distinct(row.dataset for row in measured)),
        ("model", _distinct(_model(row) for row in measured)),
        ("training", _distinct(_training(row) for row in measured)),
        ("privacy", _distinct(privacy(row) for row in measured)),
        ("device", _distinct(_device(row) for row in measured)),
        ("versions", _distinct(_versions(row) for row in measured)),
        ("unigram yardstick", _distinct(number(row.unigram_ppl, "perplexity {:.1f}") for row in measured)),
    ]
    lines = [f"runs: {counts}", *(f"{name}: {text}" for name, text in properties if text)]
    return "\n".join(textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)


def one_by_one(ok: Sequence[Result]) -> pd.DataFrame:
    """Return one line per run: measurements and comparisons.

    ``worse_percent``: perplexity above that of the baseline with the same seed. ``speed_up``, ``speed_up_bf16``: how
    many times shorter a step is than that of the baseline, of the cell `BF16`, on the same link and machine.
    ``sent_mb``: megabytes of gradients that a rank sends in a step.
    """
    runs = pd.DataFrame([row.model_dump(include={*CELL, "seed", "steps", *MEASURED}) for row in ok])
    numbers = ["steps", *MEASURED]
    runs[numbers] = runs[numbers].astype(float)
    runs["machine"] = [machine(row) for row in ok]
    runs["comm_ms"] = runs["comm_time_ms_total"] / runs["measured_steps"]
    runs["over_unigram"] = runs["val_ppl"] / runs["unigram_ppl"]
    runs["sign"] = [SIGNS[as_computed(row)] for row in ok]
    quality = _baseline(runs, "val_ppl", ["strategy", "world_size", "seed"])
    runs["worse_percent"] = 100 * (runs["val_ppl"] / quality - 1)
    alike = ["strategy", "world_size", "link", "seed", "machine"]
    for name, label in (("speed_up", BASELINE), ("speed_up_bf16", BF16)):
        runs[name] = _baseline(runs, "step_time_ms_mean", alike, label) / runs["step_time_ms_mean"]
    runs["sent_mb"] = runs["bytes_compressed_total"] / runs["steps"] / runs["world_size"] / 1e6
    return runs


def over_seeds(ok: Sequence[Result]) -> pd.DataFrame:
    """Return one line per strategy, world size, compressor and link: statistics over seeds, and comparisons.

    Sorted by strategy and world size; then those that pass the quality gate, those without a perplexity, those that do
    not pass; then perplexity. Numbers that no seed has are NaN.
    """
    runs = one_by_one(ok)
    groups = runs.groupby(CELL)
    cells = groups[[*MEASURED, "comm_ms", "over_unigram"]].mean()
    cells["n"] = groups.size()
    cells["comm_percent"] = 100 * cells["comm_ratio"]
    cells["sign"] = groups["sign"].max()  # a cell differs if one of its runs does
    for column in ESTIMATED:
        samples = [sample.dropna().tolist() for _, sample in groups[column]]
        of_each = percents if column == "worse_percent" else estimates
        found = pd.DataFrame(of_each(samples), index=cells.index)
        cells[[f"{column}{part}" for part in PARTS]] = found[list(PARTS.values())]
    cells = cells.reset_index()
    baseline = _baseline(cells, "val_ppl", ["strategy", "world_size"])
    cells["gated"] = [gated(*pair) for pair in zip(cells["val_ppl"], baseline, strict=True)]
    cells["gate"] = np.where(cells["gated"], " !", "")
    cells["standing"] = np.where(cells["val_ppl"].isna(), 1, 2 * cells["gated"])
    cells["rate"] = [-link_rate(link) for link in cells["link"]]
    order = ["strategy", "world_size", "standing", "val_ppl", "compressor", "rate"]
    return cells.sort_values(order, ignore_index=True)


def _baseline(lines: pd.DataFrame, column: str, by: list[str], label: str = BASELINE) -> pd.Series[float]:
    """Each line's baseline: the mean of ``column`` over baseline lines with the same ``by``; NaN without one."""
    means = lines[lines["compressor"] == label].groupby(by)[column].mean()
    return lines[by].join(means.rename("baseline"), on=by)["baseline"]


def op_table(ok: Sequence[Result], cells: pd.DataFrame) -> str:
    """Communication by op in milliseconds per step, in the cells' order; empty without communication."""
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
    of_ops = [columns.milliseconds(op, op) for op in ops]
    return _table(cells[[*CELL, "n"]].merge(means, on=CELL), [*columns.SUMMARY_CELL, *of_ops])


def complaints(rows: Iterable[Result]) -> str:
    """Failed, skipped and diverged runs with their reasons, as a list."""
    return "\n".join(_item(f"{row.status}: {row.run_name}: {row.reason or 'no reason was given'}") for row in rows)


def _item(text: str) -> str:
    """Wrap an item of a list to the page width."""
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _table(cells: pd.DataFrame, shown: Sequence[Column]) -> str:
    return Table.of("", "", cells.to_dict("records"), shown).markdown()


def _distinct(texts: Iterable[Any]) -> str:
    """Join the distinct texts, in order."""
    return "; ".join(dict.fromkeys(str(text) for text in texts if text and text != MISSING))


def _model(row: Result) -> str:
    size = number(row.parameters, ", {:,} parameters").removeprefix(MISSING)
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
