"""One rank's side of a reduction: the compressor of each shard, and encoding with error feedback.

Everything that a rank keeps between steps lives here, by parameter and phase: generators, residuals, and the states of
`rounds`. None of it depends on how a framework groups the parameters.

Error feedback adds what a compressor leaves out of one step to the gradient of the next. Seide et al., "1-Bit
Stochastic Gradient Descent" (Interspeech 2014); the name and the theory are Karimireddy et al.'s, "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes" (ICML 2019). With residual e, gradient g and compressor C, a step is
``p = e + g; send C(p); e = p - C(p)``. So what was sent telescopes: sum(sent) = sum(g) + e_0 - e_T, and where the
residual is stored in fewer bits, less what storing lost.

With ``average`` a the residual is a moving average of errors, e = a e + (1 - a) (p - C(p)): Xie et al., "LoCo:
Low-Bit Communication Adaptor for Large-scale Model Training" (arXiv:2407.04480, 2024), with a = 0.8, 8-bit residuals
and a reset every 1,024 steps. It does not telescope: a part of every error is never sent.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.collectives.layout import Layout, Shard
from gradwire.comm.collectives.plan import FLOAT32, Batch, Plan, Table
from gradwire.comm.collectives.state import Key, Loaded, Phase, check_keys, check_tensors, whole
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rounds import State
from gradwire.comm.compressors.segments import Segments
from gradwire.comm.reduction import ReducerOptions, Schedule


class Feedback:
    """The residuals of the shards that one call encodes, in one tensor.

    A step is `open`, then `Compressor.encode_many` with the residuals, then `close`.

    Args:
        dtype: How residuals are stored: float32, bf16 or int8. bf16 and int8 (blocks of 256) round them to nearest.
        places: The position of each shard's residual in the tensor.
        decay: Factor of the residuals before they are added; 1 forgets nothing.
        average: Weight of an old residual in the new one; 0 keeps the last error only.
        device: The device of the gradients.

    Attributes:
        in_place: Whether residuals are kept as the float32 errors themselves, which `open` hands out.
        lost: Whether another one has taken over some of the shards.
    """

    def __init__(
        self,
        dtype: str,
        places: Sequence[slice],
        *,
        decay: float = 1.0,
        average: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype = dtype
        self.places = places
        self.decay = decay
        self.average = average
        self.in_place = dtype == "float32" and not average
        self.lost = False
        self._numel = max((place.stop for place in places), default=0)
        self._store = build("none" if dtype == "float32" else dtype)
        tensors = () if self.in_place else ((place.start, (place.stop - place.start,)) for place in places)
        self._segments = Segments.of(self._store, tensors)
        if self.in_place:
            self.stored = torch.zeros(self._numel, dtype=torch.float32, device=device)
        else:
            self.stored = torch.zeros(self._segments.nbytes or 0, dtype=torch.uint8, device=device)

    def open(self) -> Tensor:
        """Return what is added to the next gradients, float32; `in_place` it is kept there."""
        residuals = self.stored if self.in_place else self.restored()
        return residuals if self.decay == 1 else residuals.mul_(self.decay)

    def close(self, errors: Tensor, bad: Tensor) -> None:
        """Keep the errors of an encoding, which are where `open` put the residuals and may change.

        Args:
            errors: The tensor that `open` returned.
            bad: uint8 [shards], not 0 where nothing is kept.
        """
        if self.in_place:
            return
        if self.average:
            errors.mul_(1 - self.average).add_(self.restored().mul_(self.average))
        self._store.encode_many(errors, self._segments, self.stored, flags=torch.zeros_like(bad))
        if bad.device.type != "cpu" or bad.any():  # an average still has the old residual; on a GPU asking would wait
            sizes = self._segments.table(bad.device)[:, 3]
            dropped = bad.to(torch.bool).repeat_interleave(sizes, output_size=self.stored.numel())
            self.stored.masked_fill_(dropped, 0)

    def restored(self) -> Tensor:
        """Return the residuals, which are not kept in place, as a new tensor."""
        residuals = torch.zeros(self._numel, dtype=torch.float32, device=self.stored.device)
        self._store.decode_add(self.stored, self._segments, residuals, onto="blank")
        return residuals

    def drop(self) -> None:
        """Forget the residuals, which may hold what is not finite."""
        self.stored.zero_()

    def part(self, index: int) -> Tensor:
        """Return what is stored of a shard: float32 [numel], or its bytes; not a copy."""
        if self.in_place:
            return self.stored[self.places[index]]
        part = self.stored[self._segments[index].bytes]
        return part.view(torch.float32) if self.dtype == "float32" else part

    def residual(self, index: int) -> Tensor:
        """Return a shard's residual: float32 [numel], a copy."""
        part = self.part(index)
        return part.clone() if self.dtype == "float32" else self._store.decoded(part, self._segments[index].form)


