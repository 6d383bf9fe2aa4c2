"""topk and randomk on a CPU core, and the codes of places; magnitudes as in `sparse.magnitudes`.

topk reads x twice: to find the least magnitude that is kept, and to collect what reaches it. randomk makes its
permutation a tile at a time.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.base import Shape, numel
from gradwire.comm.compressors.indices import CODES, HEADER, CodeName, choose, rice_planes, without_header
from gradwire.comm.compressors.kernels import Kernel, Picked
from gradwire.comm.compressors.kernels.cpu import (
    AT,
    BLANK,
    INFINITY,
    NUMEL,
    ONTO,
    SIZE,
    START,
    SUM,
    TILE,
    WHOLE,
    Chunk,
    Segmented,
    add,
    compiled,
    fill_words,
    largest,
)
from gradwire.comm.compressors.methods.randomk import LAST_SHIFT, MIX, ROUNDS, SEED, RandomK, halves
from gradwire.comm.compressors.methods.topk import TopK
from gradwire.comm.compressors.philox import draw_seed
from gradwire.comm.compressors.segments import Buffers, Segments
from gradwire.comm.compressors.sparse import Sparsifier

MAGNITUDE = np.int32(0x7FFFFFFF)  # signed numbers compare faster
FIRST_SHIFT, FIRST_WIDTH = 20, 11  # the first digit of a magnitude of 31 bits; two of 10 bits follow
WIDTH = 10
FINITE = 0x7F800000 >> FIRST_SHIFT  # from this first digit on it is not finite

FEW = 16  # so many places are found without a table of digits

WIDEST = 32  # low bits that the loops' 64-bit buffers have room for
INT32, RICE = (list(CODES).index(code) for code in ("int32", "rice"))


def encode_places(places: Tensor, n: int, code: CodeName) -> Tensor:
    """The same bytes as `indices.encode`."""
    chosen, low, lower, size = fixed(n, places.numel(), code)
    if low > WIDEST:
        return indices.encode(places, n, code)
    wire = torch.empty(size, dtype=torch.uint8, device="cpu")
    write(places.numpy(), chosen, low, lower, wire.numpy())
    return wire


def decode_places(wire: Tensor, n: int, k: int, code: CodeName) -> tuple[Tensor, int]:
    """The same indices as `indices.decode`, or its errors."""
    chosen, low, lower, size = fixed(n, k, code)
    without_header(wire, n, k, code)
    if low > WIDEST:
        return indices.decode(wire, n, k, code)
    places = torch.empty(k, dtype=torch.int64, device="cpu")
    if not read(wire[:size].numpy(), chosen, low, lower, n, places.numpy()):
        raise ValueError(f"invalid payload: the indices are not ascending, distinct and below {n}, or not {k}")
    return places, size


@compiled
def write_rice(places: np.ndarray, low: int, lower: np.ndarray, upper: np.ndarray) -> None:
    """Fill both planes (uint8, zeros)."""
    mask = (1 << low) - 1
    pending, bits, position = 0, 0, 0
    for i in range(places.size):
        unary = i + (places[i] >> low)
        upper[unary >> 3] |= np.uint8(1 << (unary & 7))
        pending |= (places[i] & mask) << bits
        bits += low
        while bits >= 8:
            lower[position] = pending & 255
            position += 1
            pending >>= 8
            bits -= 8
    if bits:
        lower[position] = pending


@compiled
def read_rice(lower: np.ndarray, upper: np.ndarray, low: int, n: int, places: np.ndarray) -> int:
    """Fill ``places``; how many there are, up to the first that is out of order, or more than there is room for."""
    mask = (1 << low) - 1
    pending, bits, position = np.int64(0), 0, 0
    count = 0
    for byte in range(upper.size):
        marks = upper[byte]
        bit = 8 * byte
        while marks:
            if marks & 1:
                if count == places.size:
                    return count + 1
                while bits < low:
                    pending |= np.int64(lower[position]) << bits
                    position += 1
                    bits += 8
                place = (bit - count) << low | (pending & mask)
                if place >= n or (count and place <= places[count - 1]):
                    return count
                places[count] = place
                count += 1
                pending >>= low
                bits -= low
            marks >>= 1
            bit += 1
    return count


def fixed(n: int, k: int, code: CodeName) -> tuple[int, int, int, int]:
    """The arguments of `write` and `read` for k indices below n: the code, `rice_planes`' first two, and all bytes."""
    chosen = choose(n, k, code)
    low, lower, _ = rice_planes(n, k)
    return list(CODES).index(chosen), low, lower, HEADER + CODES[chosen].size(n, k)


