"""qsgd on a CPU core: a bucket is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.compressors import elias
from gradwire.compressors.base import as_numbers, numel
from gradwire.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled, largest
from gradwire.compressors.kernels.cpu.int8 import multiply, round_randomly
from gradwire.compressors.kernels.cpu.packing import TILE, pack_tile, unpack_tile
from gradwire.compressors.kernels.cpu.philox import fill_words
from gradwire.compressors.methods.qsgd import SMALLEST_STEP, Qsgd
from gradwire.compressors.philox import draw_seed

TINY = np.float32(SMALLEST_STEP)


def covers(method: Qsgd) -> bool:
    """Numbers of 8, 4 or 2 bits; Elias coding where they fit into a byte."""
    return method.num_bits <= 8 if method.coding == "elias" else method.num_bits in (8, 4, 2)


def to_wire(method: Qsgd, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The wire, and whether a bucket's norm is not finite."""
    seed = draw_seed(generator, x.device, method.name).item()
    bits = 8 if method.coding == "elias" else method.num_bits
    head = 4 * method.blocks(x.shape)
    wire = torch.empty(head + -(-x.numel() * bits // 8), dtype=torch.uint8)
    norms, packed = wire[:head].view(torch.float32).numpy(), wire[head:].numpy()
    l2 = method.norm == "l2"
    bad = encode(x.view(-1).numpy(), method.block, l2, method.levels, bits, seed, norms, packed)
    if method.coding == "elias":
        wire = torch.cat([wire[:head], elias.encode(wire[head:].view(torch.int8).to(torch.int16))])
    return wire, torch.tensor([bad])


def from_wire(method: Qsgd, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Multiply each number by its bucket's step."""
    if method.coding == "elias":
        return method.from_wire(wire, shape)  # reading the stream takes longer than all the rest
    head = 4 * method.blocks(shape)
    out = torch.empty(numel(shape))
    norms, packed = as_numbers(wire[:head], torch.float32).numpy(), wire[head:].numpy()
    decode(norms, packed, method.block, method.levels, method.num_bits, out.numpy())
    return out


@compiled
def square_sum(x: np.ndarray) -> float:
    """The sum of squares in float64: four sums side by side, as one addition would wait for the other."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = x.size // 4
    for i in range(whole):
        v, w, y, z = np.float64(x[4 * i]), np.float64(x[4 * i + 1]), np.float64(x[4 * i + 2]), np.float64(x[4 * i + 3])
        a, b, c, d = a + v * v, b + w * w, c + y * y, d + z * z
    for i in range(4 * whole, x.size):
        a += np.float64(x[i]) * np.float64(x[i])
    return (a + b) + (c + d)


@compiled
def encode(
    x: np.ndarray, block: int, l2: bool, levels: int, bits: int, seed: int, norms: np.ndarray, packed: np.ndarray
) -> bool:
    """Fill ``norms`` (float32 [b]) and ``packed`` (uint8); whether a norm of ``x`` (float32 [n]) is not finite."""
    marks = norms.view(np.uint32)
    top = np.float32(levels)
    codes, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    step = TINY
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        fill_words(seed, start, words)
        at = start
        while at < end:
            owner = at // block
            stop = min((owner + 1) * block, end)
            if at == owner * block:
                if l2:
                    norms[owner] = np.float32(np.sqrt(square_sum(x[at : at + block])))
                else:
                    marks[owner] = largest(x[at : at + block].view(np.uint32))
                worst = max(worst, np.uint32(marks[owner] & SIGNLESS))
                step = max(norms[owner] / top, TINY)
            round_randomly(x[at:stop], step, top, words[at - start :], codes[at - start :])
            at = stop
        pack_tile(codes, end - start, bits, packed[start * bits // 8 :])
    return bool(worst >= INFINITY)


@compiled
def decode(norms: np.ndarray, packed: np.ndarray, block: int, levels: int, bits: int, out: np.ndarray) -> None:
    """Fill ``out`` (float32 [n])."""
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[start * bits // 8 :], end - start, bits, codes)
        at = start
        while at < end:
            stop = min((at // block + 1) * block, end)
            step = max(norms[at // block] / np.float32(levels), TINY)
            multiply(codes[at - start :], np.int32(8 - bits), step, out[at:stop])
            at = stop
