"""Sample text from a language model, one token at a time."""

from __future__ import annotations

import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from gradwire.data.tokenizer import Tokenizer
from gradwire.errors import BadInput


@torch.inference_mode()
def continuation(
    model: GPT2LMHeadModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
) -> str:
    """Return the continuation of a prompt, up to the end-of-text token.

    The model reads at most the last ``n_positions`` tokens.

    Args:
        model: A language model in evaluation mode.
        tokenizer: The model's tokenizer.
        prompt: The text to continue.
        max_new_tokens: Maximum number of tokens to generate.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Total probability of the tokens to sample from (nucleus sampling, Holtzman et al., 2020).
        generator: The random generator, on the model's device.

    Raises:
        BadInput: If the prompt has no tokens.
    """
    tokens = tokenizer.encode_batch([prompt])[0]
    if not tokens:
        raise BadInput("the prompt is empty: type some text to continue.")
    start = len(tokens)
    for _ in range(max_new_tokens):
        window = torch.tensor([tokens[-model.config.n_positions :]], device=model.device)
        logits = model(window, use_cache=False).logits[0, -1, : tokenizer.vocab_size]
        token = draw(logits, temperature, top_p, generator)
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
    return tokenizer.decode(tokens[start:])


def draw(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw one token from ``logits`` [vocabulary] by temperature and nucleus sampling."""
    if temperature == 0:
        return int(logits.argmax())
    probability, token = torch.softmax((logits.float() - logits.max()) / temperature, dim=0).sort(descending=True)
    nucleus = probability.cumsum(0) - probability < top_p  # the fewest tokens that reach top_p, at least one
    return int(token[torch.multinomial(probability * nucleus, 1, generator=generator)])
