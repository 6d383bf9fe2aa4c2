"""Numbers with their units: rates and times in the notation of ``tc`` (``100mbit``, ``50us``), and ``2 ranks``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from gradwire.base.errors import BadInput

UNSHAPED = "none"  # in place of a rate: the machine's own network
RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
SLOWEST, FASTEST = 8.0, 1e15  # bits per second: tc counts whole bytes; no network is faster
LONGEST = 32  # characters of a rate or a time, which names a folder
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def bits_per_second(text: str) -> float:
    """A rate, such as ``100mbit`` or ``2.5Gbit``, in bits per second; prefixes are powers of 1,000.

    Raises:
        BadInput: If it is invalid or outside `SLOWEST` to `FASTEST`.
    """
    rate = _read(text, RATES)
    if rate is None:
        raise BadInput(f"invalid rate {text!r}: give a number and one of {', '.join(RATES)}, such as 100mbit.")
    if not SLOWEST <= rate <= FASTEST:
        raise BadInput(
            f"invalid rate {text!r}: a rate is between {rate_text(SLOWEST)} and {rate_text(FASTEST)}, such as 100mbit."
        )
    return rate


def rate_text(rate: float) -> str:
    """Bits per second with three digits and the largest unit that leaves a number of 1 or more: ``2.5gbit``."""
    unit = max((unit for unit in RATES if RATES[unit] <= rate), key=RATES.__getitem__, default="bit")
    return f"{float(f'{rate / RATES[unit]:.3g}'):g}{unit}"


def spoken(rate: str) -> str:
    """A rate as in a sentence: ``20 Mbit/s`` for ``20mbit``."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(\w+)", rate.strip()).groups()  # type: ignore[union-attr]
    return f"{number} {unit.capitalize() if unit != 'kbit' else unit}/s"


def seconds(text: str) -> float:
    """A time, such as ``50us`` or ``0.2ms``, in seconds.

    Raises:
        BadInput: If it is invalid.
    """
    time = _read(text, TIMES)
    if time is None:
        raise BadInput(f"invalid time {text!r}: give a number and one of {', '.join(TIMES)}, such as 50us.")
    return time


def amount(number: int, noun: str) -> str:
    """A number of things: ``1 rank``, ``2 ranks``, ``3 batches``."""
    return f"{number} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """A noun as it follows a number."""
    return noun + ("es" if noun.endswith("ch") else "s") * (number != 1)


def _read(text: str, units: Mapping[str, float]) -> float | None:
    """Parse a number with its unit; None if it is invalid."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?|\.\d+)\s*({'|'.join(units)})", text.strip().lower(), re.ASCII)
    return float(match[1]) * units[match[2]] if match and len(text) <= LONGEST else None
