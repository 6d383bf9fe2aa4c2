"""A range coder for bytes with one table of frequencies: rANS, with four interleaved states.

Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of arithmetic
coding" (arXiv:1311.2540, 2013); interleaved states and division by a reciprocal as in Giesen, "Interleaved entropy
coders" (arXiv:1402.3392, 2014).

A code is: 32 bytes of bits that mark which bytes occur, the first one lowest; the frequency of each of those less 1, in
LEB128; the four states as uint32; then words as uint16. Frequencies add up to 4,096. Byte i belongs to state i mod 4. A
state x begins at 2^15. A byte of frequency f makes it ``x // f * 4096 + c + x % f``, where c is the sum of the
frequencies of smaller bytes; where that would reach 2^31, x first gives its low 16 bits to the code, as a word. Bytes
are encoded from the last to the first and words are read in order, so the decoder ends where the encoder began.

It can only be written and read one byte after the other: on the host, whatever the device of a tensor.
"""

from __future__ import annotations

import numpy as np

from gradwire.comm.compressors.kernels.cpu import compiled

BITS = 12
TOTAL = 1 << BITS  # of all frequencies
LOW = 1 << 15  # states are from here to below 2^31
STATES = 4
WORD = 16  # bits
PRESENT = 32  # bytes of the bits that mark which bytes occur
RECIPROCAL = 32  # bits


@compiled
def occurrences(data: np.ndarray) -> np.ndarray:
    """How often each byte occurs in ``data`` (uint8 [n]): int64 [256]."""
    counts = np.zeros((4, 256), np.int64)  # four tables: runs of one byte do not wait for each other
    for i in range(0, data.size - data.size % 4, 4):
        counts[0, data[i]] += 1
        counts[1, data[i + 1]] += 1
        counts[2, data[i + 2]] += 1
        counts[3, data[i + 3]] += 1
    for i in range(data.size - data.size % 4, data.size):
        counts[0, data[i]] += 1
    return counts.sum(axis=0)