@compiled
def write(places: np.ndarray, code: int, low: int, lower: int, wire: np.ndarray) -> None:
    """Fill ``wire`` (uint8) with header and body."""
    wire[0] = code
    body = wire[HEADER:]
    if code == INT32:
        numbers = body.view(np.int32)
        for i in range(places.size):
            numbers[i] = places[i]
        return
    body[:] = 0
    if code == RICE:
        write_rice(places, low, body[:lower], body[lower:])
    else:
        for i in range(places.size):
            body[places[i] >> 3] |= np.uint8(1 << (places[i] & 7))


@compiled
def read(wire: np.ndarray, code: int, low: int, lower: int, n: int, places: np.ndarray) -> bool:
    """Fill ``places`` (int64 [k]); whether ``wire`` encodes that many, ascending, distinct and below ``n``."""
    body = wire[HEADER:]
    if wire[0] != code:
        return False
    if code == INT32:
        numbers, last = body.view(np.int32), -1
        for i in range(places.size):
            places[i] = numbers[i]
            if places[i] <= last or places[i] >= n:
                return False
            last = places[i]
        return True
    if code == RICE:
        return read_rice(body[:lower], body[lower:], low, n, places) == places.size
    count = 0
    for place in range(n):
        if body[place >> 3] >> (place & 7) & 1:
            if count == places.size:
                return False
            places[count] = place
            count += 1
    return count == places.size


# topk


def place(method: Sparsifier, values: Tensor, places: Tensor, shape: Shape) -> Tensor:
    """Zeros, and the values times the gain at their places, which are known to be below the number of elements."""
    out = torch.zeros(numel(shape), dtype=torch.float32, device="cpu")
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
        flags[i] = np.int32(bits[i] & MAGNITUDE) >= least


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


@compiled
def tally(bits: np.ndarray, tables: np.ndarray) -> None:
    """Count first digits in four tables (uint32 [4, 2048]), so that equal neighbours need not wait for each other."""
    whole = bits.size // 4
    for i in range(whole):
        tables[0, np.uint32(bits[4 * i] & MAGNITUDE) >> FIRST_SHIFT] += 1
        tables[1, np.uint32(bits[4 * i + 1] & MAGNITUDE) >> FIRST_SHIFT] += 1
        tables[2, np.uint32(bits[4 * i + 2] & MAGNITUDE) >> FIRST_SHIFT] += 1
        tables[3, np.uint32(bits[4 * i + 3] & MAGNITUDE) >> FIRST_SHIFT] += 1
    for i in range(4 * whole, bits.size):
        tables[0, np.uint32(bits[i] & MAGNITUDE) >> FIRST_SHIFT] += 1


