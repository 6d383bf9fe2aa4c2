"""The command ``predict``: the fastest method for ranks, a bandwidth and a latency, from results or a description.

An experiment describes its model by its runs; its measured steps on links are held against their predictions.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import COUNT, RANKS, Number
from gradwire.base.strict import Strict, checked
from gradwire.base.units import UNSHAPED, bits_per_second, rate_text, seconds

if TYPE_CHECKING:
    import pandas as pd

    from gradwire.bench.config import Cell
    from gradwire.bench.report.tables.described import Evidence
    from gradwire.bench.statistics.cost_model import Place
    from gradwire.bench.statistics.description import Description, Expected, Shapes

MOST = 4096
NVLINK = "3.6tbit"  # of an H100 in each direction
PARAMETERS = Number(float, 1, 1e13)
MILLISECONDS = Number(float, 0, 1e9, above=True)
NEAR = 0.02  # of the number of parameters: a model is called by a rounded one


class Options(Strict):
    """Flags of ``gradwire predict``."""

    results_dir: Path | None = Field(None, description="from results: a folder with results.jsonl")
    parameters: Annotated[float, PARAMETERS] | None = Field(
        None, description="from a description: parameters of the model, such as 1.3e9"
    )
    model: str | None = Field(None, description="its shapes: a preset, or a folder with a config.json")
    vocab_size: Annotated[int, COUNT] = Field(32_000, description="vocabulary of a preset")
    step_ms: Annotated[float, MILLISECONDS] | None = Field(
        None, description="milliseconds of its float32 step where communication costs nothing, as on one machine"
    )
    strategy: Literal["ddp", "fsdp2", "hsdp"] = Field("ddp", description="how it is replicated or sharded")
    device: str | None = Field(
        None,
        description="whose codecs: cpu or cuda, timed here once (no GPU: an H200's record), or a file of rates; "
        "default: that of the runs, cpu for a description",
    )
    cells: tuple[str, ...] = Field((), description="methods, or cells as JSON, in place of the usual ones")
    world_size: Annotated[int, RANKS] = Field(description=f"ranks, 2 to {MOST}")
    bandwidth: str = Field(description="rate of each rank's link, such as 10gbit, or each island's")
    latency: str = Field("50us", description="of each message, such as 50us")
    islands: Annotated[int, RANKS] = Field(1, description="islands of ranks, with a cable each")
    inside: str = Field(UNSHAPED, description="rate of each rank's link inside its island, or nvlink")
    latency_inside: str | None = Field(None, description="of each message inside an island; default: --latency")
    as_json: bool = Field(False, alias="json", description="print the predicted steps as JSON")


def main(options: Options) -> None:
    """Predict and print."""
    place = place_of(options)
    if options.results_dir is None:
        print_described(*expected(options, place), options)
    elif (options.parameters, options.model, options.step_ms, options.strategy) == (None, None, None, "ddp"):
        from_results(options, options.results_dir, place)
    else:
        raise BadInput(
            "--results_dir describes a model itself: give it, or --parameters, --model, --step_ms and --strategy."
        )


def predict(**flags: Any) -> pd.DataFrame:
    """Predict the step of each method from a description, without a measurement on a link.

    Args:
        flags: The flags of ``gradwire predict`` without ``results_dir``: ``parameters`` or ``model``, ``step_ms``,
            ``world_size`` and ``bandwidth``; ``cells`` takes methods, and cells as JSON.

    Returns:
        A frame with a row per method, fastest first: bytes that a rank sends per step, and those of them that leave an
        island which holds the model in shards, exposed communication and step in milliseconds, how many times shorter
        the step is than with float32 and bf16, the bandwidth in bit/s below which the method pays, each with ``_low``
        and ``_high``; the share of the ceiling, bytes of residuals and anchors, the perplexity of the nearest record,
        and the line to type. Usual methods that the strategy cannot do,
        or that the device has no rate of, are left out and named on stderr.

    Raises:
        BadInput: If a value is missing, unknown, out of range or contradicts another one.
    """
    from pandas import DataFrame

    from gradwire.bench.report.tables.described import qualities, records_of

    options = checked(Options, flags, "predict")
    if options.results_dir is not None:
        raise BadInput("predict() is of a description: use `gradwire predict --results_dir` for results.")
    table, description = expected(options, place_of(options))
    return DataFrame(records_of(table, description, qualities(table, description)))


def from_results(options: Options, folder: Path, place: Place) -> None:
    """Predict from an experiment: each strategy as its runs describe it."""
    from gradwire.bench.report.tables.described import qualities, records_of
    from gradwire.bench.report.tables.predictions import Experiment
    from gradwire.bench.report.tables.results import Results

    path = folder / "results.jsonl"
    if not path.is_file():
        raise BadInput(
            f"{path} does not exist: first run an experiment by `gradwire run FILE`, or describe the model by "
            "--parameters and --step_ms."
        )
    results = Results.read(folder)
    for note in results.notes:
        print(f"gradwire predict: {note}", file=sys.stderr)
    ran = dict.fromkeys(row.strategy for row in results.ok if row.world_size > 1)
    if not ran:
        raise BadInput(f"{path} has no finished run of several ranks: there is nothing to predict from.")
    if len(ran) > 1 and "hsdp" in ran and options.islands == 1:
        print("gradwire predict: left out hsdp: it has islands: add --islands N.", file=sys.stderr)
        del ran["hsdp"]
    given = {"device": options.device} if options.device else {}
    models = [(runs, runs.flags | given) for runs in (Experiment(results, strategy) for strategy in ran)]
    labels = {label for runs, _ in models for label in runs.cells}
    predicted = []
    for runs, flags in models:
        named = tuple(word for word in options.cells if word in runs.cells or word not in labels)
        if named or not options.cells:
            model = options.model_copy(update=flags | {"cells": named})
            predicted.append((runs, *expected(model, place, runs.cells, runs.own)))
    if options.as_json:
        tables = [records_of(table, of, qualities(table, of, runs.qualities())) for runs, table, of in predicted]
        print(json.dumps([record for table in tables for record in table], indent=2))
        return
    for runs, table, description in predicted:
        print_described(table, description, options, f" as {path} describes it", runs.qualities(), runs.memory(place))
        paragraphs = "\n".join(runs.soonest(table)), runs.errors(description)
        print("", *(f"{text}\n" for text in paragraphs if text), sep="\n")


def print_described(
    table: Sequence[Expected],
    description: Description,
    options: Options,
    source: str = "",
    measured: Mapping[str, Evidence] = MappingProxyType({}),
    peaks: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Print predictions as Markdown, or as JSON."""
    from gradwire.bench.report.tables.described import count, described, qualities, records_of

    quality = qualities(table, description, measured)
    if options.as_json:
        print(json.dumps(records_of(table, description, quality), indent=2))
        return
    place = title(options, description.place)
    print(f"# {count(description.numel)} parameters, {description.strategy}, {place}{source}\n")
    print(described(table, description, quality, peaks))


