"""Metadata of a saved model, read without loading it or importing torch or transformers, and the samples it reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.base import files
from gradwire.base.errors import BadInput
from gradwire.lm.models import presets

if TYPE_CHECKING:
    from gradwire.lm.data.shards import Shards


CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADAPTER = "adapter_config.json"  # transformers would load such an adapter with the model
INDEX = "model.safetensors.index.json"  # of weights in several files
METADATA = "gradwire.json"
EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")  # as the architectures of transformers call them


def check(path: Path) -> None:
    """Check that a folder holds a model, whose configuration is as it was saved.

    Raises:
        BadInput: If a file is missing or invalid, or an adapter is next to the model.
    """
    if not (Path(path) / CONFIG).is_file() and (Path(path) / ADAPTER).is_file():
        raise BadInput(
            f"{path} holds a LoRA adapter: pass it as --lora_dir, and the model that it is of as --model_dir."
        )
    if not (Path(path) / CONFIG).is_file():
        raise BadInput(f"{path} holds no model: {CONFIG} is missing.")
    if (Path(path) / ADAPTER).is_file():
        raise BadInput(f"{path} has an adapter next to a model ({ADAPTER}): move it to a separate folder.")
    for file in weights(path):
        if not file.is_file():
            raise BadInput(f"{path} holds no model: {file.name} is missing.")
    files.check_sums(path, (CONFIG, METADATA))


def weights(path: Path) -> list[Path]:
    """The files of a model's weights; like transformers, prefers a single file to an index of shards.

    Raises:
        BadInput: If the index lists anything but safetensors files in the same folder.
    """
    index = Path(path) / INDEX
    if (Path(path) / WEIGHTS).is_file() or not index.is_file():
        return [Path(path) / WEIGHTS]
    content = files.read_json(index)
    named = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named:
        raise BadInput(f"{index} has no weight_map, which lists the weight files.")
    for name in named.values():
        if not isinstance(name, str) or Path(name).name != name or Path(name).suffix != ".safetensors":
            raise BadInput(f"{index} names {name!r}, which is not a safetensors file in that folder.")
    return [Path(path) / name for name in sorted(set(named.values()))]


def has_weights(path: Path) -> bool:
    """Whether a folder holds weights, or anything that gradwire saves with them; then missing weights are an error."""
    return any((Path(path) / name).is_file() for name in (WEIGHTS, INDEX, METADATA))


def is_saved(model: str) -> bool:
    """Whether a model is a folder with weights."""
    return presets.options(model) is None and has_weights(Path(model))


def model_type(path: Path) -> str | None:
    """The name of a folder's architecture; None if its configuration has none or is damaged, which loading reports."""
    return _of_config(path, "model_type")


def has_code(path: Path) -> bool:
    """Whether a folder's configuration names Python code for the model, which transformers would ask to run."""
    return bool(_of_config(path, "auto_map"))


def _of_config(path: Path, key: str) -> Any:
    """An entry of a folder's configuration; None if it is not there, or the configuration is damaged."""
    try:
        config = files.read_json(Path(path) / CONFIG)
    except BadInput:
        return None
    return config.get(key) if isinstance(config, dict) else None


def experts(path: Path) -> int:
    """The number of experts that a folder's configuration gives its layers; 0 for a dense model.

    Raises:
        BadInput: If the configuration is missing or invalid.
    """
    return _experts(files.read_object(Path(path) / CONFIG))


def _experts(config: Mapping[str, Any]) -> int:
    nested = [_experts(value) for value in config.values() if isinstance(value, dict)]
    counts = [value for key, value in config.items() if EXPERTS.fullmatch(key) and isinstance(value, int) and value > 1]
    return max([0, *nested, *counts])


def entries(path: Path) -> int:
    """Number of elements in a model's weights, an upper bound on the elements of its gradient.

    Raises:
        BadInput: If a file cannot be read.
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
    """A digest of the model's configuration and weights, in hex.

    Raises:
        BadInput: If either is missing.
    """
    check(path)
    return files.digest([files.sha256_file(file) for file in (Path(path) / CONFIG, *weights(path))], length=64)


def max_length(path: Path) -> int:
    """The model's context length in tokens, from ``gradwire.json`` or else ``config.json``.

    Raises:
        BadInput: If neither file has it.
    """
    file = Path(path) / METADATA
    metadata = files.read_json(file) if file.is_file() else {}
    noted = metadata.get("max_length") if isinstance(metadata, dict) else None
    length = noted if isinstance(noted, int) else positions(path)
    if length is None:
        raise BadInput(f"neither {METADATA} nor {CONFIG} in {path} gives the context length: set --max_length.")
    return length


def positions(path: Path) -> int | None:
    """The largest number of tokens that a folder's model can read, from ``config.json``; None if it has no limit."""
    counts = (_of_config(path, key) for key in ("n_positions", "max_position_embeddings"))
    return next((count for count in counts if isinstance(count, int) and count > 0), None)


def _length(path: Path, given: int | None) -> int:
    """The tokens per sample that ``--max_length`` gives, or the model's.

    Raises:
        BadInput: If the model has fewer positions, or no length is known.
    """
    if given is None:
        return max_length(path)
    most = positions(path)
    if most is not None and given > most:
        raise BadInput(f"--max_length {given}: the model in {path} has {most} positions; give at most {most}.")
    return given


def samples_of(args: Any, rank: int = 0) -> Shards:
    """The samples for a command that also takes ``--split``: a split of a shards folder, or a whole corpus file.

    Raises:
        BadInput: As `shards_folder`, and for a split of a corpus file.
        RunFault: As `shards_folder`.
    """
    from gradwire.lm.data.shards import Shards, splits

    if args.split and Path(args.data_path).is_file():
        raise BadInput(
            f"--split {args.split}: {args.data_path} is a corpus file, which is used whole; omit --split, or run "
            "`gradwire tokenize` and pass its shards folder."
        )
    folder = shards_folder(args, rank, whole=True)
    return Shards(folder, args.split or splits(folder)[0])


def shards_folder(args: Any, rank: int = 0, *, whole: bool = False) -> Path:
    """The shards folder for a command that takes ``--model_dir --data_path --max_length --cache_dir`` and the like.

    Args:
        args: The command's arguments.
        rank: This rank. Rank 0 tokenizes a corpus file, the others wait for it.
        whole: Hold no documents out for validation.

    Raises:
        BadInput: If the model or the data are unusable, or do not match.
        RunFault: If rank 0 makes no progress.
    """
    from gradwire.lm.data.tokenize import shards_of

    model_dir = Path(args.model_dir)
    check(model_dir)
    return shards_of(
        Path(args.data_path),
        tokenizer=str(model_dir),
        max_length=_length(model_dir, args.max_length),
        chat_format=args.chat_format,
        skip_invalid=args.skip_invalid,
        cache_dir=args.cache_dir,
        whole=whole,
        rank=rank,
    )