@compiled
def look_up(bits: np.ndarray, places: np.ndarray, keys: np.ndarray) -> None:
    """The magnitudes (int32) at the places."""
    for i in range(keys.size):
        keys[i] = bits[places[i]] & MAGNITUDE


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
def few_places(bits: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """`largest_places` of a few, which are kept in order: the shards of many ranks are short."""
    kept, worst = np.full(k, -1, np.int32), np.int32(0)
    for i in range(bits.size):
        key = np.int32(bits[i] & MAGNITUDE)
        worst = max(worst, key)
        if k and key > kept[0]:
            rank = 1
            while rank < k and kept[rank] < key:
                kept[rank - 1] = kept[rank]
                rank += 1
            kept[rank - 1] = key
    least, equals = (kept[0], np.int64((kept == kept[0]).sum())) if k else (MAGNITUDE, np.int64(0))
    places, written = np.empty(k, np.int64), 0
    for i in range(bits.size):
        key = np.int32(bits[i] & MAGNITUDE)
        if key > least or (key == least and equals > 0):
            places[written] = i
            written += 1
            equals -= key == least
    return places, bool(worst >= np.int32(INFINITY))


@compiled
def many_places(bits: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """`largest_places` of many.

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


@compiled
def largest_places(bits: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """Where the k largest magnitudes are, ascending, of equals the first; and whether any is not finite."""
    return few_places(bits, k) if k <= FEW else many_places(bits, k)


KEPT, CODE, LOW, LOWER, HEAD = range(SIZE + 1, SIZE + 6)  # of a row: k, and the results of `fixed`


def pick_topk(method: TopK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Head, values, and whether x is not finite."""
    largest, bad = largest_places(x.view(-1).numpy().view(np.int32), method.kept(x.numel()))
    kept = torch.from_numpy(largest)
    return (
        encode_places(kept, x.numel(), method.indices),
        x.view(-1)[kept],
        torch.tensor([bad], dtype=torch.bool, device="cpu"),
    )


def topk_places(method: TopK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """Read the code of the places."""
    return decode_places(wire, numel(shape), method.kept(shape), method.indices)


def topk_row(method: TopK, n: int) -> tuple[int, ...]:
    """`KEPT` to `HEAD`."""
    k = method.kept(n)
    return k, *fixed(n, k, method.indices)


@compiled
def encode_topk(chunk: Chunk) -> bool:
    """Fill the places' code and the values."""
    places, bad = largest_places(chunk.x.view(np.int32), chunk.row[KEPT])
    write(places, chunk.row[CODE], chunk.row[LOW], chunk.row[LOWER], chunk.wire[: chunk.row[HEAD]])
    values = chunk.wire[chunk.row[HEAD] :].view(np.float32)
    for i in range(places.size):
        values[i] = chunk.x[places[i]]
    return bad


@compiled
def decode_topk(chunk: Chunk) -> bool:
    """Zeros, and the values at their places."""
    chunk.x[:] = 0
    return place_values(chunk.row, chunk.wire, False, chunk.x)


@compiled
def place_values(row: np.ndarray, wire: np.ndarray, adding: bool, out: np.ndarray) -> bool:
    """Put the values to their places, or add them; False if the bytes are not an encoding."""
    places = np.empty(row[KEPT], np.int64)
    if not read(wire[: row[HEAD]], row[CODE], row[LOW], row[LOWER], row[NUMEL], places):
        return False
    values = wire[row[HEAD] :].view(np.float32)
    for i in range(places.size):
        out[places[i]] = out[places[i]] + values[i] if adding else values[i]
    return True


@compiled
def decode_all_topk(
    settings: tuple, table: np.ndarray, chunk: int, wires: np.ndarray, onto: int, out: np.ndarray
) -> int:
    """`segments.decode_all` that leaves the other elements of a sum alone."""
    for s in range(len(table)):
        row = table[s]
        sums = out[row[START] : row[START] + row[NUMEL]]
        if onto != SUM:
            sums[:] = 0
        for message in range(len(wires)):
            adding = onto != BLANK or message > 0
            if not place_values(row, wires[message, row[AT] : row[AT] + row[SIZE]], adding, sums):
                return s
    return -1


@compiled
def pick_all(
    table: np.ndarray,
    values: np.ndarray,
    residual: np.ndarray,
    feedback: bool,
    wire: np.ndarray,
    places: np.ndarray,
    picked: np.ndarray,
    bad: np.ndarray,
) -> None:
    """Fill all segments' codes of places, ``places`` and ``picked``; with ``feedback``, of ``residual + values``."""
    first = 0
    for s in range(len(table)):
        row = table[s]
        x = values[row[START] : row[START] + row[NUMEL]]
        if feedback:
            kept = residual[row[START] : row[START] + row[NUMEL]]
            add(x, kept)
            x = kept
        chosen, bad[s] = largest_places(x.view(np.int32), row[KEPT])
        write(chosen, row[CODE], row[LOW], row[LOWER], wire[row[AT] : row[AT] + row[HEAD]])
        for i in range(chosen.size):
            places[first + i], picked[first + i] = chosen[i], x[chosen[i]]
        first += chosen.size


@compiled
def keep_rest(table: np.ndarray, places: np.ndarray, sent: np.ndarray, bad: np.ndarray, residual: np.ndarray) -> None:
    """Subtract what was sent of each segment from its residual, which becomes 0 where the segment is ``bad``."""
    first = 0
    for s in range(len(table)):
        row = table[s]
        kept = residual[row[START] : row[START] + row[NUMEL]]
        for i in range(first, first + row[KEPT]):
            kept[places[i]] -= sent[i]
        if bad[s]:
            kept[:] = 0
        first += row[KEPT]


@compiled
def place_all(table: np.ndarray, wires: np.ndarray, picked: np.ndarray, onto: int, out: np.ndarray) -> int:
    """Put the values of all segments to their places, or add them; return the first that is no encoding, or -1.

    ``picked`` is of one message (uint8, a row of ``wires``) after the other.
    """
    before, of_message = 0, picked.size // max(1, len(wires))
    for s in range(len(table)):
        row = table[s]
        sums = out[row[START] : row[START] + row[NUMEL]]
        if onto != SUM:
            sums[:] = 0
        places = np.empty(row[KEPT], np.int64)
        for message in range(len(wires)):
            head = wires[message, row[AT] : row[AT] + row[HEAD]]
            if not read(head, row[CODE], row[LOW], row[LOWER], row[NUMEL], places):
                return s
            adding = onto != BLANK or message > 0
            values = picked[message * of_message + before :]
            for i in range(places.size):
                sums[places[i]] = sums[places[i]] + values[i] if adding else values[i]
        before += row[KEPT]
    return -1


def topk_table(method: TopK, segments: Segments) -> np.ndarray:
    """The table of a chain's segments, with topk's columns."""

    def make() -> np.ndarray:
        return np.array([(*row, *topk_row(method, row[NUMEL])) for row in segments.rows], np.int64).reshape(
            -1, HEAD + 1
        )

    return segments.derive(("places", method), make)


def pick_many_topk(method: TopK, buffers: Buffers) -> Picked:
    """See `gradwire.comm.compressors.kernels`."""
    values, segments, wire, _, bad, residual = buffers
    table = topk_table(method, segments)
    count = int(table[:, KEPT].sum())
    places = torch.empty(count, dtype=torch.int64, device="cpu")
    picked = torch.empty(count, dtype=torch.float32, device="cpu")
    kept = values if residual is None else residual
    numbers = (tensor.numpy() for tensor in (wire, places, picked, bad))
    pick_all(table, values.numpy(), kept.numpy(), residual is not None, *numbers)

    def keep(sent: Tensor, bad: Tensor) -> None:
        keep_rest(table, places.numpy(), sent.numpy(), bad.numpy(), kept.numpy())

    return Picked(picked, keep)


def place_many_topk(method: TopK, wires: Tensor, picked: Tensor, segments: Segments, out: Tensor, onto: str) -> None:
    """See `gradwire.comm.compressors.kernels`."""
    failed = place_all(topk_table(method, segments), wires.numpy(), picked.numpy(), ONTO[onto], out.numpy())
    if failed >= 0:
        raise ValueError(f"invalid payload: the bytes of segment {failed} are no places of {segments[failed].form}")


# randomk

FIRST, SECOND, LAST = np.uint32(MIX[0][0]), np.uint32(MIX[1][0]), np.uint32(LAST_SHIFT)
M0, M1 = np.uint32(MIX[0][1]), np.uint32(MIX[1][1])


def pick_randomk(method: RandomK, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Seed, values, and whether x is not finite, which takes all of x to know."""
    seed = draw_seed(generator, x.device, method.name)
    chosen = permuted(int(seed), x.numel(), method.kept(x.numel()))
    bad = largest(x.view(-1).numpy().view(np.uint32)) >= INFINITY
    return (
        seed.view(torch.uint8),
        x.view(-1).index_select(0, chosen),
        torch.tensor([bool(bad)], dtype=torch.bool, device="cpu"),
    )


def randomk_places(method: RandomK, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
    """The places drawn from the seed."""
    return permuted(int(method.seed(wire)), numel(shape), method.kept(shape)), SEED


def permuted(seed: int, n: int, k: int) -> Tensor:
    """The images of 0..k-1: int64 [k]."""
    out = torch.empty(k, dtype=torch.int64, device="cpu")
    if k:
        fill_images(seed, n, *halves(n), out.numpy())
    return out


@compiled
def fill_images(seed: int, n: int, high: int, low: int, out: np.ndarray) -> None:
    """Fill ``out`` (int64 [k])."""
    keys = np.empty(ROUNDS, np.uint32)
    fill_words(seed, 0, keys)
    numbers, slots = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    upper, lower = np.empty(TILE, np.uint32), np.empty(TILE, np.uint32)
    for start in range(0, out.size, TILE):
        count = min(TILE, out.size - start)
        for i in range(count):
            numbers[i] = slots[i] = start + i
        while count:
            cross(numbers[:count], keys, high, low, upper[:count], lower[:count])
            outside = 0
            for i in range(count):
                number, slot = numbers[i], slots[i]
                out[slot] = number
                numbers[outside], slots[outside] = number, slot
                outside += number >= n
            count = outside


@compiled
def cross(numbers: np.ndarray, keys: np.ndarray, high: int, low: int, upper: np.ndarray, lower: np.ndarray) -> None:
    """Once through the network, in place; ``upper`` and ``lower`` are room for the halves."""
    upper_mask, lower_mask = np.uint32((1 << high) - 1), np.uint32((1 << low) - 1)
    for i in range(numbers.size):
        upper[i], lower[i] = numbers[i] >> low, numbers[i] & lower_mask
    for r in range(0, ROUNDS, 2):
        stir(lower, keys[r], upper_mask, upper)
        stir(upper, keys[r + 1], lower_mask, lower)
    for i in range(numbers.size):
        numbers[i] = np.int64(upper[i]) << low | np.int64(lower[i])


@compiled
def stir(source: np.ndarray, key: np.uint32, mask: np.uint32, target: np.ndarray) -> None:
    """One round: change one half by a hash of the other."""
    for i in range(source.size):
        word = np.uint32(source[i] ^ key)
        word = np.uint32(np.uint32(word ^ (word >> FIRST)) * M0)
        word = np.uint32(np.uint32(word ^ (word >> SECOND)) * M1)
        target[i] ^= np.uint32(word ^ (word >> LAST)) & mask


topk = Segmented(
    "topk",
    encode_topk,
    decode_topk,
    settings=lambda method: (0,),
    chunk=lambda method: WHOLE,
    row=topk_row,
    decoder=decode_all_topk,
)
KERNELS = {
    "topk": topk.kernel(
        pick=pick_topk, places=topk_places, place=place, pick_many=pick_many_topk, place_many=place_many_topk
    ),
    "randomk": Kernel(pick=pick_randomk, places=randomk_places, place=place),
}
