"""Causal language models of any architecture of transformers: presets, inline options, configurations, saved models.

Random initialization depends on the seed only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from gradwire.base.errors import BadInput
from gradwire.lm.models import architecture, folder, presets, saved

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
    if is_saved(model):
        made = folder.load(Path(model))
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
        if is_saved(model):
            saved.check(Path(model))
        return architecture.of_folder(Path(model), vocab_size, max_length)
    config = architecture.configuration(options, vocab_size, max_length)
    check_memory(config, model)
    return config


def is_saved(model: str) -> bool:
    """Whether a model is a folder with weights."""
    return presets.options(model) is None and saved.has_weights(Path(model))


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
