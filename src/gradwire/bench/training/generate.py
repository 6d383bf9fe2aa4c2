"""The command ``generate``: continue prompts typed at a terminal, or a prompt from standard input."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import COUNT, NOT_NEGATIVE, SEED, SHARE
from gradwire.base.rank_env import Device
from gradwire.base.strict import Strict

COLDEST = 1e-6  # temperature; logits divided by much less overflow

if TYPE_CHECKING:
    from torch import Tensor
    from transformers.modeling_utils import PreTrainedModel

    from gradwire.lm.data.tokenizer import Tokenizer


class Options(Strict):
    """Flags of ``gradwire generate``."""

    model_dir: Path = Field(description="folder of a saved model, with its tokenizer")
    max_new_tokens: Annotated[int, COUNT] = Field(50, description="maximum number of tokens to generate")
    temperature: Annotated[float, NOT_NEGATIVE] = Field(
        0.8, description="divides the logits; 0 takes the most likely token"
    )
    top_p: Annotated[float, SHARE] = Field(
        0.95, description="sample from the most likely tokens with this total probability"
    )
    seed: Annotated[int, SEED] = Field(0, description="seed of the sampling")
    device: Device = Field("auto", description="auto: a GPU if there is one")


def main(options: Options) -> None:
    """Load the model and print the continuation of each prompt."""
    import torch

    from gradwire.comm.collectives import world
    from gradwire.lm.data import tokenizer
    from gradwire.lm.models import causal

    device = world.choose("auto", options.device, 1, world.detect_gpus()).device_type
    model = causal.load_finite(options.model_dir).to(device)
    vocabulary = tokenizer.load(options.model_dir)

    def answer(prompt: str) -> str:
        return continuation(model, vocabulary, prompt, options.max_new_tokens, options.temperature, options.top_p)

    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        _answer_prompts(answer)


def continuation(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, temperature: float, top_p: float
) -> str:
    """Return the continuation of a prompt, up to the end-of-text token, drawn from torch's global generator.

    The model reads at most as many of the last tokens as it has positions: transformers generates until these are full,
    then token by token.

    Args:
        model: A language model in evaluation mode.
        tokenizer: The model's tokenizer.
        prompt: The text to continue.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Total probability of the tokens to sample from (nucleus sampling, Holtzman et al., 2020).

    Raises:
        BadInput: If the prompt has no tokens, or a logit is not a number.
    """
    import torch
    from transformers import LogitsProcessorList

    from gradwire.lm.models import architecture

    tokens = tokenizer.encode_batch([prompt])[0]
    if not tokens:
        raise BadInput("the prompt is empty: type some text to continue.")
    sampled = {"do_sample": True, "temperature": max(temperature, COLDEST), "top_p": top_p, "top_k": 0}
    options = {
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
        "suppress_tokens": list(range(tokenizer.vocab_size, model.config.vocab_size)) or None,
        **(sampled if temperature else {"do_sample": False}),
    }
    start, end = len(tokens), len(tokens) + max_new_tokens
    limit = architecture.positions(model.config) or end
    while len(tokens) < end and (len(tokens) == start or tokens[-1] != tokenizer.eos_id):
        window = torch.tensor([tokens[-limit:]], device=model.device)
        room = limit + 1 - window.shape[1]
        generated = model.generate(
            window,
            attention_mask=torch.ones_like(window),
            max_new_tokens=min(room, end - len(tokens)),
            logits_processor=LogitsProcessorList([_numbers]),
            **options,
        )
        tokens += generated[0, window.shape[1] :].tolist()
    return tokenizer.decode(tokens[start:])


def _numbers(ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores [1, vocabulary] of the next token; -inf is a token that is left out.

    Raises:
        BadInput: If one is NaN or infinity: any token could follow.
    """
    if (scores.isnan() | (scores == math.inf)).any():
        raise BadInput("the model's logits are not finite, although its weights are: they overflow; use another model.")
    return scores


def _answer_prompts(answer: Callable[[str], str]) -> None:
    if sys.stdin.isatty():
        _converse(answer)
    else:
        prompt = sys.stdin.read().removesuffix("\n")
        print(prompt + answer(prompt))


def _converse(answer: Callable[[str], str]) -> None:
    print("Type a prompt; an empty line or Ctrl-D exits.", file=sys.stderr)
    try:
        while prompt := input("> "):
            print(prompt + answer(prompt))
    except EOFError:
        print()
