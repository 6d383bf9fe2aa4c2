"""The mean of a gradient over the ranks, through a compressor.

A reduce-scatter leaves each rank its row of the mean, an all-reduce leaves all of it everywhere. A codec sees one shard
of one parameter at a time, so the result depends on the model and on the number of ranks, not on how a framework groups
its parameters.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault, unknown
from gradwire.comm.closed_forms import FLOAT32_BYTES, rank_bytes
from gradwire.comm.collectives import ops, state
from gradwire.comm.collectives.agreement import LEFT_OUT, NONFINITE, UNREDUCED, Agreement, StepCheck, check_reduced
from gradwire.comm.collectives.algorithms import ALGORITHMS, Algorithm, Ranks
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.layout import Kind, Layout
from gradwire.comm.collectives.meter import METER, Meter, Tally, Traffic
from gradwire.comm.collectives.plan import FLOAT32
from gradwire.comm.collectives.queue import Handle, ReductionQueue, Task, build_queue, connect
from gradwire.comm.collectives.world import check_initialized
from gradwire.comm.compressors import as_compressor
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.driver import compile_kernels
from gradwire.comm.reduction import ReducerOptions, Schedule

Given: TypeAlias = Compressor | str | Mapping[str, Any]
Then: TypeAlias = Callable[[Tensor], object]  # what to do with a mean
F = TypeVar("F", bound=Callable[..., Any])
FREE = ("overlap", "nonfinite")  # options that a resumed run may change
LATE = 2**31  # a step after all that differs in the first ones
SMALL = 2**16  # bytes: up to here a collective's latency weighs more than what it carries


def check_options(
    compressor: Given, group: ops.Group = None, *, seed: int = 0, **options: Any
) -> tuple[Schedule, ReducerOptions]:
    """Check the arguments of a `Reducer` that is built later; this needs no process group.

    Returns:
        The compressor of each step, and the options.

    Raises:
        BadInput: If one is unknown, has a value that it does not take, or does not go with the compressor.
    """
    checked = ReducerOptions.of(**options)
    schedule = Schedule(as_compressor(compressor), checked.schedule)
    if checked.algorithm == "native":
        if not all(used.has_rounds for used in schedule.plateaus):
            raise BadInput(
                f"algorithm native needs a compressor that collectives can sum, and {schedule.at(0).name} with these "
                f"options is not; take exchange or gather."
            )
        if checked.granularity == "row":
            raise BadInput("algorithm native sums parameters and cannot encode rows (granularity row): use exchange.")
    return schedule, checked


def takes_options(function: F) -> F:
    """Show the fields of `ReducerOptions` in a function's signature, in the place of its ``**options``."""
    signature = inspect.signature(function)
    named = [keyword for keyword in signature.parameters.values() if keyword.kind is not keyword.VAR_KEYWORD]
    options = inspect.signature(ReducerOptions).parameters.values()
    function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


class Reduced(NamedTuple):
    """The input and output of a reduction on one rank.

    Attributes:
        kind: ``reduce_scatter`` or ``all_reduce``.
        flat: This rank's gradients: a buffer of the layout.
        layout: The layout of ``flat``.
        mean: The delivered mean: float32 [row_numel], or a buffer of the layout for an all-reduce.
    """

    kind: Kind
    flat: Tensor
    layout: Layout
    mean: Tensor


