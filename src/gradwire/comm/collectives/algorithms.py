"""Algorithms that average a flat gradient buffer over the ranks: `Exchange`, `Gather` and `Native`.

Encodings travel in one message per pair of ranks (`exchange`). Both sides know an encoding's size in advance, unless it
depends on the data; only such sizes are sent, before the data. A mean is a `Task`: a generator that yields collectives,
and goes on with their results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradwire.comm.closed_forms import FLOAT32_BYTES, rank_bytes, share, total_bytes
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.codec import Codec, Feedback, counted, is_exact
from gradwire.comm.collectives.layout import Kind, Layout, Run, Shard, whole
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.plan import FLOAT32, Plan, Sizes
from gradwire.comm.collectives.queue import Request, Task
from gradwire.comm.collectives.state import Phase
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State

T = TypeVar("T")
Lengths: TypeAlias = Sequence[Sequence[Any]]  # bytes of encodings, by message; all of them are known
Fused: TypeAlias = tuple[Request, Callable[[Tensor], list[Tensor]]]  # a collective of several tensors, and their parts


class Ranks(NamedTuple):
    """A process group from the view of one rank.

    Attributes:
        world: Number of ranks.
        rank: This rank.
        meter: Counts the bytes of the reduction.
    """

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
    def mean_of_row(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Return this rank's row of the mean: float32 [row_numel]; padding is 0."""

    @abstractmethod
    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Return the mean, bit-equal on all ranks: float32 [numel]; padding is 0."""

    @abstractmethod
    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return this rank's payload bytes of one call at the present step; None if they depend on the data.

        Over all ranks the sum is exact. Where three or more ranks sum several tensors, a rank's share may be some
        bytes more or less, as each collective rounds it.
        """

    @abstractmethod
    def closed_total(self, layout: Layout, kind: Kind) -> int | None:
        """Return the sum of `closed_form` over all ranks, without each rank's."""


class Exchange(Algorithm):
    """Sends each row's encodings to the row's owner, which decodes, sums in float32 and divides once.

    An all-reduce then sends each owner's means to all ranks, encoded again or as float32. Works with every compressor.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Encode all rows and send them to their owners; decode and average this rank's row."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "scatter", ranks.rank)
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, plan.whole, "scatter", lambda row: int(row != ranks.rank))
        sizes, mine = plan.whole.sizes, plan.row.sizes.times(ranks.world)
        incoming, lengths = yield from exchange(
            message, lengths, sizes, mine, ranks.meter, parts=parts_of(sizes, flat.device)
        )
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            plan.row.decode(incoming, ranks.world, lengths, mean, "zero")  # summed in rank order
            return mean.div_(ranks.world)

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Reduce-scatter, then gather the means; all ranks use the decoded values, the owner too."""
        codec, ranks = self.codec, self.ranks
        plan = codec.plan(layout, "gather", ranks.rank)  # of this step: the rows may be there in a later one
        mean = yield from self.mean_of_row(flat, layout)
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(mean, plan.row, "gather", lambda _: ranks.world - 1)
        incoming, lengths = yield from gather_rows(message, lengths, plan, ranks)
        with ranks.meter.span("decode", "codec", device=flat.device):
            full = layout.empty(mean.device)
            plan.whole.decode(incoming, 1, lengths, full, "blank")
            return full

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the bytes of the other ranks' rows, and for an all-reduce of its own row to each of them."""
        sizes = [plan.whole.sizes for plan in self._plans(layout, kind)]
        if not all(of_plan.fixed for of_plan in sizes):
            return None
        scattered, *means = (of_plan.known for of_plan in sizes)
        mine = self.ranks.rank
        return sum(scattered) - scattered[mine] + sum((self.ranks.world - 1) * gathered[mine] for gathered in means)

    def closed_total(self, layout: Layout, kind: Kind) -> int | None:
        """Return the bytes of all rows, from and to each of the other ranks."""
        totals = [plan.whole.sizes.total for plan in self._plans(layout, kind)]
        known = [total for total in totals if total is not None]
        return (self.ranks.world - 1) * sum(known) if len(known) == len(totals) else None

    def _plans(self, layout: Layout, kind: Kind) -> list[Plan]:
        """Return the plans of the encodings that travel."""
        phases: tuple[Phase, ...] = ("scatter", "gather") if kind == "all_reduce" else ("scatter",)
        return [self.codec.plan(layout, phase, self.ranks.rank) for phase in phases]


