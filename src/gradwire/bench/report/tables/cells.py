"""The cells of an experiment: statistics over seeds, comparisons with the baselines, groups, and columns of tables."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.record import BF16, Count, Number, Result
from gradwire.bench.report.tables.quality import (
    CellKey,
    Quality,
    cell_key,
    perplexities,
)
from gradwire.bench.report.tables.table import MISSING, Column, milliseconds, spread, text
from gradwire.bench.statistics.seeds import TOLERANCE, Estimate, estimates, percents, verdict
from gradwire.comm.topology import link_rate

CELL = ["strategy", "world_size", "compressor", "link"]
GROUP = ["strategy", "world_size", "link"]
METHOD = ["strategy", "world_size", "compressor"]
NUMBERS = (name for name, field in Result.model_fields.items() if field.annotation in (Number, Count))
MEASURED = [*NUMBERS, "all_bytes_ratio"]
ESTIMATED = ["step_time_ms_mean", "speed_up", "speed_up_bf16", "sent_mb"]
JUDGED = ["val_ppl", "worse_percent"]  # of all runs whose perplexities count for a cell
PARTS = {"": "mean", "_n": "n", "_std": "std", "_low": "low", "_high": "high"}  # of an estimate, by column suffix
STANDING = (
    "baseline",
    "better",
    "same",
    "not distinguishable",
    "one seed",
    "not compared",
    "worse",
    "diverged",
    "failed",
)
SIGNS = {None: "", True: " =", False: " ≠"}  # bytes against their closed form; the worst sorts last
BAD = ("worse", "diverged", "failed")  # verdicts

COMPRESSOR = text("compressor", "compressor")
STRATEGY = text("strategy", "strategy")
WORLD = Column("W", "world_size", "{:d}")
LINK = text("link", "link")
SEEDS = Column("n", "n", "{:d}", hint="seeds")
NAMES = (COMPRESSOR, STRATEGY, WORLD, LINK)
SUMMARY_CELL = (STRATEGY, WORLD, COMPRESSOR, LINK, SEEDS)
PERPLEXITY = Column("perplexity", "val_ppl", "{:,.2f}")
WORSE_HINT = "perplexity above that of the same optimizer in every step, paired by seed"
WORSE = Column("ppl", "worse_percent", "{:+z.2f}", " %", against="reference", hint=WORSE_HINT)
AGAINST = Column("against", "reference", number=False, hint="the cell of the same optimizer in every step")
JUDGES = Column("ppl n", "quality_n", "{:d}", hint="seeds of the perplexity", long=True)
ALL_BYTES_HINT = "all bytes of a step, gathered parameters and flags too: float32's over those sent"
ALL_BYTES = Column("all bytes ×", "all_bytes_ratio", "{:.2f}", hint=ALL_BYTES_HINT)
RATIO_HINT = "gradient bytes: a float32 collective's over those sent"
RATIO = Column("gradients ×", "compression_ratio", "{:.2f}", hint=RATIO_HINT)
STEP = milliseconds("step ms", "step_time_ms_mean")
SPEED_UP = Column("speed × fp32", "speed_up", "{:.3f}", base=BASELINE, hint="step time of none over this one's")
TOKENS = Column("tokens/s", "tokens_per_s", "{:,.0f}")
BF16_HINT = "gradient bytes: a bf16 collective's over those sent"
RATIO_BF16 = Column("gradients × bf16", "compression_ratio_bf16", "{:.2f}", hint=BF16_HINT, long=True)
SPEED_HINT = f"step time of {BF16} over this one's"
SPEED_UP_BF16 = Column("speed × bf16", "speed_up_bf16", "{:.3f}", base=BF16, hint=SPEED_HINT, long=True)
ALL_CELLS = (
    *NAMES,
    SEEDS,
    JUDGES,
    replace(PERPLEXITY, long=True),
    PERPLEXITY.spread("perplexity {spread}"),
    WORSE,
    WORSE.spread("ppl {spread}"),
    replace(AGAINST, long=True),
    ALL_BYTES,
    RATIO,
    RATIO_BF16,
    STEP,
    STEP.titled("step sd", field="step_time_ms_mean_std", form="{:,.2f}", long=True),
    STEP.spread("step {spread}"),
    SPEED_UP,
    SPEED_UP.spread("× fp32 {spread}"),
    SPEED_UP_BF16,
    replace(TOKENS, long=True),
    replace(text("marks", "marks"), long=True),
)
WORSE_FORM = "{:+z.1f}"
EFFICIENCY_HINT = "tokens/s per rank over those of one rank alone"
EFFICIENCY = Column("efficiency", "efficiency_percent", "{:.1f}", " %", hint=EFFICIENCY_HINT)


def one_by_one(ok: Sequence[Result], judged: Mapping[CellKey, Quality]) -> pd.DataFrame:
    """Return one line per run: measurements and comparisons.

    ``worse_percent``: perplexity above that of the same optimizer in every step with the same seed. ``speed_up``,
    ``speed_up_bf16``: how many times shorter a step is than that of the baseline, of the cell `BF16`, with the same
    seed on the same link and machine. ``sent_mb``: megabytes of gradients that a rank sends in a step.

    Args:
        ok: The runs with a result.
        judged: The quality of their cells (`bench.report.tables.quality.qualities`).
    """
    runs = pd.DataFrame([row.model_dump(include={*CELL, "seed", *MEASURED}) for row in ok])
    runs = runs.astype(dict.fromkeys(MEASURED, float))
    runs["machine"] = [row.machine for row in ok]
    runs["comm_ms"] = runs["comm_time_ms_total"] / runs["measured_steps"]
    runs["sign"] = [SIGNS[row.as_computed] for row in ok]
    runs["worse_percent"] = [judged[cell_key(row)].worse.get(row.seed, math.nan) for row in ok]
    alike = ["strategy", "world_size", "link", "seed", "machine"]
    for name, label in (("speed_up", BASELINE), ("speed_up_bf16", BF16)):
        means = runs[runs["compressor"] == label].groupby(alike)["step_time_ms_mean"].mean().rename("baseline")
        runs[name] = runs[alike].join(means, on=alike)["baseline"] / runs["step_time_ms_mean"]
    runs["sent_mb"] = runs["bytes_compressed_total"] / runs["steps"] / runs["world_size"] / 1e6
    return runs


def cells_of(rows: Sequence[Result], runs: pd.DataFrame, judged: Mapping[CellKey, Quality]) -> pd.DataFrame:
    """Return one line per strategy, world size, compressor and link: statistics over seeds, and comparisons.

    Perplexities are of all seeds that count for a cell, ``quality_n`` of them; ``reference`` is what their difference
    ``worse_percent`` is from, ``verdict`` what that shows, and ``saved`` how many times fewer bytes their runs sent. In
    each group cells go by their verdicts, then by speed. Numbers that no seed has are NaN.

    Args:
        rows: The rows, at least one with a result.
        runs: One line per run (`one_by_one`).
        judged: The quality of their cells.
    """
    by_cell = runs.groupby(CELL)
    cells = by_cell[[*MEASURED, "comm_ms"]].mean()
    keys = [*cells.index]
    of_cells = [judged[key] for key in keys]
    samples = {column: [sample.dropna().tolist() for _, sample in by_cell[column]] for column in ESTIMATED}
    samples["val_ppl"] = [[*perplexities(of.runs).values()] for of in of_cells]
    estimated = {column: estimates(of) for column, of in samples.items()}
    estimated["worse_percent"] = percents([[*of.worse.values()] for of in of_cells])
    parts = [
        pd.DataFrame(of, index=cells.index)[[*PARTS.values()]].set_axis([f"{name}{part}" for part in PARTS], axis=1)
        for name, of in estimated.items()
    ]
    cells = pd.concat([cells.drop(columns=[*ESTIMATED, *JUDGED], errors="ignore"), *parts], axis=1)
    cells = cells.reset_index().copy()  # in few pieces: pandas warns of adding columns to many
    cells["n"] = by_cell.size().to_numpy()
    cells["quality_n"] = [len(of.runs) for of in of_cells]
    saved = [mean([run.all_bytes_ratio for run in of.runs.values()]) for of in of_cells]
    cells["saved"] = np.where(cells["quality_n"] > 0, saved, cells["all_bytes_ratio"])
    cells["over_unigram"] = [over_unigram(of) for of in of_cells]
    cells["reference"] = [of.reference or MISSING for of in of_cells]
    cells["borrowed"] = [
        any(cell_key(run) != key for run in of.runs.values()) for key, of in zip(keys, of_cells, strict=True)
    ]
    cells["comm_percent"] = 100 * cells["comm_ratio"]
    cells["sign"] = by_cell["sign"].max().to_numpy()  # a cell differs if one of its runs does
    diverged = Counter(cell_key(row)[:3] for row in rows if row.status == "diverged")  # on any link: it changes no loss
    failed = Counter(cell_key(row) for row in rows if row.status == "failed")
    cells["diverged"], cells["failed"] = [diverged[key[:3]] for key in keys], [failed[key] for key in keys]
    cells["verdict"] = [
        "baseline" if key[2] == of.reference and not lost else verdict(worse, lost > 0)
        for key, of, worse, lost in zip(
            keys, of_cells, of_estimates(cells, "worse_percent"), cells["diverged"], strict=True
        )
    ]
    cells["standing"] = standing(cells)
    for name, field, form in (("ends", "worse_percent", WORSE_FORM), ("step_ends", "step_time_ms_mean", STEP.form)):
        cells[name] = [spread_text(of, form) for of in of_estimates(cells, field)]
    cells["rate"] = [-link_rate(link) for link in cells["link"]]
    order = ["strategy", "world_size", "rate", "standing", "step_time_ms_mean", "compressor"]
    return cells.sort_values(order, ignore_index=True)


def of_estimates(cells: pd.DataFrame, field: str) -> list[Estimate]:
    """The estimate of a field in each line."""
    parts = cells[[f"{field}{part}" for part in ("_n", "", "_std", "_low", "_high")]]
    return [Estimate(int(n), *others) for n, *others in parts.itertuples(index=False)]


def spread_text(of: Estimate, form: str) -> str:
    """A spread as text that follows its mean: a range in brackets, an interval, or nothing for one seed."""
    ends = spread(of.n, of.low, of.high, form)
    return "" if ends == MISSING else f" {ends}" if ends.startswith("[") else f" ({ends})"


def standing(cells: pd.DataFrame) -> pd.Series[int]:
    """The order of cells by their verdicts; what several seeds have not shown is last if its mean is beyond 1 %."""
    unshown = cells["verdict"].isin(("not distinguishable", "one seed"))
    return (
        cells["verdict"]
        .map(STANDING.index)
        .mask(unshown & (cells["worse_percent"] > TOLERANCE), STANDING.index("not compared"))
    )


def by_method(cells: pd.DataFrame) -> pd.DataFrame:
    """Return one line per method, strategy and world size; fields of each link have its name before them.

    The others are those of the cell whose perplexity is its own, on the fastest link. The best verdict of each strategy
    and world size is first, then the fewest bytes; the baseline precedes all.
    """
    wide = pd.DataFrame(cells.set_index([*METHOD, "link"]).unstack("link"))
    wide.columns = pd.Index([" ".join(reversed(key)) for key in wide.columns])
    wide = wide.fillna(dict.fromkeys(wide.columns.difference(wide.select_dtypes("number").columns), ""))
    first = cells.sort_values(["borrowed", "rate"]).drop_duplicates(METHOD)
    lines = first.join(wide, on=METHOD).assign(more=-first["saved"].where(first["compressor"] != BASELINE, math.inf))
    return lines.sort_values(["strategy", "world_size", "standing", "more", "compressor"], ignore_index=True)


def over_links(columns: Iterable[Column], links: Iterable[str], shaped: str = "{title} {link}") -> list[Column]:
    """The columns of each link, of lines as from `by_method`; ``shaped`` makes the headings for a link of a rate."""
    return [
        column.titled(
            column.title if link == UNSHAPED else shaped.format(title=column.title, link=link),
            field=f"{link} {column.field}",
            mark=column.mark and f"{link} {column.mark}",
        )
        for link in links
        for column in columns
    ]


def over_unigram(quality: Quality) -> float:
    """A cell's perplexity over that of a unigram model of the same text, the mean over seeds; NaN if one is unknown."""
    return mean([(run.val_ppl or math.nan) / (run.unigram_ppl or math.nan) for run in quality.runs.values()])


def mean(values: Sequence[float | None]) -> float:
    """The mean; NaN if there is no value or one is unknown."""
    return fmean(math.nan if value is None else value for value in values) if values else math.nan


class Group(NamedTuple):
    """Cells that differ in their compressor only."""

    strategy: str
    world_size: int
    link: str

    @property
    def slug(self) -> str:
        """The group as part of a file name."""
        return slug(f"{self.strategy}-ws{self.world_size}-{self.link}")

    def rows(self, rows: Iterable[Result]) -> list[Result]:
        """The rows of the group."""
        return [row for row in rows if (row.strategy, row.world_size, row.link) == tuple(self)]


def slug(text: str) -> str:
    """Turn a text into part of a file name or an id."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text)


def groups(cells: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    """The cells by group, in their order."""
    for key, of_group in cells.groupby(GROUP, sort=False):
        yield Group(*cast(tuple[str, int, str], key)), of_group


def on_one_link(all_groups: Iterable[Group]) -> list[Group]:
    """Drop groups that differ from an earlier one in their link only; a link changes no loss and no bytes."""
    first: dict[tuple[str, int], Group] = {}
    for group in all_groups:
        first.setdefault((group.strategy, group.world_size), group)
    return list(first.values())
