"""qsgd on a CPU core: a bucket is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, SIGNLESS, compiled, largest
from gradwire.comm.compressors.kernels.cpu.int8 import multiply, round_randomly
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, always, blocks_and
from gradwire.comm.compressors.kernels.cpu.shared import TILE, fill_words, pack_tile, unpack_tile
from gradwire.comm.compressors.methods.qsgd import QSGD, SMALLEST_STEP

TINY = np.float32(SMALLEST_STEP)


def covers(method: QSGD) -> bool:
    """Numbers of 8, 4 or 2 bits in the dense code."""
    return method.coding == "dense" and method.num_bits in (8, 4, 2)


def settings(method: QSGD) -> tuple[int, bool, int, int]:
    """Bucket, whether its norm is the 2-norm, levels, and bits of a number."""
    return method.block, method.norm == "l2", method.levels, method.num_bits


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
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill norms (float32) and packed numbers."""
    block, l2, levels, bits = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    norms, packed = wire[:head].view(np.float32), wire[head:]
    marks = norms.view(np.uint32)
    top = np.float32(levels)
    codes, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    step = TINY
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        fill_words(seed, first + start, words)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            if first + position == owner * block:
                if l2:
                    norms[owner] = np.float32(np.sqrt(square_sum(x[position : position + block])))
                else:
                    marks[owner] = largest(x[position : position + block].view(np.uint32))
                worst = max(worst, np.uint32(marks[owner] & SIGNLESS))
                step = max(norms[owner] / top, TINY)
            round_randomly(x[position:stop], step, top, words[position - start :], codes[position - start :])
            position = stop
        pack_tile(codes, end - start, bits, packed[(first + start) * bits // 8 :])
    return bool(worst >= INFINITY)


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Multiply each number by its bucket's step."""
    block, _, levels, bits = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    norms, packed = wire[:head].view(np.float32), wire[head:]
    codes = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        unpack_tile(packed[(first + start) * bits // 8 :], end - start, bits, codes)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            step = max(norms[owner] / np.float32(levels), TINY)
            multiply(codes[position - start :], np.int32(8 - bits), step, out[position:stop])
            position = stop
    return True


form = Segmented(__name__, encode, decode, settings, blocks_and(TILE), always)
KERNEL = Kernel(covers, encode_many=form.encode_many, decode_add=form.decode_add)