class Gather(Algorithm):
    """Sends all ranks every encoding of the whole buffer, which they decode and average.

    One encoding and one collective instead of two, for ``world / 2`` times the bytes: useful with two ranks, and for
    models so small that latency dominates. Meant for all-reduces; a reduce-scatter discards all rows but this rank's.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """All-reduce, and return this rank's row."""
        mean = yield from self.mean_everywhere(flat, layout)
        return layout.in_rows(mean)[self.ranks.rank].clone()

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Encode everything, gather, decode and average, summed in rank order."""
        codec, ranks = self.codec, self.ranks
        table = codec.plan(layout, "scatter", ranks.rank).undivided
        with ranks.meter.span("encode", "codec", device=flat.device):
            message, lengths = codec.encode(flat, table, "scatter", lambda _: ranks.world - 1)
        if not table.sizes.fixed:
            sizes = Sizes.of(joined(table.sizes.encodings)).times(ranks.world)
            incoming, lengths = yield from exchange(
                torch.cat([message] * ranks.world), joined(lengths) * ranks.world, sizes, sizes, ranks.meter
            )
        else:
            [incoming] = yield [partial(ops.begin_all_gather, message, purpose="payload", meter=ranks.meter)]
        with ranks.meter.span("decode", "codec", device=flat.device):
            mean = layout.empty(flat.device)
            table.decode(incoming.view(-1), ranks.world, lengths, mean, "zero")
            return mean.div_(ranks.world)

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return the bytes of this rank's encodings to each of the others."""
        total = self.codec.plan(layout, "scatter", self.ranks.rank).undivided.sizes.total
        return None if total is None else (self.ranks.world - 1) * total

    def closed_total(self, layout: Layout, kind: Kind) -> int | None:
        """Return the bytes of every rank, which are equal."""
        alone = self.closed_form(layout, kind)
        return None if alone is None else self.ranks.world * alone


class Group(NamedTuple):
    """Parameters that a compressor's rounds take at once.

    Attributes:
        compressor: The compressor.
        parameters: The parameters, each as one shard.
        form: The shape of x: a parameter's; [parameters, n, m] of stacked matrices; a vector of joined parameters.
        runs: The buffer's elements, in the order of x.
        rows: The position in x of each row's elements, which follow each other where rows are apart.
        feedback: Whether what is not sent is kept.
        joined: Whether x is a vector of several parameters, whose rounds keep nothing.
    """

    compressor: Compressor
    parameters: tuple[Shard, ...]
    form: tuple[int, ...]
    runs: tuple[Run, ...]
    rows: tuple[slice, ...]
    feedback: bool
    joined: bool

    @classmethod
    def of(
        cls,
        compressor: Compressor,
        parameters: Sequence[tuple[Shard, ...]],
        layout: Layout,
        feedback: bool,
        joined: bool,
    ) -> Group:
        """Put the shards of parameters one after the other; those of joined ones in the buffer's order."""
        shards = [shard for parameter in parameters for shard in parameter]
        if joined:
            shards.sort(key=lambda shard: shard.start)
        numels = [0] * layout.world
        for shard in shards:
            numels[shard.row] += shard.numel
        ends = [*accumulate(numels)]
        rows = tuple(slice(end - numel, end) for end, numel in zip(ends, numels, strict=True))
        wholes = tuple(map(whole, parameters))
        alone = wholes[0].form if len(wholes) == 1 else (len(wholes), *wholes[0].form)
        form = (ends[-1],) if joined else alone
        return cls(compressor, wholes, form, Run.merged(shards, layout.by_row), rows, feedback, joined)

    @property
    def counts(self) -> Counter[str]:
        """The counts that its parameters add in each step."""
        total = Counter[str]()
        for parameter in self.parameters:
            total.update(counted(self.compressor, parameter.form))
        return total

    @property
    def places(self) -> list[slice]:
        """The position of each parameter in x, as a vector."""
        ends = [*accumulate(parameter.numel for parameter in self.parameters)]
        return [slice(end - parameter.numel, end) for parameter, end in zip(self.parameters, ends, strict=True)]

    def is_buffer(self, numel: int) -> bool:
        """Whether x has all of a buffer's elements, in its order; stacked matrices have another one."""
        return math.prod(self.form) == numel and all(
            run.first == run.start and run.step == run.stride for run in self.runs
        )

    def taken(self, flat: Tensor) -> Tensor:
        """Return x, float32 [parameters, numel], of joined parameters [1, numel]; it may share the buffer's memory."""
        if len(self.runs) == 1:
            values = self.runs[0].in_buffer(flat).reshape(-1).to(torch.float32)
        else:
            values = torch.empty(math.prod(self.form), dtype=torch.float32, device=flat.device)
            for run in self.runs:
                run.in_vector(values).copy_(run.in_buffer(flat))
        return values.view(1 if self.joined else len(self.parameters), -1)


