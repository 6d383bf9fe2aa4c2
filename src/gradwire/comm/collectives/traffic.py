"""What a rank's reductions sent and what they cost, by the reducer's own count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from gradwire.comm.closed_forms import FLOAT32
from gradwire.comm.collectives.algorithms import Ranks
from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.layout import Kind, Layout


class Traffic:
    """Counters of a reducer; the meter and the codec count the rest.

    Args:
        codec: This rank's codec.
        ranks: The ranks, and the meter of the reductions.
    """

    def __init__(self, codec: Codec, ranks: Ranks) -> None:
        self.codec = codec
        self.ranks = ranks
        self.counts: Counter[str] = Counter()
        self._lock = Lock()  # a reduction in the queue may count while the caller skips one
        self._extra_seconds = 0.0
        self._expected: int | None = 0  # bytes over all ranks; None once a size depended on the data

    @contextmanager
    def counted(self, layout: Layout, kind: Kind, expected: int | None, extra: bool) -> Iterator[None]:
        """Count one reduction: its elements unless it is extra, the bytes that it will send, and its collectives."""
        self._expected = None if expected is None or self._expected is None else self._expected + expected
        if not extra:
            self.count(layout, kind)
        with self.ranks.meter.listing() as calls:
            yield
        if calls:
            calls.remove(max(calls, key=lambda cost: cost.bytes))
        self.counts["extra_collectives"] += len(calls)
        self._extra_seconds += sum(cost.seconds for cost in calls)

    def count(self, layout: Layout, kind: Kind) -> None:
        """Count a call's elements, and the bytes that this rank would send as float32."""
        numel = sum(piece.numel for piece in layout.pieces)
        own = sum(piece.numel for piece in layout.rows[self.ranks.rank])
        sent = numel - own + ((self.ranks.world - 1) * own if kind == "all_reduce" else 0)
        exempt = self.codec.options.exempt
        exempt_elements = sum(p.numel for p in layout.pieces if exempt.covers(p.name, p.shape))
        with self._lock:
            self.counts.update({"raw": FLOAT32 * sent, "elements": numel, "exempt_elements": exempt_elements})

    def totals(self) -> dict[str, Any]:
        """Return this rank's totals since the start.

        ``raw`` and ``sent``: payload in bytes, as float32 and as it was; ``index``: what of it says places;
        ``closed_form``: the sum of `closed_form` over all calls, so over all ranks, None if one of them was;
        ``agreement``: bytes of the flag and what travelled with it; ``elements`` of all reduced buffers,
        ``exempt_elements`` of them; ``fallbacks``: encodings as float32, though neither exempt nor dense, because the
        method would not have made them shorter: ``fallback_elements`` of ``encoded_elements``, all that it was given;
        ``chosen_elements`` of ``sparse_elements`` that sparsifiers encoded were sent; ``padding``: bytes sent for the
        sake of equal messages; ``extra_collectives`` and ``extra_seconds``: of each reduction's payload collectives all
        but the one that sends the most (the first of equals), which represents the framework's own;
        ``residuals_dropped``: pieces whose residual was lost to a value that was not finite; ``encode_seconds`` and
        ``decode_seconds``; ``by_op``: the payload's bytes, seconds and calls per collective. On a GPU seconds are
        counted inside `Meter.measuring` only.
        """
        dropped, meter = self.codec.dropped, self.ranks.meter
        return {
            **{name: self.counts[name] for name in ("raw", "elements", "exempt_elements", "nonfinite_steps")},
            "sent": meter.sent("payload"),
            "index": self.codec.index_bytes,
            "closed_form": self._expected,
            "agreement": meter.sent("agreement"),
            "fallbacks": self.codec.fallbacks,
            "fallback_elements": self.codec.fallback_elements,
            "encoded_elements": self.codec.encoded_elements,
            "residuals_dropped": 0 if dropped is None else int(dropped),
            "chosen_elements": self.codec.chosen_elements,
            "sparse_elements": self.codec.sparse_elements,
            "padding": self.codec.padding_bytes,
            "extra_collectives": self.counts["extra_collectives"],
            "extra_seconds": self._extra_seconds,
            "encode_seconds": meter.totals["encode", "codec"].seconds,
            "decode_seconds": meter.totals["decode", "codec"].seconds,
            "by_op": {op: vars(cost).copy() for op, cost in meter.by_op("payload").items()},
        }
