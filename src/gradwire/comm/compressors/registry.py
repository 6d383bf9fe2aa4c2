"""Compressors by name: the files of ``methods/``, the entry points ``gradwire.compressors``, and chains of two.

Names are known without importing torch; a method's module is imported when the method is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.base.errors import BadInput, unknown
from gradwire.base.plugins import Plugins
from gradwire.comm.compressors.methods import FAMILIES

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from gradwire.comm.compressors.base import Compressor

COMPRESSORS = Plugins("compressor", "gradwire.comm.compressors.methods", "gradwire.compressors")
ALIASES = {"nc": "natural", "thresholdv": "threshold", "1bit": "onebit"}
HERE = Path(__file__).parent


def available() -> list[str]:
    """Every compressor's name, sorted; a sparsifier or a rotation makes a chain with a quantizer, ``topk+int8``."""
    return COMPRESSORS.available()


def members(name: str) -> list[str]:
    """The methods that a name represents, aliases resolved: one, or the two of a chain.

    Raises:
        BadInput: If one of them does not exist, or there are too many.
    """
    names = [ALIASES.get(word, word) for word in name.split("+")]
    for member in names:
        COMPRESSORS.check(member)
    if len(names) > 2:
        raise BadInput(f"compressor {name!r}: a chain has two members, a sparsifier or a rotation, then a quantizer.")
    return names


def method_class(name: str) -> type[Compressor]:
    """The class behind one method's name or alias.

    Raises:
        BadInput: If there is no such compressor, or an entry point does not lead to one.
    """
    from gradwire.comm.compressors.base import Compressor

    return COMPRESSORS.find(ALIASES.get(name, name), Compressor)


def classes(name: str) -> list[type[Compressor]]:
    """The classes of a method, or of a chain: a sparsifier or a rotation, and a quantizer.

    Raises:
        BadInput: If a chain's members do not fit together.
    """
    from gradwire.comm.compressors.base import Quantizer
    from gradwire.comm.compressors.rotation import Rotation
    from gradwire.comm.compressors.sparse import Sparsifier

    pair = [method_class(member) for member in members(name)]
    if len(pair) == 2 and not (issubclass(pair[0], Sparsifier | Rotation) and issubclass(pair[1], Quantizer)):
        bases = {"a sparsifier": Sparsifier, "a rotation": Rotation, "a quantizer": Quantizer}
        kinds = [next((text for text, base in bases.items() if issubclass(kind, base)), "neither") for kind in pair]
        raise BadInput(
            f"compressor {name!r}: a chain is sparsifier+quantizer or rotation+quantizer; {pair[0].name} is "
            f"{kinds[0]}, {pair[1].name} is {kinds[1]}."
        )
    return pair


def options(name: str) -> dict[str, FieldInfo]:
    """The options that `build` takes for a method or a chain, by key.

    Every key may carry its method's name (``topk.density``); the bare one is there where one member alone has it.
    """
    fields = [(kind.name, key, field) for kind in classes(name) for key, field in kind.model_fields.items()]
    times = Counter(key for _, key, _ in fields)
    bare = {key: field for _, key, field in fields if times[key] == 1}
    return {**bare, **{f"{member}.{key}": field for member, key, field in fields}}


def build(name: str, **given: Any) -> Compressor:
    """Build a compressor from its name and options; every method and chain builds without options.

    Args:
        name: A method's name or alias, or ``sparsifier+quantizer`` or ``rotation+quantizer``.
        given: Its options (see `options`).

    Raises:
        BadInput: For an unknown name, an unknown option, or a value that the option does not take.
    """
    kinds = classes(name)
    known = options(name)
    for key in given:
        if key not in known:
            raise unknown(f"{name} option", key, known)
    made = []
    for kind in kinds:
        values: dict[str, Any] = {}
        for key in kind.model_fields:
            for spelling in {key, f"{kind.name}.{key}"} & set(given) & set(known):
                if key in values:
                    raise BadInput(f"{name} option {key!r} is given twice, as {key!r} and as '{kind.name}.{key}'.")
                values[key] = given[spelling]
        made.append(kind(**values))
    from gradwire.comm.compressors.rotation import Rotated, Rotation
    from gradwire.comm.compressors.sparse import Chain

    first, *second = made
    if second and isinstance(first, Rotation):
        return Rotated(rotation=first, quantizer=second[0])  # type: ignore[arg-type]
    return Chain(sparsifier=first, quantizer=second[0]) if second else first  # type: ignore[arg-type]


def as_compressor(given: Compressor | str | Mapping[str, Any]) -> Compressor:
    """Return a compressor, or build it from its name or from ``{"method": …, option: value, …}`` as in a cell.

    Raises:
        BadInput: As `build`, or for a value of another type.
    """
    from gradwire.comm.compressors.base import Compressor

    if isinstance(given, Compressor):
        return given
    if isinstance(given, str):
        return build(given)
    if isinstance(given, Mapping) and isinstance(given.get("method"), str):
        return build(given["method"], **{key: value for key, value in given.items() if key != "method"})
    raise BadInput(
        f"the compressor is {given!r}: pass a name, such as 'int8', a mapping with its method and options, such as "
        f"{{'method': 'int8', 'block': 128}}, or a compressor, such as gradwire.Int8(block=128)."
    )


def option_schema(name: str) -> dict[str, Any]:
    """JSON schema of one method's options, with defaults, units and descriptions."""
    return method_class(name).model_json_schema()


def sources(name: str) -> list[str]:
    """Modules that a method or chain depends on, including kernels; they are loaded by name, not imported.

    A method of another package brings none of ours.
    """
    files = [
        file
        for member in members(name)
        for folder, module in (
            ("methods", member),
            *((f"kernels/{kind}", FAMILIES.get(member, member)) for kind in ("cpu", "cuda")),
        )
        if (file := HERE / folder / f"{module}.py").is_file()
    ]
    return [".".join(("gradwire.comm.compressors", *file.relative_to(HERE).with_suffix("").parts)) for file in files]
