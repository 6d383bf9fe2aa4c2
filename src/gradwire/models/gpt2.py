"""GPT-2 language models by preset: random initialisation that depends on the seed and on nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from gradwire.errors import BadInput, unknown
from gradwire.files import check_length
from gradwire.models import folder

INITIAL_STD, INITIAL_WIDTH = 0.02, 768  # GPT-2's own; a narrower model needs larger weights for the same activations
VOCABULARY_MULTIPLE = 64  # rows of the tied embedding: whole tensor-core tiles, and an even cut over the ranks


class Preset(NamedTuple):
    """The sizes of a model that the vocabulary and the context length do not fix."""

    n_layer: int
    n_embd: int
    n_head: int


PRESETS = {
    "tiny": Preset(n_layer=2, n_embd=128, n_head=4),  # 0.7 M parameters with 2,048 tokens: trains on a CPU
    "62m": Preset(n_layer=6, n_embd=640, n_head=10),  # 62.4 M with GPT-2's vocabulary and 1,024 positions
}


def configuration(preset: str, vocab_size: int, max_length: int) -> GPT2Config:
    """The configuration of a preset, without dropout and with the vocabulary rounded up to a multiple of 64.

    Args:
        preset: A name in ``PRESETS``.
        vocab_size: Tokens that the tokenizer knows.
        max_length: Positions, in tokens.

    Raises:
        BadInput: If there is no such preset.
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
    """A model on the CPU in float32: a preset initialised from ``seed``, or the model saved in a folder.

    The global random state is left as it was.

    Args:
        preset: A name in ``PRESETS``, or the path of a folder written by ``models.folder.save``.
        vocab_size: Tokens that the model must know.
        max_length: Positions that the model must have, in tokens.
        seed: Draws a preset's weights; a saved model has its own.

    Raises:
        BadInput: If the preset is unknown, or the saved model is unusable, too short or has too small a vocabulary.
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
        raise BadInput(f"the model in {path} knows {config.vocab_size} tokens, the data have {vocab_size}.")
    if config.n_positions < max_length:
        raise BadInput(f"the model in {path} reads {config.n_positions} tokens, the data have {max_length}.")
