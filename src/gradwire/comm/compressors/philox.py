"""Randomness for codecs: a counter-based generator, so that a method and its kernels draw the same numbers.

Philox4x32 with 7 rounds, the fewest that pass BigCrush (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011, table 2). The key is a 64-bit seed drawn from the caller's generator; element i takes word ``i % 4`` of the
block whose counter is ``(i // 4, 0, 0, 0)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


# Why: docs/decisions.md, "Random codes".
def draw_seed(generator: torch.Generator | None, device: torch.device, who: str) -> Tensor:
    """A seed for one encoding: `draw_seeds` of one generator."""
    return draw_seeds([generator], device, who)


def draw_seeds(generators: Sequence[torch.Generator | None], device: torch.device, who: str) -> Tensor:
    """A seed for each of some encodings: int64 [encodings], not negative, on ``device``; nothing synchronises.

    Args:
        generators: The callers', on ``device``.
        device: Where the seeds are needed.
        who: The method that asks, for the message.

    Raises:
        ValueError: Without a generator: the global random state is not ours to use.
    """
    seeds = torch.empty(len(generators), dtype=torch.int64, device=device)
    for seed, generator in zip(seeds.split(1), generators, strict=True):
        if generator is None:
            raise ValueError(f"{who} draws random numbers and needs a generator")
        seed.random_(2**63 - 1, generator=generator)
    return seeds


def words(seed: Tensor, count: int) -> Tensor:
    """The first ``count`` words of the seed's stream: int64 [count] with values below 2^32, on the seed's device."""
    blocks = -(-count // 4)
    c0 = torch.arange(blocks, dtype=torch.int64, device=seed.device)
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(ROUNDS):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return torch.stack([c0, c1, c2, c3], dim=1).view(-1)[:count]


def uniforms(seed: Tensor, count: int) -> Tensor:
    """Uniform numbers in [0, 1), multiples of 2^-24: float32 [count], the top 24 bits of each of `words`."""
    return (words(seed, count) >> 8).to(torch.float32) * 2.0**-24


def multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of the 64-bit product of 32-bit numbers, without overflow of int64."""
    upper = a * (b >> 16)  # each of these is below 2^48
    lower = a * (b & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
