"""The verb ``generate``: continue prompts typed at a terminal, or one read from standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import BadInput

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

END_OF_TEXT = "<|endoftext|>"


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="folder of a saved model, with its tokenizer")
    parser.add_argument("--max_new_tokens", type=int, default=50, help="tokens to add at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest token")
    parser.add_argument(
        "--top_p", type=float, default=0.95, help="sample among the likeliest tokens that hold this share of probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--device", default="cpu", help="where to run, such as cpu or cuda")


def main(args: argparse.Namespace) -> None:
    """Load the model, then answer each prompt with its continuation."""
    _check(args)
    import torch

    from gradwire.models import folder

    model = folder.load(args.model_dir).to(args.device)
    tokenizer = folder.tokenizer(args.model_dir)
    generator = torch.Generator(args.device).manual_seed(args.seed)

    def answer(prompt: str) -> str:
        return continuation(model, tokenizer, prompt, args.max_new_tokens, args.temperature, args.top_p, generator)

    if sys.stdin.isatty():
        _converse(answer)
    else:
        prompt = sys.stdin.read().removesuffix("\n")
        print(prompt + answer(prompt))


def _check(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 1:
        raise BadInput(f"--max_new_tokens is {args.max_new_tokens}; it must be at least 1.")
    if args.temperature < 0:
        raise BadInput(f"--temperature is {args.temperature}; it must be 0 (greedy) or more.")
    if not 0 < args.top_p <= 1:
        raise BadInput(f"--top_p is {args.top_p}; it must be above 0 and at most 1.")


def _converse(answer: Callable[[str], str]) -> None:
    print("Type the beginning of a text; an empty line or Ctrl-D ends.", file=sys.stderr)
    try:
        while prompt := input("> "):
            print(prompt + answer(prompt))
    except EOFError:
        print()


def continuation(
    model: GPT2LMHeadModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> str:
    """The text that the model adds to a prompt, up to its end-of-text token.

    The model sees the last ``n_positions`` tokens at most.

    Args:
        model: A language model in evaluation mode.
        tokenizer: The model's tokenizer.
        prompt: The text to continue.
        max_new_tokens: Tokens to add at most.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: The share of probability to sample from (Holtzman et al., 2020: nucleus sampling).
        generator: Draws the tokens; on the model's device.

    Raises:
        BadInput: If the prompt has no token.
    """
    import torch

    tokens = tokenizer.encode(prompt).ids
    if not tokens:
        raise BadInput("the prompt is empty: type some text to continue.")
    end = tokenizer.token_to_id(END_OF_TEXT)
    start = len(tokens)
    with torch.inference_mode():
        while len(tokens) < start + max_new_tokens and (len(tokens) == start or tokens[-1] != end):
            window = torch.tensor([tokens[-model.config.n_positions :]], device=model.device)
            logits = model(window, use_cache=False).logits[0, -1, : tokenizer.get_vocab_size()]
            tokens.append(draw(logits, temperature, top_p, generator))
    return tokenizer.decode(tokens[start:])


def draw(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw one token from ``logits`` [vocabulary] by temperature and nucleus sampling."""
    import torch

    if temperature == 0:
        return int(logits.argmax())
    probability, token = torch.softmax(logits.float() / temperature, dim=0).sort(descending=True)
    nucleus = probability.cumsum(0) - probability < top_p  # the fewest tokens that reach top_p; never none
    return int(token[torch.multinomial(probability * nucleus, 1, generator=generator)])
