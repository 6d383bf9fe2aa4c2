"""What can be known of a saved model without loading it, nor the libraries that would."""

from __future__ import annotations

import math
from pathlib import Path

from gradwire import files
from gradwire.errors import BadInput

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADAPTER = "adapter_config.json"  # transformers would load such an adapter with the model
INDEX = "model.safetensors.index.json"  # of weights in several files
FACTS = "gradwire.json"


def check(path: Path) -> None:
    """See that a folder holds a model.

    Raises:
        BadInput: If a file of it is missing or cannot belong to it.
    """
    if not (Path(path) / CONFIG).is_file():
        raise BadInput(f"{path} holds no model: {CONFIG} is missing.")
    if (Path(path) / ADAPTER).is_file():
        raise BadInput(f"{path} holds an adapter beside a model ({ADAPTER}): move it into a folder of its own.")
    for file in weights(path):
        if not file.is_file():
            raise BadInput(f"{path} holds no model: {file.name} is missing.")


def weights(path: Path) -> list[Path]:
    """The files of a model's weights; of one file and an index of several, transformers reads the file.

    Raises:
        BadInput: If the index names something else than safetensors files beside it.
    """
    index = Path(path) / INDEX
    if (Path(path) / WEIGHTS).is_file() or not index.is_file():
        return [Path(path) / WEIGHTS]
    found = files.read_json(index)
    named = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(named, dict) or not named:
        raise BadInput(f"{index} has no weight_map, which names the files of the weights.")
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".safetensors":
            raise BadInput(f"{index} names {name!r}, which is no safetensors file in that folder.")
    return [Path(path) / name for name in sorted(set(named.values()))]


def entries(path: Path) -> int:
    """How many numbers a model's weights hold; its gradient has as many, or fewer where some are not trained.

    Raises:
        BadInput: If a file of them cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    count = 0
    for file in weights(path):
        try:
            with safe_open(file, framework="numpy") as stream:
                count += sum(math.prod(stream.get_slice(name).get_shape()) for name in stream.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{file} cannot be read as safetensors: {error}.") from None
    return count


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
