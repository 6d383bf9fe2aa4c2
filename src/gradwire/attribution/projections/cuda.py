"""Triton kernels of projections, which make signs in the registers that use them; the reference stores them.

Both read the gradients once. The columns' words are those of `gradwire.attribution.projections.hashing`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.attribution.projections import hashing

GAMMA = tl.constexpr(hashing.GAMMA)
FIRST, SECOND = (tl.constexpr(multiplier) for multiplier in hashing.MULTIPLIERS)
WORD = tl.constexpr(hashing.WORD)
HEIGHT = 4  # samples of a program of `turn`, which share their signs
SLOTS_EACH = 256  # slots of a program of `turn`
WORDS_EACH = 4  # words of signs, 64 rows of the matrix each, of a program of `multiply`
COLUMNS = 64  # that are multiplied at once
PROGRAMS = 1024  # of `multiply`: several for each multiprocessor
NARROWEST = 16  # samples that a matrix product takes


@triton.jit
def mix(word):
    """SplitMix64's output function, of int64."""
    word = (word ^ ((word >> 30) & 0x3FFFFFFFF)) * FIRST
    word = (word ^ ((word >> 27) & 0x1FFFFFFFFF)) * SECOND
    return word ^ ((word >> 31) & 0x1FFFFFFFF)


@triton.jit
def turn(
    values,
    sums,
    rotations,
    stream,
    samples,
    numel,
    stride,
    SLOTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the columns that land on a tile of slots, block after block, as `Sjlt.add_values` adds them."""
    slots = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rows = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)
    there = (rows < samples)[:, None]
    places = sums + rows[:, None] * SLOTS + slots[None, :]
    total = tl.load(places, mask=there, other=0.0)
    for block in range(tl.cdiv(numel, SLOTS)):
        column = block * SLOTS + ((slots - tl.load(rotations + block)) & (SLOTS - 1))
        word = mix((column // WORD).to(tl.int64) * GAMMA + stream)
        negative = (word >> (column % WORD).to(tl.int64)) & 1
        value = tl.load(
            values + rows[:, None] * stride + column[None, :], mask=there & (column < numel)[None, :], other=0.0
        )
        total += tl.where((negative != 0)[None, :], -value, value)
    tl.store(places, total, mask=there)


@triton.jit
def multiply(
    values,
    partial,
    stream,
    samples,
    numel,
    stride,
    share,
    dim,
    HEIGHT: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
):
    """A part of the product of the matrix of signs and the gradients: the rows of some words, a share of the columns.

    A float32 number is the sum of three bfloat16 numbers (PART), and a sign is one exactly: three products of the
    tensor cores have float32's precision.
    """
    words = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    begin = tl.program_id(1) * share
    row = tl.arange(0, HEIGHT).to(tl.int64)
    total = tl.zeros([WORDS * WORD, HEIGHT], tl.float32)
    for first in range(begin, tl.minimum(begin + share, numel), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        of_column = mix(column.to(tl.int64) * GAMMA + stream)
        word = mix(of_column[None, :] + (words + 1).to(tl.int64)[:, None] * GAMMA)
        bit = (word[:, None, :] >> tl.arange(0, WORD).to(tl.int64)[None, :, None]) & 1
        sign = (1.0 - 2.0 * bit.to(tl.float32)).to(PART).reshape(WORDS * WORD, COLUMNS)
        there = (column < numel)[:, None] & (row < samples)[None, :]
        value = tl.load(values + column[:, None] + row[None, :] * stride, mask=there, other=0.0)
        high = value.to(PART)
        value -= high.to(tl.float32)
        middle = value.to(PART)
        low = (value - middle.to(tl.float32)).to(PART)
        part = tl.dot(sign, low)
        part = tl.dot(sign, middle, part)
        total += tl.dot(sign, high, part)  # tensor cores truncate the sums that they keep, so these stay short
    out = tl.program_id(0) * WORDS * WORD + tl.arange(0, WORDS * WORD)
    places = partial + (tl.program_id(1) * samples + row[None, :]) * dim + out[:, None]
    tl.store(places, total, mask=(out < dim)[:, None] & (row < samples)[None, :])


def add_turned(sums: Tensor, values: Tensor, rotations: Tensor, stream: int) -> None:
    """Add gradients [samples, numel] to ``sums`` [samples, slots]; every block of slots is rotated and has signs.

    Args:
        sums: float32, contiguous.
        values: float32.
        rotations: The slot of each block's first column: int32 [blocks].
        stream: Key of the signs.
    """
    samples, slots = sums.shape
    values = rows_of(values)
    grid = (slots // SLOTS_EACH, triton.cdiv(samples, HEIGHT))
    turn[grid](
        values,
        sums,
        rotations,
        stream,
        samples,
        values.shape[1],
        values.stride(0),
        SLOTS=slots,
        HEIGHT=HEIGHT,
        TILE=SLOTS_EACH,
    )


def add_signed(sums: Tensor, values: Tensor, stream: int) -> None:
    """Add the product of gradients [samples, numel] and their columns' signs to ``sums`` [samples, dim].

    Args:
        sums: float32.
        values: float32.
        stream: Key of the signs.
    """
    values = rows_of(values)
    numel, dim = values.shape[1], sums.shape[1]
    part = tl.bfloat16 if isinstance(multiply, triton.JITFunction) else tl.float32  # the interpreter has no bfloat16
    across = triton.cdiv(dim, WORDS_EACH * hashing.WORD)
    parts = max(1, min(PROGRAMS // across, numel // (4 * COLUMNS)))
    share = COLUMNS * math.ceil(numel / parts / COLUMNS)
    for first, few in enumerate(values.split(128)):
        partial = torch.zeros(parts, len(few), dim, device=values.device)
        height = max(NARROWEST, triton.next_power_of_2(len(few)))
        multiply[across, parts](
            few,
            partial,
            stream,
            len(few),
            numel,
            few.stride(0),
            share,
            dim,
            HEIGHT=height,
            WORDS=WORDS_EACH,
            COLUMNS=COLUMNS,
            PART=part,
            num_warps=8,
        )
        sums[128 * first : 128 * first + len(few)] += partial.sum(0)


def rows_of(values: Tensor) -> Tensor:
    """The same numbers, those of a row one after another."""
    return values if values.stride(1) == 1 else values.contiguous()