class Residual(NamedTuple):
    """One shard's residual.

    Attributes:
        feedback: Where it is kept.
        number: The shard's number there.
    """

    feedback: Feedback
    number: int

    @property
    def residual(self) -> Tensor:
        """Error so far: float32 [numel], a copy."""
        return self.feedback.residual(self.number)

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return self.feedback.part(self.number).nbytes

    def drop(self) -> None:
        """Forget it."""
        self.feedback.part(self.number).zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensor kept between steps, not a copy; to be taken between steps."""
        return {f"residual.{self.feedback.dtype}": self.feedback.part(self.number)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state_dict` gave, from any device.

        Raises:
            ValueError: If it is the state of another type or of another shape.
        """
        current = self.state_dict()
        given, needed = ({key: tuple(kept.shape) for key, kept in tensors.items()} for tensors in (state, current))
        if given != needed:
            raise ValueError(f"this error feedback keeps {needed}, and was given {given}")
        for key, kept in current.items():
            kept.copy_(state[key])


class Held(NamedTuple):
    """Copies of a parameter's residuals, and of the state of `rounds`; None without one."""

    residuals: dict[Key, dict[str, Tensor]]
    state: State | None


def is_exact(compressor: Compressor, form: tuple[int, ...]) -> bool:
    """Whether a tensor travels as float32 values."""
    return compressor is FLOAT32 or not compressor.compresses(form)


def counted(compressor: Compressor, form: tuple[int, ...], wire: Tensor | None = None) -> Counter[str]:
    """Count the elements of a tensor: all, those that fell back to float32, and those that a sparsifier chose."""
    counts = Counter[str]()
    if compressor is FLOAT32:
        return counts
    numel = math.prod(form)
    counts["encoded_elements"] += numel
    if not compressor.compresses(form):
        counts.update(fallbacks=1, fallback_elements=numel)
    chosen = compressor.sent_elements(form, wire)
    if chosen is not None:
        counts.update(chosen_elements=chosen, sparse_elements=numel)
    return counts