class StepEnd(NamedTuple):
    """The end of an optimizer step, while the ranks agree on what they met in it.

    Attributes:
        reducer: The reducer.
        step: Optimizer steps finished.
        agreement: The agreement; None with one rank.
    """

    reducer: Reducer
    step: int
    agreement: Agreement | None

    @property
    def at_once(self) -> bool:
        """Whether the caller should wait before it uses its gradients: some were not reduced, or left out."""
        return self.agreement is not None and bool(self.agreement.unreduced or self.agreement.left_out)

    def wait(self) -> bool:
        """Return whether the caller takes the optimizer step, or raise, as `Reducer.finish`; the same on all ranks."""
        reducer, step, agreement = self
        if agreement is None:
            return True
        met, left_out = agreement.wait(), set[str]()
        if met == LEFT_OUT:
            left_out = agreement.left_out_by_all(set[str]().union(*(watch.names for watch in reducer._watches)))
        for watch in reducer._watches if left_out else ():
            watch.leave_out(left_out)
        for part in (reducer, *reducer.parts.values()):
            part.codec.give_back(left_out)  # what was kept of all other parameters has changed for good
        if met == UNREDUCED:
            raise RunFault(agreement.described(step), step=step - 1)
        if met < NONFINITE:
            return True
        reducer._tally.add(nonfinite_steps=1)
        if reducer.nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradient of optimizer step {step} holds NaN, infinity or a value too large for "
                f"{reducer.compressor.name} on at least one rank",
                step=step - 1,
            )
        return reducer.nonfinite == "propagate"


