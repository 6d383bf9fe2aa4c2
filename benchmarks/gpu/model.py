"""Training steps of the 62M model at 1,024 tokens: ``python -m gpu.model``.

Tokens per second, the share of a square product's speed and memory, of the bare model, compiled, wrapped, and reduced.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.part import DEVICE, SMALL, Part, Row, milliseconds, run
from gpu.workers import Ranks, alone, group
from torch import Tensor, nn

from gradwire.comm import parallel
from gradwire.comm.collectives import Layout, Reducer, queue
from gradwire.comm.collectives.algorithms import Algorithm
from gradwire.comm.collectives.layout import Kind
from gradwire.comm.collectives.meter import Meter
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build
from gradwire.comm.parallel.strategy import strategy_of
from gradwire.lm.models import causal

PRESET, VOCABULARY, LENGTH = ("micro", 512, 64) if SMALL else ("62m", 50257, 1024)
BATCH = 2 if SMALL else 32
STEPS = 2 if SMALL else 8
PRODUCT = 256 if SMALL else 8192  # rows of the square product that gives the measured peak


@contextmanager
def precision(name: str) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """The matrix products of a mode: ``bf16`` (autocast), ``tf32`` or ``fp32``; yields a context for a forward pass."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    try:
        yield lambda: torch.autocast(DEVICE, torch.bfloat16) if name == "bf16" else nullcontext()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Trainee:
    """A model, its optimizer and one batch."""

    def __init__(self, batch_size: int, world: World | None = None, **wrapping: Any) -> None:
        gc.collect()  # what earlier work left
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model: nn.Module = causal.build(PRESET, VOCABULARY, LENGTH, seed=0).train().to(DEVICE)
        self.numel = sum(p.numel() for p in model.parameters())
        self.config = model.config
        self.reducer: Reducer | None = wrapping.get("reducer")
        if wrapping.get("compiled"):
            parallel.compile_blocks(model)
        if world is not None:
            model = parallel.wrap(model, wrapping["strategy"], self.reducer, device=world.device)
            if self.reducer is not None:
                strategy_of(model).hook(model, self.reducer)  # wrap hooks no reducer of one rank
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
        generator = torch.Generator().manual_seed(0)
        self.batch = torch.randint(0, VOCABULARY, (batch_size, LENGTH), generator=generator).to(DEVICE)

    def loss(self, context: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """The mean over the targets, as the training loop has it: logits in float32."""
        with context():
            logits = self.model(self.batch, use_cache=False).logits
        return self.cross_entropy(logits, self.batch)

    def cross_entropy(self, logits: Tensor, batch: Tensor) -> Tensor:
        """Of each token after the first."""
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())

    def step(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Forward, backward, the reduction, the optimizer."""
        self.loss(context).backward()
        if self.reducer is not None:
            self.reducer.finish()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def flops_per_token(self) -> float:
        """Of forward and backward: 6 per weight of a matrix product (the tied embedding once), and attention's own."""
        positions = self.config.n_positions * self.config.n_embd
        return 6 * (self.numel - positions) + 12 * self.config.n_layer * self.config.n_embd * LENGTH


class OfOne(Reducer):
    """A reducer that encodes, exchanges and decodes with one rank, where others are the identity."""

    def _begin(self, *arguments: Any) -> Handle:
        return self._as_two(super()._begin, *arguments)

    def _algorithm(self, meter: Meter) -> Algorithm:
        algorithm = super()._algorithm(meter)
        algorithm.ranks = algorithm.ranks._replace(world=1)
        return algorithm

    def finish(self, *arguments: Any, **options: Any) -> bool:
        """End the step."""
        return self._as_two(super().finish, *arguments, **options)

    def _as_two(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.world = 2
        try:
            return call(*arguments, **options)
        finally:
            self.world = 1


def reduction_of(reducer: Reducer, kind: Kind) -> Callable[[Tensor, Layout], Tensor]:
    """A reduction by itself, also of one rank, for which a `Reducer` is the identity."""
    algorithm = reducer._algorithm(reducer.meter)
    mean = algorithm.mean_everywhere if kind == "all_reduce" else algorithm.mean_of_row
    return lambda flat, layout: queue.run(mean(flat, layout), reducer.group)


def peaks(_: None) -> Row:
    """FLOPs per second of a large square product by precision."""
    found: Row = {}
    for mode in ("bf16", "tf32", "fp32"):
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        square = torch.randn(PRODUCT, PRODUCT, device=DEVICE, dtype=dtype)
        with precision(mode):
            ms = milliseconds(lambda square=square: square @ square, 5)
        found[f"{mode}_tflops"] = 2e-9 * PRODUCT**3 / ms
    return found


def bare(_: None, mode: str, batch_size: int, compiled: str = "") -> Row:
    """Steps of the model without a wrapper; ``compiled``: blocks, loss, both, or model, which is one graph."""
    trainee = Trainee(batch_size)
    backend = {"backend": "eager"} if SMALL else {}
    if "blocks" in compiled:
        parallel.compile_blocks(trainee.model)
    if "loss" in compiled:
        trainee.cross_entropy = torch.compile(trainee.cross_entropy, **backend)  # type: ignore[method-assign]
    if compiled == "model":
        trainee.loss = torch.compile(trainee.loss, **backend)  # type: ignore[method-assign]
    with precision(mode) as context:
        began = time.perf_counter()
        trainee.step(context)
        first = time.perf_counter() - began
        ms = milliseconds(lambda: trainee.step(context), STEPS, warmup=3)
    return speed(trainee, ms, batch_size) | ({"first_step_s": first} if compiled else {})


def speed(trainee: Trainee, ms: float, batch_size: int) -> Row:
    """A step's time as tokens and FLOPs per second, and the peak memory."""
    tokens = batch_size * LENGTH / ms * 1e3
    found: Row = {"batch": batch_size, "step_ms": ms, "tokens_per_s": tokens}
    found["model_tflops"] = trainee.flops_per_token * tokens / 1e12
    if DEVICE == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def wrapped(world: World, strategy: str, method: str | None, batch_size: int, compiled: bool = False) -> Row:
    """Steps of a wrapped model in bfloat16, with a reducer or without."""
    reducer = OfOne(build(method)) if method else None
    trainee = Trainee(batch_size, world, strategy=strategy, reducer=reducer, compiled=compiled)
    if compiled:
        trainee.cross_entropy = torch.compile(trainee.cross_entropy)  # type: ignore[method-assign]
    with precision("bf16") as context:
        ms = milliseconds(lambda: trainee.step(context), STEPS, warmup=3)
    return speed(trainee, ms, batch_size)


def main() -> int:
    """Measure everything, compiled models last."""
    part = Part("model")
    single = Ranks(lambda: [alone])
    member = Ranks(lambda: group(1, "auto", DEVICE))

    def ask(
        name: str, ranks: Ranks, seconds: float, task: Callable[..., Row], *arguments: Any, **how: bool
    ) -> Row | None:
        return part.measure(name, lambda: ranks.run(part.at_most(seconds), task, *arguments)[0], **how)

    peak = ask("peak of a square product", single, 40, peaks)
    ask("bf16", single, 60, bare, "bf16", BATCH)
    for compiled in ("loss",) if SMALL else ("blocks", "blocks and loss", "model"):
        ask(f"bf16, compiled {compiled}", single, 60, bare, "bf16", BATCH, compiled, optional=True)
    name = "ddp int8, bf16, compiled blocks and loss"
    ask(name, member, 60, wrapped, "ddp", "int8", BATCH, not SMALL, optional=True)
    for strategy in ("ddp", "fsdp2"):
        ask(f"{strategy}, bf16", member, 40, wrapped, strategy, None, BATCH)
    for mode in ("tf32", "fp32"):
        ask(f"{mode}", single, 60, bare, mode, BATCH)
    single.end()
    member.end()
    shares(part, peak)
    best = max((row.get("of_the_product", 0.0) for row in part.rows), default=0.0)
    if not SMALL:
        part.target("share of the product's speed, best", best, 0.35, at_least=True)
    return part.finish(
        ["batch", "step_ms", "tokens_per_s", "model_tflops", "of_the_product", "peak_gb", "first_step_s"]
    )


def shares(part: Part, peak: Row | None) -> None:
    """Add each step's share of the measured product's FLOPs per second."""
    for row in part.rows:
        if peak is not None and "model_tflops" in row:
            mode = next(mode for mode in ("bf16", "tf32", "fp32") if mode in row["name"])
            row["of_the_product"] = row["model_tflops"] / peak[f"{mode}_tflops"]


if __name__ == "__main__":
    run(main)
