"""Traces laid out as torch.profiler's, made of events whose times are known, and what the command makes of them."""

from __future__ import annotations

import gzip
import json

from gradwire.cli import main


def event(category, name, start, end, lane, **arguments):
    """A complete event; start and end in microseconds, on a clock like a real machine's."""
    at = 4_336_211_839_493.25 + start
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": lane, "ts": at, "dur": end - start} | {
        "args": {"External id": 1, **arguments}
    }


def write_trace(run_dir, rank, events, world_size=2):
    """A file as torch.profiler lays it out: the header first, then metadata and events in no order of time."""
    document = {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "name": "process_name", "ts": 1.5, "pid": 7, "tid": 0, "args": {"name": "python"}},
            *reversed(events),
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 2.5},
        ],
        "traceName": "profiler/rank0.pt.trace.json",
    }
    path = run_dir / "profiler" / f"rank{rank}.pt.trace.json.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(document, indent=1).encode()))
    return path


def profile_of(run_dir):
    assert main(["trace", "--run_dir", str(run_dir)]) == 0
    return json.loads((run_dir / "profile.json").read_text())


def steps(*bounds):
    names = [f"ProfilerStep#{3 + i}" for i in range(len(bounds) - 1)]
    return [event("user_annotation", *entry, 1) for entry in zip(names, bounds, bounds[1:], strict=False)]
