"""Packed codes are one little-endian stream of bits, by every form that packs or unpacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator

from gradwire.comm.compressors.kernels.cpu import TILE, pack_tile, unpack_tile
from gradwire.comm.compressors.packing import pack, packed_bytes, unpack

WIDTHS = range(1, 17)
BYTE_PARTS = [1, 2, 4, 8]
COUNTS = [0, 1, 2, 3, 7, 8, 9, 255, 257, 1024]


def codes_of(bits: int, count: int) -> torch.Tensor:
    return torch.randint(2**bits, (count,), generator=generator(bits + count), dtype=torch.int64)


def stream(codes: torch.Tensor, bits: int) -> bytes:
    """The definition, in one integer of Python's: code i at the bits from ``i * bits`` on."""
    whole = sum(code << (i * bits) for i, code in enumerate(codes.tolist()))
    return whole.to_bytes(-(-len(codes) * bits // 8), "little")


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_codes_of_every_width_make_the_stream_and_come_back(bits, count):
    codes = codes_of(bits, count)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()) == stream(codes, bits) and packed.numel() == packed_bytes(count, bits)
    back = unpack(packed, bits, count)
    assert back.dtype == (torch.uint8 if bits <= 8 else torch.int64)
    assert back.tolist() == codes.tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_largest_codes_do_not_spill_over(bits):
    for place in range(9):
        codes = torch.zeros(9, dtype=torch.int64)
        codes[place] = 2**bits - 1
        assert bytes(pack(codes, bits).tolist()) == stream(codes, bits)
        assert unpack(pack(codes, bits), bits, 9).tolist() == codes.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("bits", [1, 3, 4, 7])
def test_codes_may_be_of_any_integer_type(dtype, bits):
    codes = codes_of(1 if dtype == torch.bool else bits, 45).to(dtype)
    assert bytes(pack(codes, bits).tolist()) == stream(codes.long(), bits)


@pytest.mark.parametrize("bits", BYTE_PARTS)
@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, TILE), above=st.booleans(), seed=st.integers(0, 2**31))
def test_the_compiled_tiles_make_the_same_stream(bits, count, above, seed):
    codes = torch.randint(2**bits, (count,), generator=generator(seed), dtype=torch.uint8)
    tile = np.full(TILE, 255, np.uint8)  # what an earlier tile left behind
    tile[:count] = codes.numpy() | (0xFF << bits & 0xFF if above else 0)  # only the lowest bits of a code count
    size = packed_bytes(count, bits)
    out = np.full(size + 3, 0xA5, np.uint8)
    pack_tile(tile, count, bits, out)
    assert bytes(out[:size]) == stream(codes, bits)
    assert (out[size:] == 0xA5).all(), "written beyond the last byte"
    back = np.full(TILE, 0xA5, np.uint8)
    unpack_tile(out[:size], count, bits, back)
    assert (back[:count] == codes.numpy()).all() and (back[count:] == 0xA5).all()
