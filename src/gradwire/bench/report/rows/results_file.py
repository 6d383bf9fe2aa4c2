"""Read ``results.jsonl`` line by line; an unusable line is reported and skipped."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from gradwire.base.errors import BadInput
from gradwire.bench.config import SCHEMA_VERSION
from gradwire.bench.report.rows.record import Result


def read_results(path: Path) -> tuple[list[Result], list[str]]:
    """Read the rows of a results file; return them with complaints about skipped lines.

    Raises:
        BadInput: If the file cannot be read.
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
    """Parse one line.

    Raises:
        ValueError: If it is not a row, or has another schema version.
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
