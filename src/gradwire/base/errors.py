"""Exceptions and their exit codes.

A message is for the user of the command line: what went wrong, where, and what to do. ``step`` is the last completed
optimizer step, if any.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

WORD, MESSAGE = 500, 10_000  # characters of a word and of a message that are shown in full
LISTED = 100  # names that a message lists; of more, it has the `NEAREST` closest
NEAREST = 5
DONE, CHECK_FAILED, BAD_INPUT, FAULT, STOPPED = 0, 1, 2, 3, 75


def bounded(message: str, most: int = MESSAGE) -> str:
    """Shorten a message in the middle, and each long word in it, such as an id of a hundred kilobytes."""

    def cut(text: str, most: int, kept: int) -> str:
        return text if len(text) <= most else f"{text[:kept]}… ({len(text):,} characters) …{text[-kept:]}"

    return cut(re.sub(r"\S+", lambda word: cut(word[0], WORD, 60), message), most, most // 2)


def listed(names: Sequence[str], most: int = 3) -> str:
    """List names in a sentence; of more than ``most``, the number of the others."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


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


def nearest(word: str, known: Iterable[str], most: int = 2, cutoff: float = 0.5) -> list[str]:
    """Return the names that are close to a word, closest first; upper and lower case are the same."""
    lowered = {name.lower(): name for name in known}
    return [lowered[match] for match in difflib.get_close_matches(word.lower(), lowered, n=most, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'a' or 'b'?`` with the names that are close to a word; nothing without any."""
    near = nearest(word, known)
    return f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def unknown(kind: str, word: str, known: Iterable[str]) -> BadInput:
    """Return the error for an unknown name, with close matches and all valid names, or the closest of many.

    Args:
        kind: The kind of name, for example ``"compressor"``.
        word: The unknown name.
        known: All valid names.
    """
    names = sorted(known)
    if len(names) > LISTED:
        near = ", ".join(nearest(word, names, NEAREST, cutoff=0.0))
        return BadInput(f"unknown {kind} {word!r}. Of {len(names)}, the nearest are: {near}.")
    return BadInput(f"unknown {kind} {word!r}.{did_you_mean(word, names)} Available: {', '.join(names) or 'none'}.")
