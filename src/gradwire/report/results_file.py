"""Reading ``results.jsonl``, line by line: a line that is of no use is told and spares the others."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from gradwire.config import SCHEMA_VERSION
from gradwire.errors import BadInput
from gradwire.report.record import Result


def read_results(path: Path) -> tuple[list[Result], list[str]]:
    """The rows of a results file, and what is wrong with the lines that are left out, by their numbers.

    Raises:
        BadInput: If there is no such file.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path}: no results can be read there ({error.strerror}).") from None
    rows, complaints = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
        except ValueError as error:
            complaints.append(f"{path}: line {number} is left out: {error}")
    return rows, complaints


def _row(line: bytes) -> Result:
    """One line's row.

    Raises:
        ValueError: If it is none, or one of another version.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"its schema version is {json.dumps(version)}, not {SCHEMA_VERSION}")
    try:
        return Result.model_validate(value)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
