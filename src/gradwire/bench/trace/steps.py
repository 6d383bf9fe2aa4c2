"""Read ``steps.parquet``; every reader reports the same message for an invalid file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.base.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

INTEGERS, FLAGS, TEXTS = ("step", "rank"), ("warmup", "profiled"), ("kind",)  # all other columns are float64
KNOWN = (*INTEGERS, *FLAGS, *TEXTS)  # never null; other columns are null if not measured
TIME = "step_ms"  # null in all rows if ranks were simulated, else in none


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of a run's ``steps.parquet``, one row per step and rank, unordered.

    Raises:
        BadInput: If the file is not a valid ``steps.parquet``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    types = {
        **dict.fromkeys(INTEGERS, pa.int64()),
        **dict.fromkeys(FLAGS, pa.bool_()),
        **dict.fromkeys(TEXTS, pa.string()),
    }
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=list(columns), use_threads=False).select(columns)
        table = table.cast(pa.schema([(name, types.get(name, pa.float64())) for name in columns]))
        for name in set(columns) & {*KNOWN, TIME}:
            if table.column(name).null_count not in (0, len(table) if name == TIME else 0):
                raise ValueError(f"{name} is null")
        for name in set(columns) & set(INTEGERS):
            if len(table) and not (0 <= pc.min(table[name]).as_py() <= pc.max(table[name]).as_py() < len(table)):
                raise ValueError(f"{name} is out of range")
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise BadInput(f"{path} is unusable ({' '.join(str(error).split())}); train this run again.") from None
    return table


def durations(step: NDArray[np.int64], ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Milliseconds of each step: the slowest rank's; NaN if they are unknown.

    The first step compiles and allocates, so it counts at most as long as the median of the others.

    Args:
        step: The columns ``step`` and
        ms: ``step_ms``.
    """
    import numpy as np

    longest = np.zeros(int(step.max()) + 1 if len(step) else 0)
    with np.errstate(invalid="ignore"):
        np.maximum.at(longest, step, ms)
    if len(longest) > 1:
        longest[0] = min(longest[0], np.median(longest[1:]))
    return longest
