"""The table that `make test-faults` prints: each fault, what was seen of it, and how the rerun ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tabulate import tabulate

ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture
def table(request) -> Callable[[str, str, str], None]:
    """Note a fault, what was seen and what the rerun gave; only what the test has asserted."""
    rows = request.config.stash.setdefault(ROWS, [])
    return lambda *row: rows.append(row)


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    if rows and config.option.markexpr == "faults":
        terminalreporter.section("faults")
        terminalreporter.write_line(
            tabulate(rows, ("fault", "seen", "rerun"), tablefmt="grid", maxcolwidths=[32, 66, 34])
        )
