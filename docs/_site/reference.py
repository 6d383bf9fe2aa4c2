"""A hook of MkDocs: the pages of reference/, generated from the program itself.

Commands from their ``--help``, the configuration from its JSON schema, a page per compressor from the registry, fields
of a result from their class. A page per public name and per room of the package is filled in by mkdocstrings.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import gradwire
from gradwire import HOMES, cli
from gradwire.bench import config
from gradwire.bench.report.rows.record import Result
from gradwire.comm.communication import Communication
from gradwire.comm.compressors import available, build, method_class, option_schema
from gradwire.comm.compressors.listing import MATRIX, kind, shown, taken
from gradwire.comm.reduction import ReducerOptions

NUMEL = math.prod(MATRIX)
FIRST = ("compress_gradients", "Compression", "comm_hook", "DiLoCo")  # the other names follow
METHODS = "gradwire.comm.compressors.methods."  # names from there have the pages of the compressors
OPTIMIZERS = "gradwire.comm.parallel.optimizers."
ROOMS = {  # page: its title and modules
    "parallel": ("Training scripts", ("gradwire.comm.parallel",)),
    "trainer": ("Hugging Face's Trainer", ("gradwire.comm.huggingface",)),
    "compressors": (
        "Writing a compressor",
        (
            "gradwire.comm.compressors.build",
            "gradwire.comm.compressors.base",
            "gradwire.comm.compressors.driver",
            "gradwire.comm.compressors.sparse",
            "gradwire.comm.compressors.rounds",
            "gradwire.comm.compressors.registry",
        ),
    ),
    "strategies": ("Writing a strategy", ("gradwire.comm.parallel.strategy",)),
    "reducer": ("Reducer", ("gradwire.comm.collectives.Reducer", "gradwire.comm.reduction")),
    "collectives": (
        "Collectives",
        (
            "gradwire.comm.collectives.codec.Feedback",
            "gradwire.comm.collectives.layout",
            "gradwire.comm.collectives.meter",
            "gradwire.comm.collectives.world",
        ),
    ),
    "data": (
        "Corpora and tokens",
        (
            "gradwire.lm.data.sources",
            "gradwire.lm.data.document",
            "gradwire.lm.data.corpus",
            "gradwire.lm.data.shards",
            "gradwire.lm.data.batches",
        ),
    ),
    "gradients": (
        "Per-sample gradients",
        (
            "gradwire.attribution.persample.batch",
            "gradwire.attribution.persample.norms",
            "gradwire.attribution.projections.base",
            "gradwire.attribution.store.row_writer.RowWriter",
            "gradwire.attribution.store.store",
        ),
    ),
    "benchmark": (
        "Benchmark",
        (
            "gradwire.bench.trace.trace",
            "gradwire.bench.statistics.seeds",
            "gradwire.bench.statistics.cost_model",
        ),
    ),
    "errors": ("Errors", ("gradwire.base.errors",)),
}
REEXPORTS = ("gradwire.comm.parallel",)  # rooms whose `__init__` collects what its files define


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of compressors, names and rooms to the navigation."""
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    more = {
        "Compressors": [{name: f"reference/compressors/{name}.md"} for name in available()],
        "Python": [
            *({name: f"reference/python/{name}.md"} for name in names()),
            *({title: f"reference/rooms/{room}.md"} for room, (title, _) in ROOMS.items()),
        ],
    }
    for page in reference:
        page.update({title: [page[title], *more[title]] for title in page.keys() & more})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {name: page() for name, page in PAGES.items()}
    pages |= {f"compressors/{name}": compressor(name) for name in available()}
    pages |= {f"python/{name}": documented(name, (f"gradwire.{name}",), algorithm(name)) for name in names()}
    pages |= {f"rooms/{room}": documented(title, modules) for room, (title, modules) in ROOMS.items()}
    for name, page in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def commands() -> str:
    """The text that every command's ``--help`` prints."""
    parts = ["# Commands", "What `gradwire COMMAND --help` prints.", block(printed("--help"))]
    for name in sorted(cli.COMMANDS):
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
    """The description of a class of the schema, and its keys."""
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
    """The values that a property takes, as a cell of a table."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(values, field["anyOf"])))
    if field.get("type") == "array" and "items" in field:
        return f"list of {values(field['items'])}"
    return " or ".join(map(code, taken(field).split(" | ")))


def compressors() -> str:
    """The table of all compressors."""
    text = (
        "A page for each: its source, wire format and options, from the class itself. Wire sizes are those of a "
        f"float32 matrix of 1,024 × 1,024 ({NUMEL * 4:,} bytes) with the default options; *by the data* means that the "
        "size depends on the values. A *sparsifier* and a *quantizer* make a chain, as in `topk+int8`; *rounds* means "
        "that a native collective can sum it."
    )
    rows = table(("name", "kind", "unbiased", "wire bytes", "ratio"), map(summary, available()))
    return "\n\n".join(["# Compressors", text, rows])


def compressor(name: str) -> str:
    """A compressor: what it is, whose, its bytes and its options."""
    method = method_class(name)
    parts = [f"# {name}", f"*{method.use}*" if method.use else ""]
    if method.__name__ in HOMES:
        parts.append(f"`gradwire.{method.__name__}` in Python, `method: {name}` in an experiment.")
    parts += [inspect.getdoc(inspect.getmodule(method)) or "", inspect.getdoc(method) or ""]
    size = table(("kind", "unbiased", "wire bytes", "ratio"), [summary(name)[1:]])
    rows = list(fields(option_schema(name)))
    options = table(("option", "takes", "default", "meaning"), rows) if rows else "It has no options."
    return "\n\n".join([*parts, size, options])


def summary(name: str) -> tuple[str, ...]:
    """A compressor's line in the table of all."""
    compressor = build(name)
    size = compressor.wire_bytes(MATRIX)
    sent = ("by the data", "–") if size is None else (f"{size:,}", f"{NUMEL * 4 / size:.2f}" if size else "∞")
    return f"[{name}](compressors/{name}.md)", kind(type(compressor)), "yes" if compressor.unbiased else "no", *sent


