"""How a failure is told: a file beside the verb's outputs, and a rank's own message to its launcher."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradwire.errors import FAULT, BadInput, GradwireError, RunFault, bounded
from gradwire.files import read_json, write_json

RANK_FAILURES = "GRADWIRE_RANK_FAILURES"  # a folder, set by `gradwire launch` for the ranks it starts

# How gloo, NCCL and the store say that the other side is gone, silent or elsewhere in the program.
LOST_PEER = ("gloo/transport/", "ncclRemoteError", "DistNetworkError", "DistStoreError")

TRACEBACK = 40_000  # characters of one that are kept

TIMED_OUT = ("Timed out", "timed out", "timeout", "Timeout")


def exit_code(error: BaseException) -> int:
    """The exit code that ends a verb which raised ``error``."""
    return error.exit_code if isinstance(error, GradwireError) else FAULT


def reason(error: BaseException) -> str:
    """One message for a person: our own errors speak for themselves, others need their type."""
    if isinstance(error, GradwireError):
        return str(error)
    return bounded(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def unexpected(error: BaseException) -> bool:
    """Whether this is none of the failures that gradwire knows and tells, so that where it happened matters."""
    known = isinstance(error, GradwireError) and not getattr(error, "traceback", "")
    return isinstance(error, Exception) and not known


def where(error: BaseException) -> str:
    """Where in the program it happened: a rank's own traceback, or this process's."""
    return getattr(error, "traceback", "") or bounded("".join(traceback.format_exception(error)), TRACEBACK)


def lost_peer(error: BaseException) -> bool:
    """Whether ``error``, or what led to it, says only that another rank did not answer: never the first cause."""
    return any(sign in f"{type(link).__name__}: {link}" for link in _chain(error) for sign in LOST_PEER)


def timed_out(error: BaseException) -> bool:
    """Whether another rank was not lost but silent."""
    return lost_peer(error) and any(sign in str(link) for link in _chain(error) for sign in TIMED_OUT)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what led to it, as far as a traceback would show it."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def failure_file(folder: Path, verb: str) -> Path:
    """``<verb>.failed.json`` in the folder of the verb's outputs."""
    return Path(folder) / f"{verb.replace(' ', '_')}.failed.json"


def write_failure(folder: Path, verb: str, error: BaseException) -> None:
    """Write why a verb failed, its exit code, the rank (null if there were none), the last finished step.

    Of a failure that nobody expected the traceback is kept there too.

    Where that cannot be written, as on a full disk, it is said, and the failure itself is what counts.
    """
    path = failure_file(folder, verb)
    try:
        told = {"verb": verb, "rank": getattr(error, "rank", None), **_told(error)}
        write_json(path, told | {"traceback": where(error) if unexpected(error) else ""})
    except (RunFault, OSError) as problem:
        print(f"gradwire: NOTE: {problem}", file=sys.stderr)


def clear_failure(folder: Path, verb: str) -> None:
    """Remove the file that an earlier failure of this verb left."""
    path = failure_file(folder, verb)
    if path.exists():
        path.unlink(missing_ok=True)  # another rank may be quicker


def refuse_again(folder: Path, verb: str) -> None:
    """End a repeated attempt at what failed by bad input: it would only fail again.

    Raises:
        BadInput: With the reason of the earlier attempt, if that one ended with exit code 2.
    """
    path = failure_file(folder, verb)
    if path.exists() and (failure := read_json(path))["exit_code"] == BadInput.exit_code:
        raise BadInput(failure["reason"])


def report_rank_failure(error: BaseException) -> bool:
    """In a rank started by ``gradwire launch``: leave the message where the launcher finds it.

    Returns:
        Whether a launcher will tell it, so that the rank itself stays quiet.
    """
    folder = os.environ.get(RANK_FAILURES)
    if folder is None or not os.environ.get("RANK", "").isdecimal():  # without a number nobody would find it
        return False
    rank = int(os.environ["RANK"])
    write_json(
        Path(folder) / f"rank{rank}.json",
        {
            "rank": rank,
            **_told(error),
            "lost_peer": lost_peer(error),
            "timed_out": timed_out(error),
            "traceback": where(error) if unexpected(error) else "",
        },
    )
    return True


def rank_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """What the ranks left in ``folder``, by rank."""
    return {failure["rank"]: failure for failure in map(read_json, Path(folder).glob("rank*.json"))}


def _told(error: BaseException) -> dict[str, Any]:
    """What a failure file and a rank's message both say."""
    step = getattr(error, "step", None)
    return {"reason": reason(error), "exit_code": exit_code(error), "last_step": step, "time": time.time()}
