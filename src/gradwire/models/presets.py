"""Names and sizes of GPT-2 models; imports no torch, so that a configuration is checked without it."""

from __future__ import annotations

from typing import NamedTuple


class Preset(NamedTuple):
    """Sizes of a model, apart from vocabulary and context length."""

    n_layer: int
    n_embd: int
    n_head: int


PRESETS = {
    "micro": Preset(n_layer=1, n_embd=32, n_head=2),  # 0.02 M with 256 tokens: the smallest, for tests
    "tiny": Preset(n_layer=2, n_embd=128, n_head=4),  # 0.7 M parameters with 2,048 tokens: trains on a CPU
    "62m": Preset(n_layer=6, n_embd=640, n_head=10),  # 62.4 M with GPT-2's vocabulary and 1,024 positions
}
