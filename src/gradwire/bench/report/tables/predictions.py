"""An experiment as a description, one for each strategy, and its measured steps held against their predictions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE, Cell
from gradwire.bench.report.rows.record import Result
from gradwire.bench.report.tables.described import Evidence
from gradwire.bench.report.tables.quality import cell_key
from gradwire.bench.report.tables.results import Results
from gradwire.bench.report.tables.table import markdown
from gradwire.bench.report.tables.time_to_loss import seconds_to
from gradwire.bench.statistics.cost_model import NO_ISLANDS, Islands, Place, peak_memory
from gradwire.bench.statistics.description import Description, Expected
from gradwire.comm.topology import between_islands, link_rate, sharded_islands


@dataclass(frozen=True)
class Experiment:
    """A strategy's runs, which describe their model.

    Args:
        results: The experiment.
        strategy: The strategy.
    """

    results: Results
    strategy: str

    @property
    def rows(self) -> list[Result]:
        """Its runs with a result and a step."""
        return [row for row in self.results.ok if row.strategy == self.strategy and row.typical_step_ms]

    @property
    def cells(self) -> dict[str, Mapping[str, Any]]:
        """The cells that several ranks ran."""
        return {row.compressor: row.compress_config or {} for row in self.rows if row.world_size > 1}

    @property
    def flags(self) -> dict[str, Any]:
        """The flags that describe the model.

        Raises:
            BadInput: If no run of the baseline has a result, or the runs had several kinds of devices.
        """
        path = self.results.results_dir / "results.jsonl"
        base = [row for row in self.rows if row.compressor == BASELINE and row.parameters]
        if not base:
            raise BadInput(f"{path}: no finished run of `{BASELINE}` under {self.strategy} has a step and parameters.")
        device, *others = dict.fromkeys(row.device for row in self.rows)
        if others:
            kinds = " and ".join(map(str, (device, *others)))
            raise BadInput(f"{path}: runs under {self.strategy} were on {kinds}: predict from those of one.")
        described = {"parameters": base[0].parameters, "step_ms": fastest(base), "strategy": self.strategy}
        return described | {"device": device}

    @property
    def own(self) -> dict[str, float]:
        """Seconds of each label's computation: a step of its optimizer that averages every gradient as it is."""
        steps: defaultdict[str, list[Result]] = defaultdict(list)
        for row in self.rows:
            if row.averages:
                steps[row.inner].append(row)
        return {row.compressor: fastest(steps[row.inner]) / 1e3 for row in self.rows if row.inner in steps}

    def qualities(self) -> dict[str, Evidence]:
        """The measured difference of each label that has one."""
        known = {}
        for row in self.rows:
            difference = self.results.judged[cell_key(row)].difference
            if difference.n and row.parameters:
                low, high = (None if math.isnan(end) else end for end in (difference.low, difference.high))
                percent = difference.mean, low, high
                source = self.results.quality.name
                known[row.compressor] = Evidence({}, row.parameters, row.world_size, difference.n, percent, source)
        return known

    def soonest(self, expected: Sequence[Expected]) -> list[str]:
        """For each target of the runs, the label that reaches it soonest with the predicted steps, and when."""
        steps = {row.cell.label: row.step.typical for row in expected}
        times: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for row in {row.compressor: row for row in self.rows if row.compressor in steps}.values():
            try:
                runs = list(self.results.quality.seeds(row).values())
            except BadInput:
                continue  # without a perplexity
            for target in dict.fromkeys(name for run in runs for name in run.steps_to_target or {}):
                time = seconds_to(target, runs, steps[row.compressor], steps.get(BASELINE))
                if math.isfinite(time):
                    times[target][row.compressor] = time
        first = {target: min(of, key=of.__getitem__) for target, of in sorted(times.items())}
        return [f"ppl {target}: `{label}` in {times[target][label]:,.0f} s" for target, label in first.items()]

    def memory(self, place: Place) -> dict[str, float]:
        """Predicted peak memory of a rank by label, in GB; with hsdp, an island holds the model once."""
        peaks = {}
        for row in sorted(self.rows, key=lambda row: row.mem_peak_alloc_gb or 0):
            if row.world_size > 1 and row.mem_peak_alloc_gb:
                before = row.world_size // sharded_islands(self.strategy, row.islands)
                after = place.world // sharded_islands(self.strategy, place.islands.number)
                in_shards = (row.parameters or 0) if row.sharded else 0
                peak, outer = 1e9 * row.mem_peak_alloc_gb, 1e9 * (row.mem_outer_gb or 0)
                peaks[row.compressor] = peak_memory(peak, in_shards, before, after, outer) / 1e9
        return peaks

    def errors(self, description: Description) -> str:
        """The measured steps on links with a rate, and what the description predicts there."""
        measured: defaultdict[tuple[str, int, int, str], list[float]] = defaultdict(list)
        for row in self.rows:
            if row.world_size > 1 and math.isfinite(link_rate(row.link)):
                key = row.compressor, row.world_size, row.islands, row.link
                measured[key].append((row.typical_step_ms or 0) / 1e3)
        lines, off = [], []
        for (label, world, islands, link), times in measured.items():
            there = replace(description, place=place_of(self.strategy, world, islands, link))
            try:
                (expected,) = there.expect([Cell.parse(label, self.cells[label])], [])
            except BadInput:
                continue  # named where it was left out
            step, (typical, low, high) = fmean(times), expected.step
            off.append(abs(typical / step - 1))
            shown = [f"{1e3 * step:,.1f}", f"{1e3 * typical:,.1f}", f"{1e3 * low:,.1f} … {1e3 * high:,.1f}"]
            speed_up = world * description.computed(label) / step
            lines.append([label, str(world), link, *shown, f"{100 * (typical / step - 1):+.0f} %", f"{speed_up:.2f}"])
        if not lines:
            return "No cell was measured on a link with a rate: nothing shows how far off this is."
        headers = ["compressor", "W", "link", "step ms", "predicted", "range", "off", "N/(1+α)"]
        table = markdown(lines, headers, left=(0, 2))
        return f"Measured steps, predicted with a median error of {100 * median(off):.1f} %:\n\n{table}"


def fastest(rows: Sequence[Result]) -> float:
    """Milliseconds of a step where communication costs least: on the fastest link, with the fewest ranks."""
    best = min((-link_rate(row.link), row.world_size) for row in rows)
    return fmean(row.typical_step_ms or 0.0 for row in rows if (-link_rate(row.link), row.world_size) == best)


def place_of(strategy: str, world: int, islands: int, link: str) -> Place:
    """Where a run was: its cables between islands, or its ranks' links."""
    rate = link_rate(link)
    if islands == 1:
        return Place(world, rate, 0.0, NO_ISLANDS)
    if between_islands(link):
        return Place(world, rate, 0.0, Islands(islands))
    if strategy != "hsdp":
        return Place(world, rate, 0.0, NO_ISLANDS)
    return Place(world, rate * (world // islands), 0.0, Islands(islands, rate))
