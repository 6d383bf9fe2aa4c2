"""Compressors by name: the files of ``methods/`` and the entry points ``gradwire.compressors``.

Names are known without importing torch; a method's module is imported when the method is asked for.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gradwire.errors import BadInput, unknown

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor

ENTRY_POINTS = "gradwire.compressors"
ALIASES = {"nc": "natural", "thresholdv": "threshold", "1bit": "onebit"}


def built_in() -> list[str]:
    """Names of the methods that come with gradwire: the files of ``methods/``."""
    return [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "methods")])]


def third_party() -> dict[str, EntryPoint]:
    """Methods that installed packages offer, by name.

    Raises:
        BadInput: If one of them has the name of a built-in method.
    """
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    for name in set(built_in()) & set(found):
        raise BadInput(f"entry point {found[name].value!r} takes the built-in compressor's name {name!r}; rename it.")
    return found


def available() -> list[str]:
    """Every compressor's name, sorted."""
    return sorted([*built_in(), *third_party()])


def method_class(name: str) -> type[Compressor]:
    """The class behind a name or an alias.

    Raises:
        BadInput: If there is no such compressor, or an entry point does not lead to one.
    """
    from gradwire.compressors.base import Compressor

    method = ALIASES.get(name, name)
    offered = third_party()
    if method in built_in():
        origin = f"gradwire.compressors.methods.{method}"
        members = vars(import_module(origin)).values()
        found = next((member for member in members if getattr(member, "name", None) == method), None)
    elif method in offered:
        origin, found = offered[method].value, offered[method].load()
    else:
        raise unknown("compressor", name, available())
    if not (isinstance(found, type) and issubclass(found, Compressor) and found.name == method):
        raise BadInput(f"{origin} holds no Compressor class whose name is {method!r}.")
    return found


def build(name: str, **options: Any) -> Compressor:
    """Build a compressor from its name and options; every method builds without options.

    Raises:
        BadInput: For an unknown name, an unknown option, or a value that the option does not take.
    """
    method = method_class(name)
    try:
        return method(**options)
    except ValidationError as error:
        raise bad_option(name, method, error) from None


def bad_option(name: str, method: type[Compressor], error: ValidationError) -> BadInput:
    """The first complaint of pydantic as one message: the option, what was given, what is allowed."""
    complaint = error.errors()[0]
    option = ".".join(map(str, complaint["loc"]))
    if complaint["type"] == "extra_forbidden":
        return unknown(f"{name} option", option, method.model_fields)
    return BadInput(f"{name} option {option!r} is {complaint['input']!r}: {complaint['msg']}.")


def option_schema(name: str) -> dict[str, Any]:
    """JSON schema of a compressor's options, with defaults, units and descriptions."""
    return method_class(name).model_json_schema()
