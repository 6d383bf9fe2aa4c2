"""The cosine transform's tiles against scipy's, and what DeMo's formula sends of a tile made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

from gradwire.comm.compressors import build
from gradwire.comm.compressors.methods.dcttopk import divisor

SHAPES = [(64, 128), (130, 192), (7, 13), (1, 64), (96,), (127,), (1,), (5, 0)]


def tiles_of(shape, tile):
    """Rows and columns of a tile: the largest divisors."""
    rows, columns = shape if len(shape) == 2 else (1, shape[0])
    return tuple(max([d for d in range(1, tile + 1) if n % d == 0] if n else [1]) for n in (rows, columns))


def demo(x, k, tile):
    """The values of a rank's largest coefficients, tile by tile: scipy's transforms, and a sort."""
    flat = x.reshape(1, -1) if x.ndim == 1 else x
    height, width = tiles_of(x.shape, tile)
    count = max(1, round(k / tile**2 * height * width))
    out, chosen = np.zeros_like(flat), []
    for top in range(0, flat.shape[0], height):
        for left in range(0, flat.shape[1], width):
            part = (slice(top, top + height), slice(left, left + width))
            coefficients = dctn(flat[part], norm="ortho").astype(np.float32).reshape(-1)
            largest = np.argsort(-np.abs(coefficients), kind="stable")[:count]
            kept = np.zeros_like(coefficients)
            kept[largest] = coefficients[largest]
            out[part] = idctn(kept.astype(np.float64).reshape(height, width), norm="ortho")
            chosen.append(len(largest))
    return out.reshape(x.shape), sum(chosen)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("k", "tile"), [(32, 64), (5, 8), (1, 1)])
def test_it_sends_the_largest_coefficients_of_every_tile(shape, k, tile):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) + 0.3
    method = build("dcttopk", k=k, tile=tile)
    expected, sent = demo(x.double().numpy(), k, tile)
    wire = method.encode(x)
    torch.testing.assert_close(method.decode(wire, shape), torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-6)
    assert method.sent_elements(shape, wire) == method.kept(shape) == sent
    assert wire.numel() == method.wire_bytes(shape)


def test_a_tile_made_by_hand():
    """A wave of one frequency in each dimension is one coefficient, and comes back whole."""
    t = torch.arange(8, dtype=torch.float64) + 0.5
    wave = torch.outer(torch.cos(math.pi / 8 * 3 * t), torch.cos(math.pi / 8 * 5 * t))
    method = build("dcttopk", k=1, tile=8)
    wire = method.encode(wave.float())
    assert wire.numel() == 1 + 4, "6 bits for the place, and the value"
    assert wire[0] == 3 * 8 + 5 and wire[1:].clone().view(torch.float32).item() == pytest.approx(4.0)
    torch.testing.assert_close(method.decode(wire, (8, 8)), wave.float(), rtol=1e-6, atol=1e-6)


def test_all_coefficients_are_the_tensor():
    x = torch.randn(60, 35, generator=torch.Generator().manual_seed(5))
    method = build("dcttopk", k=64, tile=8)
    torch.testing.assert_close(method.decode(method.encode(x), (60, 35)), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "most", "expected"), [(64, 64, 64), (192, 64, 64), (130, 64, 26), (127, 64, 1), (0, 64, 1)]
)
def test_sides_of_tiles(n, most, expected):
    assert divisor(n, most) == expected
