"""Model presets: one YAML file each with inline options; other packages offer theirs as ``gradwire.models``.

A ``model`` is the name of a preset, a folder, or inline options as JSON: ``{"architecture": "llama", ...}``. Their keys
are those of the architecture's configuration in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular, parse_json, read_yaml
from gradwire.base.plugins import Plugins

MEANING = "a preset (micro, tiny, small, llama-small, 62m), or a folder with a model or its config.json"
PRESETS = Plugins(
    "model preset (or folder of a model)", "gradwire.lm.models.presets", "gradwire.models", suffix=".yaml"
)


def options(model: str) -> dict[str, Any] | None:
    """Return the inline options that a model represents, or None for a folder.

    Raises:
        BadInput: If there is no such preset or folder, or the options are not a JSON object with an ``architecture``.
    """
    if model.lstrip().startswith("{"):
        return inline(model)
    check_regular(Path(model), "--model")
    if Path(model).is_dir():
        return None
    PRESETS.check(model)
    if model in PRESETS.built_in():
        return dict(read_yaml(PRESETS.folder / f"{model}.yaml"))
    return checked(PRESETS.offered(model), f"model preset {model}")


def inline(text: str) -> dict[str, Any]:
    """Parse inline options.

    Raises:
        BadInput: If they are not a JSON object with an ``architecture``.
    """
    try:
        options = parse_json(text)
    except ValueError as error:
        raise BadInput(f"--model is not valid JSON ({error}): {text[:80]}") from None
    return checked(options, "--model")


def checked(options: Any, where: str) -> dict[str, Any]:
    """Return ``options`` if it is a mapping with an ``architecture``.

    Raises:
        BadInput: If it is not.
    """
    if not isinstance(options, Mapping) or not isinstance(options.get("architecture"), str):
        raise BadInput(f"{where}: options of a model need an architecture, as in {{architecture: llama, ...}}.")
    return dict(options)


def text(model: str | Mapping[str, Any]) -> str:
    """A model as text, as `options` and ``--model`` take it."""
    return model if isinstance(model, str) else json.dumps(model, sort_keys=True)


def content(model: str) -> Any:
    """The inline options that a model's name represents, or a folder's path."""
    return options(model) or model


def import_third_party() -> None:
    """Import what other packages offer, so that they can register architectures with transformers.

    Raises:
        BadInput: If one cannot be imported.
    """
    for name in PRESETS.third_party():
        PRESETS.offered(name)
