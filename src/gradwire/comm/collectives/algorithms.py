"""Algorithms that average a flat gradient buffer over the ranks: `Exchange`, `Gather` and `Native`.

Encodings travel in one message per pair of ranks (`exchange`). Both sides know an encoding's size in advance, unless it
depends on the data; only such sizes are sent, before the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.layout import Kind, Layout, Piece, Sizes
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.compressors.rounds import Ask, Context, Rounds


class Ranks(NamedTuple):
    """A process group from the view of one rank.

    Attributes:
        group: The process group; None is the default group.
        world: Number of ranks.
        rank: This rank.
        meter: Counts the bytes of the reduction.
    """

    group: ops.Group
    world: int
    rank: int
    meter: Meter


class Algorithm(ABC):
    """A reduction over at least two ranks.

    Args:
        codec: This rank's codec.
        ranks: The participating ranks.
    """

    name: ClassVar[str]

    def __init__(self, codec: Codec, ranks: Ranks) -> None:
        self.codec = codec
        self.ranks = ranks

    @abstractmethod
    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return this rank's row of the mean: float32 [row_numel]; padding is 0."""

    @abstractmethod
    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return the mean, bit-equal on all ranks: float32 [numel]; padding is 0."""

    @abstractmethod
    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes of one call at the current step over all ranks; None if it depends on the data."""


class Exchange(Algorithm):
    """Works with every compressor."""

    name = "exchange"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode all rows and send them to their owners; decode and average this rank's row."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "scatter")
        own = plan.rows[ranks.rank]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, plan.whole, "scatter", lambda row: int(row != ranks.rank))
        known = [*own.sizes] * ranks.world
        incoming, lengths = exchange(message, lengths, plan.sizes, known, ranks, bulk=bulk(plan.sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            own.decode(incoming, lengths, mean, "zero")  # summed in rank order
            return mean.div_(ranks.world)

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Reduce-scatter, then gather the means; all ranks use the decoded values, the owner too."""
        codec, ranks = self.codec, self.ranks
        mean = self.mean_of_row(flat, layout)
        plan = codec.plan(layout, "gather")
        own = plan.rows[ranks.rank]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(mean, own, "gather", lambda _: ranks.world - 1)
            copies, known = torch.cat([message] * ranks.world), [*own.sizes] * ranks.world
        incoming, lengths = exchange(copies, lengths * ranks.world, known, plan.sizes, ranks, bulk=bulk(plan.sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            full = torch.zeros(layout.numel, dtype=torch.float32, device=mean.device)
            plan.whole.decode(incoming, [[length for row in lengths for length in row]], full, "blank")
            return full

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: ``world - 1`` times all encodings, for each phase.

        In the reduce-scatter ``world - 1`` ranks send each row to its owner; an all-reduce also sends each row from its
        owner to ``world - 1`` ranks.
        """
        totals = [self.codec.plan(layout, "scatter").total]
        if kind == "all_reduce":
            totals.append(self.codec.plan(layout, "gather").total)
        known = [total for total in totals if total is not None]
        return (self.ranks.world - 1) * sum(known) if len(known) == len(totals) else None


class Gather(Algorithm):
    """Meant for all-reduces; a reduce-scatter discards all rows but this rank's."""

    name = "gather"

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """All-reduce, and return this rank's row."""
        row = self.ranks.rank * layout.row_numel
        return self.mean_everywhere(flat, layout)[row : row + layout.row_numel].clone()

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode everything, gather, decode and average, summed in rank order."""
        codec, ranks = self.codec, self.ranks
        table = codec.plan(layout, "scatter").whole
        sizes = [[size for row in table.sizes for size in row]]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, table, "scatter", lambda _: ranks.world - 1)
        own = [[length for row in lengths for length in row]] * ranks.world
        if table.total is None:
            copies, known = torch.cat([message] * ranks.world), sizes * ranks.world
            incoming, own = exchange(copies, own, known, known, ranks)
        else:
            bulk = message.numel() > ops.CHUNK
            incoming = ops.all_gather(message, ranks.group, "payload", ranks.meter, bulk=bulk).view(-1)
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.numel, dtype=torch.float32, device=flat.device)
            table.decode(incoming, own, mean, "zero")
            return mean.div_(ranks.world)

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: every rank sends its encodings to all others."""
        total, world = self.codec.plan(layout, "scatter").total, self.ranks.world
        return None if total is None else world * (world - 1) * total


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


def exchange(
    message: Tensor,
    lengths_out: Sequence[Sequence[int]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    ranks: Ranks,
    purpose: str = "payload",
    *,
    bulk: bool = False,
) -> tuple[Tensor, list[list[int]]]:
    """Send each rank its encodings and receive those from each rank.

    All ranks must agree on whether sizes are sent, so the two tables together cover every encoding of the exchange.

    Args:
        message: The encodings for each rank, in rank order: uint8 vector.
        lengths_out: For each rank, the bytes of its encodings.
        sizes_out: The same as the receivers know them; None where they depend on the data.
        sizes_in: The sizes of incoming encodings that this rank knows; None for the others.
        ranks: The participating ranks.
        purpose: The purpose that the bytes are counted for.
        bulk: See `ops.all_to_all`.

    Returns:
        The encodings from each rank, in rank order: uint8 vector; and for each rank, the bytes of its encodings.
    """
    if any(size is None for sizes in (*sizes_out, *sizes_in) for size in sizes):
        lengths_in = swap_sizes(lengths_out, sizes_out, sizes_in, message.device, ranks, purpose)
    else:
        lengths_in = [[size for size in sizes if size is not None] for sizes in sizes_in]
    totals_out, totals_in = ([sum(row) for row in lengths] for lengths in (lengths_out, lengths_in))
    return ops.all_to_all(message, totals_out, totals_in, ranks.group, purpose, ranks.meter, bulk=bulk), lengths_in


def swap_sizes(
    lengths_out: Sequence[Sequence[int]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    device: torch.device,
    ranks: Ranks,
    purpose: str,
) -> list[list[int]]:
    """Send the lengths that are None in ``sizes_out`` (int64 each), and return ``sizes_in`` with its None filled in."""
    unknown_out = [
        [length for length, size in zip(lengths, sizes, strict=True) if size is None]
        for lengths, sizes in zip(lengths_out, sizes_out, strict=True)
    ]
    table = torch.tensor([length for row in unknown_out for length in row], dtype=torch.int64, device=device)
    received = ops.all_to_all(
        table.view(torch.uint8),
        [8 * len(row) for row in unknown_out],
        [8 * sum(size is None for size in row) for row in sizes_in],
        ranks.group,
        purpose,
        ranks.meter,
    )
    lengths = iter(received.view(torch.int64).tolist())
    return [[next(lengths) if size is None else size for size in row] for row in sizes_in]


def bulk(sizes: Sizes) -> bool:
    """Whether messages between two ranks are large on average; all ranks know all sizes, so they agree."""
    return sum(size or 0 for row in sizes for size in row) > len(sizes) * ops.CHUNK
