"""The sections on what was run, in which environments, and whether it is valid."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, read_json
from gradwire.bench.report.page.data import Data
from gradwire.bench.report.page.section import Section
from gradwire.bench.report.rows import checks as gates
from gradwire.bench.report.rows.notes import privacy
from gradwire.bench.report.tables import columns
from gradwire.bench.report.tables.markdown import MISSING
from gradwire.bench.report.tables.table import Table


def validity(data: Data) -> Section:
    """What was run, and whether it is valid."""
    measured = [row for row in data.results if row.status in ("ok", "diverged")]
    environment = next((row.environment for row in measured if row.environment), {})
    precisions = {row.precision for row in measured}
    properties = {
        "runs": f"{len(data.results)} in {len({row.run_name.rpartition('/')[0] for row in data.results})} cells",
        "compressors": _distinct(row.compressor for row in data.results),
        "strategies": _distinct(row.strategy for row in data.results),
        "world sizes": _distinct(row.world_size for row in data.results),
        "links": _distinct(row.link for row in data.results),
        "seeds": _distinct(row.seed for row in data.results),
        "model": _distinct(
            f"{row.model} ({row.parameters:,} parameters)" if row.parameters else row.model for row in measured
        ),
        "dataset": _distinct(row.dataset for row in measured),
        "training": _distinct(
            f"{row.steps} steps of {row.batch_size} × {row.max_length} tokens per rank, {row.optimizer}"
            for row in measured
        ),
        "precision": ", ".join(sorted(precisions)) if precisions != {"fp32"} else "",
        "privacy": _distinct(guarantee for row in measured if (guarantee := privacy(row))),
        "backend": _distinct(f"{row.backend} on {row.device}" for row in measured),
        "versions": ", ".join(
            f"{name} {version}"
            for name, version in {"gradwire": environment.get("gradwire"), **environment.get("packages", {})}.items()
            if version
        ),
    }
    return replace(
        Section.of("validity"),
        properties=[(name, text) for name, text in properties.items() if text],
        gates=gates.gates(data.results, data.cells, data.results_dir, data.shared),
        failures=[row for row in data.results if row.status != "ok"],
    )


def stores(data: Data) -> Section:
    """The gradient stores' validation."""
    made = Section.of("stores")
    found = gates.validations(data.results_dir)
    if not found:
        made.absent = "no gradients were collected (`gradients:` in the configuration)"
        return made
    records = [
        {
            "run": run,
            "name": check["name"],
            "result": "passed" if check["passed"] else "FAILED",
            "detail": str(check.get("detail") or ""),
        }
        for run, checks in found.items()
        for check in checks
    ]
    fails = [record["result"] == "FAILED" for record in records]
    made.tables = [replace(Table.of("stores", "Checks of each store", records, columns.STORES), fails=fails)]
    return made


def environments(data: Data) -> Section:
    """The environment of every rank."""
    made = Section.of("environment")
    folder = data.results_dir / "runs"
    ranks: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    environments: dict[str, dict[str, Any]] = {}
    for row in data.results:
        for path in sorted((folder / row.run_name / "environment").glob("rank*.json")):
            try:
                values = read_json(path)
                rank = values.pop("rank")
            except (BadInput, AttributeError, KeyError) as error:
                data.notes.append(f"{path} is unusable ({error}).")
                continue
            for changing in ("clocks", "world_size"):
                values.pop(changing, None)
            key = digest(values)
            environments[key] = values
            ranks[key].append((row.run_name, rank))
    if not environments:
        made.absent = "no run left environment/rank<R>.json"
        return made
    first = next(iter(environments.values()))
    shared = {name for name, value in first.items() if all(other.get(name) == value for other in environments.values())}
    made.properties = [(name, _text(first[name])) for name in first if name in shared and _text(first[name])]
    differing = sorted({name for values in environments.values() for name in values} - shared)
    records = [
        {name: _text(values.get(name)) or MISSING for name in differing}
        | {
            "ranks": len(ranks[key]),
            "runs": gates.listed(sorted({run for run, _ in ranks[key]})),
            "numbers": ", ".join(map(str, sorted({rank for _, rank in ranks[key]}))),
        }
        for key, values in environments.items()
    ]
    shown = [*columns.ENVIRONMENTS, *(columns.text(name, name) for name in differing)]
    made.tables = [Table.of("environment", "Environments", records, shown)]
    return made


def _text(value: Any) -> str:
    """Format a value of an environment."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(of)}" for name, of in value.items() if of is not None)
    return "" if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _distinct(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