def expected(
    options: Options,
    place: Place,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    own: Mapping[str, float] = MappingProxyType({}),
) -> tuple[list[Expected], Description]:
    """Predict cells of a description, against float32 and bf16.

    Args:
        options: The flags, which describe the model.
        place: What to predict for.
        cells: The cells where the flags name none; by default the usual ones.
        own: Seconds of computation of cells that compute something else, by label.

    Raises:
        BadInput: If the model or its step is missing, numbers of parameters differ, or a cell cannot do the strategy.
    """
    from gradwire.bench.codecs.rates import rates_of
    from gradwire.bench.config import BASELINE, Cell
    from gradwire.bench.report.rows.record import BF16
    from gradwire.bench.statistics.description import CELLS, Description

    if options.step_ms is None or (options.parameters is None and options.model is None):
        raise BadInput(
            "nothing to predict from: describe the model by --parameters (or --model) and --step_ms, or give the "
            "--results_dir of an experiment."
        )
    if options.strategy == "hsdp" and not 1 < options.islands < place.world:
        raise BadInput("strategy hsdp has islands of several ranks: add --islands N, below --world_size.")
    shapes, outside = shapes_of(options)
    chosen, unfit = cells_of(options, cells or CELLS)
    baselines = [Cell.parse(label, CELLS[label]) for label in (BASELINE, BF16)]
    codecs = [(cell.method, cell.options) for cell in (*chosen, *baselines) if cell.hooked]
    rates = rates_of(options.device or "cpu", codecs)
    known = [cell for cell in chosen if options.cells or not cell.hooked or rates.of(cell.method, cell.options)]
    if unfit:
        print(f"gradwire predict: left out {', '.join(unfit)}: not for strategy {options.strategy}.", file=sys.stderr)
    if absent := ", ".join(cell.label for cell in chosen if cell not in known):
        print(f"gradwire predict: left out {absent}: {rates.device} has no rate of the method.", file=sys.stderr)
    description = Description(shapes, outside, options.step_ms / 1e3, options.strategy, place, rates, own)
    return description.expect(known if options.cells else predictable(known, description), baselines), description


