"""Top-k sends exactly the k largest magnitudes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator, normal

from gradwire.base.errors import NonFiniteGradient
from gradwire.comm.compressors import build


def oracle(x: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of |x|, of equals those of lower index, by numpy in float64."""
    order = np.lexsort((np.arange(x.numel()), -x.double().abs().numpy()))
    kept = torch.zeros_like(x)
    places = torch.from_numpy(order[:k].copy())
    kept[places] = x[places]
    return kept


def sent(x: torch.Tensor, **options) -> torch.Tensor:
    """The values that arrive, in both forms."""
    compressor, shape = build("topk", **options), tuple(x.shape)
    arrived = compressor.decode(compressor.encode(x), shape)
    assert torch.equal(compressor.from_wire(compressor.to_wire(x, None), shape).view(shape), arrived)
    return arrived


def tie_heavy(n: int, seed: int) -> torch.Tensor:
    return torch.randint(-2, 3, (n,), generator=generator(seed)).float()


def close_together(n: int, seed: int) -> torch.Tensor:
    """Numbers that differ in their last bits only, so that every digit of a radix select counts."""
    return (0x3F800000 + torch.randint(0, 1500, (n,), generator=generator(seed))).to(torch.int32).view(torch.float32)


def all_magnitudes(n: int, seed: int) -> torch.Tensor:
    """From denormal to huge, either sign."""
    bits = torch.randint(0, 0x7F800000, (n,), generator=generator(seed)).to(torch.int32).view(torch.float32)
    return bits * (1 - 2 * torch.randint(0, 2, (n,), generator=generator(seed + 1)))


@pytest.mark.parametrize("density", [1e-9, 0.01, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("n", [1, 7, 1023, 1024, 1025, 10_007])
@pytest.mark.parametrize("inputs", [normal, tie_heavy, close_together, all_magnitudes], ids=lambda f: f.__name__)
def test_exactly_the_largest_are_sent(inputs, n, density):
    x = inputs(n, seed=n)
    k = max(1, round(density * n))
    assert build("topk", density=density).kept(n) == k
    assert torch.equal(sent(x, density=density), oracle(x, k))


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 2.0**-149, -3e38]), min_size=1, max_size=60),
    density=st.floats(0.01, 1),
)
def test_ties_go_to_the_lower_index(values, density):
    x = torch.tensor(values)
    assert torch.equal(sent(x, density=density), oracle(x, build("topk", density=density).kept(x.numel())))


def test_what_is_not_finite_is_larger_than_anything():
    x = normal(500)
    x[[3, 77, 400]] = torch.tensor([math.nan, -math.inf, math.inf])
    compressor = build("topk", density=3 / 500)
    flag = torch.zeros(1, dtype=torch.uint8)
    decoded = compressor.decode(compressor.encode(x, flag=flag), 500)
    assert flag.item() and decoded[3].isnan() and decoded[77] == -math.inf and decoded[400] == math.inf
    with pytest.raises(NonFiniteGradient):
        compressor.encode(x)


def test_wire_is_places_then_values():
    x = torch.tensor([1.0, -9.0, 0.5, 3.0, 9.0, -4.0, 2.0, 0.0, 1.0, 1.0])
    wire = build("topk", density=0.3, indices="int32").encode(x)
    assert wire[0] == 0
    assert wire[1:13].view(torch.uint8).clone().view(torch.int32).tolist() == [1, 4, 5]
    assert wire[13:].clone().view(torch.float32).tolist() == [-9.0, 9.0, -4.0]
    bitmap = build("topk", density=0.3, indices="bitmap")
    assert bitmap.encode(x)[:3].tolist() == [1, 0b00110010, 0]
    assert bitmap.index_bytes(bitmap.encode(x), 10) == 3


def test_its_size_is_known():
    for name in ("auto", "int32", "bitmap", "rice"):
        compressor = build("topk", indices=name)
        assert compressor.wire_bytes(10_007) == compressor.encode(normal(10_007)).numel()
    assert build("topk").wire_bytes(2**22) == 4 * 41_943 + 44_894  # 8.56 bits for a place
