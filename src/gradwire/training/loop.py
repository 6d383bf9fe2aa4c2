"""The training loop.

Shape legend: B = samples of a micro-batch, T = tokens of its longest sample, W = world size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from gradwire import parallel
from gradwire.collectives import Reducer, ops
from gradwire.collectives.meter import METER
from gradwire.collectives.world import World
from gradwire.compressors import build as build_compressor
from gradwire.compressors.schedule import Schedule
from gradwire.config import Training
from gradwire.data.batches import Batch, eval_batches, grouped, poisson_steps, prefetch, train_batches
from gradwire.data.shards import Shards
from gradwire.errors import NonFiniteGradient, Stopped
from gradwire.files import write_with
from gradwire.models import causal
from gradwire.parallel import optimizers
from gradwire.parallel.verify import SyncCheck
from gradwire.training import link, privacy
from gradwire.training.checkpoint import Checkpoints
from gradwire.training.environment import PeakMemory
from gradwire.training.evaluate import Quality, evaluate
from gradwire.training.objective import Plain, Private
from gradwire.training.preemption import Preemption
from gradwire.training.profiling import profiled_range, profiling, trace_file
from gradwire.training.progress import progress
from gradwire.training.sampling import sampled
from gradwire.training.scalars import tensorboard
from gradwire.training.settings import Settings

Row = dict[str, Any]  # one rank's row of steps.parquet
COUNTED = (  # counters of `Reducer.traffic`, recorded per step
    *(f"{which}_elements" for which in ("chosen", "sparse", "encoded", "fallback", "exempt")),
    *("elements", "fallbacks", "extra_collectives"),
)


class Diverged(Exception):
    """The loss or a gradient is not finite. Ends the run; divergence is a result, not a failure."""


@dataclass
class Outcome:
    """The results of a run in memory.

    Args:
        rows: This rank's rows of ``steps.parquet``.
        config: The model's configuration.
        numel: Number of trainable parameters; tied ones count once.
        reduced_numel: Elements that the framework's own reduction handles in a step, including padding.
        dense_steps: Number of first steps in which everything travels as float32.
        algorithm: The reducer's algorithm, with ``auto`` resolved; None if nothing was reduced.
        residual_bytes: Memory of this rank's residuals; None without error feedback.
        memory: Peak memory.
        quality: The last evaluation; None if the run diverged or was not evaluated.
        diverged: Why the run diverged, or None.
        guarantee: The privacy guarantee of private training.
    """

    rows: list[Row] = field(default_factory=list)
    config: Any = None
    numel: int = 0
    reduced_numel: int = 0
    dense_steps: int = 0
    algorithm: str | None = None
    residual_bytes: int | None = None
    memory: PeakMemory = field(default_factory=PeakMemory)
    quality: Quality | None = None
    diverged: str | None = None
    guarantee: privacy.Guarantee | None = None


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
    training = settings.training
    torch.manual_seed(settings.seed)
    train_split, val_split = shards
    model = causal.build(
        settings.model, train_split.meta["vocab_size"], train_split.meta["max_length"], settings.seed
    ).to(world.device)
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if training.compile:
        parallel.compile_blocks(model)
    outcome = Outcome(
        config=model.config,
        numel=sum(p.numel() for p in model.parameters() if p.requires_grad),
        memory=PeakMemory(world.device),
    )
    objective = Private(model, training, settings.seed, world) if training.private else Plain(training.precision)
    if training.private:
        outcome.guarantee = privacy.guarantee(training, settings.cell, len(train_split), world.world_size)
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}

    sizes = parallel.block_sizes(model)

    reducer = build_reducer(settings)
    compressed = settings.cell.param_compress != "none"
    options: dict[str, Any] = {"param_compress": settings.cell.param_compress} if compressed else {}
    if settings.strategy in ("bucket", "ddp"):
        options["bucket_mb"] = training.bucket_mb
    averages = settings.cell.communication.averages_gradients
    model = parallel.wrap(model, settings.strategy, reducer, device=world.device, average=averages, **options)
    optimizer = build_optimizer(settings, model, matrices, reducer)
    outcome.dense_steps = getattr(optimizer, "dense_steps", settings.cell.reduction.dense_steps)
    if reducer is None:
        outcome.reduced_numel = parallel.reduced_numel(model)

    origin = {"identity": identity, "source": settings.source()}
    checkpoints = Checkpoints(settings.output_dir, origin, world, training.keep_checkpoints)
    trace = trace_file(settings.output_dir, world)
    start = 0
    if not settings.resume:
        checkpoints.discard()
    elif own := checkpoints.resume(model, optimizer, restart=settings.restart):
        start, outcome.rows = own["step"], own["rows"]
        set_generators(own["generators"], world)
        if reducer is not None:
            reducer.load_state_dict(own["reducer"])
        if isinstance(optimizer, optimizers.Communicating):
            optimizer.load_rank_state(own["optimizer"])
        if own["trace"] is not None and not trace.exists():
            write_with(trace, lambda part: part.write_bytes(own["trace"].numpy().tobytes()))

    rank, size, batch_size = world.rank, world.world_size, training.batch_size
    feed = Feed(micro_batches(settings, train_split, world, start), world.device)
    sync = SyncCheck(model, optimizer, settings.verify_sync)
    profiled = profiled_range(training, start)
    clock = Clock(world.device)

    def save(step: int) -> None:
        own = {"step": step, "rows": outcome.rows, "generators": generators(world)}
        own["reducer"] = reducer.state_dict() if reducer is not None else None
        own["trace"] = torch.frombuffer(bytearray(trace.read_bytes()), dtype=torch.uint8) if trace.exists() else None
        if isinstance(optimizer, optimizers.Communicating):
            own["optimizer"] = optimizer.rank_state()
        checkpoints.save(step, model, optimizer, own)

    def validate() -> Quality:
        communicates = isinstance(optimizer, optimizers.Communicating)
        with optimizer.synchronized() if communicates else nullcontext():
            quality = evaluate(model, eval_batches(val_split, batch_size, rank, size), world.device)
        check_finite(quality.ppl, "the validation perplexity")
        return quality

    model.train()
    counted = None if reducer is None else reducer.traffic
    with (
        progress(settings.output_dir, training.steps, start, world) as show,
        profiling(training, start, trace, world) as profiler,
        tensorboard(settings.output_dir / "logs" / "tensorboard", outcome.rows, world) as log,
    ):
        try:
            for step in range(start, training.steps):
                evaluated = due(training.eval_every, step) or (training.evaluate and step + 1 == training.steps)
                lr = set_learning_rate(optimizer, training, step)
                sync.before(step)
                sent, around, transmitted = METER.sent("parameters"), METER.around, link.transmitted()
                measured = METER.measuring() if step in profiled else nullcontext()
                with sampled(reducer if evaluated and averages else None, outcome.memory) as sample:
                    with measured, record_function("gradwire/step"):
                        row = optimizer_step(
                            model, optimizer, reducer, feed, objective, training, world, clock, asked, step
                        )
                    row["bytes_interface"] = link.transmitted_since(transmitted)
                saves = asked.agreed or due(training.checkpoint_every, step)
                if saves and reducer is not None:
                    reducer.synchronize()  # a message in flight is counted before its checkpoint
                before, counted = counted, None if reducer is None else reducer.traffic
                row |= sample | traffic_between(before, counted, world.device.type == "cpu" or step in profiled)
                row["bytes_parameters"] = METER.sent("parameters") - sent
                row["around_ms"] = 1000 * (METER.around - around)
                row["bytes_parameters_raw"] = parallel.parameters_unhooked(
                    settings.strategy,
                    sizes,
                    size,
                    row["passes"],
                    evaluated=step > start and due(training.eval_every, step - 1) and not compressed,
                )
                sync.after(step)
                row |= {"step": step, "rank": rank, "lr": lr}
                row |= {"warmup": step < training.warmup_steps, "profiled": step in profiled}
                outcome.rows.append(row)
                profiler.step()
                if evaluated and outcome.guarantee and world.rank == 0:
                    row["epsilon"] = outcome.guarantee.epsilon(step + 1)
                if due(training.eval_every, step) and step + 1 < training.steps:
                    row["val_loss"] = validate().loss
                    row["residual_norm"] = residual_norm(reducer)
                log(row)
                show(row)
                if saves:
                    save(step + 1)
                if asked.agreed:
                    raise stopped(step + 1)
            if training.evaluate:
                outcome.quality = validate()
                if ops.all_reduce(torch.tensor(float(asked.requested), device=world.device)) > 0:
                    save(training.steps)
                    raise stopped(training.steps)
                outcome.rows[-1]["val_loss"] = outcome.quality.loss
                log({"step": training.steps - 1, "val_loss": outcome.quality.loss})
            outcome.rows[-1]["residual_norm"] = residual_norm(reducer)
        except (Diverged, NonFiniteGradient) as error:
            outcome.diverged = str(error)
        except Exception as error:
            error.step = len(outcome.rows)  # type: ignore[attr-defined]  # recorded in the failure file
            raise
    if reducer is not None and reducer.world > 1:
        outcome.algorithm = reducer.algorithm
        outcome.residual_bytes = reducer.codec.residual_bytes if reducer.codec.options.feedback else None
    return model, optimizer, outcome


def micro_batches(settings: Settings, split: Shards, world: World, start: int) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each optimizer step from ``start`` on, indefinitely."""
    training, place = settings.training, (world.rank, world.world_size, settings.seed)
    per_step = training.grad_accum_steps
    if training.private and training.dp_sampling == "poisson":
        expected = training.batch_size * per_step * world.world_size
        return poisson_steps(split, training.batch_size, expected, *place, start=start)
    return grouped(train_batches(split, training.batch_size, *place, start=start * per_step), per_step)


