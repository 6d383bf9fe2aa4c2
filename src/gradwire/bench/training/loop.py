"""The training loop.

Shape legend: B = samples of a micro-batch, T = tokens of its longest sample, W = world size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from gradwire.base.errors import NonFiniteGradient, Stopped
from gradwire.bench.config import Training
from gradwire.bench.training import results
from gradwire.bench.training.build import Outcome, build, kinds_of_steps, rehearse_codecs
from gradwire.bench.training.checkpoint import RunState
from gradwire.bench.training.measure import Clock, Counters, Row, sampled, transmitted, transmitted_since
from gradwire.bench.training.monitor import profiling, progress, scalars
from gradwire.bench.training.objective import Quality, evaluate
from gradwire.bench.training.settings import Settings
from gradwire.bench.training.step import (
    Diverged,
    Feed,
    Preemption,
    Stepper,
    check_finite,
    micro_batches,
    set_learning_rate,
)
from gradwire.comm import parallel
from gradwire.comm.closed_forms import parameters_unhooked
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.collectives.meter import METER
from gradwire.comm.collectives.world import World
from gradwire.comm.communication import LOCAL
from gradwire.comm.parallel import optimizers
from gradwire.comm.parallel.verify import SyncCheck
from gradwire.comm.topology import sharded_islands
from gradwire.lm.data.batches import eval_batches
from gradwire.lm.data.shards import Shards

NO_PROFILE = (
    "gradwire train: NOTE: the run is too short to profile and to time steps of each kind ({}): its times per step are "
    "not those of a longer run; raise `steps`."
)


def train(
    settings: Settings, shards: tuple[Shards, Shards], world: World, identity: str, asked: Preemption
) -> tuple[nn.Module, torch.optim.Optimizer, Outcome]:
    """Train one run and return the wrapped model, its optimizer and the measurements.

    Args:
        settings: The run.
        shards: The training and validation splits.
        world: The process group and this rank's position in it.
        identity: ``Settings.identity``; checkpoints with another identity are rejected.
        asked: Records signals; training stops after the step in which one arrives.

    Raises:
        Stopped: If a signal arrived, after a checkpoint is written.
    """
    loop = Loop(settings, shards, world, identity, asked)
    loop.run()
    (model, optimizer, reducer, *_), outcome = loop.parts, loop.outcome
    if reducer is not None and reducer.world > 1:
        outcome.algorithm = reducer.algorithm
        outcome.residual_bytes = reducer.residual_bytes
    return model, optimizer, outcome


class Loop:
    """The steps, evaluations and checkpoints of a run, whose arguments are those of `train`.

    Attributes:
        parts: The run's parts.
        outcome: Gets a row for each step, and the last evaluation.
        state: Writes checkpoints.
        start: The first step.
    """

    def __init__(
        self, settings: Settings, shards: tuple[Shards, Shards], world: World, identity: str, asked: Preemption
    ) -> None:
        self.settings, self.training, self.world, self.asked = settings, settings.training, world, asked
        self._train_split, self._val_split = shards
        self.parts, self.outcome = build(settings, self._train_split, world)
        model, optimizer, reducer, objective, _ = self.parts
        self.state = RunState(settings, identity, self._train_split.digest, world, self.parts, self.outcome)
        self.start = self.state.resume()
        self._sync = SyncCheck(model, optimizer, settings.verify_sync)
        self._kinds = kinds_of_steps(optimizer, self.outcome.dense_steps, self.training.steps)
        self._timetable = timetable(self.training, self._kinds, self.start)
        if self._timetable.lacking and world.rank == 0 and self.start == 0:
            print(NO_PROFILE.format(", ".join(self._timetable.lacking)), file=sys.stderr, flush=True)
        if world.world_size > 1 and not world.simulated:  # simulated ranks are not timed
            rehearse_codecs(settings.cell, self.parts, world.device)
        self._counters = Counters(reducer)
        self._timed = world.device.type == "cpu" and not world.simulated
        clock = Clock(world.device)
        feed = Feed(micro_batches(settings, self._train_split, world, self.start), world.device)
        self._stepper = Stepper(model, optimizer, reducer, feed, objective, self.training, world, clock, asked)

    def run(self) -> None:
        """Take all steps, then evaluate; a run that diverges ends early, with the reason in its outcome.

        Raises:
            Stopped: If a signal arrived, after a checkpoint is written.
        """
        training, folder, outcome = self.training, self.settings.output_dir, self.outcome
        self.parts.model.train()
        with (
            progress(folder, training.steps, self.start, self.world) as show,
            profiling(self._timetable.profiled, self.start, self.state.trace, self.world) as end_step,
            scalars(self.settings, outcome.rows, self.world) as log,
        ):
            try:
                for step in range(self.start, training.steps):
                    row = self._measured_step(step)
                    outcome.rows.append(row)
                    end_step()
                    self._evaluate_during(step, row)
                    log(row)
                    show(row)
                    self._keep_model_if_due(step)
                    self._save_if_due(step)
                if training.evaluate:
                    self._evaluate_at_end(log)
                outcome.rows[-1]["residual_norm"] = residual_norm(self.parts.reducer)
            except (Diverged, NonFiniteGradient) as error:
                outcome.diverged = str(error)
            except Exception as error:
                error.step = outcome.step  # type: ignore[attr-defined]  # recorded in the failure file
                raise

    def _measured_step(self, step: int) -> Row:
        """Take a step and return its row."""
        training, reducer = self.training, self.parts.reducer
        averages = self.settings.cell.communication.averages_gradients
        lr = set_learning_rate(self.parts.optimizer, training, step)
        self._sync.before(step)
        self._counters.start()
        before = transmitted()
        profiled = step in self._timetable.profiled
        measured = METER.measuring() if profiled else nullcontext()
        with sampled(reducer if self._evaluated(step) and averages else None, self.outcome.memory) as sample:
            with measured, record_function("gradwire/step"):
                row = self._stepper.take(step)
            row["bytes_interface"] = transmitted_since(before)
        if self._saves(step) and reducer is not None:
            reducer.synchronize()  # a message in flight is counted before its checkpoint
        row |= sample | self._counters.stop(timed=self._timed or profiled)
        row["bytes_parameters_raw"] = self._parameters_unhooked(step, row["passes"])
        self._sync.after(step)
        row |= {"step": step, "rank": self.world.rank, "kind": self._kinds[step], "lr": lr}
        return row | {"warmup": step < self._timetable.first, "profiled": profiled}

    def _evaluated(self, step: int) -> bool:
        """Whether the run is evaluated after ``step``."""
        training = self.training
        return due(training.eval_every, step) or (training.evaluate and step + 1 == training.steps)

    def _saves(self, step: int) -> bool:
        """Whether a checkpoint is written after ``step``."""
        return self.asked.agreed or due(self.training.checkpoint_every, step)

    def _parameters_unhooked(self, step: int, passes: int) -> int | None:
        """Bytes of the framework's own parameter gathers in ``step``."""
        before = step > self.start and due(self.training.eval_every, step - 1)
        cell, kind = self.settings.cell, parallel.strategy_class(self.settings.strategy).kind
        islands = sharded_islands(self.settings.strategy, self.settings.islands)
        changed = cell.param_compress != "none" or cell.communication.comm_optimizer in LOCAL  # the evaluated weights
        sizes, world, evaluated = self.parts.block_sizes, self.world.world_size, before and not changed
        each = self.parts.objective.passes
        return parameters_unhooked(
            kind, sizes, world, passes // each, backwards=each, evaluated=evaluated, islands=islands
        )

    def _evaluate_during(self, step: int, row: Row) -> None:
        """Add to a step's row the evaluation that is due after it."""
        training, guarantee = self.training, self.outcome.guarantee
        if self._evaluated(step) and guarantee and self.world.rank == 0:
            row["epsilon"] = guarantee.spent(step + 1).epsilon
        if due(training.eval_every, step) and step + 1 < training.steps:
            row["val_loss"] = self._validate().loss
            row["residual_norm"] = residual_norm(self.parts.reducer)

    def _keep_model_if_due(self, step: int) -> None:
        """Write the model to the run's ``models/`` if that is due after ``step``."""
        if due(self.training.keep_model_every, step):
            with optimizers.synchronized(self.parts.optimizer):
                results.kept_model(
                    self.settings, self.state.identity, self._train_split, self.world, self.parts, self.outcome
                )

    def _save_if_due(self, step: int) -> None:
        """Save a checkpoint if one is due after ``step``, or if a signal arrived, which also stops the run."""
        if self._saves(step):
            self.state.save(step + 1)
        if self.asked.agreed:
            raise stopped(step + 1)

    def _evaluate_at_end(self, log: Callable[[Row], None]) -> None:
        """Evaluate after the last step, and stop if a signal arrived meanwhile."""
        steps = self.training.steps
        self.outcome.quality = quality = self._validate()
        if ops.all_reduce(torch.tensor(float(self.asked.requested), device=self.world.device)) > 0:
            self.state.save(steps)
            raise stopped(steps)
        self.outcome.rows[-1]["val_loss"] = quality.loss
        log({"step": steps - 1, "val_loss": quality.loss})

    def _validate(self) -> Quality:
        """Evaluate the model on the validation split."""
        batches = eval_batches(self._val_split, self.training.batch_size, self.world.rank, self.world.world_size)
        with optimizers.synchronized(self.parts.optimizer):
            quality = evaluate(self.parts.model, batches, self.world.device)
        check_finite(quality.ppl, "the validation perplexity")
        return quality


