"""Configurations of causal language models: any architecture of transformers, from inline options or a folder."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import LARGEST_CONFIGURATION, check_size
from gradwire.lm.models import presets, saved

INITIAL_STD, INITIAL_WIDTH = 0.02, 768  # GPT-2's; a narrower model needs larger weights for the same activations
CHECK = re.compile(r"^(Class v|V)alidation error for (validator|field) '\w+': \w+: ")  # what precedes the reason
VOCABULARY_MULTIPLE = 64  # rows of the embedding: fills tensor-core tiles and shards evenly
NO_DROPOUT_OF = ("summary", "classifier")  # of heads that a language model does not have


def config_class(architecture: str) -> type[PretrainedConfig]:
    """The configuration class of an architecture.

    Raises:
        BadInput: If transformers does not know it, or knows no causal language model of it.
    """
    register(architecture)
    if architecture not in CONFIG_MAPPING:
        raise unknown("architecture", architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    kind = CONFIG_MAPPING[architecture]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BadInput(f"architecture {architecture!r} has no causal language model in transformers.")
    return kind


def register(architecture: Any) -> None:
    """Have other packages register an architecture that transformers does not know."""
    if architecture not in CONFIG_MAPPING:
        presets.import_third_party()


def register_of(folder: Path) -> None:
    """Register the architecture of a model folder, whose own Python code is never run.

    Raises:
        BadInput: If the architecture is unknown, or only that code has it, or the configuration is no file that can be
            read whole.
    """
    check_size(folder / saved.CONFIG, LARGEST_CONFIGURATION)
    architecture = saved.model_type(folder)
    register(architecture)
    if not saved.has_code(folder):
        if isinstance(architecture, str) and architecture not in CONFIG_MAPPING:
            raise unknown(f"architecture in {folder / saved.CONFIG}:", architecture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        return
    if architecture not in CONFIG_MAPPING:
        raise BadInput(
            f"{folder} brings its own Python code (auto_map in {saved.CONFIG}), which gradwire never runs, and "
            f"transformers has no architecture {architecture!r}: install a package that offers it among "
            "the entry points gradwire.models, or use another model."
        )
    _note_code(folder, architecture)


@cache
def _note_code(folder: Path, architecture: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(
            f"gradwire: NOTE: the Python code of {folder} (auto_map in {saved.CONFIG}) is not run; the model is "
            f"transformers' {architecture}.",
            file=sys.stderr,
        )


def check_options(options: Mapping[str, Any]) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    """Return the configuration class that inline options name, and its defaults.

    Raises:
        BadInput: If the architecture or an option is unknown.
    """
    kind = config_class(options["architecture"])
    usual = kind().to_dict()
    for option in options.keys() - {"architecture"}:
        if option not in usual and option not in kind.attribute_map:
            raise unknown(f"option of architecture {options['architecture']}", option, [*usual, *kind.attribute_map])
    return kind, usual


def configuration(options: Mapping[str, Any], vocab_size: int, max_length: int) -> PretrainedConfig:
    """Return the configuration that inline options describe.

    What they leave out: the vocabulary is rounded up to a multiple of 64, positions are those needed, dropout is off,
    there are no special tokens, each head has its own keys and values, and the standard deviation of initial weights
    grows as the model gets narrower. All else has the architecture's default.

    Args:
        options: ``architecture``, and options of its configuration in transformers.
        vocab_size: Size of the tokenizer's vocabulary.
        max_length: Positions needed, in tokens.

    Raises:
        BadInput: If the architecture or an option is unknown or invalid, or the sizes do not match the data.
    """
    given = dict(options)
    kind, usual = check_options(options)
    architecture = given.pop("architecture")
    alias = kind.attribute_map
    given = {alias.get(option, option): value for option, value in given.items()}
    rounded = -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    made: dict[str, Any] = {
        "vocab_size": rounded,
        **{name: 0.0 for name, value in usual.items() if _is_dropout(name, value)},
        **{name: None for name in ("bos_token_id", "eos_token_id") if name in usual},
        **({"pad_token_id": None} if (usual.get("pad_token_id") or 0) >= rounded else {}),  # such as glm's
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__],
    }
    positions = alias.get("max_position_embeddings", "max_position_embeddings")
    if positions in usual:
        made[positions] = max_length
    heads = alias.get("num_attention_heads", "num_attention_heads")
    if "num_key_value_heads" in usual and heads in given:
        made["num_key_value_heads"] = given[heads]
    try:
        config = kind(**made | given)
        if usual.get("initializer_range") == INITIAL_STD and "initializer_range" not in given:
            config.initializer_range = INITIAL_STD * math.sqrt(INITIAL_WIDTH / config.hidden_size)
    except Exception as error:  # the type depends on the architecture
        raise refused(architecture, error) from None
    _check_random(config, rounded, architecture)
    check_fit(config, vocab_size, max_length, f"architecture {architecture}")
    return config


def refused(architecture: str, error: Exception) -> BadInput:
    """The error that an architecture raises for its options."""
    return BadInput(f"architecture {architecture}: {reason(error)}.")


def reason(error: Exception) -> str:
    """The text of an error of transformers in one line, without the name of the check and the last full stop."""
    return CHECK.sub("", " ".join(str(error).split()))[:300].rstrip(".")


def of_folder(folder: Path, vocab_size: int, max_length: int) -> PretrainedConfig:
    """Return the configuration of a folder, with or without weights.

    Raises:
        BadInput: If it cannot be read, has no causal language model, or does not match the data.
    """
    try:
        register_of(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BadInput:  # a ValueError
        raise
    except Exception as error:  # the type depends on the architecture
        raise BadInput(f"the configuration in {folder} cannot be read: {reason(error)}.") from None
    config_class(config.model_type)
    if not saved.has_weights(folder):
        _check_random(config, -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE, str(folder))
    check_fit(config, vocab_size, max_length, str(folder))
    return config


def positions(config: PretrainedConfig) -> int | None:
    """The largest number of tokens that a model can read; None if it has no limit."""
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_fit(config: PretrainedConfig, vocab_size: int, max_length: int, where: str) -> None:
    """Check that a model has the tokens and the positions that the data need.

    Raises:
        BadInput: If it does not.
    """
    if config.vocab_size < vocab_size:
        raise BadInput(f"{where} has a vocabulary of {config.vocab_size} tokens, the data have {vocab_size}.")
    most = positions(config)
    if most is not None and most < max_length:
        raise BadInput(f"{where} has {most} positions, the data need {max_length}.")


def random_model(config: PretrainedConfig) -> Any:
    """Build a model from the global random state, on the default device."""
    return AutoModelForCausalLM.from_config(config)


def on_meta(config: PretrainedConfig) -> Any:
    """A model without weights.

    Raises:
        BadInput: If the architecture does not allow these sizes.
    """
    try:
        with torch.device("meta"):
            return random_model(config)
    except Exception as error:  # the type depends on the architecture
        raise refused(config.model_type, error) from None


def second_names(config: PretrainedConfig) -> set[str]:
    """Names in a model's state of tied weights that have another name already, such as ``lm_head.weight``."""
    model = on_meta(config)
    first = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return set(model.state_dict()) - first


def _check_random(config: PretrainedConfig, most: int, where: str) -> None:
    """Check that a model without weights has no tokens that the tokenizer cannot produce."""
    if config.vocab_size > most:
        raise BadInput(
            f"{where} has a vocabulary of {config.vocab_size} tokens, above the tokenizer's {most}, rounded up: "
            "leave vocab_size out, which is then set from the tokenizer, or use the tokenizer that it belongs to."
        )


def _is_dropout(name: str, value: Any) -> bool:
    rate = isinstance(value, float) and value > 0 and ("drop" in name)
    return rate and not name.startswith(NO_DROPOUT_OF)
