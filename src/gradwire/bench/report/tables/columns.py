"""The catalogue of columns: title, field and format of everything in the summary, the page and the table files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import BF16
from gradwire.bench.report.tables import markdown
from gradwire.bench.report.tables.markdown import MISSING

Record = Mapping[Any, Any]


class Entry(NamedTuple):
    """One entry of a table.

    Attributes:
        text: The text shown.
        value: The sort key, with all digits; None sorts first.
        full: The entry of the CSV file, if that is not the value.
    """

    text: str
    value: str | float | None = None
    full: str = ""

    @property
    def key(self) -> str:
        """The value as text, or an empty text."""
        return "" if self.value is None else str(self.value)


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        title: Its heading; ``{spread}`` is replaced by `markdown.spread_title`.
        field: The field of a record that it shows. A spread also reads ``<field>_n``, ``_low`` and ``_high``.
        form: Format of its numbers; a column without a format holds text.
        unit: Text after each number.
        per: Divisor of the numbers.
        base: The compressor that others are compared with; it has a dash.
        mark: The field whose text follows each entry, if any.
        ends: Whether it shows the spread over seeds, sorted by its lower end, instead of the value.
        number: Whether its entries are aligned to the right.
        hint: An explanation of the heading.
        long: Whether a short table, such as that of a paper, leaves it out.
    """

    title: str
    field: str
    form: str = ""
    unit: str = ""
    per: float = 1
    base: str = ""
    mark: str = ""
    ends: bool = False
    number: bool = True
    hint: str = ""
    long: bool = False

    def titled(self, title: str, **changes: Any) -> Column:
        """Copy the column with another title and other ``changes``."""
        return replace(self, title=title, **changes)

    def spread(self, title: str) -> Column:
        """The column of the spreads over seeds."""
        return replace(self, title=title, ends=True, mark="", hint="", long=True)

    def headed(self, records: Iterable[Record]) -> Column:
        """The column with its title for these records."""
        if not self.ends:
            return self
        kind = markdown.spread_title(record[f"{self.field}_n"] for record in records)
        return self.titled(self.title.replace("{spread}", kind))

    def entry(self, record: Record) -> Entry:
        """The record's entry; a dash if its number is None or NaN."""
        if self.base and record["compressor"] == self.base:
            return Entry(MISSING)
        if self.ends:
            n, low, high = (record[f"{self.field}_{part}"] for part in ("n", "low", "high"))
            text = markdown.spread(n, low, high, self.form)
            return Entry(text) if text == MISSING else Entry(text, low, markdown.spread(n, low, high, "{}"))
        value = record[self.field]
        if not self.form:
            return Entry(value, value)
        known = value is not None and not math.isnan(value)
        value = value / self.per if known and self.per != 1 else value
        text = self.form.format(value) + self.unit if known else MISSING
        return Entry(text + (record[self.mark] if self.mark else ""), value if known else None)


def text(title: str, field: str) -> Column:
    """A left-aligned column of text."""
    return Column(title, field, number=False)


def milliseconds(title: str, field: str) -> Column:
    """A column of times."""
    return Column(title, field, "{:,.1f}")


def megabytes(title: str, field: str, **more: Any) -> Column:
    """A column of bytes."""
    return Column(title, field, "{:,.3f}", per=1e6, **more)


# Names and measurements of a cell.

COMPRESSOR = text("compressor", "compressor")
STRATEGY = text("strategy", "strategy")
WORLD = Column("W", "world_size", "{:d}")
LINK = text("link", "link")
CELL = (COMPRESSOR, STRATEGY, WORLD, LINK)
SEEDS = Column("n", "n", "{:d}", hint="seeds")

PERPLEXITY = Column("perplexity", "val_ppl", "{:,.2f}")
WORSE = Column(
    "ppl vs fp32",
    "worse_percent",
    "{:+z.2f}",
    " %",
    base=BASELINE,
    hint="perplexity above that of none, paired by seed",
)
ALL_BYTES = Column(
    "all bytes ×",
    "all_bytes_ratio",
    "{:.2f}",
    hint="all bytes of a step, gathered parameters and flags too: float32's over those sent",
)
RATIO = Column(
    "gradients ×", "compression_ratio", "{:.2f}", hint="gradient bytes: a float32 collective's over those sent"
)
RATIO_BF16 = Column(
    "gradients × bf16", "compression_ratio_bf16", "{:.2f}", hint="gradient bytes: a bf16 collective's over those sent"
)
BYTES = Column("gradient bytes", "bytes_compressed_total", "{:,.0f}")
STEP = milliseconds("step ms", "step_time_ms_mean")
SPEED_UP = Column("speed × fp32", "speed_up", "{:.3f}", base=BASELINE, hint="step time of none over this one's")
SPEED_UP_BF16 = Column(
    "speed × bf16", "speed_up_bf16", "{:.3f}", base=BF16, hint=f"step time of {BF16} over this one's"
)
TOKENS = Column("tokens/s", "tokens_per_s", "{:,.0f}")

