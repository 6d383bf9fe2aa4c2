"""Training steps of the 62M model at 1,024 tokens: ``python -m gpu.model``.

Tokens per second, the share of the GPU's peak (MFU), memory, what a wrapped model costs beside the bare one, what
encoding the gradient costs, and where the time goes by the trace.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.part import DEVICE, SMALL, Part, Row, run
from gpu.workers import MEAN, Ranks, alone, group
from torch import Tensor, nn

from gradwire.comm import parallel
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build
from gradwire.lm.models import causal

PRESET, VOCABULARY, LENGTH = ("micro", 512, 64) if SMALL else ("62m", 50257, 1024)
BATCH, MOST = (2, 4) if SMALL else (32, 128)
STEPS = 2 if SMALL else 8
PRODUCT = 256 if SMALL else 8192  # rows of the square product that gives the measured peak
NOMINAL = {
    "H100": {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12},
    "H200": {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12},
}
NOMINAL |= {"A100": {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}}  # dense, from the data sheets
CODECS = {"int8": {}, "topk": {"density": 0.01}, "powersgd": {"rank": 4}, "onebit": {}}


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
        if world is not None:
            model = parallel.wrap(model, wrapping["strategy"], self.reducer, device=world.device)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
        generator = torch.Generator().manual_seed(0)
        self.batch = torch.randint(0, VOCABULARY, (batch_size, LENGTH), generator=generator).to(DEVICE)

    def loss(self, context: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """The mean over the targets, as the training loop has it: logits in float32."""
        with context():
            logits = self.model(self.batch, use_cache=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), self.batch[:, 1:].flatten())

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


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(action: Callable[[], Any], steps: int = STEPS, warmup: int = 2) -> float:
    """The median of several runs."""
    times = []
    for turn in range(warmup + steps):
        synchronize()
        began = time.perf_counter()
        action()
        synchronize()
        if turn >= warmup:
            times.append(1e3 * (time.perf_counter() - began))
    return median(times)


def peaks(_: None) -> Row:
    """FLOPs per second of a large square product by precision, and the state of TF32."""
    found: Row = {"tf32_by_default": torch.backends.cuda.matmul.allow_tf32, "gpu": name_of_gpu()}
    for mode in ("bf16", "tf32", "fp32"):
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        square = torch.randn(PRODUCT, PRODUCT, device=DEVICE, dtype=dtype)
        with precision(mode):
            ms = milliseconds(lambda square=square: square @ square, 5)
        found[f"{mode}_tflops"] = 2e-9 * PRODUCT**3 / ms
    return found


def name_of_gpu() -> str:
    """Its name."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"


def bare(_: None, mode: str, batch_size: int, compiled: bool = False) -> Row:
    """Steps of the model without any wrapper."""
    trainee = Trainee(batch_size)
    if compiled:
        parallel.compile_blocks(trainee.model)
    with precision(mode) as context:
        ms = milliseconds(lambda: trainee.step(context), warmup=3)
    return speed(trainee, ms, batch_size)


def speed(trainee: Trainee, ms: float, batch_size: int) -> Row:
    """A step's time as tokens and FLOPs per second, and the peak memory."""
    tokens = batch_size * LENGTH / ms * 1e3
    found: Row = {"batch": batch_size, "step_ms": ms, "tokens_per_s": tokens}
    found["model_tflops"] = trainee.flops_per_token * tokens / 1e12
    if DEVICE == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def largest(_: None, mode: str) -> Row:
    """The largest batch, by doubling, of which a step fits in memory."""
    fits, batch_size = 0, BATCH
    while batch_size <= MOST:
        try:
            with precision(mode) as context:
                Trainee(batch_size).step(context)
        except torch.cuda.OutOfMemoryError:
            break
        fits, batch_size = batch_size, 2 * batch_size
    return {"batch": fits}


def codecs(world: World, method: str, options: dict[str, Any]) -> Row:
    """What encoding, exchanging and decoding the model's gradient costs with one rank: what a hook adds to a step."""
    reducer = Reducer(build(method, **options))
    shapes = [(name, tuple(p.shape)) for name, p in causal.build(PRESET, VOCABULARY, LENGTH, 0).named_parameters()]
    layout = Layout.dim0(shapes, world.world_size)
    flat = torch.randn(layout.numel, device=world.device)
    found: Row = {}
    for kind in ("all_reduce", "reduce_scatter"):
        reducer.algorithm = "native" if method == "powersgd" else "exchange"
        found[f"{kind}_ms"] = milliseconds(lambda kind=kind: getattr(reducer._reduction, MEAN[kind])(flat, layout), 3)
    return found


