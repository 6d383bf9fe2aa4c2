"""The parts of a run: its model, reducer, optimizer and objective; and its results in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gradwire.base.machine import multiplies_bf16
from gradwire.bench.config import Cell, Training
from gradwire.bench.steps import DENSE
from gradwire.bench.training.environment import PeakMemory
from gradwire.bench.training.measure import Row
from gradwire.bench.training.objective import Guarantee, Plain, Private, Quality, guarantee
from gradwire.bench.training.settings import Settings
from gradwire.comm import parallel
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build as build_compressor
from gradwire.comm.compressors.driver import rehearse
from gradwire.comm.parallel import optimizers
from gradwire.comm.parallel.model import local
from gradwire.comm.reduction import encoding_of
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, lora

BETA1 = 0.9
SLOW_BF16 = (
    "gradwire train: NOTE: PyTorch multiplies bf16 matrices slowly on this processor, so a step may take ten times as "
    "long as with precision fp32."
)


@dataclass
class Outcome:
    """The results of a run in memory.

    Args:
        rows: This rank's rows of ``steps.parquet``, from the step on at which the run came to these ranks.
        moved_from: The strategies and ranks that took steps before, each with the step that it stopped at.
        config: The model's configuration.
        adapter: The configuration of the LoRA adapter that is trained; None if the model itself is.
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
    moved_from: list[Row] = field(default_factory=list)
    config: Any = None
    adapter: Any = None
    numel: int = 0
    reduced_numel: int = 0
    dense_steps: int = 0
    algorithm: str | None = None
    residual_bytes: int | None = None
    memory: PeakMemory = field(default_factory=PeakMemory)
    quality: Quality | None = None
    diverged: str | None = None
    guarantee: Guarantee | None = None

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has taken, on whatever ranks."""
        return len(self.rows) + (self.moved_from[-1]["step"] if self.moved_from else 0)


class Parts(NamedTuple):
    """The parts of a run.

    Attributes:
        model: The wrapped model.
        optimizer: Its optimizer.
        reducer: The cell's reducer; None if the framework's own reduction is used.
        objective: Defines the loss to differentiate.
        block_sizes: As from `comm.parallel.block_sizes`, before wrapping.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reducer: Reducer | None
    objective: Plain
    block_sizes: list[int]


def build(settings: Settings, split: Shards, world: World) -> tuple[Parts, Outcome]:
    """Build the parts of a run, and its outcome with everything that is known before the first step."""
    training, cell = settings.training, settings.cell
    if training.precision == "bf16" and world.rank == 0 and not multiplies_bf16(world.device.type):
        print(SLOW_BF16, file=sys.stderr, flush=True)
    torch.manual_seed(settings.seed)
    vocab_size, max_length = split.meta["vocab_size"], split.meta["max_length"]
    model = causal.build(settings.model, vocab_size, max_length, settings.seed).to(world.device)
    adapter = None
    if settings.lora_rank:
        model = lora.attach(model, Path(settings.model), rank=settings.lora_rank, seed=settings.seed)
        adapter = model.peft_config[lora.ADAPTER]
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    if training.compile:
        parallel.compile_blocks(model)
    outcome = Outcome(
        config=model.config,
        adapter=adapter,
        numel=sum(p.numel() for p in model.parameters() if p.requires_grad),
        memory=PeakMemory(world.device),
    )
    objective = (
        Private(model, training, settings.seed, world)
        if training.private
        else Plain(training.precision, compiled=training.compile)
    )
    if training.private:
        outcome.guarantee = guarantee(training, cell, len(split), world.world_size)
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    sizes = parallel.block_sizes(model)

    reducer = build_reducer(settings, world)
    options: dict[str, Any] = {"param_compress": cell.param_compress} if cell.param_compress != "none" else {}
    if settings.strategy in ("bucket", "ddp"):
        options["bucket_mb"] = training.bucket_mb
    if settings.strategy == "hsdp":
        options["islands"] = settings.islands
    averages = cell.communication.averages_gradients
    model = parallel.wrap(model, settings.strategy, reducer, device=world.device, average=averages, **options)
    optimizer = build_optimizer(settings, model, matrices, reducer)
    outcome.dense_steps = getattr(optimizer, "dense_steps", cell.reduction.dense_steps)
    if reducer is None or settings.strategy == "hsdp":  # which may leave the framework its part
        outcome.reduced_numel = parallel.strategy_of(model).reduced_numel(model)
    return Parts(model, optimizer, reducer, objective, sizes), outcome


