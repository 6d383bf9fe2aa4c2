"""Rates and times as tc spells them; numbers of things."""

from __future__ import annotations

import re

import pytest

from gradwire.base.errors import BadInput
from gradwire.base.units import amount, bits_per_second, rate_text, seconds


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 1e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("7kbit", 7e3), ("9bit", 9.0), ("0.4tbit", 4e11),
        (".5MBit", 5e5), (" 10 gbit ", 1e10),
    ],
)  # fmt: skip
def test_a_rate(text, rate):
    assert bits_per_second(text) == pytest.approx(rate, rel=1e-15)


NO_RATES = [
    "", "none", "fast", "100", "mbit", "-1mbit", "0mbit", "1e3mbit", "1mbps", "1.mbit", "1 000kbit", "٣mbit",
    "0.0000001bit", "7.9bit", "1001tbit", "9" * 80 + "bit", "0" * 80 + "100mbit", "1." + "3" * 80 + "gbit",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_RATES)
def test_what_is_no_rate_is_bad_input(text):
    with pytest.raises(BadInput, match=rf"invalid rate {re.escape(repr(text))}: .*, such as 100mbit"):
        bits_per_second(text)


@pytest.mark.parametrize(("text", "time"), [("50us", 5e-5), ("0.2ms", 2e-4), ("1S", 1.0), ("30ns", 3e-8), ("0s", 0.0)])
def test_a_time(text, time):
    assert seconds(text) == pytest.approx(time, rel=1e-15)


@pytest.mark.parametrize("text", ["", "50", "us", "-1ms", "1 min", "1mbit", "1s 2ms", "9" * 400 + "s"])
def test_what_is_no_time_is_bad_input(text):
    with pytest.raises(
        BadInput, match=rf"invalid time {re.escape(repr(text))}: give a number and one of s, ms, us, ns"
    ):
        seconds(text)


@pytest.mark.parametrize(
    ("rate", "text"), [(1e8, "100mbit"), (2.4999e9, "2.5gbit"), (7e3, "7kbit"), (9.5, "9.5bit"), (4e14, "400tbit")]
)
def test_a_rate_s_spelling(rate, text):
    assert rate_text(rate) == text
    assert bits_per_second(text) == pytest.approx(rate, rel=0.005)


def test_a_rate_too_low_to_be_given_is_still_spelt():
    assert rate_text(0.5) == "0.5bit"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "run", "0 runs"),
        (1, "run", "1 run"),
        (7, "rank", "7 ranks"),
        (1, "batch", "1 batch"),
        (3, "batch", "3 batches"),
    ],
)
def test_a_number_of_things_has_their_plural(number, noun, text):
    assert amount(number, noun) == text
