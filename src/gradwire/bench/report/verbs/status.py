"""The verb ``status``: which runs of an experiment are done, running, failed or pending, and the time left."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gradwire.base.flags import SECONDS
from gradwire.base.strict import Strict
from gradwire.bench.report.rows.status import listing, look, overview, records

CLEAR = "\033[H\033[2J"  # clears a terminal


class Options(Strict):
    """Flags of ``gradwire status``."""

    results_dir: Path | None = Field(None, description="the experiment's folder; default: all of results/, in short")
    watch: Annotated[float, SECONDS] | None = Field(
        None, description="seconds between updates of the view, until all runs have ended"
    )
    quiet: bool = Field(False, description="print the totals only")
    as_json: bool = Field(False, alias="json", description="print a list with an object per run")


def main(options: Options) -> None:
    """Print the state of every run, once or until all have ended.

    Raises:
        BadInput: If the folder holds no experiment.
    """
    if options.results_dir is None:
        print(listing(Path("results"), as_json=options.as_json))
        return
    if options.as_json:
        print(json.dumps(records(look(options.results_dir)), indent=2, ensure_ascii=False))
        return
    while True:
        states = look(options.results_dir)
        view = overview(states, options.results_dir, quiet=options.quiet)
        in_place = options.watch is not None and sys.stdout.isatty()
        print((CLEAR if in_place else "") + view, flush=True)
        if options.watch is None or not any(state.name in ("running", "waiting") for state in states.values()):
            return
        time.sleep(options.watch)
        if not in_place:
            print()