def build_reducer(settings: Settings, world: World) -> Reducer | None:
    """Build the cell's reducer; None if the framework's own reduction is used."""
    cell, seed = settings.cell, settings.seed
    if not cell.hooked:
        return None
    compressor = build_compressor(cell.method, **cell.options)
    if settings.strategy != "hsdp":
        return Reducer(compressor, seed=seed, **reducer_options(cell))
    islands = build_islands(settings.islands, world.device.type)
    inside = None
    if cell.inside is not None:
        inner = build_compressor(cell.inside.method, **cell.inside.options)
        inside = Reducer(inner, islands.inside, seed=seed, **reducer_options(cell.inside))
    return IslandReducer(compressor, islands, inside=inside, seed=seed, **reducer_options(cell))


def kinds_of_steps(optimizer: torch.optim.Optimizer, dense_steps: int, steps: int) -> list[str]:
    """The kind of each step of a run: steps of a kind communicate alike."""
    kind = optimizer.kind if isinstance(optimizer, optimizers.Communicating) else lambda step: optimizers.ALIKE
    return [DENSE if step < dense_steps else kind(step) for step in range(steps)]


def rehearse_codecs(cell: Cell, parts: Parts, device: torch.device) -> None:
    """Compile what the run encodes and decodes with in any step, of gradients and of parameters, before the first one.

    A kernel compiles in its first call, which takes seconds: a rank would measure it in the step that makes this call.
    """
    compressors = parts.reducer.compressors if parts.reducer is not None else set()
    if cell.param_compress != "none":
        encoding = encoding_of(cell.param_compress)
        compressors.add(build_compressor(encoding.method, **encoding.options))
    shapes = [tuple(local(p).shape) for p in parts.model.parameters() if p.requires_grad]
    rehearse(compressors, shapes, device, feedback=cell.reduction.error_feedback)


def reducer_options(cell: Cell) -> dict[str, Any]:
    """The options that a cell gives its reducer."""
    return {name: getattr(cell.reduction, name) for name in cell.reduction.model_fields_set}


def build_optimizer(
    settings: Settings, model: nn.Module, matrices: set[str], reducer: Reducer | None
) -> torch.optim.Optimizer:
    """Build the optimizer of averaged gradients, AdamW unless the cell names another, or one that communicates.

    Weight decay applies to matrices only, as in GPT-2; ``matrices`` holds parameter names before wrapping.
    """
    training, communication = settings.training, settings.cell.communication
    groups = decayed(parallel.named_parameters(model), matrices, training)
    adam: dict[str, Any] = {"lr": training.lr, "betas": (BETA1, training.beta2)}
    if communication.averages_gradients:
        return optimizers.build_inner(communication.inner or "adamw", model, groups, **adam)
    assert reducer is not None  # a cell with such an optimizer is hooked
    adam |= {"steps": training.steps, **communication.options}
    return optimizers.build(communication.comm_optimizer, model, groups, reducer, **adam)


def decayed(
    parameters: Iterable[tuple[str, nn.Parameter]], matrices: set[str], training: Training
) -> list[dict[str, Any]]:
    """Divide trainable parameters into an optimizer's groups: matrices, with weight decay, and the rest."""
    named = [(name, p) for name, p in parameters if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in matrices], "weight_decay": training.weight_decay},
        {"params": [p for name, p in named if name not in matrices], "weight_decay": 0.0},
    ]
