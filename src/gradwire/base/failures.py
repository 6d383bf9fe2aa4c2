"""Failure reports: a file next to the command's outputs, and a message from each rank to its launcher."""

from __future__ import annotations

import os
import select
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradwire.base.errors import FAULT, BadInput, GradwireError, RunFault, bounded
from gradwire.base.files import read_json, write_json

RANK_FAILURES = "GRADWIRE_RANK_FAILURES"  # a folder, set by `gradwire launch` for the processes it starts
CHECK = "GRADWIRE_CHECK"  # set by `gradwire launch` for the process that checks the ranks' input

# In messages of gloo, NCCL and the store about a peer that exited, hangs or runs another collective.
LOST_PEER = ("gloo/transport/", "ncclRemoteError", "DistNetworkError", "DistStoreError")

TRACEBACK = 40_000  # characters that are kept

TIMED_OUT = ("Timed out", "timed out", "timeout", "Timeout")


def exit_code(error: BaseException) -> int:
    """The exit code of a command that raised ``error``."""
    return error.exit_code if isinstance(error, GradwireError) else FAULT


def reason(error: BaseException) -> str:
    """The message for the user: gradwire's own errors as they are, others with their type."""
    if isinstance(error, GradwireError):
        return str(error)
    return bounded(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def unexpected(error: BaseException) -> bool:
    """Whether gradwire does not handle this error, so that the traceback matters."""
    known = isinstance(error, GradwireError) and not getattr(error, "traceback", "")
    return isinstance(error, Exception) and not known


def where(error: BaseException) -> str:
    """The traceback of the failed rank, or of this process."""
    return getattr(error, "traceback", "") or bounded("".join(traceback.format_exception(error)), TRACEBACK)


def lost_peer(error: BaseException) -> bool:
    """Whether ``error`` or its cause is only that another rank did not respond; this is never the root cause."""
    return any(sign in f"{type(link).__name__}: {link}" for link in _chain(error) for sign in LOST_PEER)


def timed_out(error: BaseException) -> bool:
    """Whether another rank did not respond in time, rather than disconnect."""
    return lost_peer(error) and any(sign in str(link) for link in _chain(error) for sign in TIMED_OUT)


def reader_left(error: BaseException) -> bool:
    """Whether ``error``, or that of the rank that it is about, is that nobody reads standard output (``| head``)."""
    return "BrokenPipeError" in reason(error) and nobody_reads()


def nobody_reads() -> bool:
    """Whether the reader of standard output is gone."""
    output = select.poll()
    output.register(sys.stdout, 0)  # errors are always reported
    return any(event & select.POLLERR for _, event in output.poll(0))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, as a traceback shows them."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def failure_file(folder: Path, command: str) -> Path:
    """``<command>.failed.json`` in the folder of the command's outputs."""
    return Path(folder) / f"{command.replace(' ', '_')}.failed.json"


# Why: docs/decisions.md, "The reason of a failed job is in its failure file".
def write_failure(folder: Path, command: str, error: BaseException) -> None:
    """Write why a command failed, its exit code, the rank (null without ranks) and the last completed step.

    An unexpected error includes its traceback. If the file cannot be written, such as on a full disk, a note is
    printed to stderr.
    """
    path = failure_file(folder, command)
    try:
        failure = {"verb": command, "rank": getattr(error, "rank", None), **_summary(error)}
        write_json(path, failure | {"traceback": where(error) if unexpected(error) else ""})
    except (RunFault, OSError) as problem:
        print(f"gradwire: NOTE: {problem}", file=sys.stderr)


def clear_failure(folder: Path, command: str) -> None:
    """Remove this command's failure file, if any."""
    path = failure_file(folder, command)
    if path.exists():
        path.unlink(missing_ok=True)  # another rank may remove it first


def refuse_again(folder: Path, command: str) -> None:
    """Refuse to retry a command that failed on bad input: it would fail again.

    Raises:
        BadInput: If the earlier attempt ended with exit code 2, with its reason.
    """
    path = failure_file(folder, command)
    if path.exists() and (failure := read_json(path))["exit_code"] == BadInput.exit_code:
        raise BadInput(failure["reason"])


def diverged(run_folder: Path) -> bool:
    """Whether a run has diverged, by its record: a result, not a failure."""
    record = Path(run_folder) / "record.json"
    content = read_json(record) if record.is_file() else None
    return isinstance(content, dict) and content.get("status") == "diverged"


def is_rank() -> bool:
    """Whether ``gradwire launch`` started this process, a rank or the check before them, and reports its failure."""
    return RANK_FAILURES in os.environ and (CHECK in os.environ or os.environ.get("RANK", "").isdecimal())


def report_rank_failure(error: BaseException) -> bool:
    """Write this rank's failure for ``gradwire launch``, if that started it.

    Returns:
        Whether a launcher reports the failure, so that the rank prints nothing.
    """
    if not is_rank():
        return False
    rank = int(os.environ.get("RANK", 0))  # the check has none
    write_json(
        Path(os.environ[RANK_FAILURES]) / f"rank{rank}.json",
        {
            "rank": rank,
            **_summary(error),
            "lost_peer": lost_peer(error),
            "timed_out": timed_out(error),
            "traceback": where(error) if unexpected(error) else "",
        },
    )
    return True


def rank_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """The failures that ranks wrote to ``folder``, by rank."""
    return {failure["rank"]: failure for failure in map(read_json, Path(folder).glob("rank*.json"))}


def _summary(error: BaseException) -> dict[str, Any]:
    """The fields that a failure file and a rank's message share."""
    step = getattr(error, "step", None)
    return {"reason": reason(error), "exit_code": exit_code(error), "last_step": step, "time": time.time()}
