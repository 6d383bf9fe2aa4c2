"""Records of the steps of ``train``: ``steps.parquet``, a row per optimizer step and rank, and its progress.

Optimizers that communicate do not send the same in every step, so the kinds of steps weigh in means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.base.errors import BadInput
from gradwire.base.files import write_with

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

COLUMNS = {  # names and Arrow's types
    "step": "int64",
    "rank": "int32",
    **dict.fromkeys(("t_start_s", "step_ms", "data_ms", "forward_ms", "backward_ms"), "double"),
    **dict.fromkeys(("comm_ms", "exposed_ms", "encode_ms", "decode_ms", "optimizer_ms"), "double"),
    "tokens": "int64",
    **dict.fromkeys(("loss", "lr", "grad_norm"), "double"),
    **dict.fromkeys(("clipped", "nonfinite"), "bool"),
    **dict.fromkeys(("bytes_raw", "bytes_sent", "bytes_index"), "int64"),
    **dict.fromkeys(("residual_norm", "grad_rel_error", "grad_rel_error_linf", "grad_cos_sim"), "double"),
    **dict.fromkeys(("warmup", "profiled"), "bool"),
    "kind": "string",
    **dict.fromkeys(("val_loss", "clipped_fraction", "sample_norm_mean", "epsilon", "around_ms"), "double"),
}
DENSE = "dense"  # the kind of steps whose gradients are not compressed yet
INTEGERS = ("step", "rank")
KNOWN = (*INTEGERS, "warmup", "profiled", "kind")  # never null; other columns are null if not measured
TIME = "step_ms"  # null in all rows if ranks were simulated, else in none


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the file, with null for columns that were not measured."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])
    table = pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS} for row in rows], schema=schema)
    write_with(path, lambda part: pq.write_table(table, part))


def read(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read columns of a file, unordered; integers as int64, and what may be null as float64.

    Raises:
        BadInput: If the file is not a valid ``steps.parquet``.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    types = {name: COLUMNS[name] for name in KNOWN} | dict.fromkeys(INTEGERS, "int64")
    schema = pa.schema([(name, pa.type_for_alias(types.get(name, "double"))) for name in columns])
    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=list(columns), use_threads=False).select(columns)
        table = table.cast(schema)
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


def weights(measured: Sequence[str], run: Sequence[str]) -> list[float]:
    """Weights of measured steps, so that each kind has the share that it has of the run; the sum is 1.

    Dense steps only begin a run, so they count where nothing else was measured.

    Args:
        measured: The kind of each measured step, at least one.
        run: The kind of each step of the run; a kind that was not measured is left out.
    """
    number, share = Counter(measured), Counter(run)
    if number.keys() != {DENSE}:
        share[DENSE] = 0
    each = [share[kind] / number[kind] for kind in measured]
    return [weight / sum(each) for weight in each]


PROGRESS = "progress.json"  # in the folder of a run while it trains


def progress_text(progress: Mapping[str, Any]) -> str:
    """Format the contents of the file, without the time left: ``step 4/10, loss 6.500, 120 ms/step, ratio 3.90``."""
    loss = "-" if progress["loss"] is None else f"{progress['loss']:.3f}"
    ratio = "" if progress["ratio"] is None else f", ratio {progress['ratio']:.2f}"
    return f"step {progress['step']}/{progress['steps']}, loss {loss}, {progress['step_ms']:.0f} ms/step{ratio}"


def duration(seconds: float) -> str:
    """Format seconds: ``1 h 05 min``, ``3 min``, ``12 s``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
