"""The second form of a compressor: a dialogue with collectives that can reduce its messages natively.

``compressor.rounds(x, state, context)`` is a generator. It yields an `Ask`, receives the reduced tensor, and returns
the approximation of the mean and this rank's own contribution to it. Who drives it decides how the tensors travel: the
reducer with collectives, fused over parameters; `lockstep` with plain sums over a list, in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gradwire.compressors.base import Compressor

State = dict[str, Tensor]


class Ask(NamedTuple):
    """A tensor to be reduced over the ranks.

    Attributes:
        op: ``sum`` and ``max`` element by element; ``gather`` puts the ranks' tensors one after another, [W, ...].
        tensor: This rank's part; equal in shape and type on all ranks.
        rows: Whether the tensor has one element per element of x, so that a reduce-scatter may answer with the part
            that belongs to this rank's rows only. Its driver then cuts what depends on it alike.
    """

    op: Literal["sum", "max", "gather"]
    tensor: Tensor
    rows: bool = False


class Context(NamedTuple):
    """What all ranks know alike about the parameter and the step.

    Attributes:
        name: The parameter's name.
        shape: Shape of ``x``.
        step: Optimizer steps finished before this one.
        world: Number of ranks.
        seed: The run's.
    """

    name: str
    shape: tuple[int, ...]
    step: int
    world: int
    seed: int

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


def reduce(asks: Sequence[Ask]) -> Tensor:
    """What every rank receives for the ranks' asks, summed in rank order."""
    stacked = torch.stack([ask.tensor for ask in asks])
    if asks[0].op == "gather":
        return stacked
    if asks[0].op == "max":
        return stacked.amax(dim=0)
    total = stacked[0].clone()
    for part in stacked[1:]:
        total += part
    return total


def lockstep(
    compressor: Compressor, xs: Sequence[Tensor], states: Sequence[State], context: Context
) -> tuple[list[Tensor], list[Tensor], int]:
    """Drive the rounds of all ranks in one process.

    Args:
        compressor: A method that has rounds.
        xs: Each rank's gradient, all of ``context.shape``.
        states: Each rank's state, changed in place.
        context: ``context.world`` is the number of ranks.

    Returns:
        Every rank's mean, every rank's own contribution, and the bytes that one rank handed over.

    Raises:
        RuntimeError: If the ranks ask for different things, or do not end together.
    """
    talks = [compressor.rounds(x, state, context) for x, state in zip(xs, states, strict=True)]
    answers: list[Tensor | None] = [None] * len(talks)
    handed = 0
    while True:
        asks, ends = [], []
        for talk, answer in zip(talks, answers, strict=True):
            try:
                asks.append(next(talk) if answer is None else talk.send(answer))
            except StopIteration as stop:
                ends.append(stop.value)
        if len(ends) == len(talks):
            means, sents = zip(*ends, strict=True)
            return list(means), list(sents), handed
        kinds = {(ask.op, ask.tensor.shape, ask.tensor.dtype, ask.rows) for ask in asks}
        if ends or len(kinds) != 1:
            raise RuntimeError(f"{compressor.name}: the ranks ask for different things: {kinds}")
        handed += asks[0].tensor.nbytes
        answers = [reduce(asks).clone() for _ in talks]
