"""Strategies on the GPU: ``python -m gpu.strategies``.

Steps of `tiny` on a made-up corpus through the package's own training loop, each strategy with each compressor: one
rank on NCCL, two ranks on gloo that share the GPU, and the same on the CPU. Losses are held against the CPU's, counted
bytes against the closed form, memory against the prediction. FSDP2's state is gathered. The reductions run once more by
themselves, where any wait of the host for the GPU is an error.
"""

from __future__ import annotations

import random
import shutil
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers.models.gpt2.modeling_gpt2  # noqa: F401  imported before the ranks are forked
from gpu.model import reduction_of
from gpu.part import DEVICE, OUT, SMALL, Part, Row, host_waits, run
from gpu.workers import Ranks, alone, group

from gradwire.base.files import write_json
from gradwire.bench.config import Cell, Training
from gradwire.bench.training import loop
from gradwire.bench.training.settings import Settings
from gradwire.bench.training.step import Preemption
from gradwire.comm import parallel
from gradwire.comm.collectives import Layout, Reducer
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build, kernels
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenize import tokenize
from gradwire.lm.models import causal

STRATEGIES = ("naive", "bucket", "ddp", "fsdp1", "fsdp2")
REPLICAS = ("naive", "bucket", "ddp")
CELLS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "none, hooked": {"method": "none", "algorithm": "exchange"},
    "int8": {"method": "int8"},
    "topk-ef": {"method": "topk", "density": 0.05, "error_feedback": True},
    "powersgd": {"method": "powersgd", "rank": 4, "error_feedback": True},
    "onebit_adam": {"method": "onebit", "comm_optimizer": "onebit_adam", "dense_steps": 3},
}
TOLERANCE = {"none": 1e-3, "none, hooked": 1e-3, "int8": 2e-3, "powersgd": 2e-2}  # relative; else OTHERS
OTHERS = 1e-2  # PowerSGD's first factors are drawn by the device's generator
STEPS = 6
WORDS = ("gradient", "rank", "wire", "tensor", "shard", "token", "byte", "sum", "mean", "row", "column")


def corpus(folder: Path) -> Path:
    """Shards of made-up documents."""
    draw = random.Random(0)
    documents = [
        {"id": f"made/{n}", "title": f"{n}", "text": " ".join(draw.choices(WORDS, k=draw.randint(40, 90)))}
        for n in range(160)
    ]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "corpus.json", documents)
    return tokenized(folder, vocab_size=320, max_length=64, shard_size=64)


def tokenized(folder: Path, **sizes: int) -> Path:
    """Shards of the documents in ``corpus.json``."""
    tokenize(folder / "corpus.json", folder, tokenizer="bpe", val_fraction=0.1, dataset="gpu", **sizes)
    return folder / "shards"


def trained(
    world: World,
    shards: Path,
    folder: Path,
    strategy: str,
    cell: dict[str, Any],
    model: str = "tiny",
    training: dict[str, Any] | None = None,
) -> Row:
    """Train; this rank's losses, bytes and peak memory."""
    patch.object(loop, "scalars", lambda *_: nullcontext(lambda row: None)).start()  # tensorboard may not be installed
    device = world.device.type
    if DEVICE == "cuda" and device == "cpu":
        kernels.find = lambda method, where: kernels.REFERENCE  # nothing to compile
    given: dict[str, Any] = {"batch_size": 4, "steps": STEPS, "evaluate": False, "eval_every": 0, "profile": False} | (
        training or {}
    )
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    settings = Settings(
        training=Training(device=device, warmup_steps=1, lr=1e-3, **given),
        cell=Cell.parse("cell", cell),
        strategy=strategy,  # type: ignore[arg-type]
        model=model,
        seed=0,
        data_path=shards,
        output_dir=folder,
        resume=False,
        verify_sync=0 if world.simulated else 2,
    )
    splits = Shards(shards, "train"), Shards(shards, "val")
    _, _, outcome = loop.train(settings, splits, world, "gpu-check", Preemption())
    return {
        "losses": [row["loss"] for row in outcome.rows],
        "sent": [row.get("bytes_sent") for row in outcome.rows],
        "closed_form": [row.get("bytes_closed_form") for row in outcome.rows],
        "step_ms": [row["step_ms"] for row in outcome.rows if not row["warmup"] and not row["profiled"]],
        "numel": outcome.numel,
        "peak_bytes": int(outcome.memory.gb()[0] * 1e9),
        "diverged": outcome.diverged,
        "val_loss": outcome.quality.loss if outcome.quality else None,
    }


def gathered(world: World) -> Row:
    """The full state of a model that fsdp2 shards, and where it is not that of the model itself."""
    model = causal.build("tiny", 320, 64, 0)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = parallel.full_state_dict(parallel.wrap(model.to(world.device), "fsdp2", None, device=world.device))
    wrong = [name for name in expected if name not in state or not torch.equal(state[name], expected[name])]
    return {"tensors": len(state), "wrong": wrong if world.rank == 0 else []}


