"""The verb ``generate``: continue prompts typed at a terminal, or a prompt from standard input."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from gradwire.flags import COUNT, NOT_NEGATIVE, SEED, SHARE
from gradwire.rank_env import DEVICES


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="folder of a saved model, with its tokenizer")
    parser.add_argument("--max_new_tokens", type=COUNT, default=50, help="maximum number of tokens to generate")
    parser.add_argument(
        "--temperature", type=NOT_NEGATIVE, default=0.8, help="divides the logits; 0 takes the most likely token"
    )
    parser.add_argument(
        "--top_p",
        type=SHARE,
        default=0.95,
        help="sample from the most likely tokens with this total probability",
    )
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the sampling")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")


def main(args: argparse.Namespace) -> None:
    """Load the model and print the continuation of each prompt."""
    import torch

    from gradwire.collectives import world
    from gradwire.data import tokenizer
    from gradwire.models import folder
    from gradwire.models.sampling import continuation

    device = world.choose("auto", args.device, 1, world.detect_gpus()).device_type
    model = folder.load(args.model_dir).to(device)
    vocabulary = tokenizer.load(args.model_dir)
    generator = torch.Generator(device).manual_seed(args.seed)

    def answer(prompt: str) -> str:
        return continuation(model, vocabulary, prompt, args.max_new_tokens, args.temperature, args.top_p, generator)

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
