"""The table that `make test-faults` prints: each fault, what was seen of it, and how the rerun ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tabulate import tabulate

ROW = "fault"


@pytest.fixture
def table(record_property) -> Callable[[str, str, str], None]:
    """Note a fault, what was seen and what the rerun gave; only what the test has asserted."""
    return lambda *row: record_property(ROW, row)  # a property gets from a worker to who prints


def pytest_terminal_summary(terminalreporter, config):
    passed = (report for report in terminalreporter.stats.get("passed", []) if report.when == "call")
    rows = [value for report in passed for name, value in report.user_properties if name == ROW]
    if rows and config.option.markexpr == "faults":
        terminalreporter.section("faults")
        terminalreporter.write_line(
            tabulate(rows, ("fault", "seen", "rerun"), tablefmt="grid", maxcolwidths=[32, 66, 34])
        )
