"""Algorithms that average a flat gradient buffer over the ranks: `Exchange`, `Gather` and `Native`.

Encodings travel in one message per pair of ranks (`exchange`). Both sides know an encoding's size in advance, unless it
depends on the data; only such sizes are sent, before the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.comm.closed_forms import total_bytes
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.layout import FLOAT32, Kind, Layout, Piece, Plan, Sizes
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.compressors.feedback import Feedback
from gradwire.comm.compressors.rounds import Ask, Context, Rounds

T = TypeVar("T")


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
    """Sends each row's encodings to the row's owner, which decodes, sums in float32 and divides once.

    An all-reduce then sends each owner's means to all ranks, encoded again or as float32. Works with every compressor.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode all rows and send them to their owners; decode and average this rank's row."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "scatter")
        row = plan.rows[ranks.rank]
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, plan.whole, "scatter", lambda row: int(row != ranks.rank))
        sizes = plan.whole.sizes
        incoming, lengths = exchange(message, lengths, sizes, [*row.sizes] * ranks.world, ranks, bulk=bulk(sizes))
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            row.decode(incoming, lengths, mean, "zero")  # summed in rank order
            return mean.div_(ranks.world)

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Reduce-scatter, then gather the means; all ranks use the decoded values, the owner too."""
        codec, ranks = self.codec, self.ranks
        mean = self.mean_of_row(flat, layout)
        plan = codec.plan(layout, "gather")
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(mean, plan.rows[ranks.rank], "gather", lambda _: ranks.world - 1)
        incoming, lengths = gather_rows(message, lengths, plan, ranks)
        with ranks.meter.span("decode", "codec", device=flat.device):
            full = torch.zeros(layout.numel, dtype=torch.float32, device=mean.device)
            plan.whole.decode(incoming, lengths, full, "blank")
            return full

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: an all-to-all's, and an all-gather's for an all-reduce."""
        world = self.ranks.world
        scattered = self.codec.plan(layout, "scatter").whole.total
        gathered = self.codec.plan(layout, "gather").whole.total if kind == "all_reduce" else 0
        if scattered is None or gathered is None:
            return None
        return total_bytes("all_to_all", scattered, world) + total_bytes("all_gather", gathered, world)


class Gather(Algorithm):
    """Sends all ranks every encoding of the whole buffer, which they decode and average.

    One encoding and one collective instead of two, for ``world / 2`` times the bytes: useful with two ranks, and for
    models so small that latency dominates. Meant for all-reduces; a reduce-scatter discards all rows but this rank's.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """All-reduce, and return this rank's row."""
        return self.mean_everywhere(flat, layout).view(layout.world, -1)[self.ranks.rank].clone()

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Tensor:
        """Encode everything, gather, decode and average, summed in rank order."""
        codec, ranks = self.codec, self.ranks
        table = codec.plan(layout, "scatter").whole
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, by_row = codec.encode(flat, table, "scatter", lambda _: ranks.world - 1)
        lengths = joined(by_row) * ranks.world
        if table.total is None:
            sizes = joined(table.sizes) * ranks.world
            incoming, lengths = exchange(torch.cat([message] * ranks.world), lengths, sizes, sizes, ranks)
        else:
            bulky = message.numel() > ops.CHUNK
            incoming = ops.all_gather(message, ranks.group, "payload", ranks.meter, bulk=bulky).view(-1)
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.numel, dtype=torch.float32, device=flat.device)
            table.decode(incoming, lengths, mean, "zero")
            return mean.div_(ranks.world)

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the payload bytes over all ranks: an all-gather's of every rank's encodings."""
        total, world = self.codec.plan(layout, "scatter").whole.total, self.ranks.world
        return None if total is None else total_bytes("all_gather", world * total, world)


class Talk(NamedTuple):
    """The state of one parameter's rounds.

    Attributes:
        pieces: The parameter's pieces, in the order of its elements.
        rounds: The compressor's generator.
        bad: Whether this rank's gradient is not finite: uint8 [1].
        feedback: Its error feedback; None if there is none.
    """

    pieces: tuple[Piece, ...]
    rounds: Rounds
    bad: Tensor
    feedback: Feedback | None

    def piece(self, row: int) -> Piece | None:
        """Return the parameter's piece in a row."""
        return next((piece for piece in self.pieces if piece.row == row), None)


