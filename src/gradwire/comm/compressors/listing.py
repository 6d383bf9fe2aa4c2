"""The command ``compressors``: list every compressor with its options, including those of other packages."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gradwire.base.flags import Positional
from gradwire.base.strict import Strict
from gradwire.comm.compressors import registry

if TYPE_CHECKING:
    from gradwire.comm.compressors.base import Compressor

MATRIX = (1024, 1024)  # the shape that wire sizes are given for, here and in the documentation


class Options(Strict):
    """Flags of ``gradwire compressors``."""

    names: Annotated[tuple[str, ...], Positional("NAME")] = Field(
        default=(), description="methods and chains; all methods by default"
    )
    as_json: bool = Field(
        default=False, alias="json", description="print the methods with the JSON schema of their options"
    )


def main(options: Options) -> None:
    """Print the list."""
    print(json.dumps(records(options.names), indent=2) if options.as_json else listing(options.names))


def records(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The methods as JSON: what each is, when to use it, its bytes for a matrix, and the schema of its options.

    Raises:
        BadInput: If there is no such method.
    """
    return [
        {
            "name": method.name,
            "kind": kind(method).split(", "),
            "summary": (method.__doc__ or "").strip().splitlines()[0],
            "use": method.use,
            "wire_bytes": {"shape": MATRIX, "bytes": method().wire_bytes(MATRIX)},
            "options": registry.option_schema(method.name).get("properties", {}),
        }
        for method in map(registry.method_class, chosen(names))
    ]


def chosen(names: Sequence[str]) -> list[str]:
    """The methods of names and chains; all methods without names."""
    return [*dict.fromkeys(member for name in names for member in registry.members(name))] or registry.available()


def listing(names: Sequence[str] = ()) -> str:
    """Return a paragraph per method: a summary, and its options with defaults and descriptions.

    Raises:
        BadInput: If a method is unknown.
    """
    text = "\n".join(described(registry.method_class(name)) for name in chosen(names))
    if not names:
        aliases = ", ".join(f"{alias} = {name}" for alias, name in registry.ALIASES.items())
        text += f"\nAliases: {aliases}. A chain is SPARSIFIER+QUANTIZER or ROTATION+QUANTIZER, such as topk+int8."
    return text


def described(method: type[Compressor]) -> str:
    """One method's paragraph."""
    head = [f"{method.name} ({kind(method)}): {(method.__doc__ or '').strip().splitlines()[0]}"]
    head += [f"  {line}" for line in (method.use, size(method)) if line]
    rows = [
        (f"  {name}", f"{taken(option)} [{shown(option.get('default'))}]", option.get("description", ""))
        for name, option in registry.option_schema(method.name).get("properties", {}).items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)] if rows else []
    lines = [f"{name:<{widths[0]}}  {values:<{widths[1]}}  {text}".rstrip() for name, values, text in rows]
    return "\n".join([*head, *lines, ""])


def size(method: type[Compressor]) -> str:
    """Wire size for a matrix, with default options."""
    wire, whole = method().wire_bytes(MATRIX), 4 * math.prod(MATRIX)
    of = f"for {MATRIX[0]} x {MATRIX[1]} elements"
    if wire is None:
        return f"Wire: as many bytes {of} as the data need."
    fewer = f", {whole / wire:.3g} times fewer than float32's" if 0 < wire < whole else ""
    return f"Wire: {wire:,} bytes {of}{fewer}."


def shown(value: Any) -> str:
    """Format a default as in a configuration."""
    return value if isinstance(value, str) else json.dumps(value)


def kind(method: type[Compressor]) -> str:
    """The method's role in a chain, and whether a native collective can reduce it."""
    from gradwire.comm.compressors.base import Quantizer
    from gradwire.comm.compressors.rotation import Rotation
    from gradwire.comm.compressors.rounds import Reducible
    from gradwire.comm.compressors.sparse import Sparsifier

    kinds = {"sparsifier": Sparsifier, "rotation": Rotation, "quantizer": Quantizer}
    roles = [name for name, base in kinds.items() if issubclass(method, base)] or ["alone"]
    return ", ".join([*roles, *(["rounds"] if method.rounds is not Reducible.rounds else [])])


def taken(option: dict[str, Any]) -> str:
    """The valid values of an option, from its JSON schema."""
    if "enum" in option or "const" in option:
        return " | ".join(map(str, option.get("enum") or [option["const"]]))
    if "anyOf" in option:
        return " | ".join(map(taken, option["anyOf"]))
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = ", ".join(f"{sign} {option[key]:.10g}" for key, sign in bounds.items() if key in option)
    return f"{option.get('type', 'any')} {limits}".rstrip()
