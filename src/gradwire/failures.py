"""How a failure is told: a file beside the verb's outputs, and a rank's own message to its launcher."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.files import write_json

RANK_FAILURES = "GRADWIRE_RANK_FAILURES"  # a folder, set by `gradwire launch` for the ranks it starts


def failure_file(folder: Path, verb: str) -> Path:
    """``<verb>.failed.json`` in the folder of the verb's outputs."""
    return Path(folder) / f"{verb.replace(' ', '_')}.failed.json"


def write_failure(folder: Path, verb: str, error: BaseException, exit_code: int) -> None:
    """Write the reason, the exit code and the last finished step of a failed verb."""
    reason = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
    step = getattr(error, "step", None)
    write_json(
        failure_file(folder, verb),
        {"verb": verb, "reason": reason, "exit_code": exit_code, "last_step": step, "time": time.time()},
    )


def clear_failure(folder: Path, verb: str) -> None:
    """Remove the file that an earlier failure of this verb left."""
    failure_file(folder, verb).unlink(missing_ok=True)


def report_rank_failure(error: BaseException, exit_code: int) -> bool:
    """In a rank started by ``gradwire launch``: leave the message where the launcher finds it.

    Returns:
        Whether a launcher will tell it, so that the rank itself stays quiet.
    """
    folder = os.environ.get(RANK_FAILURES)
    if folder is None:
        return False
    rank = int(os.environ.get("RANK", "0"))
    message = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
    write_json(
        Path(folder) / f"rank{rank}.json",
        {
            "rank": rank,
            "message": message,
            "exit_code": exit_code,
            "last_step": getattr(error, "step", None),
            "time": time.time(),
            "traceback": "" if isinstance(error, GradwireError) else "".join(traceback.format_exception(error)),
        },
    )
    return True


def rank_failures(folder: Path) -> list[dict]:
    """What the ranks left in ``folder``, the earliest first."""
    found = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    return sorted(found, key=lambda failure: failure["time"])
