"""Top-k of every chunk against a sort in plain Python, and its wire on a tensor made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from samples import normal

from gradwire.comm.compressors import build


def expected(values: list[float], k: int, chunk: int) -> list[float]:
    """The k largest of each chunk, of equal ones the first; of a short chunk as large a part."""
    out = [0.0] * len(values)
    for start in range(0, len(values), chunk):
        places = range(start, min(start + chunk, len(values)))
        count = min(len(places), max(1, round(k / chunk * len(places))))
        for place in sorted(places, key=lambda i: (-abs(values[i]), i))[:count]:
            out[place] = values[place]
    return out


@pytest.mark.parametrize("n", [1, 7, 16, 17, 45, 64, 301])
@pytest.mark.parametrize(("k", "chunk"), [(1, 16), (3, 16), (5, 10), (16, 16), (64, 4096)])
def test_each_chunk_sends_its_largest(n, k, chunk):
    x = normal(n, seed=n)
    x[n // 2 :] = x[n // 2 :].round()  # equal magnitudes, and zeros
    method = build("chunktopk", k=k, chunk=chunk)
    decoded = method.decode(method.encode(x), n)
    assert decoded.tolist() == expected(x.tolist(), k, chunk)


def test_the_wire_by_hand():
    """Two of four, places of two bits: (0, 3), (1, 2), and of the rest of three (2, 1.5 of them) places 0 and 2."""
    x = torch.tensor([9.0, 1, -2, 8, 0.5, -6, 7, 1, -5, 0.25, 4])
    method = build("chunktopk", k=2, chunk=4)
    wire = method.encode(x)
    assert wire[:2].tolist() == [0b10_01_11_00, 0b10_00]
    assert wire[2:].view(torch.uint8).clone().view(torch.float32).tolist() == [9, 8, -6, 7, -5, 4]
    assert method.wire_bytes(11) == wire.numel() == 2 + 4 * 6
    assert method.index_bytes(wire, 11) == 2


def test_the_published_size():
    """12 bits for a place and 2 for a value, per 64 elements: 146 times fewer than float32, but for the bins' means."""
    n = 64 * 4096
    assert 4 * n / (build("chunktopk+bins").wire_bytes(n) - 16) == pytest.approx(64 * 32 / 14)


def test_not_a_number_counts_as_the_largest():
    x = normal(40)
    x[3] = math.nan
    method = build("chunktopk", k=1, chunk=16)
    assert method.decode(method.encode(x, flag=torch.zeros(1, dtype=torch.uint8)), 40)[3].isnan()
