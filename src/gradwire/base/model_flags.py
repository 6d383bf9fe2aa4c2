"""Flags of a verb from the fields of a model, and back."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradwire.base.flags import CHECKS, Number, Positional
from gradwire.base.strict import Model, checked

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


# Why: docs/decisions.md, "A verb's flags are a typed model".
def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Give ``parser`` a flag for each field of ``model``, with its type, default and description.

    The flags of a base class come after those of the class. A base class with a ``group`` (title and description) has
    its own group in the help. A tuple takes several words; a value that is `Positional` has no flag. The type of a flag
    is that of its field, or the `Number`, `output_file` or `output_folder` in the field's annotation, whose checks
    `check_numbers` and `check_paths` do.
    """
    for title, fields in _grouped(model):
        target = parser.add_argument_group(*title) if title else parser
        for name, field in fields.items():
            _add_flag(target, field.alias or name, field)


def _grouped(model: type[BaseModel]) -> Iterator[tuple[tuple[str, str] | None, dict[str, FieldInfo]]]:
    """Yield the fields that each class of a model defines, and the title of their group."""
    defined = {name: kind for kind in model.__mro__ for name in vars(kind).get("__annotations__", {})}
    for kind in model.__mro__:
        fields = {name: field for name, field in model.model_fields.items() if defined.get(name) is kind}
        if fields:
            yield vars(kind).get("group"), fields


def _add_flag(target: Any, name: str, field: FieldInfo) -> None:
    """Add the flag of one field to a parser or a group of it."""
    options: dict[str, Any] = {"help": field.description}
    annotation = _without_none(field.annotation)
    several = get_origin(annotation) is tuple
    place = next((item for item in field.metadata if isinstance(item, Positional)), None)
    if not field.is_required():
        options["default"] = field.get_default(call_default_factory=True)
    elif place is None:
        options["required"] = True
    if annotation is bool:
        target.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, **options)
        return
    if several:
        options["nargs"] = "+" if place is None or field.is_required() else "*"
        annotation = get_args(annotation)[0]
    elif place is not None and not field.is_required():
        options["nargs"] = "?"
    if get_origin(annotation) is Literal:
        target.add_argument(f"--{name}", choices=get_args(annotation), **options)
        return
    metadata = (*getattr(annotation, "__metadata__", ()), *field.metadata)
    kind = getattr(annotation, "__origin__", annotation)
    checks = (item for item in metadata if isinstance(item, Number) or item in CHECKS)
    options |= {"type": next(checks, kind), "metavar": place.metavar if place else METAVARS[kind]}
    target.add_argument(name if place else f"--{name}", **options)


def _without_none(annotation: Any) -> Any:
    """Return ``int`` of ``int | None``."""
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(annotation) else annotation


def from_flags(model: type[Model], args: argparse.Namespace) -> Model:
    """Build a ``model`` from parsed flags.

    Raises:
        BadInput: If a value is out of range.
    """
    names = [field.alias or name for name, field in model.model_fields.items()]
    given = {name: getattr(args, name) for name in names}
    return checked(model, given, "arguments")


def to_flags(settings: BaseModel, *names: str) -> list[str]:
    """Return the flags for ``settings``: ``["--steps", "60", "--no-profile", ...]``; None is omitted.

    Args:
        settings: A model whose fields are flags of a verb.
        names: Only these fields; default: all.
    """
    words: list[str] = []
    for name, value in settings:
        if names and name not in names:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words
