"""Save and load model folders: Hugging Face's files, the tokenizer's files, and ``gradwire.json``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers.modeling_utils import PreTrainedModel
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.utils import logging

from gradwire.errors import BadInput
from gradwire.files import whole_folder, write_json
from gradwire.models import optimizer, saved
from gradwire.models.saved import max_length

__all__ = ["load", "load_causal", "max_length", "save"]

TIED = "lm_head.weight"  # the embedding's second name

logging.disable_progress_bar()  # 28 tensors need no progress bar


def save(
    model_state: Mapping[str, torch.Tensor],
    config: GPT2Config,
    tokenizer_dir: Path,
    output: Path,
    extra: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
) -> None:
    """Write a model folder atomically, replacing an existing one.

    Args:
        model_state: The full CPU state by the unwrapped model's names; a tied weight may appear under both names.
        config: The model's configuration.
        tokenizer_dir: The tokenizer's folder, whose files are copied.
        output: The folder to write.
        extra: Entries of ``gradwire.json`` in addition to ``max_length`` (positions, in tokens).
        optimizer_state: Adam's full state by parameter name; its moments are saved with the weights.
    """
    tied = {TIED} if config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model_state.items() if name not in tied}
    with whole_folder(output) as part:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True)
        config.save_pretrained(part)
        save_file(weights, part / saved.WEIGHTS, metadata={"format": "pt"})
        write_json(part / saved.METADATA, {"max_length": config.n_positions, **extra})
        if optimizer_state is not None:
            optimizer.save(optimizer_state, part)


def load(path: Path) -> GPT2LMHeadModel:
    """Load a GPT-2 from a folder, on the CPU, in float32 and evaluation mode.

    Raises:
        BadInput: If the folder or a file is missing or damaged, or the weights do not match the configuration.
    """
    return _load(GPT2LMHeadModel, path)


def load_causal(path: Path) -> PreTrainedModel:
    """Load any causal language model that transformers supports, as `load` does.

    Raises:
        BadInput: As `load`, and if a weight is not finite, because every gradient would be NaN.
    """
    from transformers import AutoModelForCausalLM

    model = _load(AutoModelForCausalLM, path)
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight.detach()).all():
            raise BadInput(f"{name} of the model in {path} is not finite: training diverged, or the file is damaged.")
    return model


def _load(kind: Any, path: Path) -> Any:
    saved.check(path)
    try:
        model, report = kind.from_pretrained(
            path, local_files_only=True, output_loading_info=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, SafetensorError) as error:
        raise BadInput(f"the model in {path} cannot be read: {error}") from error
    if getattr(model.config, "transformers_weights", None) is not None:
        raise BadInput(f"the config.json in {path} names other weights as transformers_weights: remove that entry.")
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong:
        raise BadInput(f"the weights in {path} do not match its config.json: {', '.join(wrong[:3])} …")
    return model