class Feed:
    """Prefetches the next step's micro-batches; their target count is reduced together with the current step's loss.

    For a GPU they wait in pinned memory, so that nothing here waits for the device.

    Args:
        steps: Endless iterator of this rank's micro-batches, one list per step.
        device: The device to move them to.
    """

    def __init__(self, steps: Iterator[list[Batch]], device: torch.device) -> None:
        if device.type == "cuda":
            steps = (pinned(batches, device) for batches in steps)
        self._steps, self._device = prefetch(steps), device
        self._coming = next(self._steps)
        self.n_targets = ops.all_reduce(self.coming_targets(), purpose="control")  # of all ranks in the next step

    def take(self) -> list[Batch]:
        """Return the current step's micro-batches on the device, and read the next step's."""
        taken, self._coming = self._coming, next(self._steps)
        return [batch.to(self._device) for batch in taken]

    @property
    def own_targets(self) -> int:
        """This rank's number of targets in the next step."""
        return sum(batch.n_targets for batch in self._coming)

    def coming_targets(self) -> Tensor:
        """The same on the device."""
        return torch.full((), float(self.own_targets), device=self._device)


def pinned(batches: list[Batch], device: torch.device) -> list[Batch]:
    """Copies of the batches in pinned memory; in any thread, the context is that of ``device``."""
    with torch.cuda.device(device):
        return [batch.pinned() for batch in batches]


