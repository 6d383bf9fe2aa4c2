"""Flags of a verb from the fields of a model, and back."""

from __future__ import annotations

import argparse
from types import NoneType
from typing import Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gradwire.base.strict import Model, checked


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Give ``parser`` a flag for each field of ``model``, with its type, default and description."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if field.annotation is bool:
            parser.add_argument(
                f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=field.description
            )
            continue
        choices = get_args(field.annotation) if _is_literal(field) else None
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]  # of `int | None`: int
        kind = str if choices else kinds[0] if kinds else field.annotation
        parser.add_argument(f"--{name}", type=kind, choices=choices, default=default, help=field.description)  # type: ignore[arg-type]


def _is_literal(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is Literal


def from_flags(model: type[Model], args: argparse.Namespace) -> Model:
    """Build a ``model`` from parsed flags.

    Raises:
        BadInput: If a value is out of range.
    """
    return checked(model, {name: getattr(args, name) for name in model.model_fields}, "arguments")


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
