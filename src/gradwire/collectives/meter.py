"""What every collective cost this rank: bytes, seconds and calls, by operation and purpose.

Purposes: ``payload`` (gradients), ``agreement`` (the non-finite flag), ``parameters``, ``control`` (losses, norms), and
``codec`` for encoding and decoding, which send nothing. Each span is a profiler range ``gradwire/<op>``.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import record_function


@dataclass
class Cost:
    """Sums over the calls of one operation for one purpose."""

    bytes: int = 0
    seconds: float = 0.0
    calls: int = 0

    def __iadd__(self, other: Cost) -> Cost:
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.calls += other.calls
        return self


class Meter:
    """A ledger of costs; what it counts, its parent counts too.

    ``bytes`` are those that this rank hands over for other ranks. ``seconds`` are the host's, from start to wait:
    nothing is synchronised, so on CUDA they are the time to issue the work.
    """

    def __init__(self, parent: Meter | None = None) -> None:
        self.parent = parent
        self.totals: defaultdict[tuple[str, str], Cost] = defaultdict(Cost)

    def add(self, op: str, purpose: str, cost: Cost) -> None:
        """Count a cost here and in every ancestor."""
        self.totals[op, purpose] += cost
        if self.parent is not None:
            self.parent.add(op, purpose, cost)

    @contextmanager
    def span(self, op: str, purpose: str, sent: int = 0) -> Iterator[None]:
        """Time one call of ``op`` that sends ``sent`` bytes, and show it to the profiler as ``gradwire/<op>``."""
        start = time.perf_counter()
        with record_function(f"gradwire/{op}"):
            yield
        self.add(op, purpose, Cost(sent, time.perf_counter() - start, 1))

    def by_op(self, purpose: str) -> dict[str, Cost]:
        """Costs of one purpose, by operation."""
        return {op: cost for (op, of), cost in self.totals.items() if of == purpose}

    def sent(self, purpose: str) -> int:
        """Bytes sent for one purpose."""
        return sum(cost.bytes for cost in self.by_op(purpose).values())


METER = Meter()  # every data collective of this process