# Tables of the summary, the page and a comparison.

SUMMARY_CELL = (STRATEGY, WORLD, COMPRESSOR, LINK, SEEDS)
QUALITY = (
    *SUMMARY_CELL,
    PERPLEXITY.titled("val ppl"),
    PERPLEXITY.titled("sd", field="val_ppl_std"),
    PERPLEXITY.spread("{spread}"),
    WORSE.titled(f"vs {BASELINE}", mark="gate"),
    WORSE.spread("{spread} of it"),
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
TARGETS = (
    text("target", "target"),
    *SUMMARY_CELL,
    Column("reached", "reached", hint="seeds that reached the target"),
    Column("steps", "steps"),
    Column("seconds", "seconds"),
    Column("MB sent", "megabytes", hint="gradient bytes over all ranks until then"),
)
CELLS = (
    *CELL,
    SEEDS,
    PERPLEXITY.titled("perplexity", long=True),
    PERPLEXITY.spread("ppl {spread}"),
    WORSE,
    WORSE.spread("vs fp32 {spread}"),
    ALL_BYTES,
    RATIO,
    RATIO_BF16.titled("gradients × bf16", long=True),
    STEP,
    STEP.spread("step {spread}"),
    SPEED_UP,
    SPEED_UP.spread("× fp32 {spread}"),
    SPEED_UP_BF16.titled("speed × bf16", long=True),
    TOKENS.titled("tokens/s", long=True),
    text("marks", "marks").titled("marks", long=True),
)
SCALING = (
    *CELL,
    Column(
        "efficiency",
        "efficiency_percent",
        "{:.1f}",
        " %",
        hint="tokens/s per rank over those of one rank alone",
    ),
)
STORES = (text("run", "run"), text("check", "name"), text("result", "result"), text("detail", "detail"))
ENVIRONMENTS = (Column("ranks", "ranks", "{:d}"), text("of runs", "runs"), text("rank numbers", "numbers"))
QUANTITIES = (PERPLEXITY, STEP.titled("step time, ms"), BYTES, ALL_BYTES)
DIFFERENCE = Column("difference", "difference", "{:+z.2f}", " %")

# Tables of quality tiers and of bytes at the interfaces.

TIER = (
    COMPRESSOR,
    SEEDS,
    WORSE.titled("ppl", form="{:+.1f}", mark="ends"),
    Column("tier", "tier", "{:d}", " %"),
    Column("fastest", "fastest"),
    milliseconds("step ms", "step"),
    Column("speed-up", "speed_up", "{:.2f}", base=BASELINE),
    Column("ceiling", "ceiling", "{:.2f}", base=BASELINE),
    Column("of it", "of_ceiling", "{:.0f}", " %", base=BASELINE),
    milliseconds("transfer ms", "transfer"),
    Column("×", "shorter", "{:.2f}", base=BASELINE),
    Column("bytes ×", "fewer", "{:.2f}", base=BASELINE),
    Column("÷", "quotient", "{:.2f}", base=BASELINE),
)
WIRE = (
    STRATEGY,
    WORLD,
    COMPRESSOR,
    LINK,
    Column("seed", "seed", "{:d}"),
    text("sent by", "carriers"),
    megabytes("MB counted", "counted"),
    megabytes("MB interface", "seen"),
    Column("quotient", "quotient", "{:.3f}"),
    Column("explained", "explained", "{:.3f}"),
    Column("rest", "rest_percent", "{:+.1f}", " %"),
)
CABLES = (
    STRATEGY,
    WORLD,
    Column("islands", "islands", "{:d}"),
    COMPRESSOR,
    LINK,
    Column("seed", "seed", "{:d}"),
    megabytes("MB counted", "counted"),
    megabytes("MB interface", "seen"),
    Column("quotient", "quotient", "{:.3f}"),
)


def compared(quantity: Column) -> tuple[Column, ...]:
    """Columns of the table that compares a quantity of two experiments."""
    return (
        *CELL,
        Column("pairs", "pairs", "{:d}"),
        quantity.titled("A", field="one"),
        quantity.titled("B", field="other"),
        DIFFERENCE,
        DIFFERENCE.spread("{spread}"),
        Column("sees", "sees", "{:.2g}", " %"),
        Column("p", "p", "{:.2g}"),
        Column("p adjusted", "adjusted", "{:.2g}"),
        text("B is", "verdict"),
    )
