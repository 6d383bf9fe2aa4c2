"""Errors that say what went wrong, where, and what to do; and the exit codes they carry.

An error's message is meant for the person who typed the command. ``step`` is the last optimizer step that finished,
where there was one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

WORD, MESSAGE = 500, 10_000  # characters of one word, and in all, that are shown whole
DONE, CHECK_FAILED, BAD_INPUT, FAULT, STOPPED = 0, 1, 2, 3, 75


def bounded(message: str, most: int = MESSAGE) -> str:
    """A message without the middle of what nobody reads to its end, such as an id of a hundred kilobytes."""

    def cut(text: str, most: int, kept: int) -> str:
        return text if len(text) <= most else f"{text[:kept]}… ({len(text):,} characters) …{text[-kept:]}"

    return cut(re.sub(r"\S+", lambda word: cut(word[0], WORD, 60), message), most, most // 2)


class GradwireError(Exception):
    """Base of every error that gradwire raises on purpose, its message `bounded`; the exit code is the class's."""

    exit_code = FAULT

    def __init__(self, message: str, *, step: int | None = None) -> None:
        super().__init__(bounded(message))
        self.step = step


class CheckFailed(GradwireError):
    """A check ran and its answer is no (``grads validate``, a gate): exit code 1."""

    exit_code = CHECK_FAILED


class BadInput(GradwireError):
    """An argument, a configuration or a file is unusable: exit code 2, nothing was written."""

    exit_code = BAD_INPUT


class RunFault(GradwireError):
    """The run broke: a killed rank, a timeout, a full disk: exit code 3."""

    exit_code = FAULT


class NonFiniteGradient(GradwireError):
    """A gradient holds NaN or infinity."""


class Stopped(GradwireError):
    """A signal stopped the run after a checkpoint was written; it can be resumed: exit code 75."""

    exit_code = STOPPED


def unknown(kind: str, word: str, known: Iterable[str]) -> BadInput:
    """The error for a name that is not known, with the nearest known names and the whole list.

    Args:
        kind: What the word should have named, for example ``"compressor"``.
        word: What was given.
        known: Every name that would have been accepted.
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
    return BadInput(f"unknown {kind} {word!r}.{hint} Available: {', '.join(names) or 'none'}.")
