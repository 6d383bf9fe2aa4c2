"""Save and load model folders: Hugging Face's files, the tokenizer's files, and ``gradwire.json``."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from gradwire.base.errors import BadInput
from gradwire.base.files import SUMS, check_sums, whole_folder, write_json, write_sums
from gradwire.lm.models import architecture, optimizer, saved
from gradwire.lm.models.saved import max_length

__all__ = ["load", "load_finite", "max_length", "not_finite", "save"]

logging.disable_progress_bar()  # 28 tensors need no progress bar


def save(
    model_state: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
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
    second = architecture.second_names(config)
    weights = {name: tensor.contiguous() for name, tensor in model_state.items() if name not in second}
    with whole_folder(output) as part:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS))
        config.save_pretrained(part)
        save_file(weights, part / saved.WEIGHTS, metadata={"format": "pt"})
        write_json(part / saved.METADATA, {"max_length": architecture.positions(config), **extra})
        if optimizer_state is not None:
            optimizer.save(optimizer_state, part)
        write_sums(part, (file.relative_to(part).as_posix() for file in part.rglob("*") if file.is_file()))


def load(path: Path) -> PreTrainedModel:
    """Load a causal language model from a folder, on the CPU, in float32 and evaluation mode.

    Raises:
        BadInput: If the folder or a file is missing, damaged or not as it was saved, or the weights do not match the
            configuration.
    """
    saved.check(path)
    check_sums(path, (file.name for file in saved.weights(path)))
    try:
        architecture.register_of(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, output_loading_info=True, dtype=torch.float32
        )
    except BadInput:  # a ValueError
        raise
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, SafetensorError) as error:
        raise BadInput(f"the model in {path} cannot be read: {error}") from error
    if getattr(model.config, "transformers_weights", None) is not None:
        raise BadInput(f"the config.json in {path} names other weights as transformers_weights: remove that entry.")
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong:
        raise BadInput(f"the weights in {path} do not match its config.json: {', '.join(wrong[:3])} …")
    return model


def load_finite(path: Path) -> PreTrainedModel:
    """Load a model that is to compute something: where a weight is not finite, every gradient and token would be NaN.

    Raises:
        BadInput: As `load`, and if a weight is not finite.
    """
    model = load(path)
    if wrong := not_finite(model):
        raise BadInput(f"{wrong} of the model in {path} is not finite: training diverged, or the file is damaged.")
    return model


def not_finite(model: nn.Module) -> str | None:
    """The name of a model's first parameter that holds NaN or infinity; None if all are finite."""
    named = model.named_parameters()
    return next((name for name, weight in named if not torch.isfinite(weight.detach()).all()), None)
