"""Encodings that are late, and reductions that go on late, so that ranks meet in many orders."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gradwire.comm.collectives.codec import Codec
from gradwire.comm.collectives.queue import Connections


@contextmanager
def late_encoding(rank: int, longest: float = 0.002) -> Iterator[None]:
    """Delay each encoding by up to ``longest`` seconds, a sequence of this rank's own."""
    generator, encode = torch.Generator().manual_seed(rank), Codec.encode

    def delayed(self, *args):
        time.sleep(longest * float(torch.rand((), generator=generator)))
        return encode(self, *args)

    Codec.encode = delayed
    try:
        yield
    finally:
        Codec.encode = encode


@contextmanager
def only_when_waited_for() -> Iterator[None]:
    """Go on with reductions in `wait` and `synchronize` only."""
    go_on, Connections.go_on = Connections.go_on, lambda self: None
    try:
        yield
    finally:
        Connections.go_on = go_on
