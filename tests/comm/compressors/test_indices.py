"""Codes of places: the bytes that the definitions say, of the size that is promised, and nothing else accepted."""

from __future__ import annotations

import math
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import indices
from gradwire.comm.compressors.kernels.cpu import sparse

CODES = ["auto", "int32", "bitmap", "rice"]
every_code = pytest.mark.parametrize("code", CODES)
KERNEL = SimpleNamespace(encode=sparse.encode_places, decode=sparse.decode_places)
every_form = pytest.mark.parametrize("form", [indices, KERNEL], ids=["reference", "kernel"])


@st.composite
def subsets(draw) -> tuple[list[int], int]:
    """Ascending distinct numbers below n: scattered, clustered, none or all."""
    n = draw(st.one_of(st.integers(0, 40), st.integers(41, 3000), st.sampled_from([2**20, 2**31, 2**40])))
    kind = draw(st.sampled_from(["scattered", "clustered", "none", "all"]))
    if kind == "none" or n == 0:
        return [], n
    if kind == "all" and n <= 3000:
        return list(range(n)), n
    if kind == "scattered":
        return sorted(draw(st.sets(st.integers(0, n - 1), max_size=60))), n
    found = set()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, n - 1))
        found |= set(range(start, min(n, start + draw(st.integers(1, 30)))))
    return sorted(found), n


def said(code: str, places: list[int], n: int) -> bytes:
    """The body straight from the definition, through one large integer where bits are packed."""
    if code == "int32":
        return struct.pack(f"<{len(places)}i", *places)
    if code == "bitmap":
        return sum(1 << place for place in places).to_bytes(-(-n // 8), "little")
    k = len(places)
    sizes = {low: k * low + k + ((n - 1) >> low if n else 0) for low in range(64)}
    low = min(sizes, key=lambda low: (sizes[low], low))
    lower = sum(place % 2**low << low * i for i, place in enumerate(places))
    upper = sum(1 << (i + (place >> low)) for i, place in enumerate(places))
    unary = sizes[low] - k * low
    return lower.to_bytes(-(-k * low // 8), "little") + upper.to_bytes(-(-unary // 8), "little")


@every_form
@settings(max_examples=50, deadline=None)
@given(subset=subsets())
def test_the_bytes_are_the_definitions_and_come_back(form, subset):
    places, n = subset
    for number, code in enumerate(CODES[1:]):
        if (code == "bitmap" and n > 2**20) or (code == "int32" and n > 2**31):
            continue
        wire = form.encode(torch.tensor(places, dtype=torch.int64), n, code)
        assert bytes(wire.tolist()) == bytes([number]) + said(code, places, n)
        assert indices.coded_bytes(n, len(places), code) in (None, wire.numel())
        found, used = form.decode(torch.cat([wire, wire.new_full((9,), 0xFF)]), n, len(places), code)
        assert (found.tolist(), found.dtype, used) == (places, torch.int64, wire.numel())


@every_form
@settings(max_examples=50, deadline=None)
@given(subset=subsets())
def test_auto_is_the_smallest_of_known_size(form, subset):
    places, n = subset
    wire = form.encode(torch.tensor(places, dtype=torch.int64), n, "auto")
    known = ("int32", "bitmap", "rice") if n <= 2**31 else ("bitmap", "rice")
    sizes = [indices.coded_bytes(n, len(places), code) for code in known]
    assert wire.numel() == indices.coded_bytes(n, len(places)) == min(sizes)
    assert form.decode(wire, n, len(places), "auto")[0].tolist() == places


@pytest.mark.parametrize(("n", "k"), [(10_007, 100), (2**22, 41_943), (2**22, 4_194), (999_983, 50_000), (2**33, 99)])
def test_rice_is_within_six_tenths_of_a_bit_of_the_entropy(n, k):
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    assert entropy <= 8 * indices.coded_bytes(n, k, "rice") <= entropy + 0.6 * k + 32
    assert indices.choose(n, k, "auto") == "rice"


def test_auto_is_a_bitmap_where_more_than_a_quarter_is_sent():
    assert indices.choose(10_000, 2_700, "auto") == "bitmap"
    assert indices.choose(10_000, 2_300, "auto") == "rice"


@every_form
@every_code
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_is_corrupt_is_refused_or_says_ascending_places_in_range(form, code, data):
    n = data.draw(st.sampled_from([1, 9, 300, 2000]))
    places = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=40)))
    wire = form.encode(torch.tensor(places, dtype=torch.int64), n, code).clone()
    for _ in range(data.draw(st.integers(0, 4))):
        wire[data.draw(st.integers(0, wire.numel() - 1))] = data.draw(st.integers(0, 255))
    wire = wire[: data.draw(st.integers(0, wire.numel()))] if data.draw(st.booleans()) else wire
    try:
        found, used = form.decode(wire, n, len(places), code)
    except ValueError:
        return
    assert len(found) == len(places) and used <= wire.numel()
    assert all(0 <= place < n for place in found.tolist())
    assert (found.diff() > 0).all()


@every_form
@pytest.mark.parametrize("code", ["int32", "bitmap", "rice"])
def test_another_number_of_places_is_refused(form, code):
    places, n = torch.tensor([3, 4, 90]), 100
    wire = form.encode(places, n, code)
    with pytest.raises(ValueError):
        form.decode(wire[:-1], n, 3, code)
    with pytest.raises(ValueError):
        form.decode(wire, n, 101, code)
    with pytest.raises(ValueError, match="in code 2, expected bitmap" if code == "rice" else "in code"):
        form.decode(torch.cat([wire, wire.new_zeros(99)]), n, 3, "bitmap" if code == "rice" else "rice")


@every_form
@pytest.mark.parametrize("bad", [[5, 5, 9], [9, 5, 7], [1, 2, 100], [-1, 2, 3]], ids=str)
def test_places_out_of_order_or_range_are_refused(form, bad):
    wire = torch.cat([torch.zeros(1, dtype=torch.uint8), torch.tensor(bad, dtype=torch.int32).view(torch.uint8)])
    with pytest.raises(ValueError, match="ascending, distinct and below 100"):
        form.decode(wire, 100, 3, "int32")


@every_form
def test_a_remainder_beyond_the_range_is_refused(form):
    wire = indices.encode(torch.tensor([299]), 300, "rice")
    assert wire.tolist() == [2, 43, 0b100]  # 299 is 2 << 7 | 43
    wire[1] = 44
    with pytest.raises(ValueError, match="below 300"):
        form.decode(wire, 300, 1, "rice")


@every_form
def test_32_bits_are_refused_where_they_do_not_reach(form):
    with pytest.raises(BadInput, match=r"below 2,147,483,648, not below 2,147,483,649; use rice or auto"):
        form.encode(torch.tensor([1]), 2**31 + 1, "int32")
