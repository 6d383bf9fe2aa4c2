"""Elias's code is the one of the books, and a stream of it is read within its bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator

from gradwire.comm.compressors import elias


def omega(number: int) -> str:
    """Elias's omega code, from its definition."""
    code = "0"
    while number > 1:
        code = f"{number:b}" + code
        number = number.bit_length() - 1
    return code


def stream_of(numbers: list[int]) -> list[int]:
    """The bytes of a stream, from its description."""
    bits, last = "", -1
    for i, number in enumerate(numbers):
        if number:
            bits += omega(i - last) + str(int(number < 0)) + omega(abs(number))
            last = i
    bits += omega(len(numbers) - last)
    return [int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8)]


def decoded(stream: list[int], count: int, top: int = 2**15 - 1) -> list[int]:
    return elias.decode(torch.tensor(stream, dtype=torch.uint8), count, top).tolist()


def test_codes_of_the_literature():
    known = {1: "0", 2: "100", 3: "110", 4: "101000", 7: "101110", 8: "1110000", 15: "1111110", 16: "10100100000"}
    for number in [*known, 17, 100, 2**16, 2**31, 2**40 + 12345]:
        bits, length = elias.code(number)
        assert f"{int(bits):0{length}b}"[::-1] == known.get(number, omega(number))


numbers = st.integers(-(2**15) + 1, 2**15 - 1)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.one_of(st.just(0), st.integers(-3, 3), numbers), max_size=60))
def test_a_stream_is_what_its_description_says_and_comes_back(values):
    stream = elias.encode(torch.tensor(values, dtype=torch.int16))
    assert stream.tolist() == stream_of(values)
    assert decoded(stream.tolist(), len(values)) == values


def test_long_gaps_and_dense_numbers():
    for density in (0.0, 1e-4, 0.02, 1.0):
        kept = torch.rand(100_000, generator=generator()) < density
        values = torch.where(kept, torch.randint(-127, 128, (100_000,), generator=generator(1)), 0).to(torch.int16)
        assert torch.equal(elias.decode(elias.encode(values), 100_000, 127), values)


@pytest.mark.parametrize(
    ("stream", "count"),
    [
        ([], 3),  # nothing
        (stream_of([0, 5, -2]), 2),  # numbers past the end
        (stream_of([0, 5, -2]), 9),  # no end
        (stream_of([0, 5, -2])[:-1], 3),  # cut short
        ([*stream_of([0, 5, -2]), 0], 3),  # a byte too many
        (stream_of([0, 6, -2]), 3),  # above top = 5
        ([0b11110100], 3),  # bits after the end
        ([255] * 40, 3),  # a number of 2^64 digits
        ([255] * 4, 3),
        ([0], 3),
    ],
)
def test_what_is_no_stream_is_refused(stream, count):
    with pytest.raises(ValueError, match="by Elias's code"):
        decoded(stream, count, top=5)


@settings(max_examples=50, deadline=None)
@given(stream=st.lists(st.integers(0, 255), max_size=12), count=st.integers(0, 20))
def test_whatever_is_read_is_the_only_stream_of_what_it_says(stream, count):
    try:
        values = decoded(stream, count)
    except ValueError:
        return
    assert stream_of(values) == stream
