"""What can be known of a saved model without loading it, nor the libraries that would."""

from __future__ import annotations

from pathlib import Path

from gradwire import files
from gradwire.errors import BadInput

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FACTS = "gradwire.json"


def check(path: Path) -> None:
    """See that a folder holds a model.

    Raises:
        BadInput: If a file of it is missing.
    """
    for name in (CONFIG, WEIGHTS):
        if not (Path(path) / name).is_file():
            raise BadInput(f"{path} holds no model: {name} is missing.")


def digest(path: Path) -> str:
    """A digest of what the model computes: its configuration and its weights, in hex.

    Raises:
        BadInput: If one of the two is missing.
    """
    check(path)
    return files.digest([files.sha256_file(Path(path) / name) for name in (CONFIG, WEIGHTS)], length=64)


def max_length(path: Path) -> int:
    """The tokens that the model was trained to read at once, from ``gradwire.json``.

    Raises:
        BadInput: If the file is missing or does not say.
    """
    facts = files.read_json(Path(path) / FACTS)
    if not isinstance(facts, dict) or not isinstance(facts.get("max_length"), int):
        raise BadInput(f"{Path(path) / FACTS} has no max_length.")
    return facts["max_length"]
