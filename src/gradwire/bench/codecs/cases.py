"""The cases of ``bench compressors``: every registered method, variants, and chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.comm.compressors import kernels, registry
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rotation import Rotated
from gradwire.comm.compressors.sparse import Chain

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "int8": [{"rounding": "stochastic"}, {"num_bits": 4}],
    "fp8": [{"format": "e5m2"}],
    "signsgd": [{"scale": "none"}],
    "qsgd": [{"norm": "max"}],
}
"""Options that are timed in addition to the defaults."""

CHAINS = ("topk+int8", "topk+natural", "topk+fp16", "randomk+qsgd", "randomk+int8", "threshold+onebit")
"""Chains that are timed by default."""


class Codec(Protocol):
    """Interface of timed objects; a `Compressor` has it."""

    def encode(self, x: Tensor, *, generator: torch.Generator, flag: Tensor) -> Any:
        """Encode into one or several tensors."""

    def decode(self, wire: Any, shape: tuple[int, ...]) -> Tensor:
        """Decode ``wire`` into a tensor."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    name: str
    codec: Codec
    options: dict[str, Any] = field(default_factory=dict)

    def form(self, device: torch.device) -> str:
        """``kernel``, ``reference`` or, for a chain of both, ``kernel+reference``; ``torch`` for other codecs."""
        if not isinstance(self.codec, Compressor):
            return "torch"
        stages: list[Compressor] = [self.codec]
        if isinstance(self.codec, Chain):
            stages = [self.codec.sparsifier, self.codec.quantizer]
        elif isinstance(self.codec, Rotated):
            stages = [self.codec.rotation, self.codec.quantizer]
        return "+".join(
            dict.fromkeys(
                "reference" if kernels.find(stage, device) is kernels.REFERENCE else "kernel" for stage in stages
            )
        )


def cases(names: Sequence[str] | None = None) -> list[Case]:
    """Return the cases in the order of the table.

    Args:
        names: Methods (with their variants) and chains; by default all.

    Raises:
        BadInput: If a method or chain is unknown.
    """
    if names is None:
        methods = registry.available()
        chains = [chain for chain in CHAINS if set(chain.split("+")) <= set(methods)]
    else:
        chosen = dict.fromkeys("+".join(registry.members(name)) for name in names)
        methods, chains = [name for name in chosen if "+" not in name], [name for name in chosen if "+" in name]
    builds = [(name, options) for name in methods for options in ({}, *VARIANTS.get(name, []))]
    builds += [(chain, {}) for chain in chains]
    return [Case(name, registry.build(name, **options), options) for name, options in builds]


def size(wire: Any) -> int:
    """Return the bytes of an encoding."""
    tensors = wire if isinstance(wire, tuple) else (wire,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
