"""Strict models: unknown keys are errors; a message has the place, what is given and what is allowed.

A command's flags are the fields of such a model.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from gradwire.base.errors import BadInput, unknown
from gradwire.base.flags import Number, Positional, Short, output_file, path

Model = TypeVar("Model", bound=BaseModel)
P = ParamSpec("P")
R = TypeVar("R")

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

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
BOUND = "Input should be "  # how pydantic's other problems begin, such as of a number out of bounds


class Strict(BaseModel):
    """A frozen model without unknown keys and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class Direct(type(BaseModel)):  # type: ignore[misc]  # pydantic's metaclass has no public name
    """Metaclass of models that a user's program builds: a wrong argument is one `BadInput` there too."""

    if not TYPE_CHECKING:

        def __call__(cls, **fields: Any) -> Any:
            """Build the model from its fields; as `checked`."""
            return checked(cls, fields, cls.__name__)


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


@dataclass(frozen=True)
class Matching:
    """In an `Annotated`: text that matches a pattern as a whole; a message says that it must be ``form``."""

    pattern: str
    form: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of ``source`` with the pattern, and the message."""
        schema = {**handler(source), "pattern": f"^{self.pattern}$"}
        return core_schema.custom_error_schema(schema, "matching", custom_error_message=f"must be {self.form}")


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function, or of a constructor, whose annotations are or contain an `Annotated`.

    Such a type has limits, as ``Annotated[int, COUNT]``; nothing is converted but a schedule's keys. A call raises
    `BadInput` for a value outside of them.
    """
    signature = inspect.signature(function)

    @cache
    def arguments() -> type[BaseModel]:  # of the first call: then every name in the annotations exists
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints[name], None) for name in signature.parameters if limited(hints.get(name))
        }
        return create_model("Arguments", __config__=ConfigDict(strict=True, arbitrary_types_allowed=True), **fields)

    @wraps(function)
    def checking(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind_partial(*args, **kwargs)
        given = {name: bound.arguments[name] for name in arguments().model_fields if name in bound.arguments}
        name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        values = checked(arguments(), given, name)
        bound.arguments |= {name: getattr(values, name) for name in given}
        return function(*bound.args, **bound.kwargs)

    return checking


def limited(annotation: Any) -> bool:
    """Whether a type is or contains an `Annotated`."""
    return hasattr(annotation, "__metadata__") or any(map(limited, get_args(annotation)))


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
    message = problem["msg"].removeprefix("Value error, ").replace(BOUND, "must be ").rstrip(".")
    if message.startswith("must be "):
        return f"{place} {message}, got {shown}"
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


# Why: docs/decisions.md, "A command's flags are a typed model".
def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Give ``parser`` a flag for each field of ``model``, with its type, default and description.

    The flags of a base class come after those of the class. A base class with a ``group`` (title and description) has
    its own group in the help. A tuple takes several words; a value that is `Positional` has no flag. The type of a flag
    is that of its field, or the `Number` or `output_file` in the field's annotation, which `check_numbers` and
    `check_paths` check. A number or a word, ``int | Literal["auto"]``, is one flag.
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
    annotation = _first_type(field.annotation)
    several = get_origin(annotation) is tuple
    place = next((item for item in field.metadata if isinstance(item, Positional)), None)
    if not field.is_required():
        options["default"] = field.get_default(call_default_factory=True)
    elif place is None:
        options["required"] = True
    if annotation is bool:
        short = (item.flag for item in field.metadata if isinstance(item, Short))
        target.add_argument(*short, f"--{name}", action=argparse.BooleanOptionalAction, **options)
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
    words = tuple(word for part in get_args(field.annotation) if get_origin(part) is Literal for word in get_args(part))
    numbers = (replace(item, words=words) for item in metadata if isinstance(item, Number))
    options["type"] = next(numbers, path if kind is Path else kind)
    if output_file in metadata:
        options["type"] = output_file
    options["metavar"] = place.metavar if place else METAVARS[kind]
    target.add_argument(name if place else f"--{name}", **options)


def _first_type(annotation: Any) -> Any:
    """Return ``int`` of ``int | None``, and of ``int | Literal["auto"]``."""
    return get_args(annotation)[0] if get_origin(annotation) in (Union, UnionType) else annotation


def from_flags(model: type[Model], args: argparse.Namespace) -> Model:
    """Build a ``model`` from parsed flags.

    Raises:
        BadInput: If a value is out of range.
    """
    names = [field.alias or name for name, field in model.model_fields.items()]
    given = {name: getattr(args, name) for name in names}
    return checked(model, given, "arguments")


def to_flags(settings: BaseModel, *names: str) -> list[str]:
    """Return the flags for ``settings``: ``["--steps", "60", "--no-profile", ...]``; None and empty tuples are omitted.

    Args:
        settings: A model whose fields are flags of a command.
        names: Only these fields; default: all.
    """
    words: list[str] = []
    for name, value in settings:
        if names and name not in names:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words
