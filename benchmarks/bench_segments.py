"""Measure encoding and decoding all parameters of a model at once, one by one, and as one tensor of as many elements.

Prints a Markdown table of medians of processor time over interleaved rounds, on one core, with the ratio of all at once
to one tensor. Memory that is freed stays with the process. ``--sum N`` instead decodes and sums the encodings of two
ranks of a tensor with N elements, and prints the ratio to encoding one:

    python benchmarks/bench_segments.py
    python benchmarks/bench_segments.py --sum 37000000 --methods int8 onebit bf16 --repeats 11
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor

from gradwire.bench.codecs.timing import kept_memory, one_thread
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.feedback import Feedback
from gradwire.comm.compressors.segments import Segments

WIDTH = 128  # of the model preset ``tiny``: two layers, 2,048 tokens, 128 positions
LAYER = [(WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,),
         (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]  # fmt: skip
FORMS = [(2048, WIDTH), (128, WIDTH), *LAYER, *LAYER, (WIDTH,), (WIDTH,)]
NUMELS = [math.prod(form) for form in FORMS]
STARTS = list(accumulate(NUMELS, initial=0))
METHODS = {
    "int8": {}, "int8 num_bits=4": {"num_bits": 4}, "int8 stochastic": {"rounding": "stochastic"}, "fp8": {},
    "onebit": {}, "signsgd": {}, "natural": {}, "qsgd": {}, "terngrad": {}, "bf16": {}, "fp16": {}, "topk": {},
}  # fmt: skip
Calls = dict[str, Callable[[], object]]


def timed(calls: Calls, repeats: int) -> dict[str, float]:
    """Median milliseconds of each call; in a round each runs once, in a new random order."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 3):
        for name in random.sample(list(calls), len(calls)):
            began = time.process_time_ns()
            calls[name]()
            times[name].append((time.process_time_ns() - began) / 1e6)
    return {name: median(values[3:]) for name, values in times.items()}


def calls_for(compressor: Compressor, values: Tensor) -> Calls:
    """What is timed for one method."""
    drawn = [torch.Generator().manual_seed(seed) for seed in range(len(FORMS))]
    flags, out = torch.zeros(len(FORMS), dtype=torch.uint8), torch.zeros_like(values)
    tables = {
        "one": Segments.of(compressor, [(0, (values.numel(),))]),
        "all": Segments.of(compressor, zip(STARTS, FORMS, strict=False)),
    }
    wires = {name: compressor.encode_many(values, table, generators=drawn[: len(table)])[0]
             for name, table in tables.items()}  # fmt: skip
    feedbacks = [Feedback("float32", numel) for numel in NUMELS]
    residual = torch.zeros_like(values)

    def encode(name: str) -> None:
        count = len(tables[name])
        compressor.encode_many(values, tables[name], wires[name], generators=drawn[:count], flags=flags[:count])

    def encode_each() -> list[Tensor]:
        return [compressor.encode(values[segment.elements].view(segment.form), generator=generator, flag=flags[:1])
                for segment, generator in zip(tables["all"], drawn, strict=True)]  # fmt: skip

    def decode_each() -> None:
        for segment in tables["all"]:
            out[segment.elements] += compressor.decode(wires["all"][segment.bytes], segment.form).view(-1)

    def feedback_each() -> None:
        for segment, generator, feedback in zip(tables["all"], drawn, feedbacks, strict=True):
            corrected = feedback.compensate(values[segment.elements])
            wire = compressor.encode(corrected.view(segment.form), generator=generator, flag=flags[:1])
            feedback.update(compressor.decode(wire, segment.form).view(-1))
            feedback.drop(where=flags[:1])

    return {
        "encode one": lambda: encode("one"),
        "encode all": lambda: encode("all"),
        "encode each": encode_each,
        "decode one": lambda: compressor.decode_add(wires["one"], tables["one"], out),
        "decode all": lambda: compressor.decode_add(wires["all"], tables["all"], out),
        "decode each": decode_each,
        "feedback all": lambda: compressor.encode_many(
            values, tables["all"], wires["all"], generators=drawn, flags=flags, residual=residual
        ),
        "feedback each": feedback_each,
    }


def sum_of_two(compressor: Compressor, numel: int, repeats: int) -> dict[str, float]:
    """Encoding a tensor, and decoding and summing the encodings of two ranks."""
    values, out, drawn = torch.randn(numel), torch.zeros(numel), [torch.Generator()]
    table = Segments.of(compressor, [(0, (numel,))])
    wires = torch.stack([compressor.encode_many(values, table, generators=drawn)[0]] * 2)
    return timed(
        {
            "encode": lambda: compressor.encode_many(values, table, wires[0], generators=drawn),
            "decode and sum": lambda: compressor.decode_add(wires, table, out, onto="zero"),
        },
        repeats,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--sum", type=int, metavar="N", help="decode and sum two ranks' tensors of N elements")
    args = parser.parse_args()
    torch.manual_seed(0)
    with one_thread(), kept_memory():
        for index, name in enumerate(args.methods):
            compressor = build(name.split()[0], **METHODS[name])
            if args.sum:
                found = sum_of_two(compressor, args.sum, args.repeats)
                ratios = {"ratio": found["decode and sum"] / found["encode"]}
            else:
                found = timed(calls_for(compressor, torch.randn(STARTS[-1])), args.repeats)
                ratios = {f"{kind} all / one": found[f"{kind} all"] / found[f"{kind} one"]
                          for kind in ("encode", "decode")}  # fmt: skip
            if not index:
                print(
                    "| method | " + " | ".join([*found, *ratios]) + " |\n|" + " --- |" * (1 + len(found) + len(ratios))
                )
            cells = [f"{value:.3f}" for value in found.values()] + [f"{value:.2f}" for value in ratios.values()]
            print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
