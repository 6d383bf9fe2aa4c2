"""What can be known of a saved model without loading it, nor the libraries that would."""

from __future__ import annotations

from pathlib import Path

from gradwire import files
from gradwire.errors import BadInput

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files
FACTS = "gradwire.json"


def check(path: Path) -> None:
    """See that a folder holds a model.

    Raises:
        BadInput: If a file of it is missing.
    """
    if not (Path(path) / CONFIG).is_file():
        raise BadInput(f"{path} holds no model: {CONFIG} is missing.")
    for file in weights(path):
        if not file.is_file():
            raise BadInput(f"{path} holds no model: {file.name} is missing.")


def weights(path: Path) -> list[Path]:
    """The files of a model's weights."""
    index = Path(path) / INDEX
    if not index.is_file():
        return [Path(path) / WEIGHTS]
    return [Path(path) / name for name in sorted(set(files.read_json(index).get("weight_map", {}).values()))]


def digest(path: Path) -> str:
    """A digest of what the model computes: its configuration and its weights, in hex.

    Raises:
        BadInput: If one of the two is missing.
    """
    check(path)
    return files.digest([files.sha256_file(file) for file in (Path(path) / CONFIG, *weights(path))], length=64)


def max_length(path: Path) -> int:
    """The tokens that the model reads at once: by ``gradwire.json``, else by its ``config.json``.

    Raises:
        BadInput: If neither says.
    """
    for name, key in ((FACTS, "max_length"), (CONFIG, "n_positions"), (CONFIG, "max_position_embeddings")):
        file = Path(path) / name
        facts = files.read_json(file) if file.is_file() else {}
        if isinstance(facts, dict) and isinstance(facts.get(key), int):
            return facts[key]
    raise BadInput(f"neither {FACTS} nor {CONFIG} in {path} says how many tokens the model reads: give --max_length.")
