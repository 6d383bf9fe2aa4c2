"""Programs on a GPU pack the same stream: on one where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from diagonals import swept
from samples import generator

from gradwire.comm.compressors.packing import pack, packed_bytes

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
load_packed = pytest.importorskip("gradwire.comm.compressors.kernels.cuda").load_packed
store_packed = pytest.importorskip("gradwire.comm.compressors.kernels.cuda").store_packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = 256
BEYOND = 5  # bytes after the stream, which no program may write


@triton.jit
def store(codes, out, n, BITS: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    store_packed(out, start * BITS // 8, tl.load(codes + at, mask=at < n, other=0), n - start, BITS, TILE)


@triton.jit
def load(packed, codes, n, BITS: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0) * TILE
    at = start + tl.arange(0, TILE)
    tl.store(codes + at, load_packed(packed, start, n - start, BITS, TILE))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 9, 256, 600, *swept(2, 7, 8, 255, 257, 1024)])
def test_packed_tiles_make_the_stream_and_come_back(bits, count):
    codes = torch.randint(2**bits, (count,), generator=generator(count), dtype=torch.int32).to(DEVICE)
    size, programs = packed_bytes(count, bits), triton.cdiv(count, TILE)
    out = torch.full((size + BEYOND,), 0xA5, dtype=torch.uint8, device=DEVICE)
    store[(programs,)](codes, out, count, BITS=bits, TILE=TILE)
    assert torch.equal(out[:size], pack(codes, bits)) and (out[size:] == 0xA5).all()
    back = torch.full((programs * TILE,), -1, dtype=torch.int32, device=DEVICE)
    load[(programs,)](out, back, count, BITS=bits, TILE=TILE)
    assert torch.equal(back[:count], codes)
    assert (back[count:] == 0).all(), "what is beyond the last code is not 0"
