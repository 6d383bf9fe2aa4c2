"""The second form of a compressor: a dialogue with collectives that can reduce its messages natively.

``compressor.rounds(x, state, context)`` is a generator. It yields an `Ask`, receives the reduced tensor, and returns
the approximation of the mean and this rank's own contribution to it. The reducer drives it with collectives, fused over
parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import Literal, NamedTuple

from torch import Tensor

State = dict[str, Tensor]


class Ask(NamedTuple):
    """A tensor to be reduced over the ranks.

    Attributes:
        op: ``sum`` and ``max`` element by element; ``gather`` puts the ranks' tensors one after another, [W, ...].
        tensor: This rank's part; equal in shape and type on all ranks.
        rows: Whether the tensor has one element per element of x, so that a reduce-scatter may answer with the part
            that belongs to this rank's rows only. Its driver then cuts what depends on it alike.
        spare: Whether the driver may overwrite the tensor.
    """

    op: Literal["sum", "max", "gather"]
    tensor: Tensor
    rows: bool = False
    spare: bool = False


class Context(NamedTuple):
    """Values that are equal on all ranks: the parameter and the step.

    Attributes:
        name: The parameter's name.
        shape: Shape of ``x``.
        step: Optimizer steps finished before this one.
        world: Number of ranks.
        seed: The run's.
        feedback: Whether the contribution that the rounds return is used.
    """

    name: str
    shape: tuple[int, ...]
    step: int
    world: int
    seed: int
    feedback: bool = True

    def derived_seed(self) -> int:
        """A seed for this parameter and step, the same on all ranks: below 2^63."""
        words = f"{self.seed} {self.step} {self.name}".encode()
        return int.from_bytes(hashlib.sha256(words).digest()[:8], "little") >> 1


class RoundCost(NamedTuple):
    """Bytes of the tensors that one rank hands over in `rounds`, by how they travel.

    Attributes:
        summed: In sums and maxima of whole tensors.
        rows: In those that may be answered row by row.
        gathered: In gathers.
    """

    summed: int = 0
    rows: int = 0
    gathered: int = 0


Rounds = Generator[Ask, Tensor, tuple[Tensor, Tensor]]
