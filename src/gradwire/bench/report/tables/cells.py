"""The cells of an experiment: statistics over seeds, comparisons with the baselines, groups, and columns of tables."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.checks import machine
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.rows.record import BF16, OWN_QUALITY, Count, Number, Result
from gradwire.bench.report.tables.table import Column, milliseconds, text
from gradwire.bench.statistics.seeds import TOLERANCE, estimates, gated, percents
from gradwire.comm.topology import link_rate

CELL = ["strategy", "world_size", "compressor", "link"]
GROUP = ["strategy", "world_size", "link"]
NUMBERS = (name for name, field in Result.model_fields.items() if field.annotation in (Number, Count))
MEASURED = [*NUMBERS, "all_bytes_ratio"]
ESTIMATED = ["val_ppl", "worse_percent", "step_time_ms_mean", "speed_up", "speed_up_bf16", "sent_mb"]
PARTS = {"": "mean", "_n": "n", "_std": "std", "_low": "low", "_high": "high"}  # of an estimate, by column suffix
WORSE_PERCENT = [f"worse_percent{part}" for part in PARTS]
SIGNS = {None: "", True: " =", False: " ≠"}  # bytes against their closed form; the worst sorts last

COMPRESSOR = text("compressor", "compressor")
STRATEGY = text("strategy", "strategy")
WORLD = Column("W", "world_size", "{:d}")
LINK = text("link", "link")
SEEDS = Column("n", "n", "{:d}", hint="seeds")
NAMES = (COMPRESSOR, STRATEGY, WORLD, LINK)
SUMMARY_CELL = (STRATEGY, WORLD, COMPRESSOR, LINK, SEEDS)
PERPLEXITY = Column("perplexity", "val_ppl", "{:,.2f}")
WORSE_HINT = "perplexity above that of none, paired by seed"
WORSE = Column("ppl vs fp32", "worse_percent", "{:+z.2f}", " %", base=BASELINE, hint=WORSE_HINT)
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
    replace(PERPLEXITY, long=True),
    PERPLEXITY.spread("ppl {spread}"),
    WORSE,
    WORSE.spread("vs fp32 {spread}"),
    ALL_BYTES,
    RATIO,
    RATIO_BF16,
    STEP,
    STEP.spread("step {spread}"),
    SPEED_UP,
    SPEED_UP.spread("× fp32 {spread}"),
    SPEED_UP_BF16,
    replace(TOKENS, long=True),
    replace(text("marks", "marks"), long=True),
)
LOST_MACHINES = (
    Column("restarts", "restarts", "{:.0f}", hint="of groups of ranks that were lost"),
    Column("training s", "training_s", "{:,.1f}", hint="from the first step to the last one"),
    Column("stalled s", "stalled_s", "{:,.1f}", hint="of these, seconds in which no group trained"),
    Column("goodput", "goodput_percent", "{:.0f}", " %", hint="share of all groups' time in steps that a mean counts"),
)
EFFICIENCY_HINT = "tokens/s per rank over those of one rank alone"
EFFICIENCY = Column("efficiency", "efficiency_percent", "{:.1f}", " %", hint=EFFICIENCY_HINT)


def one_by_one(ok: Sequence[Result]) -> pd.DataFrame:
    """Return one line per run: measurements and comparisons.

    ``worse_percent``: perplexity above that of the baseline with the same seed. ``speed_up``, ``speed_up_bf16``: how
    many times shorter a step is than that of the baseline, of the cell `BF16`, on the same link and machine.
    ``sent_mb``: megabytes of gradients that a rank sends in a step.
    """
    runs = pd.DataFrame([row.model_dump(include={*CELL, "seed", *MEASURED}) for row in ok])
    runs = runs.astype(dict.fromkeys(MEASURED, float))
    runs["machine"] = [machine(row) for row in ok]
    runs["comm_ms"] = runs["comm_time_ms_total"] / runs["measured_steps"]
    runs["over_unigram"] = runs["val_ppl"] / runs["unigram_ppl"]
    runs["sign"] = [SIGNS[row.as_computed] for row in ok]
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
    by_cell = runs.groupby(CELL)
    cells = by_cell[[*MEASURED, "comm_ms", "over_unigram"]].mean()
    estimated = []
    for column in ESTIMATED:
        samples = [sample.dropna().tolist() for _, sample in by_cell[column]]
        parts = pd.DataFrame((percents if column == "worse_percent" else estimates)(samples), index=cells.index)
        estimated.append(parts[[*PARTS.values()]].set_axis([f"{column}{part}" for part in PARTS], axis=1))
    cells = pd.concat([cells.drop(columns=ESTIMATED, errors="ignore"), *estimated], axis=1)
    cells = cells.reset_index().copy()  # in few pieces: pandas warns of adding columns to many
    cells["n"] = by_cell.size().to_numpy()
    cells["comm_percent"] = 100 * cells["comm_ratio"]
    cells["goodput_percent"] = 100 * cells["goodput"]
    cells["sign"] = by_cell["sign"].max().to_numpy()  # a cell differs if one of its runs does
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


def cells_of(ok: Sequence[Result], quality: PerplexityReference) -> pd.DataFrame:
    """Return one line per cell, as `over_seeds`; in each group gated cells last, then by speed.

    A cell with the perplexity of another experiment is compared over all seeds of that experiment; ``quality_n`` is
    their number.
    """
    cells = over_seeds(ok)
    rows: defaultdict[tuple[Hashable, ...], list[Result]] = defaultdict(list)
    for row in ok:
        rows[row.strategy, row.world_size, row.compressor, row.link].append(row)
    keys = [*cells[CELL].itertuples(index=False, name=None)]
    cells["quality_n"] = [sum(row.val_ppl is not None for row in rows[key]) for key in keys]
    bases = {(row.strategy, row.world_size): row for row in ok if row.compressor == BASELINE}
    for i, key in enumerate(keys):
        row, base = rows[key][0], bases.get(key[:2])
        if row.quality_from in (None, *OWN_QUALITY) or base is None:
            continue
        worse = percents([quality.percent_worse(row, base)])[0]
        if worse.n:
            cells.loc[i, WORSE_PERCENT] = [getattr(worse, part) for part in PARTS.values()]
            cells.loc[i, "quality_n"] = worse.n
            cells.loc[i, "gated"] = worse.mean > TOLERANCE
    cells["standing"] = np.where(cells["worse_percent"].isna(), 1, 2 * cells["gated"].astype(int))
    order = ["strategy", "world_size", "rate", "standing", "step_time_ms_mean", "compressor"]
    return cells.sort_values(order, ignore_index=True)


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