def due(every: int, step: int) -> bool:
    """Whether an action with period ``every`` (0: never) is due after ``step``, counted from 0."""
    return every > 0 and (step + 1) % every == 0


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reducer: Reducer | None,
    feed: Feed,
    objective: Plain,
    training: Training,
    world: World,
    clock: Clock,
    asked: Preemption,
    step: int,
) -> Row:
    """Run one optimizer step over its micro-batches and return its measurements.

    The reported loss is the mean over the targets of all ranks and micro-batches: each rank's sum is divided by the
    global number of targets. The objective defines the loss to differentiate, which is multiplied by W because the
    strategies average gradients over ranks. One small all-reduce then sums the loss, the next step's number of targets,
    the stop requests and, with a reducer, its flag.

    Raises:
        Diverged: If the loss or the gradient's norm is not finite.
        NonFiniteGradient: If the reducer found a non-finite gradient, with ``nonfinite: raise``.
    """
    clock.start()
    n_targets, tokens, micro_batches = feed.n_targets, feed.own_targets, feed.take()
    clock.lap("data_ms")

    total = torch.zeros((), device=world.device)
    objective.begin(model, micro_batches, step)
    clock.lap("forward_ms")
    for i, batch in enumerate(micro_batches):
        last = i + 1 == len(micro_batches)
        with parallel.accumulation(model, last):
            loss, reported = objective.loss(model, batch, n_targets, last)
            clock.lap("forward_ms")
            total += reported
            (loss * world.world_size).backward()
            clock.lap("backward_ms")

    stop = torch.full((), float(asked.requested), device=world.device)
    totals = torch.stack([total, feed.coming_targets(), stop, *objective.totals()])
    if isinstance(optimizer, optimizers.Communicating):
        grad_norm, reduced = optimizer.exchange(training.clip_grad_norm, totals)
    else:
        if reducer is not None:
            reduced = reducer.finish(totals)
        else:
            reduced = True
            ops.all_reduce(totals, purpose="control")
        grad_norm = parallel.clip_grad_norm(model, training.clip_grad_norm)
    if reduced:
        check_finite(grad_norm, "the gradient's norm")
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    clock.lap("optimizer_ms")
    loss_of_all, feed.n_targets, stops, *statistics = totals
    asked.agreed = bool(stops > 0)
    check_finite(float(loss_of_all), "the loss")
    clock.stop()

    return clock.times | {
        "t_start_s": clock.started_s,
        "tokens": tokens,
        "loss": float(loss_of_all) if n_targets else None,
        "passes": objective.passes * len(micro_batches),
        **objective.columns([float(value) for value in statistics]),
        "grad_norm": grad_norm,
        "clipped": grad_norm > training.clip_grad_norm,
        "nonfinite": not reduced,
        "val_loss": None,
        "residual_norm": None,
    }


