"""Progress of a running run: a progress bar on terminals, and ``progress.json`` for `gradwire status`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gradwire.base.files import write_json
from gradwire.comm.collectives.world import World

FILE = "progress.json"  # in the run's folder while it runs
EVERY = 1.0  # seconds between writes


@contextmanager
def progress(folder: Path, steps: int, start: int, world: World) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that takes each step's row; on ranks other than 0 it does nothing.

    Args:
        folder: The run's folder.
        steps: Optimizer steps of the whole run.
        start: First step of this process.
        world: The process group and this rank's position in it.
    """
    if world.rank != 0:
        yield lambda row: None
        return
    raw = sent = 0
    began = written = time.monotonic()

    def show(row: dict[str, Any]) -> None:
        nonlocal raw, sent, written
        raw, sent = raw + (row["bytes_raw"] or 0), sent + (row["bytes_sent"] or 0)
        loss = row["loss"]
        bar.set_postfix(loss="-" if loss is None else f"{loss:.3f}", ms=f"{row['step_ms']:.0f}", refresh=False)
        bar.update()
        now, done = time.monotonic(), row["step"] + 1
        if now - written >= EVERY:
            written = now
            left = (now - began) / (done - start) * (steps - done)
            state = {"step": done, "steps": steps, "loss": loss, "step_ms": row["step_ms"]}
            write_json(folder / FILE, state | {"ratio": raw / sent if sent else None, "left_s": left})

    try:
        with tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True, disable=None) as bar:
            yield show
    finally:
        (folder / FILE).unlink(missing_ok=True)