def reduced(world: World, cell: dict[str, Any], kind: str) -> Row:
    """A reduction of the gradients of `tiny` by itself, also with one rank, and how often the host waits."""
    parsed = Cell.parse("cell", cell)
    options = {name: getattr(parsed.reduction, name) for name in parsed.reduction.model_fields_set}
    reducer = Reducer(build(parsed.method, **parsed.options), **options)
    shapes = [(name, tuple(p.shape)) for name, p in causal.build("tiny", 320, 64, 0).named_parameters()]
    layout = Layout.dim0(shapes, world.world_size)
    numel = sum(shard.numel for shard in layout.shards)
    reducer.prepare(kind, numel)  # type: ignore[arg-type]
    flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(world.rank)).to(world.device)
    reduction = reduction_of(reducer, kind)  # type: ignore[arg-type]
    for _ in range(2):  # the second step: state is made in the first
        result = reduction(flat.clone(), layout)
        reducer.finish()
    found: Row = {"algorithm": reducer.algorithm, "finite": bool(result.isfinite().all())}
    if world.device.type == "cpu":
        return found
    given = flat.clone()
    found["host_waits"] = host_waits(lambda: reduction(given, layout))
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # type: ignore[no-untyped-call]
    for _ in range(5):
        reduction(flat, layout)
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()
    return found | {"ms": begin.elapsed_time(end) / 5}


def compared(label: str, here: list[Row], there: list[Row]) -> Row:
    """Measurements of the ranks on the device, and how they differ from the CPU's ranks and from the closed form."""
    wrong = []
    losses, expected = here[0]["losses"], there[0]["losses"]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    if not apart <= TOLERANCE.get(label, OTHERS):
        wrong.append(f"losses {losses} are not the CPU's {expected}")
    sent, closed = total_of(here, "sent"), total_of(here, "closed_form")
    if sent != total_of(there, "sent"):
        wrong.append(f"bytes {sent} are not the CPU's {total_of(there, 'sent')}")
    if any(rank["losses"] != losses for rank in here):
        wrong.append("ranks report different losses")
    if any(rank["diverged"] for rank in here):
        wrong.append(f"diverged: {here[0]['diverged']}")
    if any(None not in pair and pair[0] != pair[1] for pair in zip(sent, closed, strict=True)):
        wrong.append(f"sent {sent} bytes, the closed form is {closed}")
    return {
        "loss": losses[-1],
        "apart": apart,
        "bytes_per_step": sent[-1],
        "closed_form": closed[-1],
        "step_ms": min(here[0]["step_ms"], default=None),
        "peak_mb": max(rank["peak_bytes"] for rank in here) / 1e6,
        "wrong": wrong,
    }


def total_of(ranks: list[Row], count: str) -> list[int | None]:
    """Bytes of each step over all ranks; None if one is unknown, as without a reducer."""
    steps = zip(*(rank[count] for rank in ranks), strict=True)
    return [None if None in each else sum(each) for each in steps]


def count_gpus(_: None) -> int:
    """Number of GPUs; asked in a worker, since asking may keep later forks from using them."""
    return torch.cuda.device_count() if DEVICE == "cuda" else 0


def main() -> int:
    """Run all cells on both world sizes."""
    part = Part("strategies")
    shards = corpus(OUT / "made-up")
    counting = Ranks(lambda: [alone])
    gpus = counting.run(60, count_gpus)[0]
    counting.end()
    strategies = ("ddp", "fsdp2") if SMALL else STRATEGIES
    labels = ("none", "int8", "onebit_adam") if SMALL else tuple(CELLS)
    for world in [1, 2, *([gpus] if gpus > 2 else [])]:
        # NCCL with a GPU for each rank, gloo where they share one
        here = Ranks(lambda world=world: group(world, "auto", DEVICE))
        there = Ranks(lambda world=world: group(world, "gloo", "cpu"))

        def cell(strategy: str, label: str, here: Ranks = here, there: Ranks = there) -> Row:
            folder, seconds = OUT / "runs" / strategy / label.replace(", ", "-"), part.at_most(60)
            try:
                expected = there.run(seconds, trained, shards, folder / "cpu", strategy, CELLS[label])
                measured = here.run(seconds, trained, shards, folder / "device", strategy, CELLS[label])
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return compared(label, measured, expected)

        def reduction(label: str, kind: str, here: Ranks = here, nccl: bool = world <= gpus) -> Row:
            result = here.run(part.at_most(40), reduced, CELLS[label], kind)[0]
            waits = result.get("host_waits", 0) if nccl else 0  # gloo copies through the host
            return result | {"wrong": [f"the host waits {waits} times"] if waits else []}

        part.measure(f"state of fsdp2, W = {world}", lambda here=here: here.run(part.at_most(40), gathered)[0])
        for strategy, label in product(strategies, labels):
            if label != "onebit_adam" or strategy in REPLICAS:
                part.measure(f"{strategy}, {label}, W = {world}", partial(cell, strategy, label))
        for label, kind in product(labels, ("all_reduce", "reduce_scatter")):
            if label not in ("none", "onebit_adam"):
                part.measure(f"{label} alone, {kind}, W = {world}", partial(reduction, label, kind))
        here.end()
        there.end()
    return part.finish(["loss", "apart", "bytes_per_step", "closed_form", "step_ms", "peak_mb", "ms", "host_waits"])


if __name__ == "__main__":
    run(main)