def copied(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors."""
    return {name: tensor.clone() for name, tensor in kept.items()}


class Codec:
    """One rank's side of the compression.

    Args:
        schedule: The compressor of each step.
        options: The reducer's.
        counts: Counters of `comm.collectives.meter.Tally`.
        seed: Of the generators.
        rank: This rank, to which its state belongs.
        draws: The number of this rank in the seeds of its generators.

    Attributes:
        feedbacks: Residuals by parameter, phase and first element of the shard.
    """

    def __init__(
        self, schedule: Schedule, options: ReducerOptions, *, counts: Counter[str], seed: int, rank: int, draws: int
    ) -> None:
        self.schedule = schedule
        self.options = options
        self.counts = counts
        self.seed = seed
        self.rank = rank
        self.draws = draws
        self.step = 0  # optimizer steps finished
        self.began = 0  # of them, those before anything was kept
        self.plain = False  # for now everything travels as float32, after the first steps too
        self.flag: Tensor | None = None  # uint8 [1]: this rank met a value that is not finite
        self._dropped: Tensor | None = None  # int64 [1]: residuals dropped because of that
        self._plans: WeakKeyDictionary[Layout, dict[tuple[Compressor, int], Plan]] = WeakKeyDictionary()
        self._generators: dict[tuple[str, Phase], torch.Generator] = {}
        self.feedbacks: dict[Key, Residual] = {}
        self._states: dict[str, State] = {}
        self._held: dict[str, Held] = {}  # what was kept before this step, of parameters that it may not count for
        self._loaded = Loaded()

    def of(self, shard: Shard, phase: Phase) -> Compressor:
        """Return what encodes a shard at the present step."""
        return FLOAT32 if self.options.exempt.covers(shard.name, shard.shape) else self._of_phase(phase)

    def plan(self, layout: Layout, phase: Phase, rank: int) -> Plan:
        """Return what is encoded at once at the present step; ``rank`` is this rank's row."""
        plans, key = self._plans.setdefault(layout, {}), (self._of_phase(phase), rank)
        if key not in plans:
            for old in plans.keys() - {(self._of_phase(used), rank) for used in get_args(Phase)}:
                del plans[old]
            plans[key] = Plan.of(layout, key[0], self.options.exempt, self.options.granularity, rank)
        return plans[key]

    def encode(
        self, flat: Tensor, table: Table, phase: Phase, copies: Callable[[int], int]
    ) -> tuple[Tensor, Sequence[Sequence[Any]]]:
        """Encode the rows of a table; a value that is not finite sets the flag.

        Args:
            flat: The buffer that the table is of.
            table: A table of the present step.
            phase: The phase.
            copies: Number of other ranks that a row goes to.

        Returns:
            The message, and the bytes of each encoding by row.
        """
        sizes = table.sizes
        message = torch.empty(sizes.total or 0, dtype=torch.uint8, device=flat.device)
        wires: dict[int, Tensor] = {}
        for batch in table.batches:
            wire, segments = self._encode(flat, batch, phase, message, copies)
            if not sizes.fixed:
                wires |= {i: wire[segment.bytes] for i, segment in zip(batch.order, segments, strict=True)}
        if sizes.fixed:
            return message, sizes.encodings
        message = torch.cat([wires[i] for i in range(len(wires))])
        lengths = iter(wires[i].numel() for i in range(len(wires)))
        return message, [[next(lengths) for _ in row] for row in sizes.encodings]

    def _encode(
        self, flat: Tensor, batch: Batch, phase: Phase, message: Tensor, copies: Callable[[int], int]
    ) -> tuple[Tensor, Segments]:
        """Encode a batch into the message, or where a size depends on the data into a separate wire."""
        compressor, device = batch.compressor, flat.device
        flags = torch.zeros(len(batch.segments), dtype=torch.uint8, device=device)
        fed_back = compressor is not FLOAT32 and self.options.feedback is not None
        feedback = self._feedback_of(batch, phase, device) if fed_back else None
        residual = None if feedback is None else feedback.open()
        wire, segments = compressor.encode_many(
            batch.values(flat),
            batch.segments,
            message if batch.segments.fixed and message.numel() else None,
            generators=self._generators_of(batch, phase, device),
            flags=flags,
            residual=residual,
        )
        if feedback is not None and residual is not None:
            self._keep(feedback, residual, batch, flags)
        if segments.fixed:
            self.counts.update(segments.derive(("counts", phase), lambda: self._counted(batch, segments, wire, copies)))
        else:
            self.counts.update(self._counted(batch, segments, wire, copies))
        self.note(flags.amax(0, keepdim=True))
        return wire, segments

    def _counted(self, batch: Batch, segments: Segments, wire: Tensor, copies: Callable[[int], int]) -> Counter[str]:
        """Count what a batch encodes, its bytes of places and of float32; of fixed sizes it is equal in each step."""
        counts = Counter[str]()
        for group, segment in zip(batch.shards, segments, strict=True):
            encoding = wire[segment.bytes]
            receivers = copies(group[0].row)
            counts["index"] += receivers * batch.compressor.index_bytes(encoding, segment.form)
            if is_exact(batch.compressor, segment.form):
                counts["exact"] += receivers * encoding.numel()
            counts.update(counted(batch.compressor, segment.form, encoding))
        return counts

    def _generators_of(self, batch: Batch, phase: Phase, device: torch.device) -> list[torch.Generator]:
        """Return the generators of a batch's tensors."""
        kept: dict[str, Any] = batch.segments.derive(("generators", phase, device), dict)
        if kept.get("among") is not self._generators or self._loaded.unmet:
            values = [self._generator(group[0].name, phase, device) for group in batch.shards]
            kept |= {"among": self._generators, "values": values}
        generators: list[torch.Generator] = kept["values"]
        return generators

    def _feedback_of(self, batch: Batch, phase: Phase, device: torch.device) -> Feedback:
        """Return the error feedback of a batch's shards, laid out as its values."""
        return self.feedback(
            batch.segments.derive(("feedback", phase, device), dict),
            lambda: [shard for group in batch.shards for shard in group],
            lambda: batch.elements,
            phase,
            device,
        )

    def _keep(self, feedback: Feedback, residual: Tensor, batch: Batch, flags: Tensor) -> None:
        """Keep the errors of an encoding, except those of tensors that are flagged."""
        shards = batch.segments.derive(
            ("shards", flags.device),
            lambda: torch.tensor([len(group) for group in batch.shards], dtype=torch.int64, device=flags.device),
        )
        bad = flags.repeat_interleave(shards, output_size=len(feedback.places))
        feedback.close(residual, bad)
        self.note_dropped(bad.sum(0, keepdim=True))

    def feedback(
        self,
        kept: dict[str, Any],
        shards: Callable[[], Sequence[Shard]],
        places: Callable[[], Sequence[slice]],
        phase: Phase,
        device: torch.device,
    ) -> Feedback:
        """Return the error feedback of shards, before their encoding in the present step.

        Args:
            kept: What this keeps for these shards from step to step; empty at first.
            shards: Returns the shards.
            places: Returns the position of each one's residual in their tensor.
            phase: The phase.
            device: The device of the gradients.
        """
        for shard in shards() if self._loaded.unmet else ():
            self.meet(shard.name, phase)
        if kept.get("among") is not self.feedbacks or kept["feedback"].lost:
            kept |= {"among": self.feedbacks, "feedback": self._taken_over(shards(), places(), phase, device)}
        feedback: Feedback = kept["feedback"]
        if self.options.ef_reset and self.step % self.options.ef_reset == 0:
            feedback.drop()
        return feedback

    def _taken_over(
        self, shards: Sequence[Shard], places: Sequence[slice], phase: Phase, device: torch.device
    ) -> Feedback:
        """Return a new error feedback of shards, with the residuals that they have or that were loaded."""
        options = self.options
        assert options.feedback is not None
        feedback = Feedback(options.feedback, places, decay=options.ef_decay, average=options.ef_average, device=device)
        for index, shard in enumerate(shards):
            key, residual = (shard.name, phase, shard.at), Residual(feedback, index)
            if (earlier := self.feedbacks.get(key)) is not None:
                earlier.feedback.lost = True
                residual.load_state_dict(earlier.state_dict())
            elif (loaded := self._loaded.residual(shard, phase)) is not None:
                check_tensors(loaded, residual.state_dict(), f"residuals of {shard.name}")
                residual.load_state_dict(loaded)
            self.feedbacks[key] = residual
        return feedback

    def loosen(self) -> None:
        """Take the residuals, kept as float32, from their shards: a layout of other ranks cuts parameters elsewhere.

        The next shards get those of their elements.
        """
        self._loaded.loosen({key: feedback.state_dict() for key, feedback in self.feedbacks.items()})
        self.feedbacks = {}

    def drop_loose(self) -> None:
        """Drop the residuals that no shard has taken up."""
        self._loaded.drop_loose()

    def hold(self, names: set[str]) -> None:
        """Copy what is kept of parameters, before the first reduction of a step that may not count for them."""
        if not (names := names - self._held.keys()):
            return
        kept = {**self._loaded.residuals, **{key: feedback.state_dict() for key, feedback in self.feedbacks.items()}}
        for name in names:
            residuals = {key: copied(residual) for key, residual in kept.items() if key[0] == name}
            self._held[name] = Held(residuals, copied(self._states[name]) if name in self._states else None)

    def give_back(self, names: set[str]) -> None:
        """Keep of these parameters what was kept before the step, and forget what is held of all."""
        held, self._held = self._held, {}
        for name in names & held.keys():
            for key, feedback in self.feedbacks.items():
                if key in held[name].residuals:
                    feedback.load_state_dict(held[name].residuals[key])
                elif key[0] == name:
                    feedback.drop()
            if (state := held[name].state) is not None:
                self._states[name] = state
            else:
                self._states.pop(name, None)

    def state(self, name: str, shape: tuple[int, ...]) -> State:
        """Return what `rounds` keeps of a parameter; it starts empty where the schedule changes the compressor."""
        self.meet(name, "scatter")
        if name not in self._states or self.method_step == 0:
            self._states[name] = self.schedule.at(self.step).new_state(shape, self.seed)
        return self._states[name]

    @property
    def method_step(self) -> int:
        """Steps that the present compressor has made."""
        return self.step - max(self.schedule.began(self.step), self.options.dense_steps, self.began)

    def note(self, bad: Tensor) -> None:
        """Remember that a value was not finite."""
        if self.flag is None:
            self.flag = torch.zeros_like(bad)
        self.flag.logical_or_(bad)

    def note_dropped(self, number: Tensor) -> None:
        """Count residuals that were dropped because a value was not finite; nothing synchronises."""
        self._dropped = number.to(torch.int64) if self._dropped is None else self._dropped + number

    @property
    def residuals_dropped(self) -> int:
        """Shards whose residual was dropped because a value was not finite."""
        return 0 if self._dropped is None else int(self._dropped)

    @property
    def residual_norm(self) -> float | None:
        """Euclidean norm of this rank's residuals; None without error feedback."""
        if self.options.feedback is None:
            return None
        ordered = (self.feedbacks[key] for key in sorted(self.feedbacks))  # a resumed run meets them in another
        squares = [feedback.residual.double().square().sum() for feedback in ordered]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    @property
    def residual_bytes(self) -> int:
        """Memory of this rank's residuals."""
        return sum(feedback.nbytes for feedback in self.feedbacks.values())

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps, as plain data and tensors."""
        current = {key: generator.get_state() for key, generator in self._generators.items()}
        residuals = {key: feedback.state_dict() for key, feedback in self.feedbacks.items()}
        return {
            "step": self.step,
            "began": self.began,
            "generators": {**self._loaded.generators, **current},
            "residuals": {**self._loaded.all_residuals(), **residuals},
            "states": {name: dict(state) for name, state in self._states.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check what `load_state_dict` is given.

        Raises:
            BadInput: If it is not what `state_dict` returns, or a residual does not have the present shape.
        """
        check_keys(state, {"step", "began", "generators", "residuals", "states"}, "a reducer")
        if not (
            whole(state["began"])
            and all(isinstance(state[kind], Mapping) for kind in ("generators", "residuals", "states"))
            and all(isinstance(key, tuple) and len(key) == 2 for key in state["generators"])
            and all(isinstance(key, tuple) and len(key) == 3 for key in state["residuals"])
            and all(isinstance(kept, Mapping) for kept in state["states"].values())
        ):
            raise BadInput("the state of a reducer is damaged: it is not what state_dict() returned.")
        for (name, phase, start), kept in state["residuals"].items():
            if feedback := self.feedbacks.get((name, phase, start)):
                check_tensors(kept, feedback.state_dict(), f"residuals of {name}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what the same rank of an earlier run kept, after `check_state`."""
        self.begin(state["began"])
        self.step = state["step"]
        self._loaded = Loaded(state["generators"], state["residuals"], state["states"])
        self._states = {name: copied(kept) for name, kept in state["states"].items()}

    def begin(self, step: int) -> None:
        """Forget what was kept and met, and go on at an optimizer step."""
        self.step = self.began = step
        self.flag = None
        self._generators, self.feedbacks, self._states, self._held = {}, {}, {}, {}
        self._loaded = Loaded()

    def check_names(self, names: Container[str]) -> None:
        """Warn of restored state of parameters that the model does not have; otherwise the first reduction warns.

        Args:
            names: The model's parameters.
        """
        self._loaded.end(missing=sorted(name for name in self._loaded.unmet if name not in names))

    def meet(self, name: str, phase: Phase) -> None:
        """Mark what was loaded of a parameter as used."""
        self._loaded.meet(name, phase, self.step)

    def _of_phase(self, phase: Phase) -> Compressor:
        """Return what encodes all that is not exempt at the present step; none is always `FLOAT32`."""
        dense = self.plain or self.step < self.options.dense_steps
        current = self.schedule.at(self.step)
        as_float32 = dense or (phase == "gather" and self.options.second == "float32") or current.name == FLOAT32.name
        return FLOAT32 if as_float32 else current

    def _generator(self, name: str, phase: Phase, device: torch.device) -> torch.Generator:
        """Return the generator of one parameter and phase on this rank."""
        key = (name, phase)
        self.meet(name, phase)
        if key not in self._generators:
            generator = torch.Generator(device)
            if (loaded := self._loaded.generators.pop(key, None)) is not None:
                generator.set_state(loaded)
            else:
                words = f"{self.seed}/{self.draws}/{phase}/{name}".encode()
                generator.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:8], "little"))
            self._generators[key] = generator
        return self._generators[key]
