"""Bins against the formula of hivemind's and SparseLoCo's code in plain Python."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
import torch
from samples import normal

from gradwire.comm.compressors import build


def reference(values: list[float], bits: int) -> list[float]:
    """``round(centered / scale + offset)``, clamped, with ``scale = 6 * std / bins``; then each bin's mean."""
    bins, mean = 2**bits, fmean(values)
    scale = 6.0 * stdev(values) / bins if len(values) > 1 else 0.0
    codes = [min(bins - 1, max(0, round((v - mean) / scale + bins // 2))) if scale else bins // 2 for v in values]
    means = {code: fmean(v for v, c in zip(values, codes, strict=True) if c == code) for code in set(codes)}
    return [means[code] for code in codes]


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_each_element_decodes_to_its_bins_mean(n, bits):
    x = normal(n, seed=n) + 0.3
    method = build("bins", bits=bits)
    decoded = method.decode(method.encode(x), n)
    torch.testing.assert_close(decoded.tolist(), reference(x.tolist(), bits), rtol=1e-6, atol=1e-7)
    assert float(decoded.double().sum()) == pytest.approx(float(x.double().sum()), rel=1e-4, abs=1e-4), "sums stay"


def test_the_wire_by_hand():
    """Variance 36.5 / 8, so bins are 3.2 wide: -4 is in bin 0.75, so 1; 4 in 3.25, so 3; the others round to 2."""
    x = torch.tensor([-4.0, 1, -1, 4, 0.5, -0.5, 1, -1, 0])
    assert x.sum() == 0 and x.square().sum() == 36.5
    method = build("bins")
    wire = method.encode(x)
    assert wire[:16].clone().view(torch.float32).tolist() == [0, -4, 0, 4]
    assert wire[16:].tolist() == [0b11_10_10_01, 0b10_10_10_10, 0b10]
    assert method.wire_bytes(9) == wire.numel() == 16 + 3


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(value):
    x = normal(30)
    x[7] = value
    method = build("bins")
    flag = torch.zeros(1, dtype=torch.uint8)
    decoded = method.decode(method.encode(x, flag=flag), 30)
    assert flag and not decoded[7].isfinite()
