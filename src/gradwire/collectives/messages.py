"""Messages: encodings go straight to the rank that needs them, one message per pair of ranks.

An encoding's size is known to both sides in advance, unless it depends on the data: only such sizes travel, first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives import ops
from gradwire.collectives.group import Ranks
from gradwire.collectives.plan import Sizes


def exchange(
    outgoing: Sequence[Sequence[Tensor]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    device: torch.device,
    ranks: Ranks,
    purpose: str = "payload",
    *,
    bulk: bool = False,
) -> list[list[Tensor]]:
    """Send to each rank its encodings and receive each rank's.

    Whether sizes travel must be the same everywhere, so the two tables together name every encoding of the exchange.

    Args:
        outgoing: For each rank, the encodings that it gets (uint8 vectors on ``device``).
        sizes_out: What the receivers know about the sizes of ``outgoing``.
        sizes_in: What this rank knows about the sizes of what it gets.
        device: Device of all of them.
        ranks: Who takes part.
        purpose: What the bytes count as.
        bulk: See `ops.all_to_all`.

    Returns:
        For each rank, the encodings that it sent: views of one buffer.
    """
    lengths_out = [[wire.numel() for wire in wires] for wires in outgoing]
    if any(size is None for sizes in (*sizes_out, *sizes_in) for size in sizes):
        lengths_in = swap_sizes(lengths_out, sizes_out, sizes_in, device, ranks, purpose)
    else:
        lengths_in = [[size for size in sizes if size is not None] for sizes in sizes_in]
    message = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *(w for wires in outgoing for w in wires)])
    totals_out, totals_in = ([sum(row) for row in lengths] for lengths in (lengths_out, lengths_in))
    received = ops.all_to_all(message, totals_out, totals_in, ranks.group, purpose, ranks.meter, bulk=bulk)
    parts = iter(received.split([length for row in lengths_in for length in row]))
    return [[next(parts) for _ in row] for row in lengths_in]


def swap_sizes(
    lengths_out: Sequence[Sequence[int]],
    sizes_out: Sizes,
    sizes_in: Sizes,
    device: torch.device,
    ranks: Ranks,
    purpose: str,
) -> list[list[int]]:
    """Send the lengths that ``sizes_out`` leaves open (int64 each) and fill in those that ``sizes_in`` leaves open."""
    unknown_out = [
        [length for length, size in zip(lengths, sizes, strict=True) if size is None]
        for lengths, sizes in zip(lengths_out, sizes_out, strict=True)
    ]
    table = torch.tensor([length for row in unknown_out for length in row], dtype=torch.int64, device=device)
    received = ops.all_to_all(
        table.view(torch.uint8),
        [8 * len(row) for row in unknown_out],
        [8 * sum(size is None for size in row) for row in sizes_in],
        ranks.group,
        purpose,
        ranks.meter,
    )
    lengths = iter(received.view(torch.int64).tolist())
    return [[next(lengths) if size is None else size for size in row] for row in sizes_in]