class Native(Algorithm):
    """Runs a compressor's `rounds` with reducing collectives, fused over the parameters of a buffer.

    All parameters advance together; their requests of one round with the same operation and dtype share a collective.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Tensor:
        """Return this rank's row; if a compressor reduces by rows, only that part is summed."""
        out = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
        for talk, mean in self._means(flat, layout, "reduce_scatter"):
            if piece := talk.piece(self.ranks.rank):
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
        """Return the payload bytes over all ranks; a reduce-scatter sends every rank's row, padded to the longest."""
        world = self.ranks.world
        summed = gathered = 0
        rows: defaultdict[int, list[int]] = defaultdict(lambda: [0] * world)  # by size of an element
        for pieces in layout.parameters.values():
            parameter = whole(pieces)
            cost = self.codec.of(parameter, "scatter").round_cost(parameter.form, self.codec.method_step)
            summed, gathered = summed + cost.summed, gathered + cost.gathered
            for piece in pieces:
                rows[cost.rows // parameter.numel][piece.row] += piece.numel
        by_row = sum(
            total_bytes(kind, size * (sum(numels) if kind == "all_reduce" else world * max(numels)), world)
            for size, numels in rows.items()
        )
        return by_row + total_bytes("all_reduce", summed, world) + total_bytes("all_gather", world * gathered, world)

    def _means(self, flat: Tensor, layout: Layout, kind: Kind) -> list[tuple[Talk, Tensor]]:
        """Return every parameter's mean as a vector: whole, or this rank's part if its compressor reduces by rows."""
        with self.ranks.meter.span("encode", "codec", device=flat.device):
            talks = [self._begun(flat, pieces) for pieces in layout.parameters.values()]
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
                        self._update(talks[i], sent.reshape(-1))
        return [(talk, means[i]) for i, talk in enumerate(talks)]

    def _begun(self, flat: Tensor, pieces: tuple[Piece, ...]) -> Talk:
        """Start a parameter's rounds, with its residual added."""
        codec, parameter, feedback = self.codec, whole(pieces), None
        compressor = codec.of(parameter, "scatter")
        values = torch.cat([flat[piece.place] for piece in pieces]).to(torch.float32)
        if codec.options.feedback is not None and compressor is not FLOAT32:
            feedback = codec.feedback(parameter, "scatter", flat.device)
            values = feedback.compensate(values)
        bad = compressor.not_representable(values).to(torch.uint8).view(1)
        codec.note(bad)
        codec.count(compressor, parameter.form)
        state = codec.state(parameter.name, parameter.form) if compressor is codec.schedule.at(codec.step) else {}
        context = Context(parameter.name, parameter.form, codec.step, self.ranks.world, codec.seed)
        return Talk(pieces, compressor.rounds(values.view(parameter.form), state, context), bad, feedback)

    def _update(self, talk: Talk, sent: Tensor) -> None:
        """Keep what of a compensated parameter was not sent."""
        if talk.feedback is not None:
            bad = talk.bad | FLOAT32.not_representable(sent)  # what PowerSGD sends depends on the other ranks too
            talk.feedback.update(sent)
            talk.feedback.drop(where=bad)
            self.codec.note_dropped(bad)

    def _answers(self, talks: Sequence[Talk], asks: dict[int, Ask], kind: Kind) -> dict[int, Tensor]:
        """Return the answers to the parameters' requests, with one collective per operation and dtype."""
        groups: defaultdict[tuple[str, torch.dtype, bool], list[int]] = defaultdict(list)
        for i, ask in asks.items():
            groups[ask.op, ask.tensor.dtype, ask.rows and kind == "reduce_scatter"].append(i)
        answers: dict[int, Tensor] = {}
        for (op, _, by_row), members in groups.items():
            tensors = [asks[i].tensor for i in members]
            received = self._sum_rows([talks[i] for i in members], tensors) if by_row else self._fused(op, tensors)
            answers.update(zip(members, received, strict=True))
        return answers

    def _fused(self, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce tensors in one collective; or gather them, each to [world, ...]."""
        group, world, _, meter = self.ranks
        fused = torch.cat([tensor.reshape(-1) for tensor in tensors])
        leading: tuple[int, ...] = ()
        if op == "gather":
            fused, leading = ops.all_gather(fused, group, "payload", meter), (world,)
        else:
            ops.all_reduce(fused, op, group, "payload", meter)
        answers = fused.split([tensor.numel() for tensor in tensors], dim=-1)
        return [answer.reshape(*leading, *tensor.shape) for answer, tensor in zip(answers, tensors, strict=True)]

    def _sum_rows(self, talks: Sequence[Talk], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reduce-scatter tensors in one collective, padded to the longest row; return this rank's parts as vectors."""
        group, world, rank, meter = self.ranks
        numels = [[piece.numel if (piece := talk.piece(row)) else 0 for talk in talks] for row in range(world)]
        longest = max(map(sum, numels))
        buffer = torch.zeros((world, longest), dtype=tensors[0].dtype, device=tensors[0].device)
        for row in range(world):
            parts = [
                tensor.reshape(-1)[piece.source]
                for talk, tensor in zip(talks, tensors, strict=True)
                if (piece := talk.piece(row))
            ]
            buffer[row, : sum(numels[row])] = torch.cat([buffer[row, :0], *parts])
        lacking = sum(longest - sum(row) for index, row in enumerate(numels) if index != rank)
        self.codec.counts["padding"] += lacking * buffer.element_size()
        received = ops.reduce_scatter(buffer, group, "payload", meter)
        return list(received[: sum(numels[rank])].split(numels[rank]))


ALGORITHMS: dict[str, type[Algorithm]] = {"exchange": Exchange, "gather": Gather, "native": Native}


def whole(pieces: tuple[Piece, ...]) -> Piece:
    """Join a parameter's pieces into one."""
    return pieces[0]._replace(numel=sum(piece.numel for piece in pieces), at=0)


def gather_rows(
    message: Tensor, lengths: Sequence[Sequence[int]], plan: Plan, ranks: Ranks, purpose: str = "payload"
) -> tuple[Tensor, list[list[int]]]:
    """Send the encodings of this rank's row to all ranks, and receive those of all rows.

    Args:
        message: The encodings: uint8 vector.
        lengths: Their bytes, as one row.
        plan: The plan of the buffer.
        ranks: The participating ranks.
        purpose: The purpose that the bytes are counted for.

    Returns:
        The encodings of the whole buffer: uint8 vector; and the bytes of each, as one message.
    """
    sizes, copies = plan.whole.sizes, torch.cat([message] * ranks.world)
    known = [*plan.rows[ranks.rank].sizes] * ranks.world
    incoming, by_row = exchange(copies, [*lengths] * ranks.world, known, sizes, ranks, purpose, bulk=bulk(sizes))
    return incoming, joined(by_row)


def joined(rows: Iterable[Iterable[T]]) -> list[list[T]]:
    """Return the entries of all rows as the only row."""
    return [[entry for row in rows for entry in row]]


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
    """Return whether messages between two ranks are large on average; all ranks know all sizes, so they agree."""
    return sum(size or 0 for row in sizes for size in row) > len(sizes) * ops.CHUNK
