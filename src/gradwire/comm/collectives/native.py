"""Native: runs a compressor's `rounds` with reducing collectives, fused over the parameters of a buffer.

All parameters advance together; their requests of one round with the same operation and dtype share a collective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.collectives import ops
from gradwire.comm.collectives.algorithm import Algorithm, Kind
from gradwire.comm.collectives.layout import Layout, Piece
from gradwire.comm.compressors.rounds import Ask, Context, Rounds


class Talk(NamedTuple):
    """The state of one parameter's rounds.

    Attributes:
        pieces: The parameter's pieces, in the order of its elements.
        rounds: The compressor's generator.
        bad: Whether this rank's gradient is not finite: uint8 [1].
    """

    pieces: tuple[Piece, ...]
    rounds: Rounds
    bad: Tensor

    def part(self, row: int) -> Piece | None:
        """Return the parameter's piece in a row."""
        return next((piece for piece in self.pieces if piece.row == row), None)


class Native(Algorithm):
    """For compressors that have `rounds`."""

    name = "native"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return this rank's row; if a compressor reduces by rows, only that part is summed."""
        row = self.ranks.rank
        out = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
        for talk, mean in self._means(flat, layout, "reduce_scatter"):
            piece = talk.part(row)
            if piece is not None:
                out[layout.place_in_row(piece)] = mean if mean.numel() == piece.numel else mean[piece.source]
        return out

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return the whole buffer."""
        out = torch.zeros(layout.numel, dtype=torch.float32, device=flat.device)
        for talk, mean in self._means(flat, layout, "all_reduce"):
            for piece in talk.pieces:
                out[piece.place] = mean[piece.source]
        return out

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks.

        An all-reduce sends its bytes ``2 (world - 1)`` times, a gather ``world (world - 1)`` times. A reduce-scatter
        sends every rank's row, padded to the longest, ``world - 1`` times.
        """
        world = self.ranks.world
        total = 0
        rows: defaultdict[int, list[int]] = defaultdict(lambda: [0] * world)  # by size of an element
        for pieces in layout.parameters.values():
            form, numel = whole_form(pieces[0]), sum(piece.numel for piece in pieces)
            cost = self.codec.of(pieces[0], "scatter").round_cost(form, self.codec.method_step)
            total += 2 * (world - 1) * cost.summed + world * (world - 1) * cost.gathered
            for piece in pieces if numel else ():
                rows[cost.rows // numel][piece.row] += piece.numel
        for size, numels in rows.items():
            total += (2 * sum(numels) if kind == "all_reduce" else world * max(numels)) * (world - 1) * size
        return total

    def _means(self, flat: Tensor, layout: Layout, kind: Kind) -> list[tuple[Talk, Tensor]]:
        """Return every parameter's mean as a vector: whole, or this rank's part if its compressor reduces by rows."""
        with self.ranks.meter.span("encode", "codec", device=flat.device):
            talks = [self._talk(flat, pieces) for pieces in layout.parameters.values()]
            waiting = {i: next(talk.rounds) for i, talk in enumerate(talks)}
        means: dict[int, Tensor] = {}
        while waiting:
            answers = self._answers(talks, waiting, kind)
            waiting = {}
            with self.ranks.meter.span("encode", "codec", device=flat.device):
                for i, answer in answers.items():
                    try:
                        waiting[i] = talks[i].rounds.send(answer)
                    except StopIteration as stop:
                        mean, sent = stop.value
                        means[i] = mean.reshape(-1)
                        self.codec.update(whole(talks[i].pieces), sent.reshape(-1), talks[i].bad)
        return [(talk, means[i]) for i, talk in enumerate(talks)]

    def _talk(self, flat: Tensor, pieces: tuple[Piece, ...]) -> Talk:
        """Start a parameter's rounds, with its residual added."""
        codec, piece = self.codec, whole(pieces)
        compressor = codec.of(piece, "scatter")
        values = torch.cat([flat[part.place] for part in pieces]).to(torch.float32)
        values = codec.compensate(piece, values)
        bad = compressor.not_representable(values).to(torch.uint8).view(1)
        codec.note(bad)
        form = whole_form(piece)
        state = codec.state(piece.name, form) if compressor is codec.current else {}
        codec.count(compressor, form)
        context = Context(piece.name, form, codec.step, self.ranks.world, codec.seed)
        return Talk(pieces, compressor.rounds(values.view(form), state, context), bad)

    def _answers(self, talks: Sequence[Talk], asks: dict[int, Ask], kind: Kind) -> dict[int, Tensor]:
        """Return the answers to the parameters' requests, with one collective per operation and dtype."""
        groups: defaultdict[tuple[str, torch.dtype, bool], list[int]] = defaultdict(list)
        for i, ask in asks.items():
            groups[ask.op, ask.tensor.dtype, ask.rows and kind == "reduce_scatter"].append(i)
        answers: dict[int, Tensor] = {}
        for (op, _, by_row), members in groups.items():
            tensors = [asks[i].tensor for i in members]
            if by_row:
                received = self._sum_rows([talks[i] for i in members], tensors)
            elif op == "gather":
                received = self._gather(tensors)
            else:
                received = self._reduce(tensors, op)
            answers.update(zip(members, received, strict=True))
        return answers

    def _reduce(self, tensors: Sequence[Tensor], op: str) -> list[Tensor]:
        """All-reduce tensors in one collective."""
        group, _, _, meter = self.ranks
        fused = ops.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), op, group, "payload", meter)
        parts = fused.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather tensors in one collective: each [world, ...]."""
        group, world, _, meter = self.ranks
        fused = ops.all_gather(torch.cat([tensor.reshape(-1) for tensor in tensors]), group, "payload", meter)
        parts = fused.split([tensor.numel() for tensor in tensors], dim=1)
        return [part.reshape(world, *tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _sum_rows(self, talks: Sequence[Talk], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce-scatter tensors in one collective, padded to the longest row; return this rank's parts as vectors."""
        group, world, rank, meter = self.ranks
        numels = [[piece.numel if (piece := talk.part(row)) else 0 for talk in talks] for row in range(world)]
        longest = max(map(sum, numels))
        buffer = torch.zeros((world, longest), dtype=tensors[0].dtype, device=tensors[0].device)
        for row in range(world):
            at = 0
            for talk, tensor in zip(talks, tensors, strict=True):
                if piece := talk.part(row):
                    buffer[row, at : at + piece.numel] = tensor.reshape(-1)[piece.source]
                    at += piece.numel
        lacking = sum(longest - sum(row) for index, row in enumerate(numels) if index != rank)
        self.codec.padding_bytes += lacking * buffer.element_size()
        received = ops.reduce_scatter(buffer, group, "payload", meter)
        return list(received[: sum(numels[rank])].split(numels[rank]))


def whole(pieces: tuple[Piece, ...]) -> Piece:
    """Join a parameter's pieces into one."""
    return pieces[0]._replace(numel=sum(piece.numel for piece in pieces), at=0)


def whole_form(piece: Piece) -> tuple[int, ...]:
    """Return a parameter's shape for `rounds`: a matrix with its first dimension as rows, or a vector."""
    rows = piece.shape[0] if len(piece.shape) > 1 else None
    return (math.prod(piece.shape),) if rows is None else (rows, math.prod(piece.shape[1:]))
