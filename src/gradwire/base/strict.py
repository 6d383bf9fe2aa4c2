"""Strict models: unknown keys are errors; a message has the place, what is given and what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from gradwire.base.errors import BadInput, unknown

Model = TypeVar("Model", bound=BaseModel)

EXPECTED = {  # by the type of pydantic's problem
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping, such as {}",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "model_type": "must be a mapping, such as {}",
    "string_type": "must be text",
    "tuple_type": "must be a list, such as [a, b]",
}

BOUND = "Input should be "  # how pydantic's other problems begin, such as of a number out of bounds


class Strict(BaseModel):
    """A frozen model without unknown keys and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def checked(model: type[Model], value: Any, where: str) -> Model:
    """Build ``model`` from ``value``.

    Raises:
        BadInput: If a value is invalid; the message has the place, the value and what is allowed.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = explain(model, error)
        raise BadInput(f"{where}: {problems}." if where else f"{problems}.") from None


def explain(model: type[BaseModel], error: ValidationError) -> str:
    """All problems of ``error`` on one line; a key that is missing because it is misspelt is one problem."""
    problems: list[Any] = [*error.errors()]
    strangers = [problem["loc"] for problem in problems if problem["type"] == "extra_forbidden"]
    problems = [problem for problem in problems if not any(_inside(outer, problem) for outer in problems)]
    reasons = [_explain(model, problem) for problem in problems if not _misspelt(problem, strangers)]
    return "; ".join(dict.fromkeys(reasons))


def short(text: str) -> str:
    """A value as a message shows it: of a long one the beginning."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def _inside(inner: Any, outer: Any) -> bool:
    """Whether a problem is inside of the value of another, and its reason."""
    whole, place = outer["loc"], inner["loc"]
    return bool(whole) and len(place) > len(whole) and place[: len(whole)] == whole


def _misspelt(problem: Any, strangers: list[tuple[int | str, ...]]) -> bool:
    """Whether a key is missing where an unknown one is close to it."""
    *parents, key = problem["loc"] or ("",)
    unknown_keys = [str(loc[-1]) for loc in strangers if [*loc[:-1]] == parents]
    return problem["type"] == "missing" and bool(difflib.get_close_matches(str(key), unknown_keys, cutoff=0.5))


def _explain(model: type[BaseModel], problem: Any) -> str:
    kind, given = problem["type"], problem["input"]
    place = ".".join(short(str(key)) for key in problem["loc"])
    if kind == "extra_forbidden":
        *parents, key = problem["loc"]
        inside = f" in {'.'.join(map(str, parents))}" if parents else ""
        if home := _home(model, str(key), parents):
            return f"unknown key{inside} {str(key)!r}: it belongs {home}"
        return str(unknown(f"key{inside}", str(key), _fields(model, parents))).rstrip(".")
    if kind == "missing":
        return f"{place} is missing"
    if kind == "literal_error" and isinstance(given, str):
        choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        return str(unknown(f"value of {place}", short(given), choices)).rstrip(".")
    shown = short(json.dumps(given, default=str))
    if kind in EXPECTED:
        return f"{place} {EXPECTED[kind]}, got {shown}".lstrip()
    if kind == "string_pattern_mismatch" and "links" in problem["loc"]:
        return f"{place} must be a rate such as 100mbit, or none, or between-100mbit for islands, got {shown}"
    if kind == "string_pattern_mismatch":
        return f"{place} must be made of letters, digits and . _ + - and start with a letter or digit, got {shown}"
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    if message.startswith(BOUND):
        return f"{place} must be {message.removeprefix(BOUND)}, got {shown}"
    named = isinstance(given, Mapping) or message.startswith("unknown ")  # the message has the value already
    where = f"{place}: " if place else ""
    return f"{where}{message}, got {shown}" if place and not named else f"{where}{message}"


def _home(model: type[BaseModel], key: str, parents: Sequence[str | int]) -> str | None:
    """Where in ``model`` a key belongs that is in another place; None if there is no such key."""
    if parents and key in model.model_fields:
        return "at the top level"
    for section, field in model.model_fields.items():
        if section not in parents[:1] and any(key in kind.model_fields for kind in _models(field.annotation)):
            return f"in `{section}:`"
    return None


def _fields(model: type[BaseModel], path: Sequence[str | int]) -> Iterable[str]:
    """Names of the fields of the model that a path of keys and positions leads to inside ``model``."""
    for key in path:
        if isinstance(key, str):
            annotation = model.model_fields[key].annotation
            model = next(kind for kind in _models(annotation))
    return model.model_fields


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model that is part of a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
