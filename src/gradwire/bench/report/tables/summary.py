"""The summary as Markdown that is readable in a terminal: quality, bytes and times over seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import pandas as pd

from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import Result, Status
from gradwire.bench.report.tables.cells import (
    AGAINST,
    ALL_BYTES,
    CELL,
    PERPLEXITY,
    RATIO,
    SEEDS,
    SPEED_UP,
    STEP,
    SUMMARY_CELL,
    TOKENS,
    WORSE,
)
from gradwire.bench.report.tables.checks import fallbacks, losses_over_links, machines, privacy
from gradwire.bench.report.tables.headline import findings, of_optimizers
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import (
    MISSING,
    SPREAD,
    Column,
    Table,
    markdown_of,
    megabytes,
    milliseconds,
    number,
)
from gradwire.bench.report.tables.tiers import tiers
from gradwire.bench.report.tables.time_to_loss import TARGETS, records
from gradwire.bench.statistics.seeds import TOLERANCE

STATUSES = get_args(Status)
WIDTH = 138

QUALITY = (
    *SUMMARY_CELL[:-1],
    SEEDS.titled("n", field="quality_n"),
    PERPLEXITY.titled("val ppl"),
    PERPLEXITY.titled("sd", field="val_ppl_std"),
    PERPLEXITY.spread("{spread}"),
    WORSE.titled("differs by", mark="gate"),
    WORSE.spread("{spread} of it"),
    AGAINST.titled("from"),
    Column("× unigram", "over_unigram", "{:.3f}"),
)
SENT = (
    *SUMMARY_CELL,
    ALL_BYTES.titled("all bytes ×", form="{:.3f}"),
    RATIO.titled("gradients ×", form="{:.3f}"),
    Column("steady", "compression_ratio_steady", "{:.3f}"),
    megabytes("MB sent", "bytes_compressed_total"),
    megabytes("MB closed form", "bytes_closed_form_total", mark="sign"),
    megabytes("MB parameters", "bytes_parameters_total"),
)
STEPS = (
    *SUMMARY_CELL,
    STEP,
    STEP.titled("sd", field="step_time_ms_mean_std"),
    STEP.spread("{spread}"),
    SPEED_UP.titled(f"vs {BASELINE}", unit=" ×"),
    SPEED_UP.spread("{spread} of it"),
    TOKENS,
)
TIMES = (
    *SUMMARY_CELL,
    milliseconds("comm ms", "comm_ms"),
    Column("share", "comm_percent", "{:.0f}", " %"),
    milliseconds("exposed", "exposed_comm_ms"),
    milliseconds("compute", "compute_time_ms"),
    milliseconds("encode", "compress_time_ms"),
    milliseconds("decode", "decompress_time_ms"),
)

TIME_TO_TARGET = (
    "Medians over seeds until the first evaluation that is as good; ∞: more than half of the seeds never are."
)

SEEDS_TERMS = f"""\
- n seeds; sd: sample standard deviation over them; range or 95 % interval of the column before it:
  {SPREAD}."""

TERMS = {  # by section: the meaning of its columns
    "Quality": f"""\
- Perplexity `differs by`: in percent, from the cell with the same optimizer whose gradients are averaged in every step
  as they are, paired by seed: `{BASELINE}` for AdamW (fp32, the framework's own reduction). `!` marks a mean more than
  {TOLERANCE:g} % above it, and a cell of which a run diverged: such a cell is listed below all others, however fast it
  is. `× unigram`: perplexity over that of a model that knows only how often each token occurs. A cell on a link that
  was not evaluated has the perplexity of the same cell without the link, and no line.""",
    "Bytes": """\
- `all bytes ×`: how many times fewer bytes a run sends than with float32: gradients, the parameters that FSDP gathers
  and the flags of each step. The other columns are of gradient reduction, summed over ranks and all steps:
  `gradients ×` is against a bandwidth-optimal float32 collective, `steady` that after the dense steps;
  `MB closed form` is what the formula says: `=` what was measured is equal to the byte, `≠` it is not, no sign:
  nothing was measured. A reducer's messages are metered; where the framework reduces, `MB sent` is the formula's, and
  the sign is of the profiled steps, by their traces.
  `MB parameters`: what FSDP's gathers of parameters send, by formula unless `param_compress` encodes them.""",
    "Step time": f"""\
- Step time and tokens/s leave out warm-up and profiled steps. `vs {BASELINE}`: the step time of `{BASELINE}` over this
  one's, with the same strategy and world size W on the same link and machine, paired by seed.""",
    "Where a step's time goes": """\
- These times are of the mean profiled step, in which a round has its share: `comm` is the union of all collectives
  (parameters, control and waiting for other ranks included), `share` its part of the step, `exposed` what no
  computation of the same rank covers. Two ops may run at once.""",
}