@compiled
def frequencies(occurring: np.ndarray) -> np.ndarray:
    """Frequencies that add up to TOTAL, at least 1 for each byte that occurs (int64 [256], not all 0): int64 [256]."""
    count = occurring.sum()
    frequency = np.zeros(256, np.int64)
    for byte in range(256):
        if occurring[byte]:
            frequency[byte] = max(1, int(occurring[byte] / count * TOTAL + 0.5))
    left = TOTAL - frequency.sum()
    while left:  # rounding is made good at the most frequent bytes, where it costs least
        most = frequency.argmax()
        change = left if left > 0 else max(left, -(frequency[most] // 8 + 1))
        frequency[most] += change
        left -= change
    return frequency


@compiled
def estimate(occurring: np.ndarray, frequency: np.ndarray) -> int:
    """Bytes of the code, up to a few."""
    bits, table = 0.0, PRESENT + 4 * STATES
    for byte in range(256):
        if occurring[byte]:
            bits += occurring[byte] * (BITS - np.log2(frequency[byte]))
            table += 1 if frequency[byte] <= 128 else 2
    return table + int(bits / 8)


@compiled
def write_table(frequency: np.ndarray, code: np.ndarray) -> int:
    """Write the frequencies; returns their bytes."""
    code[:PRESENT] = 0
    position = PRESENT
    for byte in range(256):
        rest = frequency[byte] - 1
        if rest >= 0:
            code[byte >> 3] |= 1 << (byte & 7)
            if rest >= 128:
                code[position] = 128 | (rest & 127)
                rest >>= 7
                position += 1
            code[position] = rest
            position += 1
    return position


@compiled
def read_table(code: np.ndarray) -> tuple[np.ndarray, int]:
    """The frequencies, and their bytes; 0 bytes if they are not there or do not add up."""
    frequency = np.zeros(256, np.int64)
    position = PRESENT
    if code.size < position:
        return frequency, 0
    for byte in range(256):
        if code[byte >> 3] >> (byte & 7) & 1:
            shift = 0
            while position < code.size and code[position] >= 128 and shift < BITS:
                frequency[byte] |= np.int64(code[position] & 127) << shift
                shift += 7
                position += 1
            if position == code.size:
                return frequency, 0
            frequency[byte] = (frequency[byte] | np.int64(code[position]) << shift) + 1
            position += 1
    return frequency, position if frequency.sum() == TOTAL else 0


@compiled
def encoder(frequency: np.ndarray) -> np.ndarray:
    """By byte: the least state that gives off a word, the reciprocal, its shift, and two summands: int64 [256, 5]."""
    table = np.zeros((256, 5), np.int64)
    start = 0
    for byte in range(256):
        f = frequency[byte]
        if f == 1:
            table[byte] = (LOW >> BITS << WORD, (1 << RECIPROCAL) - 1, RECIPROCAL, start + TOTAL - 1, TOTAL - 1)
        elif f:
            shift = 0
            while f > 1 << shift:
                shift += 1
            reciprocal = ((1 << (shift + RECIPROCAL - 1)) + f - 1) // f
            table[byte] = (f * (LOW >> BITS << WORD), reciprocal, RECIPROCAL + shift - 1, start, TOTAL - f)
        start += f
    return table


@compiled
def put(x: int, byte: int, table: np.ndarray, words: np.ndarray, position: int) -> tuple[int, int]:
    """The state after a byte, and the position of the last word."""
    words[position - 1] = x & 0xFFFF
    if x >= table[byte, 0]:
        x >>= WORD
        position -= 1
    return x + table[byte, 3] + (x * table[byte, 1] >> table[byte, 2]) * table[byte, 4], position


@compiled
def write_words(data: np.ndarray, table: np.ndarray, words: np.ndarray, states: np.ndarray) -> int:
    """Encode from the end; fills ``states``, and ``words`` (as many as bytes, and one) from the end; returns the first
    word's place.
    """
    position, whole = words.size, data.size - data.size % STATES
    states[:] = LOW
    for i in range(data.size - 1, whole - 1, -1):
        states[i - whole], position = put(states[i - whole], data[i], table, words, position)
    a, b, c, d = states[0], states[1], states[2], states[3]
    for i in range(whole - STATES, -1, -STATES):
        d, position = put(d, data[i + 3], table, words, position)
        c, position = put(c, data[i + 2], table, words, position)
        b, position = put(b, data[i + 1], table, words, position)
        a, position = put(a, data[i], table, words, position)
    states[0], states[1], states[2], states[3] = a, b, c, d
    return position


@compiled
def decoder(frequency: np.ndarray) -> np.ndarray:
    """By a state's low bits: the byte, its frequency less 1, and their offset in it: uint32 [TOTAL]."""
    table = np.zeros(TOTAL, np.uint32)
    start = 0
    for byte in range(256):
        for i in range(frequency[byte]):
            table[start + i] = byte | (frequency[byte] - 1) << 8 | i << 20
        start += frequency[byte]
    return table


@compiled
def earlier(x: int, entry: int) -> int:
    """The state before a byte, by the byte's entry in the table; it takes a word where it is below LOW."""
    return ((entry >> 8 & (TOTAL - 1)) + 1) * (x >> BITS) + (entry >> 20)


@compiled
def refill(x: int, words: np.ndarray, position: int) -> tuple[int, int]:
    """A state with the next word where it needs one, and the place of the word after; without a branch."""
    low = int(x < LOW)
    filled = x << WORD | int(words[position])
    return filled if low else x, position + low


@compiled
def read_words(words: np.ndarray, table: np.ndarray, states: np.ndarray, data: np.ndarray) -> bool:
    """Fill ``data``; whether ``words`` are its code."""
    position = done = 0
    a, b, c, d = states[0], states[1], states[2], states[3]
    for i in range(0, data.size - STATES + 1, STATES):
        if position + STATES > words.size:
            break
        p, q = int(table[a & (TOTAL - 1)]), int(table[b & (TOTAL - 1)])
        r, s = int(table[c & (TOTAL - 1)]), int(table[d & (TOTAL - 1)])
        a, position = refill(earlier(a, p), words, position)
        b, position = refill(earlier(b, q), words, position)
        c, position = refill(earlier(c, r), words, position)
        d, position = refill(earlier(d, s), words, position)
        data[i] = p & 255
        data[i + 1] = q & 255
        data[i + 2] = r & 255
        data[i + 3] = s & 255
        done = i + STATES
    states[0], states[1], states[2], states[3] = a, b, c, d
    for i in range(done, data.size):
        entry = int(table[states[i % STATES] & (TOTAL - 1)])
        data[i] = entry & 255
        states[i % STATES] = earlier(states[i % STATES], entry)
        if states[i % STATES] < LOW:
            if position == words.size:
                return False
            states[i % STATES], position = refill(states[i % STATES], words, position)
    return position == words.size and (states == LOW).all()


def encode(data: np.ndarray) -> np.ndarray:
    """The shorter of the code of ``data`` (uint8 [n], contiguous) and ``data`` itself: uint8 [at most n]."""
    if data.size <= PRESENT + 4 * STATES:
        return data
    occurring = occurrences(data)
    frequency = frequencies(occurring)
    if estimate(occurring, frequency) >= data.size:
        return data
    words, states, table = np.empty(data.size + 1, np.uint16), np.empty(STATES, np.int64), np.empty(600, np.uint8)
    first = write_words(data, encoder(frequency), words, states)
    used = write_table(frequency, table)
    code = np.concatenate([table[:used], states.astype("<u4").view(np.uint8), words[first:].view(np.uint8)])
    return code if code.size < data.size else data


def decode(code: np.ndarray, count: int) -> np.ndarray:
    """The bytes that `encode` was given: uint8 [count].

    Raises:
        ValueError: If these bytes (uint8, contiguous) are not a code of ``count`` bytes.
    """
    if code.size == count:
        return code
    frequency, used = read_table(code)
    states, words = code[used : used + 4 * STATES], code[used + 4 * STATES :]
    data = np.empty(count, np.uint8)
    if (
        code.size > count
        or not used
        or states.size < 4 * STATES
        or words.size % 2
        or not read_words(
            words.copy().view(np.uint16), decoder(frequency), states.copy().view("<u4").astype(np.int64), data
        )
    ):
        raise ValueError(f"invalid payload: {code.size} bytes cannot encode {count} bytes by the range coder")
    return data
