"""A hook of MkDocs: the pages of reference/, generated from the program itself.

Verbs from their ``--help``, the configuration from its JSON schema, compressors from the registry, the fields of a
result from their class. What `python.md` shows of the package is read from the docstrings by mkdocstrings.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from gradwire import HOMES, cli
from gradwire.bench import config
from gradwire.bench.report.rows.record import Result
from gradwire.comm.communication import Communication
from gradwire.comm.compressors import available, build, method_class, option_schema
from gradwire.comm.compressors.listing import MATRIX, kind, shown, taken
from gradwire.comm.reduction import ReducerOptions

NUMEL = math.prod(MATRIX)
PYTHON = {
    "Library: in a training script": (
        "gradwire.comm.collectives.Reducer",
        "gradwire.comm.parallel",
        "gradwire.comm.compressors.build",
        "gradwire.comm.huggingface",
    ),
    "Library: compressors": (
        "gradwire.comm.compressors.base",
        "gradwire.comm.compressors.driver",
        "gradwire.comm.compressors.sparse",
        "gradwire.comm.compressors.rounds",
        "gradwire.comm.compressors.registry",
    ),
    "Library: collectives": (
        "gradwire.comm.reduction",
        "gradwire.comm.collectives.feedback",
        "gradwire.comm.collectives.layout",
        "gradwire.comm.collectives.meter",
        "gradwire.comm.collectives.world",
    ),
    "Library: strategies": ("gradwire.comm.parallel.strategy",),
    "Attribution: corpora and tokens": (
        "gradwire.lm.data.sources",
        "gradwire.lm.data.document",
        "gradwire.lm.data.corpus",
        "gradwire.lm.data.shards",
        "gradwire.lm.data.batches",
    ),
    "Attribution: per-sample gradients": (
        "gradwire.attribution.persample.batch",
        "gradwire.attribution.persample.norms",
        "gradwire.attribution.collect.huggingface",
        "gradwire.attribution.projections.base",
        "gradwire.attribution.store.store",
    ),
    "Benchmark": (
        "gradwire.bench.trace.trace",
        "gradwire.bench.statistics.seeds",
        "gradwire.bench.statistics.collective_costs",
        "gradwire.bench.statistics.collective_costs",
        "gradwire.bench.statistics.cost_model",
    ),
    "Errors": ("gradwire.base.errors",),
}
REEXPORTS = ("gradwire.comm.parallel",)  # rooms whose `__init__` collects what its files define


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    return files


def verbs() -> str:
    """What every verb's ``--help`` prints."""
    parts = ["# Verbs", "What `gradwire VERB --help` prints.", block(printed("--help"))]
    for name in sorted(cli.VERBS):
        parts += [f"## {name}", block(printed(*name.split(), "--help"))]
    return "\n\n".join(parts)


def printed(*words: str) -> str:
    """The standard output of a command that ends by itself."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # as wide as a page
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main(list(words))
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)
    return out.getvalue().rstrip()


def configuration() -> str:
    """The JSON schema of an experiment, a table per class."""
    schema = config.json_schema()
    parts = [
        "# Configuration",
        "An experiment is one YAML file. The same classes check it, give `gradwire train` its flags and generate "
        "`workflow/schemas/config.schema.json`, from which this page is made. A key not listed here "
        "is an error, which names the nearest one. `extends: FILE` takes what is not given from another file.",
        "## Experiment",
        *described(schema),
    ]
    of_cells = [ReducerOptions.model_json_schema(), Communication.model_json_schema()]
    definitions = schema["$defs"] | {name: made for part in of_cells for name, made in part["$defs"].items()}
    for name, definition in sorted(definitions.items()):
        parts += [f"## {name}", *described(definition)]
    parts += [
        "## Options of every cell",
        "A cell is a flat mapping: these keys, and the options of its [compressor](compressors.md).",
        table(
            ("key", "takes", "default", "meaning"),
            [row for part in of_cells for row in fields(part)],
        ),
    ]
    return "\n\n".join(parts)


def described(schema: dict[str, Any]) -> Iterator[str]:
    """What a class of the schema says of itself, and its keys."""
    if text := schema.get("description"):
        yield text
    if schema.get("properties"):
        yield table(("key", "takes", "default", "meaning"), fields(schema))


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Key, values, default and meaning of each property."""
    needed = schema.get("required", [])
    for key, field in schema.get("properties", {}).items():
        default = code(shown(field["default"])) if "default" in field else "required" if key in needed else "its own"
        yield code(key), values(field), default, field.get("description", "")


def values(field: dict[str, Any]) -> str:
    """What a property takes, as a cell of a table."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(values, field["anyOf"])))
    if field.get("type") == "array" and "items" in field:
        return f"list of {values(field['items'])}"
    return " or ".join(map(code, taken(field).split(" | ")))


def compressors() -> str:
    """Every compressor: what it is, whose, its bytes and its options."""
    parts = [
        "# Compressors",
        "Each one's source, its wire format and its options, from the class itself. Wire sizes are those of a float32 "
        f"matrix of 1,024 × 1,024 ({NUMEL * 4:,} bytes) with the default options; *by the data* means that the size "
        "depends on the values. A *sparsifier* and a *quantizer* make a chain, as in `topk+int8`; *rounds* means that "
        "a native collective can sum it.",
        table(("name", "kind", "unbiased", "wire bytes", "ratio"), map(summary, available())),
    ]
    for name in available():
        method = method_class(name)
        parts += [f"## {name}", f"*{method.use}*" if method.use else ""]
        parts += [inspect.getdoc(inspect.getmodule(method)) or "", inspect.getdoc(method) or ""]
        rows = list(fields(option_schema(name)))
        parts.append(table(("option", "takes", "default", "meaning"), rows) if rows else "It has no options.")
    return "\n\n".join(parts)


def summary(name: str) -> tuple[str, ...]:
    """A compressor's line in the table of all."""
    compressor = build(name)
    size = compressor.wire_bytes(MATRIX)
    sent = ("by the data", "–") if size is None else (f"{size:,}", f"{NUMEL * 4 / size:.2f}" if size else "∞")
    return f"[{name}](#{name})", kind(type(compressor)), "yes" if compressor.unbiased else "no", *sent


def results() -> str:
    """The fields of a line of results.jsonl."""
    parts = ["# Results", inspect.getdoc(Result) or ""]
    rows = []
    for key, field in Result.model_json_schema()["properties"].items():
        rows.append((code(key), values(field)))
    return "\n\n".join([*parts, table(("field", "type"), rows)])


def python() -> str:
    """The package's public parts, for mkdocstrings to fill in."""
    extras = "`gradwire[attribution]` installs what the parts on attribution need, `gradwire[bench]` the benchmark's."
    parts = ["# Python", f"`from gradwire import {', '.join(HOMES)}`", extras]
    for title, names in PYTHON.items():
        parts.append(f"## {title}")
        for name in names:
            parts.append("\n".join([f"::: {name}", *(["    options: {members: null}"] if name in REEXPORTS else [])]))
    return "\n\n".join(parts)


def table(head: tuple[str, ...], rows: Any) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    """Text in a fixed font, if there is any."""
    return f"`{text}`" if text else ""


def block(text: str) -> str:
    """Text as it is printed."""
    return f"```text\n{text}\n```"


PAGES: dict[str, Callable[[], str]] = {
    "verbs": verbs,
    "configuration": configuration,
    "compressors": compressors,
    "results": results,
    "python": python,
}