class Timetable(NamedTuple):
    """The first timed step and the profiled steps of a run.

    Attributes:
        first: The first step after the warm-up.
        profiled: The steps with the profiler, of which it records all but the first; in no step time.
        lacking: Kinds of steps that are not both profiled and timed, as the run is too short.
    """

    first: int
    profiled: range
    lacking: tuple[str, ...] = ()


def timetable(training: Training, kinds: Sequence[str], begun: int = 0) -> Timetable:
    """Plan the steps of a run.

    The warm-up lasts until a step of each kind was taken: whole dense steps, and a whole round of local updates. The
    profiler records the fewest steps, at least `profile_steps`, in which each kind occurs. A run that is too short for
    that has the warm-up of its settings, in which a round may be the first one.

    Args:
        training: The settings.
        kinds: The kind of each step of the run.
        begun: The first step of this process.
    """
    later = kinds[:-1]  # the last step may be of a kind alone
    seen = 1 + max((later.index(kind) for kind in set(later)), default=0)
    needed = set(later[seen - 1 :])
    for first in (max(training.warmup_steps, seen if len(set(later)) > 1 else 0), training.warmup_steps):
        start = max(first, begun)
        if not training.profile and needed <= {*kinds[first:]}:
            return Timetable(first, range(start, start))
        if training.profile and (profiled := shortest(kinds, needed, start, training.profile_steps)) is not None:
            return Timetable(first, profiled)
    end = min(start + training.profiled_steps, len(kinds))
    return Timetable(first, range(start, end), tuple(sorted(needed)))


