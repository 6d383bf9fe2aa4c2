"""Choosing elements by magnitude on a CPU core, and putting values at places; magnitudes as in `sparse.magnitudes`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.kernels.cpu import compiled
from gradwire.comm.compressors.sparse import Sparsifier

TILE = 1024
SIGNLESS = np.int32(0x7FFFFFFF)  # signed numbers compare faster
FIRST_SHIFT, FIRST_WIDTH = 20, 11  # the first digit of a magnitude of 31 bits; two of 10 bits follow
WIDTH = 10
FINITE = 0x7F800000 >> FIRST_SHIFT  # from this first digit on it is not finite


def place(method: Sparsifier, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
    """Zeros, and the values times the gain at their places, which are known to be below the number of elements."""
    out = torch.zeros(numel(shape))
    scatter(values.numpy(), np.float32(method.gain(shape)), places.numpy(), out.numpy())
    return out


@compiled
def scatter(values: np.ndarray, gain: np.float32, places: np.ndarray, out: np.ndarray) -> None:
    """Values (float32 [k]) times ``gain`` to ``places`` (int64 [k])."""
    for i in range(places.size):
        out[places[i]] = values[i] * gain


@compiled
def reaching(bits: np.ndarray, least: np.int32, flags: np.ndarray) -> None:
    """Which magnitudes reach ``least``: 1 or 0 (uint8) for each of ``bits`` (int32)."""
    for i in range(bits.size):
        flags[i] = np.int32(bits[i] & SIGNLESS) >= least


@compiled
def count(bits: np.ndarray, least: np.int32) -> int:
    """How many magnitudes reach ``least``."""
    total = 0
    for i in range(bits.size):
        total += int(np.int32(bits[i] & SIGNLESS) >= least)
    return total


@compiled
def collect(bits: np.ndarray, least: np.int32, places: np.ndarray) -> None:
    """Write where the magnitudes reach ``least`` to ``places`` (int64), which has room for one more than those are."""
    flags = np.zeros(TILE, np.uint8)
    eights = flags.view(np.uint64)
    written = 0
    for start in range(0, bits.size, TILE):
        tile = bits[start : start + TILE]
        reaching(tile, least, flags)
        flags[tile.size :] = 0
        for eight in range(eights.size):
            if eights[eight]:
                for i in range(8 * eight, 8 * eight + 8):  # without branches: keep the place, or write over it
                    places[written] = start + i
                    written += flags[i]


def collected(bits: np.ndarray, least: int, count: int) -> Tensor:
    """Where the magnitudes reach ``least``, which ``count`` of them do: int64 [count], ascending."""
    places = torch.empty(count + 1, dtype=torch.int64)
    collect(bits, np.int32(least), places.numpy())
    return places[:count]


@compiled
def tally(bits: np.ndarray, tables: np.ndarray) -> None:
    """Count first digits in four tables (uint32 [4, 2048]), so that equal neighbours need not wait for each other."""
    whole = bits.size // 4
    for i in range(whole):
        tables[0, np.uint32(bits[4 * i] & SIGNLESS) >> FIRST_SHIFT] += 1
        tables[1, np.uint32(bits[4 * i + 1] & SIGNLESS) >> FIRST_SHIFT] += 1
        tables[2, np.uint32(bits[4 * i + 2] & SIGNLESS) >> FIRST_SHIFT] += 1
        tables[3, np.uint32(bits[4 * i + 3] & SIGNLESS) >> FIRST_SHIFT] += 1
    for i in range(4 * whole, bits.size):
        tables[0, np.uint32(bits[i] & SIGNLESS) >> FIRST_SHIFT] += 1


@compiled
def look_up(bits: np.ndarray, places: np.ndarray, keys: np.ndarray) -> None:
    """The magnitudes (int32) at the places."""
    for i in range(keys.size):
        keys[i] = bits[places[i]] & SIGNLESS


@compiled
def tally_within(keys: np.ndarray, prefix: np.int32, shift: int, table: np.ndarray) -> None:
    """Count the digits of WIDTH bits at ``shift`` of those keys (int32) whose bits above are ``prefix``."""
    for i in range(keys.size):
        if keys[i] >> (shift + WIDTH) == prefix:
            table[(keys[i] >> shift) & ((1 << WIDTH) - 1)] += 1


@compiled
def compact(keys: np.ndarray, least: np.int32, equals: int, places: np.ndarray) -> None:
    """Keep the places whose key is above ``least``, and the first ``equals`` of those whose key is ``least``."""
    written = 0
    for i in range(keys.size):
        equal = keys[i] == least
        places[written] = places[i]  # found <= i
        written += (keys[i] > least) | (equal & (equals > 0))
        equals -= equal


@compiled
def locate(counts: np.ndarray, k: int) -> tuple[int, int]:
    """The digit of the k-th largest number by how often each digit occurs, and how many numbers have a larger one."""
    above = 0
    for digit in range(counts.size - 1, 0, -1):
        if above + counts[digit] >= k:
            return digit, above
        above += counts[digit]
    return 0, above


@compiled
def largest_places(bits: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """Where the k largest magnitudes are, ascending, of equals the first; and whether any is not finite.

    Radix select, digit by digit from the top: x is read once to count the first digit and once to collect the
    candidates, which are all whose first digit reaches the k-th's.
    """
    tables = np.zeros((4, 1 << FIRST_WIDTH), np.uint32)
    tally(bits, tables)
    counts = np.empty(1 << FIRST_WIDTH, np.int64)
    for digit in range(counts.size):
        counts[digit] = np.int64(tables[0, digit]) + tables[1, digit] + tables[2, digit] + tables[3, digit]
    prefix, above = locate(counts, k)
    places = np.empty(above + counts[prefix] + 1, np.int64)
    collect(bits, np.int32(prefix << FIRST_SHIFT), places)
    keys = np.empty(places.size - 1, np.int32)
    look_up(bits, places, keys)
    for shift in (WIDTH, 0):
        table = np.zeros(1 << WIDTH, np.int64)
        tally_within(keys, np.int32(prefix), shift, table)
        digit, more = locate(table, k - above)
        prefix, above = prefix << WIDTH | digit, above + more
    compact(keys, np.int32(prefix), k - above, places)
    return places[:k], bool(counts[FINITE:].any())