def results() -> str:
    """The fields of a line of results.jsonl."""
    parts = ["# Results", inspect.getdoc(Result) or ""]
    rows = []
    for key, field in Result.model_json_schema()["properties"].items():
        rows.append((code(key), values(field)))
    return "\n\n".join([*parts, table(("field", "type"), rows)])


def names() -> list[str]:
    """The public names that have a page, those of compressors apart."""
    others = sorted(name for name, home in HOMES.items() if not home.startswith(METHODS) and name not in FIRST)
    return [*FIRST, *others]


def python() -> str:
    """The public names and the rooms of the package."""
    public = [
        (
            f"[`gradwire.{name}`](python/{name}.md)",
            first_line(algorithm(name) or inspect.getdoc(getattr(gradwire, name))),
        )
        for name in names()
    ]
    rooms = [
        (f"[{title}](rooms/{room}.md)", ", ".join(f"`{module}`" for module in modules))
        for room, (title, modules) in ROOMS.items()
    ]
    parts = [
        "# Python",
        table(("name", "is"), public),
        "Each [compressor](compressors.md) has a class too, such as `gradwire.Int8`.",
        "## Rooms",
        "`gradwire[attribution]` installs what data and gradients need, `gradwire[bench]` the benchmark's.",
        table(("page", "modules"), rooms),
    ]
    return "\n\n".join(parts)


def first_line(docstring: str | None) -> str:
    """The first line of a docstring."""
    return (docstring or "").partition("\n")[0]


def algorithm(name: str) -> str:
    """The docstring of an optimizer's module, which explains it."""
    home = HOMES[name]
    return inspect.getdoc(import_module(home)) or "" if home.startswith(OPTIMIZERS) else ""


def documented(title: str, members: tuple[str, ...], text: str = "") -> str:
    """A page for mkdocstrings to fill in."""
    parts = [f"# {title}", text]
    for name in members:
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
    "commands": commands,
    "configuration": configuration,
    "compressors": compressors,
    "results": results,
    "python": python,
}