def stopped(step: int) -> Stopped:
    """The error that ends a run after ``step`` steps because of a signal."""
    return Stopped(f"stopped by a signal after step {step}, with a checkpoint; continue with --resume.")


def generators(world: World) -> dict[str, Tensor]:
    """The states of torch's global random generators on this rank, which dropout uses."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(world.device)} if world.device.type == "cuda" else {})


def set_generators(states: dict[str, Tensor], world: World) -> None:
    """Restore the states returned by `generators`."""
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), world.device)


def residual_norm(reducer: Reducer | None) -> float | None:
    """Euclidean norm of this rank's error-feedback residuals, computed at evaluations only."""
    if reducer is None:
        return None
    reducer.synchronize()
    return reducer.codec.residual_norm


def check_finite(value: float, what: str) -> None:
    """Raise `Diverged` if ``value``, which is equal on all ranks, is not finite."""
    if not math.isfinite(value):
        raise Diverged(f"{what} is {value}")


def traffic_between(before: dict[str, Any] | None, now: dict[str, Any] | None, timed: bool) -> Row:
    """Bytes, elements and times between two `Reducer.traffic` of this rank; all None without a reducer.

    ``bytes_closed_form`` is over all ranks, and None if a size depended on the data. Times are None unless ``timed``:
    on a GPU, measuring them needs a synchronization, which the meter does in profiled steps only.
    """
    if before is None or now is None:
        return dict.fromkeys(("bytes_raw", "bytes_sent", "bytes_index", "comm_ms", "encode_ms", "decode_ms"))

    def milliseconds(seconds: float) -> float | None:
        return 1000 * seconds if timed else None

    closed = now["closed_form"]
    return {
        "bytes_closed_form": None if closed is None else closed - before["closed_form"],
        "bytes_agreement": now["agreement"] - before["agreement"],
        "bytes_raw": now["raw"] - before["raw"],
        "bytes_sent": now["sent"] - before["sent"],
        "bytes_by_op": {
            op: cost["bytes"] - before["by_op"].get(op, {"bytes": 0})["bytes"] for op, cost in now["by_op"].items()
        },
        **{f"bytes_{name}": now[name] - before[name] for name in ("index", "padding")},
        **{name: now[name] - before[name] for name in COUNTED},
        "extra_ms": milliseconds(now["extra_seconds"] - before["extra_seconds"]),
        "comm_ms": milliseconds(seconds_on_wire(now) - seconds_on_wire(before)),
        "encode_ms": milliseconds(now["encode_seconds"] - before["encode_seconds"]),
        "decode_ms": milliseconds(now["decode_seconds"] - before["decode_seconds"]),
    }


