"""The cells of an experiment on the page: statistics over seeds, groups of cells, commands to reproduce them."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import pandas as pd

from gradwire.bench.config import BASELINE
from gradwire.bench.report.rows.quality import PerplexityReference
from gradwire.bench.report.rows.record import OWN_QUALITY, Result
from gradwire.bench.report.tables.summary import CELL, PARTS, over_seeds
from gradwire.bench.statistics.seeds import TOLERANCE, percents

GROUP = ["strategy", "world_size", "link"]
WORSE = [f"worse_percent{part}" for part in PARTS]


class Group(NamedTuple):
    """Cells that differ in their compressor only."""

    strategy: str
    world_size: int
    link: str

    @property
    def slug(self) -> str:
        """The group as part of a file name."""
        return slug(f"{self.strategy}-ws{self.world_size}-{self.link}")


def slug(text: str) -> str:
    """Turn a text into part of a file name or an id."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text)


def cells_of(ok: Sequence[Result], quality: PerplexityReference) -> pd.DataFrame:
    """Return one line per cell, as `bench.report.tables.table.over_seeds`; in each group gated cells last, then by
    speed.

    A cell with the perplexity of another experiment is compared over all seeds of that experiment; ``quality_n`` is
    their number.
    """
    cells = over_seeds(ok)
    rows: defaultdict[tuple[Hashable, ...], list[Result]] = defaultdict(list)
    for row in ok:
        rows[row.strategy, row.world_size, row.compressor, row.link].append(row)
    cells["quality_n"] = [
        sum(row.val_ppl is not None for row in rows[key]) for key in cells[CELL].itertuples(index=False, name=None)
    ]
    bases = {(row.strategy, row.world_size): row for row in ok if row.compressor == BASELINE}
    for i, key in enumerate(cells[CELL].itertuples(index=False, name=None)):
        row = rows[key][0]
        base = bases.get(key[:2])
        if row.quality_from in (None, *OWN_QUALITY) or base is None:
            continue
        found = percents([quality.percent_worse(row, base)])[0]
        if found.n:
            cells.loc[i, WORSE] = [getattr(found, part) for part in PARTS.values()]
            cells.loc[i, "quality_n"] = found.n
            cells.loc[i, "gated"] = found.mean > TOLERANCE
    cells["standing"] = np.where(cells["worse_percent"].isna(), 1, 2 * cells["gated"].astype(int))
    order = ["strategy", "world_size", "rate", "standing", "step_time_ms_mean", "compressor"]
    return cells.sort_values(order, ignore_index=True)


def groups(cells: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    """The cells by group, in their order."""
    for key, found in cells.groupby(GROUP, sort=False):
        yield Group(*cast(tuple[str, int, str], key)), found


def on_one_link(found: Iterable[Group]) -> list[Group]:
    """Drop groups that differ from an earlier one in their link only; a link changes no loss and no bytes."""
    seen: dict[tuple[str, int], Group] = {}
    for group in found:
        seen.setdefault((group.strategy, group.world_size), group)
    return list(seen.values())


def of_group(rows: Iterable[Result], group: Group) -> list[Result]:
    """The rows of a group."""
    return [row for row in rows if (row.strategy, row.world_size, row.link) == tuple(group)]


def command(runs: Sequence[Result], results_dir: Path) -> str:
    """The shell command that repeats a cell's runs, from the folder that has ``results/``."""
    folder = Path("results") / results_dir.resolve().name
    config = folder / "config.json" if (results_dir / "config.json").is_file() else Path("CONFIG.yaml")
    records = [str(folder / "runs" / row.run_name / "record.json") for row in runs]
    return shlex.join(["gradwire", "run", str(config), "--", "--force", *records])
