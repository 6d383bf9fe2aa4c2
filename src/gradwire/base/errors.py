"""Exceptions and their exit codes.

A message is for the user of the command line: what went wrong, where, and what to do. ``step`` is the last completed
optimizer step, if any.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

WORD, MESSAGE = 500, 10_000  # characters of a word and of a message that are shown in full
LISTED = 100  # names that a message lists
DONE, CHECK_FAILED, BAD_INPUT, FAULT, STOPPED = 0, 1, 2, 3, 75


def bounded(message: str, most: int = MESSAGE) -> str:
    """Shorten a message in the middle, and each long word in it, such as an id of a hundred kilobytes."""

    def cut(text: str, most: int, kept: int) -> str:
        return text if len(text) <= most else f"{text[:kept]}… ({len(text):,} characters) …{text[-kept:]}"

    return cut(re.sub(r"\S+", lambda word: cut(word[0], WORD, 60), message), most, most // 2)


class GradwireError(Exception):
    """Base class of gradwire's errors. The message is `bounded`; each subclass has an exit code."""

    exit_code = FAULT

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(bounded(message))
        self.step = step


class CheckFailed(GradwireError):
    """A check failed, such as ``grads validate`` or a gate: exit code 1."""

    exit_code = CHECK_FAILED


class BadInput(GradwireError, ValueError):
    """Invalid argument, configuration or file: exit code 2. Nothing was written."""

    exit_code = BAD_INPUT


class RunFault(GradwireError):
    """The run failed, such as by a killed rank, a timeout or a full disk: exit code 3."""

    exit_code = FAULT


class NonFiniteGradient(GradwireError):
    """A gradient holds NaN or infinity."""


class Stopped(GradwireError):
    """A signal stopped the run after it wrote a checkpoint; it can be resumed: exit code 75."""

    exit_code = STOPPED


def nearest(word: str, known: Iterable[str], most: int = 2) -> list[str]:
    """Return the names that are close to a word, closest first; upper and lower case are the same."""
    lowered = {name.lower(): name for name in known}
    return [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered, n=most, cutoff=0.5)]


def did_you_mean(word: str, known: Iterable[str], most: int = 2) -> str:
    """Return `` Did you mean 'a' or 'b'?`` with the names that are close to a word; nothing without any."""
    if not (near := nearest(word, known, most)):
        return ""
    *others, last = map(repr, near)
    return f" Did you mean {', '.join(others)} or {last}?" if others else f" Did you mean {last}?"


def unknown(kind: str, word: str, known: Iterable[str]) -> BadInput:
    """Return the error for an unknown name, with close matches and all valid names, if they are not too many.

    Args:
        kind: What the name should be, for example ``"compressor"``.
        word: The unknown name.
        known: All valid names.
    """
    names = sorted(known)
    if len(names) > LISTED:
        return BadInput(f"unknown {kind} {word!r}.{did_you_mean(word, names, 5)} {len(names)} are known.")
    return BadInput(f"unknown {kind} {word!r}.{did_you_mean(word, names)} Available: {', '.join(names) or 'none'}.")
