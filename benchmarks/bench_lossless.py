"""Measure the lossless stage on the gradients of a model in training: how much shorter messages become, and how fast.

Trains the preset ``tiny`` in one process on the default corpus and encodes its gradients, each parameter by itself, at
a few steps. Prints two Markdown tables: bytes without the stage over bytes with it, bits of an index, and the stage's
speed, MB of what it is given over the processor time that it adds on one core; then ratio and speed by a tensor's size:

    gradwire download --output corpus.json
    gradwire tokenize --data_path corpus.json --output_dir data --vocab_size 1024
    python benchmarks/bench_lossless.py --shards data/shards
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from gradwire.bench.codecs.timing import kept_memory, one_thread
from gradwire.bench.training.evaluate import loss_sum
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.lm.data.batches import train_batches
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

TOPK = {"density": 0.016}
CHAINS = {
    "bf16": ("bf16", {}),
    "int8, num_bits 4, block 64": ("int8", {"num_bits": 4, "block": 64}),
    "topk, density 0.016": ("topk", TOPK),
    "topk, density 0.016, indices varint": ("topk", {**TOPK, "indices": "varint"}),
}
SIZES = [2**exponent for exponent in (9, 11, 13, 15, 17)]  # elements of a tensor


def gradients(shards: Path, steps: int, at: list[int], seed: int) -> Iterator[tuple[int, list[Tensor]]]:
    """Train as the default experiment does, with its two ranks' batch, and yield the gradients of some steps."""
    split = Shards(shards, "train")
    model = causal.build("tiny", split.meta["vocab_size"], split.meta["max_length"], seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.006, betas=(0.9, 0.95), weight_decay=0.1)
    batches = train_batches(split, 16, 0, 1, seed)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 0.006 * min(1.0, step / 6)
        batch = next(batches)
        optimizer.zero_grad()
        (loss_sum(model, batch) / batch.n_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step in at:
            yield step, [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()


def seconds(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """The median of each call's processor time; in a round each runs once."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 2):
        for call, own in zip(calls, times, strict=True):
            began = time.process_time()
            call()
            own.append(time.process_time() - began)
    return [median(own[2:]) for own in times]


def speeds(plain: Compressor, coded: Compressor, tensors: list[Tensor], repeats: int) -> str:
    """MB of what the stage is given over the time that it adds to encoding, and to decoding."""

    def encode(compressor: Compressor) -> list[Tensor]:
        return [compressor.encode(tensor) for tensor in tensors]

    def decode(compressor: Compressor, wires: list[Tensor]) -> list[Tensor]:
        return [compressor.decode(wire, tensor.shape) for wire, tensor in zip(wires, tensors, strict=True)]

    first, second = encode(plain), encode(coded)
    calls = [
        partial(encode, plain),
        partial(encode, coded),
        partial(decode, plain, first),
        partial(decode, coded, second),
    ]
    times = seconds(calls, repeats)
    total = sum(wire.numel() for wire in first) / 1e6
    return f"{total / (times[1] - times[0]):.0f} | {total / (times[3] - times[2]):.0f}"


def line(name: str, step: int, tensors: list[Tensor], repeats: int) -> str:
    """A line of the first table."""
    method, options = CHAINS[name]
    plain, coded = build(method, **options), build(f"{method}+entropy", **options)
    raw = sent = index = kept = 0
    for tensor in tensors:
        before, wire = plain.encode(tensor), coded.encode(tensor)
        assert torch.equal(coded.decode(wire, tensor.shape), plain.decode(before, tensor.shape)), "the same numbers"
        raw, sent = raw + before.numel(), sent + wire.numel()
        index += coded.index_bytes(wire, tensor.shape)
        kept += coded.sent_elements(tensor.shape, wire) or 0
    bits = f"{8 * index / kept:.3f}" if index else "–"
    speed = speeds(plain, coded, tensors, repeats)
    return f"| {name} | {step} | {raw:,} | {sent:,} | {raw / sent:.3f} | {bits} | {speed} |"


def by_size(tensor: Tensor, repeats: int) -> Iterator[str]:
    """The lines of the second table: the beginning of a gradient."""
    for numel in SIZES:
        part, found = [tensor.view(-1)[:numel].clone()], []
        for name in ("bf16", "int8, num_bits 4, block 64", "topk, density 0.016, indices varint"):
            method, options = CHAINS[name]
            plain, coded = build(method, **options), build(f"{method}+entropy", **options)
            raw, sent = plain.encode(part[0]).numel(), coded.encode(part[0]).numel()
            speed = speeds(plain, coded, part * (2**17 // numel), repeats) if sent < raw else "– | –"
            found.append(f"{raw / sent:.2f} | {speed}")
        yield f"| {numel:,} | {' | '.join(found)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="token shards, such as data/shards")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--at", type=int, nargs="+", default=[5, 20, 60], help="steps whose gradients are encoded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    found = list(gradients(args.shards, args.steps, args.at, args.seed))
    with one_thread(), kept_memory():
        print("| chain before `+entropy` | step | bytes without | bytes with | ratio | bits of an index "
              "| code MB/s | decode MB/s |\n|:--|--:|--:|--:|--:|--:|--:|--:|")  # fmt: skip
        for name in CHAINS:
            for step, tensors in found:
                print(line(name, step, tensors, args.repeats), flush=True)
        print("\n| elements | bf16 ratio | code | decode | int4 ratio | code | decode | varint ratio | code | decode |"
              "\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")  # fmt: skip
        for text in by_size(max(found[-1][1], key=Tensor.numel), args.repeats):
            print(text, flush=True)


if __name__ == "__main__":
    main()
