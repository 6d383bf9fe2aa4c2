"""The progress of a run that trains: the file in its folder, and a line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