class Reducer:
    """Reduces flat gradient buffers; one per run and rank, and every rank makes the same calls in the same order.

    Reductions begin one after another in a queue (`comm.collectives.queue`): `begin_all_reduce` and
    `begin_reduce_scatter` add one, and the handle's `wait` returns its mean. At a world size of 1 the reducer is the
    identity: nothing is encoded, kept or counted.

    Args:
        compressor: The encoder of a shard: a compressor, its name, or a mapping of its ``method`` and options.
        group: The ranks; None is the default group.
        seed: Of the codecs' generators. Each parameter, phase and rank draws from a separate generator.
        draws: The number of this rank in their seeds; None is its number in ``group``. It counts data-parallel ranks:
            peers of tensor parallelism, which have layers in common that it does not split, must draw alike.
        options: The fields of `ReducerOptions`, such as ``error_feedback=True``.

    Attributes:
        everyone: The ranks that `finish` agrees over.
        topology: The ranks that a state belongs to.
        parts: Reducers over other ranks that end their steps with this one, by name; see `join`.

    Raises:
        BadInput: If an option is unknown, has a value that it does not take, or does not go with the compressor.
    """

    @takes_options
    def __init__(
        self, compressor: Given, group: ops.Group = None, *, seed: int = 0, draws: int | None = None, **options: Any
    ) -> None:
        check_initialized("a Reducer")
        schedule, checked = check_options(compressor, **options)
        self._given = {"compressor": as_compressor(compressor), "seed": seed, "draws": draws, **options}
        self.compressor = schedule.at(0)
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.everyone = group
        self.topology: int | str = self.world
        self.algorithm: str = checked.algorithm
        self.nonfinite = checked.nonfinite
        self.parts: dict[str, Reducer] = {}
        self._loss_scale = 1.0
        self._watches: list[StepCheck] = []
        self._claimed: set[str] = set()  # parameters whose residuals and states this reducer keeps
        self.meter = Meter(METER)
        kept_for = {**dict(checked), "compressor": schedule, "seed": seed}
        self._options = {name: repr(value) for name, value in kept_for.items() if name not in (*FREE, "schedule")}
        self._tally = Tally(self.meter)
        self.codec = Codec(
            schedule,
            checked,
            counts=self._tally.counts,
            seed=seed,
            rank=dist.get_rank(),
            draws=self.rank if draws is None else draws,
        )
        self._queue: ReductionQueue | None = None  # from the first reduction on
        self._kept: list[Reduced] | None = None  # of a `keeping` that has not ended

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copies and pickles: the arguments, the same ranks, and this rank's state.

        Raises:
            BadInput: If it is more than a `Reducer`, or the ranks cannot be pickled.
        """
        if type(self) is not Reducer:
            raise BadInput(f"{type(self).__name__} belongs to its ranks and cannot be copied: save its state_dict().")
        return copied, (
            self._given,
            ops.Shared(self.group),
            self.parts,
            self.loss_scale,
            self._claimed,
            self.state_dict(),
        )

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self.codec.step

    @property
    def alone(self) -> bool:
        """Whether there is no other rank, so that `finish` checks nothing."""
        return self.world == 1

    def prepare(self, kind: Kind, numel: int, device: torch.device | None = None) -> None:
        """Resolve ``auto``, once, connect the ranks and compile kernels; else the first reduction does so.

        If ranks then start different reducers first, as with threads, they deadlock.

        Args:
            kind: The collective that the strategy needs.
            numel: Elements of the whole model.
            device: Where the gradients are; all ranks call this together. None: they are not connected yet.
        """
        if self.algorithm == "auto":
            self.algorithm = chosen(self.codec.schedule, self.codec.options, kind, numel, self.world)
        if device is not None and self.world > 1:
            connect(self.group, device, self.codec.options.overlap)
            if device.type == "cpu" and self.algorithm != "native":
                compile_kernels(self.compressors)

    def join(self, name: str, part: Reducer) -> None:
        """Attach a reducer over another process group; `finish` of this reducer finishes it too.

        Its traffic and its state are included in this reducer's, its traffic also listed under ``name``. It draws with
        the number that this rank has here.
        """
        part.codec.draws = self.codec.draws
        self.parts[name] = part

    def over(self, group: ops.Group) -> Reducer | None:
        """Return this reducer, or its part, that averages over a group's ranks; None if none does, or for one rank."""
        if group is None or group.size() == 1:
            return None
        ranks = dist.get_process_group_ranks(group)
        for reducer in (self, *self.parts.values()):
            if dist.get_process_group_ranks(reducer.group or dist.group.WORLD) == ranks:
                return reducer
        return None

    @property
    def compressors(self) -> set[Compressor]:
        """All that it encodes with, in any step, and its parts: exempt parameters in float32, residuals by one too."""
        codecs = [reducer.codec for reducer in (self, *self.parts.values())]
        stores = {codec.options.feedback for codec in codecs} - {None, "float32"}
        methods = {method for codec in codecs for method in codec.schedule.plateaus}
        return {FLOAT32} | methods | {as_compressor(store) for store in stores if store is not None}

    @property
    def loss_scale(self) -> float:
        """The factor of the present step's loss, as of `torch.amp.GradScaler`; 1 at first. Set it before the backward.

        Gradients of the unscaled loss are encoded and kept, so it may change from step to step; the means that the
        framework gets back are scaled again.
        """
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        for part in self.parts.values():
            part.loss_scale = scale

    def claim(self, names: Collection[str]) -> None:
        """Reserve parameters for one model: what is kept for them must not serve another one.

        Raises:
            BadInput: If a model that this reducer was given before has a parameter of the same name.
        """
        if taken := self._claimed.intersection(names):
            raise BadInput(
                f"the reducer has averaged another model with the same parameters ({min(taken)}, …), and keeps "
                f"residuals and states by name: build a reducer for each model."
            )
        self._claimed |= {*names}

    def watch(self, watch: StepCheck) -> None:
        """Have `finish` check that all of a model was reduced; several parts of a model may be watched.

        Raises:
            BadInput: As `claim`.
        """
        self.claim(watch.names)
        for reducer in (self, *self.parts.values()):
            reducer._watches.append(watch)

    def layout(self, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
        """Return the layout in which an all-reduce takes parameters with the fewest copies; after `prepare`."""
        return (Layout.dim0 if self.algorithm == "exchange" else Layout.packed)(shapes, self.world)

    def apart(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether the mean of a parameter does not depend on what is reduced with it, down to the last bit.

        A sum over three or more ranks has an order that depends on an element's place, and matrices are multiplied
        together.

        Args:
            shapes: The parameters' shapes.
        """
        if self.codec.options.granularity == "row":
            return False
        return self.algorithm != "native" or (self.world == 2 and not self.mixes(shapes))

    def mixes(self, shapes: Iterable[tuple[int, ...]]) -> bool:
        """Whether a mean's elements depend on other elements, as in products of matrices, so that messages are small.

        Args:
            shapes: The parameters' shapes.
        """
        used = self.codec.schedule.plateaus
        return self.algorithm == "native" and not all(method.elementwise(shape) for method in used for shape in shapes)

    def reduce_scatter(self, flat: Tensor, layout: Layout | str) -> Tensor:
        """Return this rank's row of the mean over the ranks: `begin_reduce_scatter`, and wait."""
        return self.begin_reduce_scatter(flat, layout).wait()

    def all_reduce(self, flat: Tensor, layout: Layout | str) -> Tensor:
        """Return the mean over the ranks, bit-equal on all of them: `begin_all_reduce`, and wait."""
        return self.begin_all_reduce(flat, layout).wait()

    def begin_reduce_scatter(self, flat: Tensor, layout: Layout | str, then: Then | None = None) -> Handle:
        """Begin to reduce a buffer to this rank's row of the mean over the ranks.

        Args:
            flat: Vector of any float type, `layout.numel` elements; not to be changed before the reduction has
                finished.
            layout: The shards of ``flat``; a name represents one vector that is cut anywhere.
            then: Called with the mean, in the queue's stream, before ``wait`` returns.

        Returns:
            A handle; its ``wait`` returns float32 [row_numel], padding 0, or raises what the reduction raised.

        Raises:
            RunFault: If ``flat`` does not have that layout, or its rows do not follow each other.
            Exception: That of an earlier reduction.
        """
        return self._begin("reduce_scatter", flat, layout, then)

    def begin_all_reduce(self, flat: Tensor, layout: Layout | str, then: Then | None = None) -> Handle:
        """Begin to reduce a buffer to the mean over the ranks, bit-equal on all of them.

        Its handle's ``wait`` returns float32 of ``flat``'s shape; else as `begin_reduce_scatter`.
        """
        return self._begin("all_reduce", flat, layout, then)

    def synchronize(self) -> None:
        """Wait for all reductions that have begun, on the host or with the current CUDA stream; `finish` does.

        Raises:
            Exception: That of one of them.
        """
        for part in self.parts.values():
            part.synchronize()
        if self._queue is not None:
            self._queue.synchronize()

    def skip(self, layout: Layout) -> None:
        """Count a buffer that is not reduced in this step, in the place of `all_reduce`: raw bytes, and none sent."""
        if self.world > 1:
            self._count(layout, "all_reduce")

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Send as float32 what is reduced in this context, as in the first ``dense_steps``."""
        self.synchronize()
        self.codec.plain = True
        try:
            yield
            self.synchronize()
        finally:
            self.codec.plain = False

    @contextmanager
    def keeping(self) -> Iterator[list[Reduced]]:
        """Keep the input and the output of every reduction in this context, for the sampled gradient error.

        The buffers live as long as the list, and nobody may write into them.
        """
        self._kept = kept = list[Reduced]()
        try:
            yield kept
        finally:
            self._kept = None

    def finish(self, total: Tensor | None = None, *, wait: bool = True) -> bool:
        """End the optimizer step: advance `step` and agree over the ranks whether every value was finite.

        Call it once per optimizer step, after backward, on every rank.

        Args:
            total: A float32 vector of the caller's, such as its loss, that is summed over the ranks in place. It
                travels with the flag, since a small message costs its latency and nothing else.
            wait: Whether to wait for reductions that have begun. One that has not finished may still set the flag of a
                later step, and counts its bytes there.

        Returns:
            Whether the caller takes the optimizer step; always with one rank, where nothing is checked.

        Raises:
            BadInput: If ``total`` is no vector.
            NonFiniteGradient: On all ranks alike, under ``raise``.
            RunFault: If nothing was reduced in this step, or on any rank a parameter has a gradient that was not: the
                framework no longer calls the reducer for it. A step is not ended twice.
            Exception: That of a reduction.
        """
        return self.begin_finish(total, wait=wait).wait()

    def begin_finish(self, total: Tensor | None = None, *, wait: bool = True) -> StepEnd:
        """End the optimizer step, and begin to agree: `finish` without its wait for the other ranks.

        What it returns has to be waited for, by ``wait``, which does what `finish` does after it.
        """
        if total is not None and (not isinstance(total, Tensor) or total.ndim != 1):
            raise BadInput("finish() sums a vector over the ranks: give total as a tensor of one dimension.")
        if wait:
            self.synchronize()
        elif self._queue is not None:
            self._queue.go_on()
        unreduced = check_reduced(self._watches, self.step) if self.world > 1 else []
        self.codec.step += 1
        for part in self.parts.values():
            part.codec.step += 1
            if part.codec.flag is not None:
                self.codec.note(part.codec.flag)
                part.codec.flag.zero_()
        if self.alone:
            return StepEnd(self, self.step, None)
        left_out = set[str]().union(*(watch.left_out() for watch in self._watches))
        agreement = Agreement(self.everyone, self.meter, self.codec.flag, unreduced, left_out, total)
        return StepEnd(self, self.step, agreement)

    @property
    def traffic(self) -> Traffic:
        """This rank's traffic since the start, of reductions that have finished.

        In ``details`` also ``residuals_dropped``: shards whose residual was lost to a value that was not finite. The
        counts of each part are included, and its traffic is in ``details`` under its name.
        """
        totals = {**self._tally.totals(), "residuals_dropped": self.codec.residuals_dropped}
        parts = {name: part.traffic for name, part in self.parts.items()}
        for part in parts.values():
            totals = {name: _sum(value, (part | part.details)[name]) for name, value in totals.items()}
        return Traffic(totals, parts)

    @property
    def residual_norm(self) -> float | None:
        """Euclidean norm of this rank's residuals, those of all parts; None without error feedback."""
        norms = [reducer.codec.residual_norm for reducer in (self, *self.parts.values())]
        kept = [norm for norm in norms if norm is not None]
        return math.hypot(*kept) if kept else None

    @property
    def residual_bytes(self) -> int | None:
        """Memory of this rank's residuals, those of all parts; None without error feedback."""
        codecs = [reducer.codec for reducer in (self, *self.parts.values())]
        kept = [codec.residual_bytes for codec in codecs if codec.options.feedback]
        return sum(kept) if kept else None

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Return this rank's payload bytes of one call at the present step; as `Algorithm.closed_form`."""
        self.prepare(kind, sum(shard.numel for shard in layout.shards))
        return self._algorithm(self.meter).closed_form(layout, kind)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, in the form of `comm.collectives.state`; a run that resumes equals an unbroken one.

        Every rank has its own, for a file or for `torch.distributed.checkpoint`. Its tensors are not copies.
        """
        self.synchronize()
        parts = {"parts": {name: part.state_dict() for name, part in self.parts.items()}} if self.parts else {}
        kept = {"options": self._options, "algorithm": self.algorithm, **self.codec.state_dict(), **parts}
        return state.stored(self.codec.rank, self.step, self.topology, kept)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state that the same rank of an earlier run left, before or after `prepare`.

        Of another world size or other islands only the step counts: the rest is dropped, with a warning.

        Raises:
            BadInput: If it is no state, another rank's, or of a reducer with other options than this one, except for
                `FREE`; nothing has changed.
        """
        step, topology, part = state.taken(state_dict, self.codec.rank, self.topology, "a reducer")
        if part is None:
            warnings.warn(
                f"the reducer's state is of {topology} ranks and this run has {self.topology}: "
                f"residuals, compressor states and generators are reset",
                stacklevel=2,
            )
            self.begin(step)
            return
        self._check_state(part)
        if part["algorithm"] != "auto":
            self.algorithm = part["algorithm"]
        self.codec.load_state_dict(part)
        for name, reducer in self.parts.items():
            reducer.load_state_dict(part["parts"][name])

    def begin(self, step: int) -> None:
        """Go on at an optimizer step without residuals, compressor states and generators of earlier ones."""
        for reducer in (self, *self.parts.values()):
            reducer.codec.begin(step)

    def _check_state(self, part: Mapping[str, Any]) -> None:
        """Check a state of this rank, before anything changes.

        Raises:
            BadInput: If it is incomplete or of a reducer with other options.
        """
        state.check_keys(part, {"options", "algorithm"}, "a reducer")
        state.check_keys(part["options"], {*self._options}, "a reducer (options)")
        for option, value in self._options.items():
            if part["options"][option] != value:
                raise BadInput(
                    f"the state was saved by a reducer with {option} {part['options'][option]}, and this one has "
                    f"{value}: build it with the same options."
                )
        if part["algorithm"] not in (*ALGORITHMS, "auto"):
            raise unknown("algorithm of the reducer's state", part["algorithm"], ALGORITHMS)
        self.codec.check_state(part)
        states = part.get("parts", {})
        if states.keys() != self.parts.keys():
            raise BadInput(
                f"the reducer's state has the parts {', '.join(states) or 'none'}, and this reducer "
                f"{', '.join(self.parts) or 'none'}: build it with the same mesh and compressors."
            )
        for name, reducer in self.parts.items():
            taken = state.taken(states[name], self.codec.rank, reducer.topology, f"the reducer's part {name}")
            state.check_keys(taken.part, set(), f"the reducer's part {name}")
            reducer._check_state(taken.part or {})

    def _begin(self, kind: Kind, flat: Tensor, layout: Layout | str, then: Then | None) -> Handle:
        """Add a reduction to the queue."""
        numel, flat = flat.numel(), flat.detach()
        if isinstance(layout, str):
            layout = Layout.cut([(layout, (numel,))], self.world)
            flat = pad(flat, (0, layout.numel - numel))
        layout.check(flat)
        if kind == "reduce_scatter" and not layout.by_row:
            raise RunFault("a reduce-scatter needs a layout with contiguous rows: use Layout.dim0.")
        if self.world == 1:
            mean = flat.to(torch.float32)
            if then is not None:
                then(mean)
            return Handle(mean)
        for watch in self._watches:
            watch.begun(layout)
        if self.algorithm == "auto":
            self.prepare(kind, sum(shard.numel for shard in layout.shards))
        if self._queue is None:
            self._queue = build_queue(self.group, flat.device, self.codec.options.overlap)
        if self._kept is not None and not layout.by_row:
            flat = flat.clone()  # it may be the memory that the mean goes to
        task = self._reduce(kind, flat, layout, numel, self.loss_scale, self._kept, then)
        return self._queue.begin(task, flat)

    def _reduce(
        self,
        kind: Kind,
        flat: Tensor,
        layout: Layout,
        numel: int,
        scale: float,
        kept: list[Reduced] | None,
        then: Then | None,
    ) -> Task[Tensor]:
        """Reduce a buffer; what the caller may change before the task has ended is passed in."""
        gradient = flat if scale == 1 else flat.to(torch.float32) / scale  # narrow types may not hold it
        self._count(layout, kind)
        with self._tally.reduction(self._algorithm(self.meter).closed_form(layout, kind)) as meter:
            algorithm = self._algorithm(meter)
            average = algorithm.mean_everywhere if kind == "all_reduce" else algorithm.mean_of_row
            mean = yield from average(gradient, layout)
        if scale != 1:
            mean.mul_(scale)
        if kept is not None:
            kept.append(Reduced(kind, flat, layout, mean))
        delivered = mean[:numel] if kind == "all_reduce" else mean
        if then is not None:
            then(delivered)
        return delivered

    def _count(self, layout: Layout, kind: Kind) -> None:
        """Count a buffer's elements, and the bytes that this rank would send as float32."""
        plan = self.codec.plan(layout, "scatter", self.rank)
        self._tally.add(
            raw=FLOAT32_BYTES * rank_bytes(kind, plan.numel, plan.row_elements, self.world),
            elements=plan.numel,
            exempt_elements=plan.exempt_numel,
        )

    def _algorithm(self, meter: Meter) -> Algorithm:
        """The algorithm, whose collectives a meter counts."""
        return ALGORITHMS[self.algorithm](self.codec, Ranks(self.world, self.rank, meter))


def chosen(schedule: Schedule, options: ReducerOptions, kind: Kind, numel: int, world: int) -> str:
    """Return the algorithm of a reduction: the one that is given, or what ``auto`` resolves to."""
    if options.algorithm != "auto":
        return options.algorithm
    if options.granularity == "piece" and all(method.linear and method.has_rounds for method in schedule.plateaus):
        return "native"
    if kind == "reduce_scatter":
        return "exchange"
    size = schedule.at(0).wire_bytes(numel)
    if size is None or world == 2:
        return "gather" if world == 2 else "exchange"
    small = (world - 1) * size <= SMALL and world * size <= 2 * FLOAT32_BYTES * numel
    return "gather" if small else "exchange"


class Payload(NamedTuple):
    """The bytes of a reduction.

    Attributes:
        algorithm: How it travels.
        bytes: Payload over all ranks; None if it depends on the data.
    """

    algorithm: str
    bytes: int | None


def payload(
    compressor: Given, shapes: Mapping[tuple[int, ...], int], kind: Kind, world: int, **options: Any
) -> Payload:
    """Return the bytes of a reduction in the steady state, by their closed form; this needs no process group.

    Args:
        compressor: As of a `Reducer`.
        shapes: The shapes of the parameters, and how many have each.
        kind: The collective that the strategy needs.
        world: Number of ranks, at least 2.
        options: As of a `Reducer`.

    Raises:
        BadInput: As `check_options`, and if ``exempt`` has names.
    """
    schedule, checked = check_options(compressor, **options)
    if checked.exempt.names:
        raise BadInput("exempt has names, and bytes are predicted of shapes: give max_numel or max_ndim instead.")
    numel = sum(count * math.prod(shape) for shape, count in shapes.items())
    algorithm = chosen(schedule, checked, kind, numel, world)
    codec = Codec(schedule, checked, counts=Counter(), seed=0, rank=0, draws=0)
    codec.step = LATE
    forms = ALGORITHMS[algorithm](codec, Ranks(world, 0, Meter()))
    layouts = [(count, [("", shape)]) for shape, count in shapes.items()]
    if checked.granularity == "row":  # all parameters are encoded together
        layouts = [(1, [(f"{shape} {i}", shape) for shape, count in shapes.items() for i in range(count)])]
    sizes = [(count, forms.closed_total(Layout.dim0(named, world), kind)) for count, named in layouts]
    known = [count * size for count, size in sizes if size is not None]
    return Payload(algorithm, sum(known) if len(known) == len(sizes) else None)


def copied(
    given: dict[str, Any],
    group: ops.Shared,
    parts: Mapping[str, Reducer],
    loss_scale: float,
    claimed: Collection[str],
    state_dict: Mapping[str, Any],
) -> Reducer:
    """Return a copy of a reducer, which has sent nothing and watches no model.

    Args:
        given: The arguments.
        group: The ranks.
        parts: Copies of its parts.
        loss_scale: As of the reducer.
        claimed: The names of the parameters that it keeps something of.
        state_dict: Its state.
    """
    reducer = Reducer(group=group.group, **given)
    for name, part in parts.items():
        reducer.join(name, part)
    reducer.loss_scale = loss_scale
    reducer.claim(claimed)
    reducer.load_state_dict(state_dict)
    return reducer


def _sum(total: Any, added: Any) -> Any:
    """Sum two totals; None if one is unknown."""
    if isinstance(total, dict):
        both = total.keys() & added.keys()
        return {**total, **added, **{key: _sum(total[key], added[key]) for key in both}}
    return None if total is None or added is None else total + added
