"""Meter of this rank's collectives: bytes, seconds and calls, by operation and purpose.

Purposes: ``payload`` (gradients), ``agreement`` (the non-finite flag), ``parameters`` (including their codec's time),
``momenta`` (that Muon gathers under FSDP), ``control`` (losses, norms), and ``codec`` for encoding and decoding
gradients, which send nothing. While a profiler runs, each span is a range ``gradwire/<purpose>/<op>``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from gradwire.comm.torch_internals import profiler_runs

CPU = torch.device("cpu")


@dataclass
class Cost:
    """Sums over the calls of one operation for one purpose.

    ``around``: host seconds spent on opening and closing the profiler ranges; not part of ``seconds``.
    """

    bytes: int = 0
    seconds: float = 0.0
    calls: int = 0
    around: float = 0.0

    def __iadd__(self, other: Cost) -> Cost:
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.calls += other.calls
        self.around += other.around
        return self


class Running(NamedTuple):
    """A GPU span that may still be running; its duration is the time between two events."""

    meter: Meter
    op: str
    purpose: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class Meter:
    """Counts costs, also in its parent; threads may share it.

    ``bytes`` are those that this rank sends to other ranks. ``seconds`` of CPU work are the host's, in calls and in
    waits for them. ``seconds`` of GPU work are counted inside `measuring` only.
    """

    event = staticmethod(partial(torch.cuda.Event, enable_timing=True))

    def __init__(self, parent: Meter | None = None) -> None:
        self.parent = parent
        self.totals: defaultdict[tuple[str, str], Cost] = defaultdict(Cost)
        self._lock = Lock()
        self._running: list[Running] | None = None  # GPU spans of a `measuring` that has not ended
        self.calls: list[Cost] | None = None  # of the payload, if they are listed, without seconds of GPU work

    def add(self, op: str, purpose: str, cost: Cost) -> None:
        """Count a cost here and in every ancestor."""
        with self._lock:
            self.totals[op, purpose] += cost
        if self.calls is not None and purpose == "payload" and cost.calls:
            self.calls.append(cost)
        if self.parent is not None:
            self.parent.add(op, purpose, cost)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time the GPU work that this meter and its children count in the context, with events on its streams.

        Only the exit waits for the work, and adds its seconds. For benchmarks: in training, waiting at every step would
        change what is measured.
        """
        self._running = []
        try:
            yield
        finally:
            running, self._running = self._running, None
            for meter, op, purpose, start, end in running:
                end.synchronize()
                meter.add(op, purpose, Cost(seconds=start.elapsed_time(end) / 1000))

    @contextmanager
    def span(
        self, op: str, purpose: str, sent: int = 0, *, device: torch.device = CPU, calls: int = 1
    ) -> Iterator[Cost]:
        """Time a call of ``op`` on ``device`` that sends ``sent`` bytes, and mark it for the profiler.

        ``calls`` is 0 for waiting on a call that was already counted. The context's value is the cost, which is
        complete when it ends.
        """
        cost = Cost(sent, calls=calls)
        running = self._measured() if device.type == "cuda" else None
        if running is not None:
            first, last = self.event(), self.event()
            first.record()
        entered = time.perf_counter()
        with profiler_range(f"gradwire/{purpose}/{op}"):
            start = time.perf_counter()
            yield cost
            seconds = time.perf_counter() - start
        if device.type == "cpu":
            cost.seconds, cost.around = seconds, time.perf_counter() - entered - seconds
        if running is not None:
            last.record()
            running.append(Running(self, op, purpose, first, last))
        self.add(op, purpose, cost)

    def _measured(self) -> list[Running] | None:
        """Return the list for GPU spans of the nearest meter inside `measuring`, or None."""
        if self._running is None and self.parent is not None:
            return self.parent._measured()
        return self._running

    def by_op(self, purpose: str) -> dict[str, Cost]:
        """Return the costs of one purpose, by operation."""
        with self._lock:
            return {op: cost for (op, of), cost in self.totals.items() if of == purpose}

    @property
    def around(self) -> float:
        """Seconds spent on opening and closing profiler ranges, over all purposes."""
        with self._lock:
            return sum(cost.around for cost in self.totals.values())

    def sent(self, purpose: str) -> int:
        """Return the bytes sent for one purpose."""
        return sum(cost.bytes for cost in self.by_op(purpose).values())


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a profiler range, or nothing where no profiler runs: opening one costs more than a small collective."""
    return record_function(name) if profiler_runs() else nullcontext()


METER = Meter()  # every data collective of this process


COUNTED = (
    *("raw", "exact", "index", "padding", "nonfinite_steps", "extra_collectives", "fallbacks", "elements"),
    *(f"{which}_elements" for which in ("exempt", "fallback", "encoded", "chosen", "sparse")),
)


class Traffic(dict[str, Any]):
    """Bytes that one rank has sent for its gradients since the start: a dict of five numbers, and ``details``.

    ``sent``: bytes handed to collectives, scales and indices included. ``raw``: bytes that float32 would have sent.
    ``ratio``: ``raw / sent``, None if nothing was sent. ``messages``: collectives that carried them. ``exact``: bytes
    of ``sent`` that are float32 values as they are: of exempt tensors, of steps before compression begins, of tensors
    that the method would not make shorter, and of means sent back with ``second="float32"``.

    Attributes:
        details: The other counters, by name: those of `Tally.totals`, and the traffic of parts of the reducer.
    """

    def __init__(self, totals: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        numbers = {name: totals[name] for name in ("sent", "raw", "messages", "exact")}
        sent, raw, messages, exact = numbers.values()
        super().__init__(sent=sent, raw=raw, ratio=raw / sent if sent else None, messages=messages, exact=exact)
        self.details = {name: value for name, value in totals.items() if name not in numbers} | {**more}


# Why: docs/decisions.md, "Byte counts of the reducer".
class Tally:
    """Counters of a reducer's traffic; its meter counts the bytes and seconds of its collectives.

    Args:
        meter: The reducer's.

    Attributes:
        counts: The counters `COUNTED`, of which only the reducer's queue changes those of encodings; see `totals`.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        self._lock = Lock()  # a reduction in the queue may count while the caller skips one
        self._extra_seconds = 0.0
        self._expected: int | None = 0  # this rank's bytes; None once a size depended on the data

    def add(self, **counts: int) -> None:
        """Add to counters from any thread."""
        with self._lock:
            self.counts.update(counts)

    @contextmanager
    def reduction(self, expected: int | None) -> Iterator[Meter]:
        """Count one reduction, in which this rank sends ``expected`` bytes; the value is the meter of its calls."""
        self._expected = None if expected is None or self._expected is None else self._expected + expected
        meter = Meter(self.meter)
        meter.calls = calls = list[Cost]()
        yield meter
        if calls:
            calls.remove(max(calls, key=lambda cost: cost.bytes))
        self.add(extra_collectives=len(calls))
        self._extra_seconds += sum(cost.seconds for cost in calls)

    def totals(self) -> dict[str, Any]:
        """Return this rank's totals since the start.

        Those of `Traffic`, and ``index``: bytes that encode positions; ``closed_form``: the sum of
        `Reducer.closed_form` over all calls, None if one of them was; ``agreement``: bytes of the flag and what
        travelled with it; ``elements`` of all reduced buffers, ``exempt_elements`` of them; ``fallbacks``: encodings as
        float32, though neither exempt nor dense, because the method would not have made them shorter:
        ``fallback_elements`` of ``encoded_elements``, all that it was given; ``chosen_elements`` of ``sparse_elements``
        that sparsifiers encoded were sent; ``padding``: bytes sent for the sake of equal messages;
        ``extra_collectives`` and ``extra_seconds``: of each reduction's payload collectives all but the one that sends
        the most (the first of equals), which represents the framework's own; ``encode_seconds`` and ``decode_seconds``;
        ``by_op``: the payload's bytes, seconds and calls per collective. On a GPU seconds are counted inside
        `Meter.measuring` only.
        """
        payload = self.meter.by_op("payload")
        return {
            **self.counts,
            "sent": sum(cost.bytes for cost in payload.values()),
            "messages": sum(cost.calls for cost in payload.values()),
            "closed_form": self._expected,
            "agreement": self.meter.sent("agreement"),
            "extra_seconds": self._extra_seconds,
            "encode_seconds": self.meter.totals["encode", "codec"].seconds,
            "decode_seconds": self.meter.totals["decode", "codec"].seconds,
            "by_op": {op: vars(cost).copy() for op, cost in payload.items()},
        }
