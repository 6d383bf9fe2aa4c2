"""A model on disk: Hugging Face's files, the tokenizer's, and ``gradwire.json`` with what neither of them says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.utils import logging

from gradwire.errors import BadInput
from gradwire.files import read_json, write_json

WEIGHTS = "model.safetensors"
FACTS = "gradwire.json"
TOKENIZER = "tokenizer.json"
TIED = "lm_head.weight"  # the embedding's second name

logging.disable_progress_bar()  # 28 tensors need no bar


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a ``.part`` folder to fill; on success its files are flushed to disk and it takes the place of ``path``.

    On an exception the part is removed and ``path`` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.mkdir()
        yield part
        for file in filter(Path.is_file, part.rglob("*")):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        part.replace(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def save(
    model_state: Mapping[str, torch.Tensor],
    config: GPT2Config,
    tokenizer_dir: Path,
    output: Path,
    extra: Mapping[str, Any],
) -> None:
    """Write a model folder, whole or not at all; a folder that is there already is replaced.

    Args:
        model_state: The full state by the unwrapped model's names, on the CPU; a tied weight may have both names.
        config: The model's configuration.
        tokenizer_dir: The folder whose files go beside the weights.
        output: The folder to write.
        extra: What ``gradwire.json`` holds beside ``max_length`` (positions, in tokens).
    """
    tied = {TIED} if config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model_state.items() if name not in tied}
    with whole_folder(output) as part:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True)
        config.save_pretrained(part)
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"})
        write_json(part / FACTS, {"max_length": config.n_positions, **extra})


def load(path: Path) -> GPT2LMHeadModel:
    """Read a model folder: on the CPU, float32, in evaluation mode.

    Raises:
        BadInput: If the folder or one of its files is missing, is damaged, or does not fit the configuration.
    """
    path = Path(path)
    for name in ("config.json", WEIGHTS):
        if not (path / name).is_file():
            raise BadInput(f"{path} holds no model: {name} is missing.")
    try:
        model, report = GPT2LMHeadModel.from_pretrained(
            path, local_files_only=True, output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise BadInput(f"the model in {path} cannot be read: {error}") from error
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong:
        raise BadInput(f"the weights in {path / WEIGHTS} do not fit config.json: {', '.join(map(str, wrong[:3]))}.")
    return model


def max_length(path: Path) -> int:
    """The tokens that the saved model was trained to read at once, from ``gradwire.json``.

    Raises:
        BadInput: If the file is missing or does not say.
    """
    facts = read_json(Path(path) / FACTS)
    if not isinstance(facts, dict) or not isinstance(facts.get("max_length"), int):
        raise BadInput(f"{Path(path) / FACTS} has no max_length.")
    return facts["max_length"]


def tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that was saved with the model.

    Raises:
        BadInput: If its file is missing or damaged.
    """
    file = Path(path) / TOKENIZER
    if not file.is_file():
        raise BadInput(f"{path} holds no tokenizer: {TOKENIZER} is missing.")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise BadInput(f"{file} is no tokenizer: {error}") from error
