"""GPT-2 language models by preset; random initialization depends on the seed only."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from gradwire.errors import BadInput, unknown
from gradwire.files import check_length
from gradwire.models import folder
from gradwire.models.presets import PRESETS

INITIAL_STD, INITIAL_WIDTH = 0.02, 768  # GPT-2's; a narrower model needs larger weights for the same activations
VOCABULARY_MULTIPLE = 64  # rows of the tied embedding: fills tensor-core tiles and shards evenly


def configuration(preset: str, vocab_size: int, max_length: int) -> GPT2Config:
    """Return a preset's configuration, without dropout and with the vocabulary rounded up to a multiple of 64.

    Args:
        preset: A name in ``PRESETS``.
        vocab_size: Size of the tokenizer's vocabulary.
        max_length: Positions, in tokens.

    Raises:
        BadInput: If the preset is unknown.
    """
    if preset not in PRESETS:
        raise unknown("model preset (or folder of a saved model)", preset, PRESETS)
    return GPT2Config(
        **PRESETS[preset]._asdict(),
        vocab_size=-(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        n_positions=max_length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=INITIAL_STD * math.sqrt(INITIAL_WIDTH / PRESETS[preset].n_embd),
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
        attn_implementation="sdpa",
    )


def build(preset: str, vocab_size: int, max_length: int, seed: int) -> GPT2LMHeadModel:
    """Build a float32 model on the CPU: a preset initialized from ``seed``, or the model saved in a folder.

    The global random state does not change.

    Args:
        preset: A name in ``PRESETS``, or the path of a folder written by ``models.folder.save``.
        vocab_size: Smallest vocabulary size required.
        max_length: Smallest number of positions required, in tokens.
        seed: Seed of a preset's weights; ignored for a saved model.

    Raises:
        BadInput: If the preset is unknown, or the saved model is unusable or has too few positions or tokens.
    """
    check_length(Path(preset), "--model")
    if Path(preset).is_dir():
        model = folder.load(Path(preset))
        _check_size(model.config, vocab_size, max_length, preset)
        return model
    config = configuration(preset, vocab_size, max_length)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return GPT2LMHeadModel(config)


def _check_size(config: GPT2Config, vocab_size: int, max_length: int, path: str) -> None:
    if config.vocab_size < vocab_size:
        raise BadInput(f"{path} has a vocabulary of {config.vocab_size} tokens, the data have {vocab_size}.")
    if config.n_positions < max_length:
        raise BadInput(f"{path} has {config.n_positions} positions, the data need {max_length}.")