def shortest(kinds: Sequence[str], needed: set[str], start: int, least: int) -> range | None:
    """Find the shortest range of steps to profile, and of these the first; None if there is none.

    Args:
        kinds: The kind of each step.
        needed: The kinds that are to be among its recorded steps, and among the steps that are left to time.
        start: The first step that may be in it.
        least: The fewest recorded steps.
    """
    if not needed <= {*kinds[start + 1 :]}:
        return None
    total = Counter(kinds[start:])
    ends = {begin: reaching(kinds, needed, begin, least) for begin in range(start + 1, len(kinds))}
    for size, begin in sorted((end - begin, begin) for begin, end in ends.items() if end is not None):
        left = total - Counter(kinds[begin - 1 : begin + size])
        if left and all(left[kind] for kind in needed):
            return range(begin - 1, begin + size)
    return None


def reaching(kinds: Sequence[str], needed: set[str], begin: int, least: int) -> int | None:
    """The end of the shortest range from ``begin`` with all needed kinds and ``least`` steps; None if there is none."""
    lacking = set(needed)
    for step in range(begin, len(kinds)):
        lacking.discard(kinds[step])
        if not lacking and step + 1 - begin >= least:
            return step + 1
    return None


def due(every: int, step: int) -> bool:
    """Whether an action with period ``every`` (0: never) is due after ``step``, counted from 0."""
    return every > 0 and (step + 1) % every == 0


def stopped(step: int) -> Stopped:
    """The error that ends a run after ``step`` steps because of a signal."""
    return Stopped(f"stopped by a signal after step {step}, with a checkpoint; continue with --resume.")


def residual_norm(reducer: Reducer | None) -> float | None:
    """Euclidean norm of this rank's error-feedback residuals, computed at evaluations only."""
    if reducer is None:
        return None
    reducer.synchronize()
    return reducer.residual_norm
