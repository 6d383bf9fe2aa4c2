"""onebit gives each element its side's mean, by the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from samples import normal

from gradwire.comm.compressors import build


def oracle(x: np.ndarray) -> np.ndarray:
    """One block in float64, element by element, from the definition."""
    negative = [value for value in x if value < 0]
    rest = [value for value in x if not value < 0]
    low = math.fsum(negative) / len(negative) if negative else 0.0
    high = math.fsum(rest) / len(rest) if rest else 0.0
    return np.array([low if value < 0 else high for value in x])


def expected(x: torch.Tensor, options: dict) -> torch.Tensor:
    """Every block's `oracle`, rounded once to float32."""
    values = x.double().numpy()
    flat, block = values.ravel(), options.get("block", 256)
    done = np.concatenate([oracle(flat[start : start + block]) for start in range(0, flat.size, block)])
    return torch.from_numpy(done.reshape(values.shape)).float()


OPTIONS = [{}, {"block": 7}, {"block": 2048}]


def coded(x: torch.Tensor, options: dict) -> torch.Tensor:
    compressor = build("onebit", **options)
    return compressor.decode(compressor.encode(x), tuple(x.shape))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [1, 255, 256, 257, 5003, (33, 40), (7, 300), (129, 1)], ids=str)
def test_every_element_becomes_its_sides_mean(options, shape):
    for scale in (1.0, 2.0**124, 2.0**-140):  # sums that float32 does not hold, and numbers that are not normal
        x = scale * (normal(shape, seed=2) + 0.1)
        assert torch.equal(coded(x, options), expected(x, options)), scale


def test_wire_is_pairs_of_means_then_bits():
    x = torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0, -0.0, 6.0, -6.0, -1.0, 9.0])
    wire = build("onebit", block=8).encode(x)
    assert wire[:16].view(torch.float32).tolist() == [2.0, -4.0, 9.0, -1.0]
    assert wire[16:].tolist() == [0b10001010, 0b01]