class Rows(NamedTuple):
    """Some rows, one after the other, that have as many elements of each group.

    Attributes:
        first: The first one.
        number: Their number.
        starts: Where the first one begins in each group's x.
        numels: Elements of each group in a row.
    """

    first: int
    number: int
    starts: tuple[int, ...]
    numels: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> list[Rows]:
        """Return all rows."""
        alike: list[Rows] = []
        for row, places in enumerate(zip(*(group.rows for group in groups), strict=True)):
            numels = tuple(place.stop - place.start for place in places)
            if alike and alike[-1].numels == numels:
                alike[-1] = alike[-1]._replace(number=alike[-1].number + 1)
            else:
                alike.append(cls(row, 1, tuple(place.start for place in places), numels))
        return alike


class RoundState(NamedTuple):
    """The state of a group's rounds.

    Attributes:
        group: The group.
        rounds: The compressor's generator.
        x: This rank's values, with residuals added, in the place of those: float32 [parameters, numel].
        bad: Whether a parameter's gradient is not finite: uint8 [parameters].
        feedback: The parameters' error feedback; None without it.
        residual: Their residuals, as x.
        states: The compressor's state of each parameter.
        state: The same, stacked.
    """

    group: Group
    rounds: Rounds
    x: Tensor
    bad: Tensor
    feedback: Feedback | None
    residual: Tensor | None
    states: list[State]
    state: State


