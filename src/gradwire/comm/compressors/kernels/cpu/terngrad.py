"""terngrad on a CPU core: a block is read twice, the second time from the cache."""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels import Kernel
from gradwire.comm.compressors.kernels.cpu import INFINITY, compiled, largest
from gradwire.comm.compressors.kernels.cpu.int8 import multiply
from gradwire.comm.compressors.kernels.cpu.qsgd import square_sum
from gradwire.comm.compressors.kernels.cpu.segments import NUMEL, Segmented, always, blocks_and
from gradwire.comm.compressors.kernels.cpu.shared import fill_words, pack_tile, uniform, unpack_tile
from gradwire.comm.compressors.methods.terngrad import SMALLEST_SCALE, TernGrad
from gradwire.comm.compressors.packing import TRITS

TINY = np.float32(SMALLEST_SCALE)
TILE = 1280  # elements in a tile; bytes of either packing, and calls of Philox, end with it
VALUES = np.array([[byte // 3**lane % 3 - 1 for lane in range(TRITS)] for byte in range(256)], np.int8).view(np.uint8)


def settings(method: TernGrad) -> tuple[int, float, bool]:
    """Block, clip (0: none), and whether digits are packed in base 3."""
    return method.block, method.clip or 0.0, method.packing == "base3"


@compiled
def encode(settings: tuple, row: np.ndarray, first: int, x: np.ndarray, seed: int, wire: np.ndarray) -> bool:
    """Fill scales (float32) and packed digits."""
    block, clip, base3 = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, packed = wire[:head].view(np.float32), wire[head:]
    digits, words = np.empty(TILE, np.uint8), np.empty(TILE, np.uint32)
    worst = np.uint32(0)
    for start in range(0, x.size, TILE):
        end = min(start + TILE, x.size)
        fill_words(seed, first + start, words)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            if first + position == owner * block:
                numbers = x[position : position + block]
                most = largest(numbers.view(np.uint32))
                worst = max(worst, most)
                scales.view(np.uint32)[owner] = most
                if clip:
                    sigma = np.sqrt(square_sum(numbers) / numbers.size)
                    scales[owner] = min(scales[owner], np.float32(clip * sigma))
                scales[owner] = max(scales[owner], TINY)
            draw(x[position:stop], scales[owner], words[position - start :], digits[position - start :])
            position = stop
        if base3:
            pack_trits(digits, end - start, packed[(first + start) // TRITS :])
        else:
            pack_tile(digits, end - start, 2, packed[(first + start) // 4 :])
    return bool(worst >= INFINITY)


@compiled
def draw(x: np.ndarray, scale: np.float32, words: np.ndarray, digits: np.ndarray) -> None:
    """Signs of ``x`` as signed bytes, or 0."""
    for i in range(x.size):
        level = x[i] / scale
        sign = np.int32(1) if level > np.float32(0) else np.int32(-1)
        digits[i] = sign if uniform(words[i]) < abs(level) else np.int32(0)


@compiled
def pack_trits(digits: np.ndarray, count: int, out: np.ndarray) -> None:
    """Pack ``count`` digits (-1, 0, 1 as signed bytes; the array is a whole tile), what follows them as -1."""
    filled = -(-count // TRITS)
    digits[count : filled * TRITS] = 255
    for i in range(filled):
        byte = np.uint8(0)
        for lane in range(TRITS - 1, -1, -1):
            byte = np.uint8(3 * byte + np.uint8(digits[TRITS * i + lane] + 1))
        out[i] = byte


@compiled
def decode(settings: tuple, row: np.ndarray, first: int, wire: np.ndarray, out: np.ndarray) -> bool:
    """Multiply each digit by its block's scale."""
    block, _, base3 = settings
    head = 4 * ((row[NUMEL] + block - 1) // block)
    scales, packed = wire[:head].view(np.float32), wire[head:]
    digits = np.empty(TILE, np.uint8)
    for start in range(0, out.size, TILE):
        end = min(start + TILE, out.size)
        if base3:
            unpack_trits(packed[(first + start) // TRITS :], -(-(end - start) // TRITS), digits)
        else:
            unpack_tile(packed[(first + start) // 4 :], end - start, 2, digits)
        position = start
        while position < end:
            owner = (first + position) // block
            stop = min((owner + 1) * block - first, end)
            multiply(digits[position - start :], np.int32(0 if base3 else 6), scales[owner], out[position:stop])
            position = stop
    return True


@compiled
def unpack_trits(packed: np.ndarray, count: int, digits: np.ndarray) -> None:
    """The digits of the first ``count`` bytes, as `pack_trits` takes them."""
    for i in range(count):
        byte = packed[i]
        for lane in range(TRITS):
            digits[TRITS * i + lane] = VALUES[byte, lane]


form = Segmented(__name__, encode, decode, settings, blocks_and(TILE), always)
KERNEL = Kernel(encode_many=form.encode_many, decode_add=form.decode_add)
