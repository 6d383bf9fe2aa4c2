"""The rounds of all ranks in one process, with plain sums over a list."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rounds import Context, ReduceRequest, State


def reduce(asks: Sequence[ReduceRequest]) -> Tensor:
    """The answers that every rank receives to the ranks' asks, summed in rank order."""
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