class Native(Algorithm):
    """Runs a compressor's `rounds` with reducing collectives, fused over the parameters of a buffer.

    All parameters advance together; their requests of one round with the same operation and dtype share a collective.
    """

    def mean_of_row(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Return this rank's row; if a compressor reduces by rows, only that part is summed."""
        means = yield from self._means(flat, layout, "reduce_scatter")
        out = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
        rank = self.ranks.rank
        for group, mean in means:
            mine = group.rows[rank]
            first = mine.start if mean.numel() == mine.stop - mine.start else 0  # that part, or all
            for run in group.runs:
                if run.row <= rank < run.row + run.pieces:
                    piece = rank - run.row
                    start = run.start + piece * run.stride - rank * layout.row_numel
                    of_mean = run.first + piece * run.step - first
                    out[start : start + run.numel] = mean[of_mean : of_mean + run.numel]
        return out

    def mean_everywhere(self, flat: Tensor, layout: Layout) -> Task[Tensor]:
        """Return the whole buffer."""
        means = yield from self._means(flat, layout, "all_reduce")
        if len(means) == 1 and means[0][0].is_buffer(layout.numel):
            return means[0][1]
        out = layout.empty(flat.device)
        for group, mean in means:
            for run in group.runs:
                run.in_buffer(out).copy_(run.in_vector(mean))
        return out

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return this rank's share of the sums; a reduce-scatter sends the others' rows, padded to the longest."""
        summed, others = self._closed(layout, kind)
        return self._all_reduced(summed) + (self.ranks.world - 1) * others

    def closed_total(self, layout: Layout, kind: Kind) -> int | None:
        """Return the bytes of the sums, and of each rank to the others."""
        (summed, others), world = self._closed(layout, kind), self.ranks.world
        return total_bytes("all_reduce", summed, world) + total_bytes("all_gather", world * others, world)

    def _closed(self, layout: Layout, kind: Kind) -> tuple[int, int]:
        """Return the bytes that are all-reduced, and those that a rank sends to each of the others."""
        step = self.codec.method_step
        costs = tuple(self.codec.of(alone, "scatter").round_cost(alone.form, step) for alone in layout.wholes)
        rows = self._plan(layout).derive(("closed", kind, costs), lambda: self._row_bytes(layout, kind, costs))
        gathered = sum(cost.gathered for cost in costs)
        summed = sum(cost.summed for cost in costs)
        return (summed + rows, gathered) if kind == "all_reduce" else (summed, gathered + rows)

    def _row_bytes(self, layout: Layout, kind: Kind, costs: Sequence[RoundCost]) -> int:
        """Return the bytes of what is reduced by rows: of all rows, or for a reduce-scatter of the longest."""
        rows: defaultdict[int, list[int]] = defaultdict(lambda: [0] * self.ranks.world)  # by size of an element
        for cost, parameter, shards in zip(costs, layout.wholes, layout.parameters.values(), strict=True):
            for shard in shards:
                rows[cost.rows // parameter.numel][shard.row] += shard.numel
        return sum(size * (sum if kind == "all_reduce" else max)(numels) for size, numels in rows.items())

    def _plan(self, layout: Layout) -> Plan:
        """Return the plan, which keeps what is derived from it."""
        return self.codec.plan(layout, "scatter", self.ranks.rank)

    def _all_reduced(self, nbytes: int) -> int:
        """Return the bytes that this rank sends in an all-reduce of so many."""
        world, rank = self.ranks.world, self.ranks.rank
        return rank_bytes("all_reduce", nbytes, share(nbytes, world, rank), world)

    def _exact(self, layout: Layout, kind: Kind) -> int:
        """Return the bytes that this rank sends as float32 values, padding apart."""
        rows = [0] * self.ranks.world
        for shards in layout.parameters.values():
            parameter = whole(shards)
            if is_exact(self.codec.of(parameter, "scatter"), parameter.form):
                for shard in shards:
                    rows[shard.row] += FLOAT32_BYTES * shard.numel
        return self._all_reduced(sum(rows)) if kind == "all_reduce" else sum(rows) - rows[self.ranks.rank]

    def _groups(self, layout: Layout) -> list[Group]:
        """Return what rounds take at once: joined or stacked parameters, or one."""
        together: defaultdict[tuple[Any, ...], list[tuple[Shard, ...]]] = defaultdict(list)
        for shards in layout.parameters.values():
            parameter = whole(shards)
            compressor, form = self.codec.of(parameter, "scatter"), parameter.form
            feedback = self.codec.options.feedback is not None and compressor.compresses(form)
            feedback = feedback and compressor is not FLOAT32
            joined = compressor.elementwise(form) and not feedback
            alike = None if joined else form if compressor.stacks(form) else parameter.name
            together[compressor, feedback, joined, alike].append(shards)
        return [
            Group.of(compressor, parameters, layout, feedback, joined)
            for (compressor, feedback, joined, _), parameters in together.items()
        ]

    def _means(self, flat: Tensor, layout: Layout, kind: Kind) -> Task[list[tuple[Group, Tensor]]]:
        """Return every group's mean as a vector: whole, or this rank's part if its compressor reduces by rows."""
        if not layout.shards:
            return []
        kept = self._plan(layout)
        self.codec.counts["exact"] += kept.derive(("exact", kind), lambda: self._exact(layout, kind))
        with self.ranks.meter.span("encode", "codec", device=flat.device):
            groups = kept.derive("groups", lambda: self._groups(layout))
            reductions = [self._begun(flat, group, kept, i) for i, group in enumerate(groups)]
            waiting = {i: next(reduction.rounds) for i, reduction in enumerate(reductions)}
        means: dict[int, Tensor] = {}
        while waiting:
            answers = yield from self._answers(reductions, waiting, kind, kept)
            waiting = {}
            with self.ranks.meter.span("encode", "codec", device=flat.device):
                for i, answer in answers.items():
                    try:
                        waiting[i] = reductions[i].rounds.send(answer)
                    except StopIteration as stop:
                        mean, sent = stop.value
                        means[i] = mean.reshape(-1)
                        self._update(reductions[i], sent)
        return [(reduction.group, means[i]) for i, reduction in enumerate(reductions)]

    def _begun(self, flat: Tensor, group: Group, kept: Plan, number: int) -> RoundState:
        """Start a group's rounds, with residuals added."""
        codec, compressor, parameters = self.codec, group.compressor, group.parameters
        feedback, residual = None, None
        if group.feedback:
            earlier: dict[str, Any] = kept.derive(("feedback", number, flat.device), dict)
            feedback = codec.feedback(earlier, lambda: parameters, lambda: group.places, "scatter", flat.device)
            residual = feedback.open().view(len(parameters), -1)
            for run in group.runs:
                run.in_vector(residual.view(-1)).add_(run.in_buffer(flat))  # until `_update` puts the new ones there
        x = group.taken(flat) if residual is None else residual
        bad = compressor.rows_not_representable(x).to(torch.uint8)
        codec.note(bad.amax(0, keepdim=True))
        codec.counts.update(kept.derive(("counts", number), lambda: group.counts))
        states = list[State]()
        if compressor is codec.schedule.at(codec.step):
            for parameter in parameters:
                codec.meet(parameter.name, "scatter")
            if not group.joined:
                states = [codec.state(parameter.name, parameter.form) for parameter in parameters]
        state = states[0] if len(states) == 1 else stacked(states)
        context = Context(
            parameters[0].name, parameters[0].form, codec.step, self.ranks.world, codec.seed, group.feedback
        )
        rounds = compressor.rounds(x.view(group.form), state, context)
        return RoundState(group, rounds, x, bad, feedback, residual, states, state)

    def _update(self, reduction: RoundState, sent: Tensor) -> None:
        """Keep the compressor's state, and what of compensated parameters was not sent."""
        if len(reduction.states) > 1:
            for key, values in reduction.state.items():
                for state, part in zip(reduction.states, values, strict=True):
                    state[key] = part
        if reduction.feedback is None or reduction.residual is None:
            return
        sent = sent.reshape(reduction.x.shape)
        bad = reduction.bad | FLOAT32.rows_not_representable(sent)  # what PowerSGD sends depends on the other ranks too
        reduction.residual.sub_(sent)
        if bad.device.type != "cpu" or bad.any():  # a pass over all values; on a GPU asking would wait
            reduction.residual.masked_fill_(bad.to(torch.bool)[:, None], 0)
        reduction.feedback.close(reduction.residual.view(-1), bad.to(torch.uint8))
        self.codec.note_dropped(bad.sum(0, keepdim=True))

    def _answers(
        self, reductions: Sequence[RoundState], requests: dict[int, ReduceRequest], kind: Kind, kept: Plan
    ) -> Task[dict[int, Tensor]]:
        """Return the answers to the groups' requests, with one collective per operation and dtype."""
        together: defaultdict[tuple[str, torch.dtype, bool], list[int]] = defaultdict(list)
        for i, request in requests.items():
            together[request.op, request.tensor.dtype, request.rows and kind == "reduce_scatter"].append(i)
        fused = []
        for (op, _, by_row), members in together.items():
            tensors = [requests[i].tensor for i in members]
            if by_row:
                groups = [reductions[i].group for i in members]
                alike = kept.derive(("rows", *members), partial(Rows.of, groups))
                fused.append(self._sum_rows(alike, tensors))
            else:
                fused.append(self._fused(op, tensors, spare=requests[members[0]].spare))
        results = yield [request for request, _ in fused]
        answers: dict[int, Tensor] = {}
        for members, (_, parts_of), result in zip(together.values(), fused, results, strict=True):
            answers.update(zip(members, parts_of(result), strict=True))
        return answers

    def _fused(self, op: str, tensors: Sequence[Tensor], spare: bool) -> Fused:
        """Reduce tensors in one collective; or gather them, each to [world, ...]."""
        alone = spare and len(tensors) == 1  # may be reduced in place
        vector = tensors[0].view(-1) if alone else torch.cat([tensor.reshape(-1) for tensor in tensors])
        shapes = [tensor.shape for tensor in tensors]

        def parts_of(result: Tensor) -> list[Tensor]:
            parts = result.split([shape.numel() for shape in shapes], dim=-1)
            return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

        counted: dict[str, Any] = {"purpose": "payload", "meter": self.ranks.meter}
        if op == "gather":
            return partial(ops.begin_all_gather, vector, **counted), parts_of
        return partial(ops.begin_all_reduce, vector, op, **counted), parts_of

    def _sum_rows(self, alike: Sequence[Rows], tensors: Sequence[Tensor]) -> Fused:
        """Reduce-scatter tensors in one collective, padded to the longest row, to this rank's parts as vectors."""
        world, rank = self.ranks.world, self.ranks.rank
        longest = max(sum(rows.numels) for rows in alike)
        buffer = torch.zeros((world, longest), dtype=tensors[0].dtype, device=tensors[0].device)
        for rows in alike:
            column = 0
            for start, numel, tensor in zip(rows.starts, rows.numels, tensors, strict=True):
                part = tensor.reshape(-1)[start : start + rows.number * numel]
                buffer[rows.first : rows.first + rows.number, column : column + numel] = part.view(rows.number, numel)
                column += numel
        mine = next(rows.numels for rows in alike if rows.first <= rank < rows.first + rows.number)
        padding = sum(rows.number * (longest - sum(rows.numels)) for rows in alike) - (longest - sum(mine))
        self.codec.counts["padding"] += padding * buffer.element_size()
        request = partial(ops.begin_reduce_scatter, buffer, purpose="payload", meter=self.ranks.meter)
        return request, lambda result: list(result[: sum(mine)].split(mine))


ALGORITHMS: dict[str, type[Algorithm]] = {"exchange": Exchange, "gather": Gather, "native": Native}


def stacked(states: Sequence[State]) -> State:
    """Stack the states of several parameters, which have the same keys."""
    keys = states[0] if states else ()
    return {key: torch.stack([state[key] for state in states]) for key in keys}


def gather_rows(
    message: Tensor, lengths: Lengths, plan: Plan, ranks: Ranks, purpose: str = "payload"
) -> Task[tuple[Tensor, Lengths]]:
    """Send the encodings of this rank's row to all ranks, and receive those of all rows.

    Args:
        message: The encodings: uint8 vector.
        lengths: Their bytes, as one row.
        plan: The plan of the buffer.
        ranks: The participating ranks.
        purpose: The purpose that the bytes are counted for.

    Returns:
        The encodings of the whole buffer: uint8 vector; and the bytes of each, by row.
    """
    sizes, copies = plan.whole.sizes, torch.cat([message] * ranks.world)
    known, parts = plan.row.sizes.times(ranks.world), parts_of(sizes, message.device)
    every = [*lengths] * ranks.world
    return (yield from exchange(copies, every, known, sizes, ranks.meter, purpose, parts=parts))


def joined(rows: Iterable[Iterable[T]]) -> list[list[T]]:
    """Return the entries of all rows as the only row."""
    return [[entry for row in rows for entry in row]]


def exchange(
    message: Tensor,
    lengths: Lengths,
    sizes_out: Sizes,
    sizes_in: Sizes,
    meter: Meter,
    purpose: str = "payload",
    parts: int = 1,
) -> Task[tuple[Tensor, Lengths]]:
    """Send each rank its encodings and receive those from each rank.

    All ranks must agree on whether sizes are sent, so the two tables together cover every encoding of the exchange.

    Args:
        message: The encodings for each rank, in rank order: uint8 vector.
        lengths: For each rank, the bytes of its encodings.
        sizes_out: The same as the receivers know them.
        sizes_in: The sizes of incoming encodings, as this rank knows them.
        meter: The meter that counts the bytes.
        purpose: The purpose that they are counted for.
        parts: Messages per pair of ranks; see `ops.begin_all_to_all`.

    Returns:
        The encodings from each rank, in rank order: uint8 vector; and for each rank, the bytes of its encodings.
    """
    counted: dict[str, Any] = {"purpose": purpose, "meter": meter}
    incoming, totals_out, totals_in = sizes_in.encodings, sizes_out.known, sizes_in.known
    if not (sizes_out.fixed and sizes_in.fixed):
        incoming = yield from swap_sizes(lengths, sizes_out, sizes_in, message.device, counted)
        totals_out, totals_in = ([sum(of_rank) for of_rank in known] for known in (lengths, incoming))
    [received] = yield [partial(ops.begin_all_to_all, message, totals_out, totals_in, parts=parts, **counted)]
    return received, incoming


def swap_sizes(
    lengths: Lengths, sizes_out: Sizes, sizes_in: Sizes, device: torch.device, counted: dict[str, Any]
) -> Task[list[list[int]]]:
    """Send the lengths that the receivers do not know (int64 each), and return those of all incoming encodings."""
    unknown_out = [
        [length for length, size in zip(of_rank, sizes, strict=True) if size is None]
        for of_rank, sizes in zip(lengths, sizes_out.encodings, strict=True)
    ]
    table = torch.tensor([length for row in unknown_out for length in row], dtype=torch.int64, device=device)
    bytes_out = [8 * len(row) for row in unknown_out]
    bytes_in = [8 * sum(size is None for size in row) for row in sizes_in.encodings]
    [received] = yield [partial(ops.begin_all_to_all, table.view(torch.uint8), bytes_out, bytes_in, **counted)]
    arrived = iter(received.view(torch.int64).tolist())
    return [[next(arrived) if size is None else size for size in row] for row in sizes_in.encodings]


def parts_of(sizes: Sizes, device: torch.device) -> int:
    """Return the messages between two ranks, by the mean of their sizes; all ranks know all of these, so they agree."""
    return ops.parts_of(sum(sizes.known) // len(sizes.known), device)
