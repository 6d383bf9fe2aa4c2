"""Causal language models of any architecture of transformers: presets, inline options, configurations, saved models.

Random initialization depends on the seed only. A saved model is a folder of Hugging Face's files, the tokenizer's files
and ``gradwire.json``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from gradwire.base.errors import BadInput, listed
from gradwire.base.files import SUMS, atomic_folder, check_sums, write_json, write_sums
from gradwire.lm.models import architecture, lora, optimizer, presets, saved

logging.disable_progress_bar()  # 28 tensors need no progress bar
PROBED = 8  # tokens
BYTES = 16  # of a parameter in training: weight, gradient and two moments in float32


def build(model: str, vocab_size: int, max_length: int, seed: int) -> PreTrainedModel:
    """Build a float32 model on the CPU: initialized from ``seed``, or the model saved in a folder.

    The global random state does not change.

    Args:
        model: A preset's name, inline options as JSON, or a folder: of a saved model, or with a ``config.json`` alone.
        vocab_size: Smallest vocabulary size required.
        max_length: Smallest number of positions required, in tokens.
        seed: Seed of the weights; ignored for a saved model.

    Raises:
        BadInput: If the preset, the architecture or an option is unknown, the model does not match the data, a saved
            model is damaged, or the model does not predict each token from the ones before it alone.
    """
    config = check(model, vocab_size, max_length)
    if saved.is_saved(model):
        made = load(Path(model))
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = architecture.random_model(config)
    check_causal(made, model)
    return made


# Why: docs/decisions.md, "Causality is tested, not looked up".
def check(model: str, vocab_size: int, max_length: int) -> PretrainedConfig:
    """Return a model's configuration, checked without building its weights; arguments and errors as in `build`."""
    options = presets.options(model)
    if options is None:
        if saved.is_saved(model):
            saved.check(Path(model))
        return architecture.of_folder(Path(model), vocab_size, max_length)
    config = architecture.configuration(options, vocab_size, max_length)
    check_memory(config, model)
    return config


def check_memory(config: PretrainedConfig, model: str) -> None:
    """Check that this machine has the memory to train a model; some architectures' default sizes are their largest.

    Raises:
        BadInput: If it does not.
    """
    count = sum(parameter.numel() for parameter in architecture.on_meta(config).parameters())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if BYTES * count > memory:
        raise BadInput(
            f"model {model} has {count:,} parameters; with gradients and Adam's moments they take "
            f"{BYTES * count / 1e9:.1f} GB, and this machine has {memory / 1e9:.1f} GB: give smaller sizes, such as "
            "hidden_size and num_hidden_layers."
        )


@torch.no_grad()
def check_causal(model: nn.Module, where: str) -> None:
    """Check that changing the last token changes no prediction before it.

    Raises:
        BadInput: If it does, as with bidirectional attention, or the model cannot be run on tokens alone.
    """
    training = model.training
    model.eval()
    tokens = torch.arange(PROBED)[None]
    changed = torch.cat([tokens[:, :-1], tokens[:, :1]], 1)
    try:
        logits, changed_logits = (probe(model, ids) for ids in (tokens, changed))
    except Exception as error:  # any model's code may run
        raise BadInput(f"model {where} cannot be run as a language model of tokens: {error!r}") from error
    finally:
        model.train(training)
    if not torch.allclose(logits, changed_logits, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise BadInput(
            f"model {where} is not causal: a token changes the predictions before it. Choose a decoder; some "
            "architectures become one with the option is_decoder: true."
        )


def probe(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits before the last token."""
    return model(ids, use_cache=False).logits[:, :-1]


def save(
    model_state: Mapping[str, torch.Tensor],
    config: PretrainedConfig,
    tokenizer_dir: Path,
    output: Path,
    extra: Mapping[str, Any],
    optimizer_state: Mapping[str, Any] | None = None,
    adapter: Any = None,
) -> None:
    """Write a model folder atomically, replacing an existing one; of a model with a LoRA adapter, the adapter's alone.

    Args:
        model_state: The full CPU state by the unwrapped model's names; a tied weight may appear under both names.
        config: The model's configuration.
        tokenizer_dir: The tokenizer's folder, whose files are copied.
        output: The folder to write.
        extra: Entries of ``gradwire.json`` in addition to ``max_length`` (positions, in tokens).
        optimizer_state: Adam's full state by parameter name; its moments are saved with the weights.
        adapter: The adapter's configuration; None for a model without one.
    """
    if adapter is None:
        second = architecture.second_names(config)
        file, weights = saved.WEIGHTS, {name: of for name, of in model_state.items() if name not in second}
    else:
        file, weights = lora.WEIGHTS, lora.weights(model_state)
    with atomic_folder(output) as part:
        shutil.copytree(tokenizer_dir, part, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS))
        (adapter or config).save_pretrained(part)
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, part / file, metadata={"format": "pt"})
        write_json(part / saved.METADATA, {"max_length": architecture.positions(config), **extra})
        if optimizer_state is not None:
            optimizer.save(optimizer_state, part)
        write_sums(part, (file.relative_to(part).as_posix() for file in part.rglob("*") if file.is_file()))


def load(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal language model from a folder, on the CPU, with weights of type ``dtype`` and in evaluation mode.

    Raises:
        BadInput: If the folder or a file is missing, damaged or not as it was saved, or the weights do not match the
            configuration.
    """
    saved.check(path)
    check_sums(path, (file.name for file in saved.weights(path)))
    try:
        architecture.register_of(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, output_loading_info=True, dtype=dtype
        )
    except BadInput:  # a ValueError
        raise
    except Exception as error:  # the type depends on the architecture
        raise BadInput(f"the model in {path} cannot be read: {architecture.reason(error)}.") from error
    if getattr(model.config, "transformers_weights", None) is not None:
        raise BadInput(f"the config.json in {path} names other weights as transformers_weights: remove that entry.")
    wrong = sorted(report["missing_keys"] | report["unexpected_keys"])
    if wrong:
        raise BadInput(f"the weights in {path} do not match its config.json: {listed(wrong)}.")
    return model


def load_finite(path: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a model that is to compute something: where a weight is not finite, every gradient and token would be NaN.

    Raises:
        BadInput: As `load`, and if a weight is not finite.
    """
    model = load(path, dtype)
    if wrong := not_finite(model):
        raise BadInput(f"{wrong} of the model in {path} is not finite: training diverged, or the file is damaged.")
    return model


def not_finite(model: nn.Module) -> str | None:
    """The name of a model's first parameter that holds NaN or infinity; None if all are finite."""
    named = model.named_parameters()
    return next((name for name, weight in named if not torch.isfinite(weight.detach()).all()), None)


def checkpoint_blocks(model: nn.Module) -> None:
    """Recompute the activations of a model's blocks in the backward pass rather than keep them.

    transformers itself does so in training only, where dropout is on.

    Raises:
        BadInput: If the model has none.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise BadInput(
            f"--gradient_checkpointing: {type(model).__name__} has no blocks that can be checkpointed; omit it."
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