def predictable(cells: Sequence[Cell], description: Description) -> list[Cell]:
    """The cells whose bytes have a closed form; says which do not."""
    known = []
    for cell in cells:
        try:
            description.traffic(cell)
        except BadInput as error:
            print(f"gradwire predict: {error}", file=sys.stderr)
        else:
            known.append(cell)
    return known


def cells_of(options: Options, usual: Mapping[str, Mapping[str, Any]]) -> tuple[list[Cell], list[str]]:
    """The cells that the flags name, each once, or the usual ones that the strategy can do, and the labels of the rest.

    Raises:
        BadInput: If one is unknown or cannot do the strategy.
    """
    from gradwire.base.files import parse_json
    from gradwire.bench.config import Cell

    cells, unfit = [], []
    for number, word in enumerate(dict.fromkeys(options.cells), start=1):
        label, mapping = word, usual.get(word, {})
        if word.lstrip().startswith("{"):
            try:
                label, mapping = f"cell-{number}", parse_json(word)
            except ValueError as error:
                raise BadInput(f"--cells: {word[:80]} is not valid JSON ({error}).") from None
        cells.append(Cell.parse(label, mapping))
    for cell in cells:
        cell.check_strategy(options.strategy)
    for label, mapping in usual.items() if not cells else ():
        cell = Cell.parse(label, mapping)
        try:
            cell.check_strategy(options.strategy)
        except BadInput:
            unfit.append(label)
        else:
            cells.append(cell)
    return cells, unfit


def shapes_of(options: Options, max_length: int = 1024) -> tuple[Shapes, int]:
    """Shapes of the described parameters, and how many are outside the blocks.

    Raises:
        BadInput: If the number of parameters is not that of the model.
    """
    from gradwire.bench.statistics.description import shapes_of_size

    if options.model is None:
        return shapes_of_size(round(options.parameters or 0)), 0
    from gradwire.comm.parallel.model import block_sizes
    from gradwire.lm.models import architecture, presets

    given = presets.options(options.model)
    config = (
        architecture.of_folder(Path(options.model), 1, 1)
        if given is None
        else architecture.configuration(given, options.vocab_size, max_length)
    )
    made = architecture.on_meta(config)
    numel = sum(parameter.numel() for parameter in made.parameters())
    if options.parameters is not None and abs(options.parameters / numel - 1) > NEAR:
        raise BadInput(
            f"--parameters {options.parameters:g} contradicts --model {options.model}, which has {numel:,}: give one."
        )
    return Counter(tuple(parameter.shape) for parameter in made.parameters()), block_sizes(made)[0]


def place_of(options: Options) -> Place:
    """Return where the flags predict for.

    Raises:
        BadInput: If islands do not divide the ranks, a number is invalid, or links inside islands lack islands.
    """
    from gradwire.bench.statistics.cost_model import NO_ISLANDS, Islands, Place
    from gradwire.comm.topology import check_islands

    bandwidth, latency = bits_per_second(options.bandwidth), seconds(options.latency)
    islands = NO_ISLANDS
    if options.islands > 1:
        check_islands(options.world_size, options.islands)
        inside = NVLINK if options.inside == "nvlink" else options.inside
        rate = math.inf if inside == UNSHAPED else bits_per_second(inside)
        islands = Islands(options.islands, rate, seconds(options.latency_inside or options.latency))
    elif (options.inside, options.latency_inside) != (UNSHAPED, None):
        raise BadInput("--inside and --latency_inside are for links inside islands: add --islands N.")
    if not 2 <= options.world_size <= MOST:
        raise BadInput(f"--world_size {options.world_size}: a prediction is for 2 to {MOST} ranks.")
    return Place(options.world_size, bandwidth, latency, islands)


def title(options: Options, place: Place) -> str:
    """Describe the place that is predicted for."""
    text = f"W = {place.world}, {rate_text(place.bandwidth)} and {options.latency} per message"
    if options.islands == 1:
        return text
    inside = "no limit" if math.isinf(place.islands.rate) else rate_text(place.islands.rate)
    return f"{text} between {options.islands} islands, {inside} and {options.latency_inside or options.latency} inside"