def wrapped(world: World, strategy: str, method: str | None, mode: str, batch_size: int) -> Row:
    """Steps of a wrapped model, with a reducer or without."""
    reducer = Reducer(build(method)) if method else None
    trainee = Trainee(batch_size, world, strategy=strategy, reducer=reducer)
    with precision(mode) as context:
        ms = milliseconds(lambda: trainee.step(context), 2 if world.world_size > 1 else STEPS, warmup=2)
    return speed(trainee, ms, batch_size)


def traced(world: World, strategy: str, mode: str, batch_size: int) -> Row:
    """The GPU's time of a step by kernel: the ten that take the most, and NCCL's."""
    from torch.profiler import ProfilerActivity, profile

    trainee = Trainee(batch_size, world, strategy=strategy)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    with precision(mode) as context:
        for _ in range(2):
            trainee.step(context)
        synchronize()
        began = time.perf_counter()
        with profile(activities=activities) as profiler:
            trainee.step(context)
            synchronize()
        wall = 1e6 * (time.perf_counter() - began)
    key = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
    averages = sorted(profiler.key_averages(), key=lambda one: -getattr(one, key))
    kernels = [one for one in averages if DEVICE == "cpu" or "CUDA" in str(one.device_type)]
    total = sum(getattr(one, key) for one in kernels)
    return {
        "busy_share": total / wall,
        "top": {one.key[:60]: round(getattr(one, key) / total, 3) for one in kernels[:10]},
        "nccl_us": sum(getattr(one, key) for one in kernels if "nccl" in one.key.lower()),
    }


def main() -> int:
    """Measure everything."""
    part = Part("model")
    single = Ranks(lambda: [alone])
    member = Ranks(lambda: group(1, "auto", DEVICE))
    pair = Ranks(lambda: group(2, "auto", DEVICE))

    def ask(
        name: str, ranks: Ranks, seconds: float, task: Callable[..., Row], *arguments: Any, **how: bool
    ) -> Row | None:
        return part.measure(name, lambda: ranks.run(part.at_most(seconds), task, *arguments)[0], **how)

    peak = ask("peak of a square product", single, 40, peaks)
    for mode in ("bf16", "fp32", "tf32"):
        ask(f"{mode}", single, 60, bare, mode, BATCH)
    ask("largest batch, bf16", single, 40, largest, "bf16")
    if not SMALL:
        ask("bf16, compiled blocks", single, 60, bare, "bf16", BATCH, True, optional=True)
    single.end()
    for strategy in ("ddp", "fsdp2"):
        ask(f"{strategy} W = 1, bf16", member, 40, wrapped, strategy, None, "bf16", BATCH)
        ask(f"{strategy} W = 1 none, bf16", member, 40, wrapped, strategy, "none", "bf16", BATCH)
        ask(f"trace of {strategy} W = 1, bf16", member, 40, traced, strategy, "bf16", BATCH)
    for method, options in CODECS.items():
        ask(f"{method} alone, W = 1", member, 40, codecs, method, options)
    member.end()
    batch_size = max(1, BATCH // 4)
    for strategy, method in (("ddp", None), ("ddp", "none"), ("ddp", "int8"), ("fsdp2", None), ("fsdp2", "int8")):
        name = f"{strategy} W = 2 {method or 'unhooked'}, bf16"
        ask(name, pair, 60, wrapped, strategy, method, "bf16", batch_size)
    pair.end()
    shares(part, peak)
    columns = ["batch", "step_ms", "tokens_per_s", "model_tflops", "mfu_nominal", "mfu_measured", "peak_gb"]
    return part.finish([*columns, "all_reduce_ms", "reduce_scatter_ms", "busy_share", "nccl_us"])


def shares(part: Part, peak: Row | None) -> None:
    """Add MFU against the data sheet and against the measured product, and the targets' overheads."""
    for row in part.rows:
        if peak is None or "model_tflops" not in row or "W = 2" in row["name"]:
            continue
        mode = next(mode for mode in ("bf16", "tf32", "fp32") if mode in row["name"])
        nominal = next((by for name, by in NOMINAL.items() if name in peak["gpu"]), None)
        row["mfu_measured"] = row["model_tflops"] / peak[f"{mode}_tflops"]
        row["mfu_nominal"] = 1e12 * row["model_tflops"] / nominal[mode] if nominal else None
    plain, hooked = part.row("bf16"), part.row("ddp W = 1 none, bf16")
    if plain and hooked:
        print(f"\nddp on one rank takes {hooked['step_ms'] / plain['step_ms']:.3f} of the bare model's step")
    for method in CODECS:
        alone_, whole = part.row(f"{method} alone, W = 1"), part.row("bf16")
        if alone_ and whole:
            share = alone_["all_reduce_ms"] / whole["step_ms"]
            print(f"{method}: encoding and decoding the gradient takes {share:.3f} of a step of batch {BATCH}")


if __name__ == "__main__":
    run(main)
