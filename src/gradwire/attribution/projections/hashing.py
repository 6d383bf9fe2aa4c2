"""Random bits as a function of a key and two counters, the same on every device: SplitMix64 on int64 tensors.

Steele, Lea & Flood, 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

WORD = 64  # bits of a word
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def key(seed: int, name: str) -> int:
    """Return the int64 key of a named stream."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)


def words(stream: int, counters: Tensor) -> Tensor:
    """Return the stream's word at each int64 counter."""
    return _mix(counters * GAMMA + stream)


def table(stream: int, columns: Tensor, count: int) -> Tensor:
    """Return ``count`` words for each of the ``columns`` [c]: int64 [c, count]."""
    return _mix(words(stream, columns)[:, None] + torch.arange(1, count + 1, device=columns.device) * GAMMA)


def sign_table(stream: int, columns: Tensor, dim: int) -> Tensor:
    """Return ``dim`` signs ±1 for each of the ``columns`` [c]: float32 [c, dim]; a set bit is -1."""
    return _signs(table(stream, columns, math.ceil(dim / WORD)))[:, :dim]


def signs(stream: int, first: int, last: int, device: torch.device) -> Tensor:
    """Return one sign for each column of ``range(first, last)``: float32 [last - first]."""
    skipped = first % WORD
    counters = torch.arange(first // WORD, -(-last // WORD), device=device)
    return _signs(words(stream, counters)[:, None]).flatten()[skipped : skipped + last - first]


def below(stream: int, counters: Tensor, limit: int) -> Tensor:
    """Return a number in ``range(limit)`` per counter; for limits up to 2**31 the bias is at most 1 in 2**32."""
    return ((words(stream, counters) >> 32) & 0xFFFFFFFF) * limit >> 32


def _signs(bits: Tensor) -> Tensor:
    """Expand words [c, w] to their 64 signs each: float32 [c, 64 w]."""
    return embedding(bits.view(torch.uint8).int(), _byte_signs(bits.device)).flatten(1)


def _byte_signs(device: torch.device) -> Tensor:
    """Return the signs of the eight bits of each byte, float32 [256, 8]; a set bit is -1."""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    return 1.0 - 2.0 * (byte >> bit & 1)


def _mix(mixed: Tensor) -> Tensor:
    """Apply SplitMix64's output function to int64: products wrap around, shifts are logical."""
    for shift, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        mixed = (mixed ^ _shift(mixed, shift)) * multiplier
    return mixed ^ _shift(mixed, 31)


def _shift(values: Tensor, by: int) -> Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)