def summary(results: Results) -> str:
    """Format an experiment, with at least one row, as Markdown of at most about 140 columns."""
    parts, titles = [f"# {results.results_dir.resolve().name}\n\n{header(results.rows)}"], set()

    def add(title: str, text: str) -> None:
        if text:
            parts.append(f"## {title}\n\n{text}")
            titles.add(title)

    ok, cells, reached = results.ok, results.cells, records(results.times)
    lost = [row for row in results.rows if row.status in ("failed", "diverged")]
    add("Failed and diverged runs", items(map(ending, lost)))
    if cells is not None:
        by_speed = cells.sort_values(["strategy", "world_size", "rate", "standing", "step_time_ms_mean"])
        answers = [f"{answer.regime}: {answer.text}" for answer in findings(results)]
        add("In short", items([*answers, *of_optimizers(results)]))
        add("Quality", _table(by_quality(cells), QUALITY))
        add("Bytes", _table(cells, SENT))
        add("Step time", _table(by_speed, STEPS))
        add("Where a step's time goes", _table(by_speed, TIMES))
        add("Communication by op, ms per step", op_table(ok, by_speed))
        parts += [text] if (text := tiers(results)) else []
    add("Time to target", f"{markdown_of(reached, TARGETS)}\n\n{TIME_TO_TARGET}" if reached else "")
    add("Notes", items([*machines(ok), *losses_over_links(ok), *fallbacks(ok), *results.notes]))
    add("Runs left out", items(ending(row) for row in results.rows if row.status == "skipped"))
    terms = [text for title, text in TERMS.items() if title in titles]
    add("What the columns mean", "\n".join([SEEDS_TERMS, *terms]) if terms else "")
    return "\n\n".join(parts) + "\n"


def ending(row: Result) -> str:
    """How a run without a result ended, and why."""
    return f"{row.status}: {row.run_name}: {row.reason or 'no reason was given'}"


def by_quality(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells whose perplexity is not that of others, else one cell of each label, the best of each group first."""
    cell = ["strategy", "world_size", "compressor"]
    first = cells.sort_values(["borrowed", "rate"])
    shown = first[~first["borrowed"] | ~first.duplicated(cell)]
    return shown.sort_values(["strategy", "world_size", "standing", "val_ppl", "compressor", "rate"])


def header(results: Sequence[Result]) -> str:
    """Describe the experiment, its machines and how many runs have a result."""
    statuses = [row.status for row in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    measured = [row for row in results if row.status in ("ok", "diverged")]
    steps = distinct(sorted(row.steps for row in measured if row.steps))
    optimizers = distinct(row.optimizer for row in measured)
    properties = {
        "dataset": (row.dataset for row in measured),
        "model": (
            f"{row.model}{number(row.parameters, ', {:,} parameters').removeprefix(MISSING)}" for row in measured
        ),
        "training": (
            f"{steps} steps of {row.batch_size} samples per rank, at most {row.max_length} tokens each, {optimizers}"
            for row in measured
        ),
        "privacy": map(privacy, measured),
        "device": map(_device, measured),
        "versions": map(versions, measured),
        "unigram yardstick": (number(row.unigram_ppl, "perplexity {:.1f}") for row in measured),
    }
    lines = [f"runs: {counts}", *(f"{name}: {text}" for name, of in properties.items() if (text := distinct(of, "; ")))]
    return "\n".join(textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ") for line in lines)


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
    of_ops = [milliseconds(op, op) for op in ops]
    return _table(cells[[*CELL, "n"]].merge(means, on=CELL), [*SUMMARY_CELL, *of_ops])


def items(texts: Iterable[str]) -> str:
    """Format a list, wrapped to the page width."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent="- ", subsequent_indent="  ", **options) for text in texts
    )


def distinct(values: Iterable[Any], separator: str = ", ") -> str:
    """Join the distinct values that are known, in order."""
    return separator.join(dict.fromkeys(str(value) for value in values if value not in (None, "", MISSING)))


def versions(row: Result) -> str:
    """The versions of a run's packages."""
    environment = row.environment or {}
    packages = environment.get("packages", {})
    known = {"gradwire": environment.get("gradwire"), **packages, "Python": environment.get("python")}
    return ", ".join(f"{name} {version}" for name, version in known.items() if version)


def _table(cells: pd.DataFrame, columns: Sequence[Column]) -> str:
    """A table of cells; empty if it has no number."""
    made = Table.of("", "", cells.to_dict("records"), columns)
    measured = any(entry.text != MISSING for row in made.rows for entry in row[len(SUMMARY_CELL) :])
    return made.markdown() if measured else ""


def _device(row: Result) -> str:
    environment = row.environment or {}
    return (
        f"{row.device} ({environment.get('device', 'unknown')}, {environment.get('cores', '?')} cores), {row.backend}"
    )
