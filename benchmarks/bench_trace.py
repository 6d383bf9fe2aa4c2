"""Speed and memory of `gradwire trace`: ``python benchmarks/bench_trace.py [--mb 1024]``.

Writes a trace in the layout of torch's profiler (five steps of nested CPU ops, gloo's collectives, the package's own
ranges), then analyses it in another process. Times are processor times, so that other load does not matter.
"""

from __future__ import annotations

import argparse
import gzip
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

STEPS = 5
SLOT_US = 40.0  # a slot holds an op with two more inside, all on one thread
EVERY = 500  # slots between two collectives
HEADER = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1},\n'
EVENT = """  {{
    "ph": "X",
    "cat": "{category}",
    "name": "{name}",
    "pid": 19181,
    "tid": {thread},
    "ts": {start:.3f},
    "dur": {duration:.3f}
    ,
    "args": {{
      "External id": {number},"Record function id": 0, "Sequence number": 261, "Fwd thread id": 0, "Ev Idx": {number}
    }}
  }},
"""


def events(slots: int) -> Iterator[str]:
    """Slots of three ops; a collective and its range in some of them; the steps last."""
    origin, number = 4_429_199_000_000.0, 0

    def event(category: str, name: str, start: float, duration: float, thread: int = 19181) -> str:
        return EVENT.format(
            category=category, name=name, thread=thread, start=origin + start, duration=duration, number=number
        )

    for slot in range(slots):
        number, start = number + 1, slot * SLOT_US
        yield event("cpu_op", "aten::linear", start, 30.0)
        yield event("cpu_op", "aten::addmm", start + 2, 25.0)
        yield event("cpu_op", "aten::copy_", start + 4, 10.5)
        if slot % EVERY == 0:
            yield event("user_annotation", "gradwire/payload/all_to_all", start + 31, 8.0)
            yield event("cpu_op", "c10d::alltoall_base_", start + 32, 1.0)
            yield event("user_annotation", "gloo:all_to_all", start + 34, 4.0, thread=19349)
    length = slots * SLOT_US / STEPS
    for step in range(STEPS):
        yield event("user_annotation", f"ProfilerStep#{step + 3}", step * length, length)


def write(path: Path, size: int) -> tuple[int, int]:
    """Write a trace of about ``size`` bytes before compression; return its numbers of events and bytes."""
    path.parent.mkdir(parents=True)
    slots = size // (3 * 320)
    count = written = 0
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write(HEADER + '  "traceEvents": [\n')
        for one in events(slots):
            count, written = count + 1, written + len(one)
            file.write(one)
        file.write('  {"ph": "i", "name": "Record Window End", "ts": 1}\n  ]\n}\n')
    return count, written


def analyse(run_dir: Path) -> None:
    """Print the time and the peak memory of the analysis."""
    from gradwire.bench.trace import trace

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    steps = trace.profile(run_dir)["steps"]
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{steps} steps in {seconds:.1f} s of one core; peak {peak / 1024:.0f} MiB, {before / 1024:.0f} at the start")


def main() -> None:
    """Write, then analyse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1024, help="size before compression")
    parser.add_argument("--run_dir", type=Path, help="analyse an existing run instead")
    args = parser.parse_args()
    if args.run_dir:
        analyse(args.run_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiler" / "rank0.pt.trace.json.gz"
        count, size = write(path, args.mb * 2**20)
        print(
            f"{count:,} events, {size / 2**20:,.0f} MiB, {path.stat().st_size / 2**20:.0f} MiB compressed", flush=True
        )
        subprocess.run([sys.executable, __file__, "--run_dir", folder], check=True)


if __name__ == "__main__":
    main()
