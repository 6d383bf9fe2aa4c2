"""The command ``predict``: which compressor wins at a world size, bandwidth and latency, from cells measured on links.

`bench.statistics.cost_model` is fitted to the rows of ``results.jsonl``, and tested by predicting each link from the
others.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import RANKS
from gradwire.base.strict import Strict
from gradwire.base.units import UNSHAPED, bits_per_second, rate_text, seconds

if TYPE_CHECKING:
    from gradwire.bench.report.tables.predictions import Place

MOST = 4096


class Options(Strict):
    """Flags of ``gradwire predict``."""

    results_dir: Path = Field(Path("results/links"), description="a folder with results.jsonl of cells on links")
    world_size: Annotated[int, RANKS] = Field(description=f"ranks, 2 to {MOST}")
    bandwidth: str = Field(description="rate of each rank's link, such as 10gbit, or each island's")
    latency: str = Field("50us", description="of each message, such as 50us")
    islands: Annotated[int, RANKS] = Field(1, description="islands of ranks, with a cable each")
    bandwidth_inside: str = Field(UNSHAPED, description="rate of each rank's link inside its island")
    latency_inside: str | None = Field(None, description="of each message inside an island; default: --latency")
    as_json: bool = Field(False, alias="json", description="print the predicted steps as JSON")
    memory: bool = Field(False, description="predict each rank's peak memory as well")


def main(options: Options) -> None:
    """Fit, predict and print."""
    from gradwire.bench.report.tables.measurements import measurement_of, unpredictable, usable
    from gradwire.bench.report.tables.predictions import predictions, records
    from gradwire.bench.report.tables.results import Results
    from gradwire.bench.statistics.cost_model import Model

    place = place_of(options)
    path = options.results_dir / "results.jsonl"
    if not path.is_file():
        raise BadInput(
            f"{path} does not exist; first run an experiment with links: make run CONFIG=configs/links.yaml."
        )
    results = Results.read(options.results_dir)
    reasons = [unpredictable(row, options.islands) for row in results.rows]
    left_out = Counter(reason for reason in reasons if reason is not None)
    chosen = usable([row for row, reason in zip(results.rows, reasons, strict=True) if reason is None], path)
    for complaint in [*results.notes, *(f"left out {count} rows: {reason}." for reason, count in left_out.items())]:
        print(f"gradwire predict: {complaint}", file=sys.stderr)
    model = Model(tuple(measurement_of(row) for row in chosen))
    if options.as_json:
        print(json.dumps(records(model, place), indent=2))
        return
    source = f"From {len(chosen)} cells of {path} at W = {chosen[0].world_size}."
    text = predictions(model, results, chosen, place, options.memory)
    print(f"# {title(options, place)}\n\n{source}\n\n{text}")


def place_of(options: Options) -> Place:
    """Return what the flags describe.

    Raises:
        BadInput: If islands do not divide the ranks, a number is invalid, or links inside islands lack islands.
    """
    from gradwire.bench.report.tables.predictions import Place
    from gradwire.bench.statistics.cost_model import NO_ISLANDS, Islands
    from gradwire.comm.topology import check_islands

    bandwidth, latency = bits_per_second(options.bandwidth), seconds(options.latency)
    islands = NO_ISLANDS
    if options.islands > 1:
        check_islands(options.world_size, options.islands)
        inside = options.bandwidth_inside
        rate = math.inf if inside == UNSHAPED else bits_per_second(inside)
        islands = Islands(options.islands, rate, seconds(options.latency_inside or options.latency))
    elif (options.bandwidth_inside, options.latency_inside) != (UNSHAPED, None):
        raise BadInput("--bandwidth_inside and --latency_inside are for links inside islands: add --islands N.")
    if not 2 <= options.world_size <= MOST:
        raise BadInput(f"--world_size {options.world_size}: a prediction is for 2 to {MOST} ranks.")
    return Place(options.world_size, bandwidth, latency, islands)


def title(options: Options, place: Place) -> str:
    """Describe what is predicted."""
    text = f"W = {place.world}, {rate_text(place.bandwidth)} and {options.latency} per message"
    if options.islands == 1:
        return text
    inside = "no limit" if math.isinf(place.islands.rate) else rate_text(place.islands.rate)
    return f"{text} between {options.islands} islands, {inside} and {options.latency_inside or options.latency} inside"