def seconds_on_wire(traffic: dict[str, Any]) -> float:
    """Seconds spent in the collectives that carry gradients."""
    return sum(cost["seconds"] for cost in traffic["by_op"].values())


def build_reducer(settings: Settings) -> Reducer | None:
    """Build the cell's reducer; None if the framework's own reduction is used."""
    cell = settings.cell
    if not cell.hooked:
        return None
    compressor = build_compressor(cell.method, **cell.options)
    options = {name: getattr(cell.reduction, name) for name in cell.reduction.model_fields_set}
    if "schedule" in options:
        options["schedule"] = Schedule(cell.method, cell.options, options["schedule"])
    return Reducer(compressor, seed=settings.seed, **options)


def build_optimizer(
    settings: Settings, model: nn.Module, matrices: set[str], reducer: Reducer | None
) -> torch.optim.Optimizer:
    """Build AdamW, or the cell's communicating optimizer.

    Weight decay applies to matrices only, as in GPT-2; ``matrices`` holds parameter names before wrapping.
    """
    training, communication = settings.training, settings.cell.communication
    named = list(parallel.named_parameters(model))
    groups = [
        {"params": [p for name, p in named if name in matrices], "weight_decay": training.weight_decay},
        {"params": [p for name, p in named if name not in matrices], "weight_decay": 0.0},
    ]
    adam: dict[str, Any] = {"lr": training.lr, "betas": (0.9, 0.95)}
    if communication.averages_gradients:
        return torch.optim.AdamW(groups, **adam)
    assert reducer is not None  # a cell with such an optimizer is hooked
    options = communication.options
    if communication.comm_optimizer != "onebit_adam":  # the last step synchronises
        options["steps"] = training.steps
    return optimizers.build(communication.comm_optimizer, model, groups, reducer, **adam, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, training: Training, step: int) -> float:
    """Set and return the learning rate of ``step``, a function of the step only, so resuming needs no state."""
    lr = learning_rate(training, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up to ``lr``, then cosine decay to a tenth of it."""
    if step < training.lr_warmup_steps:
        return training.lr * (step + 1) / training.lr_warmup_steps
    done = (step - training.lr_warmup_steps) / max(1, training.steps - training.lr_warmup_steps)
    return training.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Clock:
    """Times of one step in milliseconds. Phases are timed on CPU only: on CUDA they would need a synchronization.

    A step ends by reading a number from the device, so its wall time is correct on every device.
    """

    def __init__(self, device: torch.device) -> None:
        self._phases = device.type == "cpu"
        self._origin = time.perf_counter()
        self.times: Row = {}
        self.started_s = 0.0

    def start(self) -> None:
        """Start a step."""
        self._started = self._last = time.perf_counter()
        self.started_s = self._started - self._origin
        self.times = dict.fromkeys(("data_ms", "forward_ms", "backward_ms", "optimizer_ms"))

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        now = time.perf_counter()
        if self._phases:
            self.times[phase] = (self.times[phase] or 0.0) + 1000 * (now - self._last)
        self._last = now

    def stop(self) -> None:
        """End the step and record ``step_ms``."""
        self.times["step_ms"] = 1000 * (time.perf_counter() - self._started)
