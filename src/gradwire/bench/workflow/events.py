"""Snakemake with its events as lines of JSON: ``python -m gradwire.bench.workflow.events [Snakemake's arguments]``.

Events go to standard output for `gradwire.bench.workflow.run`; what Snakemake prints by itself goes to standard
error.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

from snakemake.cli import main
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

from gradwire.base import parent_watch

NAME = "gradwire"  # of the logger plugin

# What of an event is passed on, by Snakemake's name for the event.
PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "run_info": lambda record: {"jobs": {rule: n for rule, n in record.stats.items() if rule not in ("all", "total")}},
    "job_info": lambda record: {
        "job": record.jobid,
        "rule": record.rule_name,
        "wildcards": dict(record.wildcards or {}),
    },
    "job_finished": lambda record: {"job": record.job_id},
    "job_error": lambda record: {
        "job": record.jobid,
        "rule": record.rule_name,
        "output": list(map(str, record.output)),
        "log": list(map(str, record.log)),
    },
    "error": lambda record: {"text": record.getMessage()},
}


# Why: docs/decisions.md, "Progress comes from Snakemake's events".
class LogHandler(LogHandlerBase):  # type: ignore[misc]
    """Writes each event and each message."""

    writes_to_stream = True
    writes_to_file = False
    has_filter = False
    has_formatter = False
    needs_rulegraph = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as an event, if it is one, and as text."""
        event = str(getattr(record, "event", None))
        if event in PARTS:
            print(json.dumps({"event": event, **PARTS[event](record)}), flush=True)
        print(self.format(record), file=sys.stderr, flush=True)


if __name__ == "__main__":
    parent_watch.watch()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # how `run` stops it; a script's `&` leaves it ignored
    LoggerPluginRegistry().register_plugin(NAME, sys.modules[__name__])
    main([*sys.argv[1:], "--logger", NAME])
