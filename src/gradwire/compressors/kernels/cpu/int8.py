"""int8 on a CPU core: a block is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cpu import INFINITY, compiled, largest
from gradwire.compressors.kernels.cpu.packing import TILE, pack_tile, unpack_tile
from gradwire.compressors.kernels.cpu.philox import fill_words, uniform
from gradwire.compressors.methods.int8 import SMALLEST_SCALE, Int8
from gradwire.compressors.philox import draw_seed

TINY = np.float32(SMALLEST_SCALE)
ROUNDER = np.float32(1.5 * 2**23)  # adding and subtracting it rounds to an integer, ties to even


def covers(method: Int8) -> bool:
    """All options."""
    return True


def to_wire(method: Int8, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a block's maximum is not finite."""
    stochastic = method.rounding == "stochastic"
    seed = draw_seed(generator, x.device, method.name).item() if stochastic else 0
    wire = torch.empty(method.wire_bytes(x.shape), dtype=torch.uint8)
    head = 4 * method.blocks(x.shape)
    scales, packed = wire[:head].view(torch.float32).numpy(), wire[head:].numpy()
    bad = encode(x.view(-1).numpy(), method.block, method.num_bits, stochastic, seed, scales, packed)
    return wire, torch.tensor([bad])


def from_wire(method: Int8, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each code by its block's scale."""
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape))
    decode(
        as_numbers(wire[:head], torch.float32).numpy(), wire[head:].numpy(), method.block, method.num_bits, out.numpy()
    )
    return out


@compiled
def encode(
    x: np.ndarray, block: int, bits: int, stochastic: bool, seed: int, scales: np.ndarray, packed: np.ndarray
) -> bool:
    """Fill ``scales`` (float32 [b]) and ``packed`` (uint8); whether a block of ``x`` (float32 [n]) is not finite."""
    marks = scales.view(np.uint32)
    top = np.float32((1 << (bits - 1)) - 1)
    codes, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        if stochastic:
            fill_words(seed, start, words)
        at = start
        while at < end:
            owner = at // block
            stop = min((owner + 1) * block, end)
            if at == owner * block:
                marks[owner] = largest(x[at : at + block].view(np.uint32))
                worst = max(worst, marks[owner])
                scales[owner] = max(scales[owner] / top, TINY)
            if stochastic:
                round_randomly(x[at:stop], scales[owner], top, words[at - start :], codes[at - start :])
            else:
                round_nearest(x[at:stop], scales[owner], codes[at - start :])
            at = stop
        pack_tile(codes, end - start, bits, packed[start * bits // 8 :])
    return bool(worst >= INFINITY)


@compiled
def round_nearest(x: np.ndarray, scale: np.float32, codes: np.ndarray) -> None:
    """Codes of ``x`` as signed bytes, ties to even."""
    for i in range(x.size):
        codes[i] = np.int32((x[i] / scale + ROUNDER) - ROUNDER)


@compiled
def round_randomly(x: np.ndarray, scale: np.float32, top: np.float32, words: np.ndarray, codes: np.ndarray) -> None:
    """Codes of ``x`` as signed bytes, up with the probability of the fractional part."""
    for i in range(x.size):
        level = x[i] / scale
        low = np.floor(level)
        code = low + np.float32(uniform(words[i]) < level - low)
        codes[i] = np.int32(min(max(code, -top), top))


@compiled
def decode(scales: np.ndarray, packed: np.ndarray, block: int, bits: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32 [n])."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start * bits // 8 :], end - start, bits, codes)
        at = start
        while at < end:
            stop = min((at // block + 1) * block, end)
            multiply(codes[at - start :], np.int32(8 - bits), scales[at // block], out[at:stop])
            at = stop


@compiled
def multiply(codes: np.ndarray, unused: np.int32, scale: np.float32, out: np.ndarray) -> None:
    """Codes, whose upper ``unused`` bits are 0, as signed numbers times ``scale``."""
    for i in range(out.size):
        out[i] = np.float32(np.int32(np.int8(codes[i] << unused)) >> unused) * scale
