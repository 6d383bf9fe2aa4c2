"""PyTorch's operations that benchmarks/gpu times beside compressors do the compressors' jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from samples import normal

from gradwire.bench.codecs.cases import size
from gradwire.comm.compressors import build

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu.torch_codecs import torch_cases


def test_torchs_own_operations_do_the_job():
    x, generator, flag = normal((40, 50)), torch.Generator(), torch.zeros(1, dtype=torch.uint8)
    own = {case.name: case.codec for case in torch_cases()}
    wires = {name: codec.encode(x, generator=generator, flag=flag) for name, codec in own.items()}
    decoded = {name: codec.decode(wires[name], (40, 50)) for name, codec in own.items()}
    top = build("topk")
    assert torch.equal(decoded["torch: topk"], top.decode(top.encode(x), (40, 50)))
    assert torch.equal(decoded["torch: to(float16)"], x.half().float())
    assert size(wires["torch: topk"]) == 20 * 12 and size(wires["torch: to(float16)"]) == 4000
    assert (decoded["torch: quantize_per_channel"] - x).abs().max() <= x.abs().max() / 254 * 1.001
    assert 5 <= torch.count_nonzero(decoded["torch: nonzero"]) <= 60
    assert torch.linalg.matrix_rank(decoded["torch: PowerSGD hook's maths"]) == 4
