"""The summary as Markdown that is readable in a terminal: one line per method and strategy, with links as columns."""

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
    COMPRESSOR,
    PERPLEXITY,
    RATIO,
    SEEDS,
    SPEED_UP,
    STEP,
    STRATEGY,
    SUMMARY_CELL,
    WORLD,
    WORSE,
    by_method,
    over_links,
)
from gradwire.bench.report.tables.checks import fallbacks, losses_over_links, machines, privacy
from gradwire.bench.report.tables.glance import answer, doubts, glance, lost, of_optimizers
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import MISSING, SPREAD, Column, Table, megabytes, milliseconds, number
from gradwire.bench.report.tables.time_to_loss import by_target
from gradwire.bench.statistics.seeds import VERDICTS
from gradwire.comm.topology import link_rate

STATUSES = get_args(Status)
WIDTH = 138

METHOD = (STRATEGY, WORLD, COMPRESSOR)
QUALITY = (
    *METHOD,
    SEEDS.titled("n", field="quality_n"),
    PERPLEXITY.titled("val ppl"),
    PERPLEXITY.titled("sd", field="val_ppl_std"),
    PERPLEXITY.spread("{spread}"),
    WORSE.titled("differs by"),
    WORSE.spread("{spread} of it"),
    AGAINST.titled("from"),
    Column("× unigram", "over_unigram", "{:.3f}"),
)
SENT = (
    *METHOD,
    SEEDS,
    ALL_BYTES.titled("all bytes ×", form="{:.3f}"),
    RATIO.titled("gradients ×", form="{:.3f}"),
    Column("steady", "compression_ratio_steady", "{:.3f}"),
    megabytes("MB sent", "bytes_compressed_total"),
    megabytes("MB closed form", "bytes_closed_form_total", mark="sign"),
    megabytes("MB parameters", "bytes_parameters_total"),
)
STEPS = STEP.titled("step ms", mark="step_ends"), SPEED_UP.titled(f"× {BASELINE}", form="{:.2f}")
TIMES = milliseconds("comm ms", "comm_ms"), milliseconds("exposed", "exposed_comm_ms")
PARTS = (
    milliseconds("compute", "compute_time_ms"),
    milliseconds("encode", "compress_time_ms"),
    milliseconds("decode", "decompress_time_ms"),
)
TIME_TO_TARGET = (
    "Medians over seeds until the first evaluation that is as good; ∞: more than half of the seeds never are."
)
SEEDS_TERMS = f"- n seeds; sd: sample standard deviation over them.\n- {SPREAD}."
WORDS = "\n".join(f"  - `{word}`: {meaning}" for word, meaning in VERDICTS.items())
TERMS = {  # by section: the meaning of its columns
    "In short": f"""\
- `perplexity`: against the same optimizer in every step, paired by seed. The verdict is the first that holds:
{WORDS}""",
    "Quality": f"""\
- `differs by`: percent of perplexity from the cell with the same optimizer whose gradients are averaged in every step
  as they are, paired by seed: `{BASELINE}` for AdamW (fp32, the framework's own reduction). `× unigram`: perplexity
  over that of a model that knows only how often each token occurs. Losses do not depend on the link.""",
    "Bytes": """\
- `all bytes ×`: how many times fewer bytes a run sends than with float32: gradients, the parameters that FSDP gathers
  and the flags of each step. The other columns are of gradient reduction, summed over ranks and all steps of a run that
  was evaluated: `gradients ×` is against a bandwidth-optimal float32 collective, `steady` that after the dense steps;
  `MB closed form` is what the formula says: `=` what was measured is equal to the byte, `≠` it is not, no sign:
  nothing was measured. A reducer's messages are metered; where the framework reduces, `MB sent` is the formula's, and
  the sign is of the profiled steps, by their traces.
  `MB parameters`: what FSDP's gathers of parameters send, by formula unless `param_compress` encodes them.""",
    "Step time": f"""\
- The mean step on each link, without warm-up and profiled steps, and its range over seeds. `× {BASELINE}`: how many
  times shorter than that of `{BASELINE}`, with the same strategy and world size W on the same machine, by seed.""",
    "Where a step's time goes": """\
- These times are of the mean profiled step, in which a round has its share: `comm` is the union of all collectives
  (parameters, control and waiting for other ranks included), `exposed` what no computation of the same rank covers.
  The page has all parts on each link.""",
    "Communication by op, ms per step": """\
- `share`: of the mean profiled step, that in which a collective runs. Two ops may run at once.""",
}


def summary(results: Results) -> str:
    """Format an experiment, with at least one row, as Markdown."""
    parts, titles = [f"# {results.results_dir.resolve().name}\n\n{header(results.rows)}"], set()

    def add(title: str, text: str) -> None:
        if text:
            parts.append(f"## {title}\n\n{text}")
            titles.add(title)

    ok, cells, reached = results.ok, results.cells, by_target(results.times)
    add("Failed and diverged runs", items(map(str, lost(results.rows, "failed", "diverged"))))
    if cells is not None:
        made = by_method(cells)
        links = sorted({*cells["link"]}, key=link_rate, reverse=True)
        texts = [str(answer(results)), doubts(results), *of_optimizers(results)]
        table = glance(results)
        add("In short", "\n\n".join([items(filter(None, texts)), *([table.markdown()] if table.rows else [])]))
        add("Quality", _table(made, QUALITY))
        add("Bytes", _table(made, SENT))
        add("Step time", _table(made, [*METHOD, *over_links(STEPS, links)]))
        add("Where a step's time goes", _table(made, [*METHOD, *over_links(TIMES, links), *PARTS]))
        add("Communication by op, ms per step", by_op(ok, cells))
    add("Time to target", f"{reached.markdown()}\n\n{TIME_TO_TARGET}" if reached.rows else "")
    add("Notes", items([*machines(ok), *losses_over_links(ok), *fallbacks(ok), *results.notes]))
    add("Runs left out", items(map(str, lost(results.rows, "skipped"))))
    terms = [text for title, text in TERMS.items() if title in titles]
    add("What the columns mean", "\n".join([SEEDS_TERMS, *terms]) if terms else "")
    return "\n\n".join(parts) + "\n"


def header(results: Sequence[Result]) -> str:
    """Describe the experiment, its machines and how many runs have a result."""
    statuses = [row.status for row in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in STATUSES if status in statuses)
    counts += ", none failed" * {"ok", "skipped"}.issuperset(statuses)
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


def by_op(ok: Sequence[Result], cells: pd.DataFrame) -> str:
    """A table of communication by op in milliseconds per profiled step, in the cells' order; empty without any."""
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
    columns = [*SUMMARY_CELL, Column("share", "comm_percent", "{:.0f}", " %"), *(milliseconds(op, op) for op in ops)]
    return _table(cells[[*CELL, "n", "comm_percent"]].merge(means, on=CELL), columns)


def _table(made: pd.DataFrame, columns: Sequence[Column]) -> str:
    """A table of methods; empty if it has no number."""
    table = Table.of("", "", made.to_dict("records"), columns)
    measured = any(entry.text != MISSING for row in table.rows for entry in row[len(METHOD) :])
    return table.markdown() if measured else ""


def _device(row: Result) -> str:
    environment = row.environment or {}
    return (
        f"{row.device} ({environment.get('device', 'unknown')}, {environment.get('cores', '?')} cores), {row.backend}"
    )
