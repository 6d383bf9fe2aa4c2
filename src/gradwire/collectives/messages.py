"""Point-to-point exchange of encodings, with one message per pair of ranks.

Both sides know an encoding's size in advance, unless it depends on the data; only such sizes are sent, before the data.
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
    """Send each rank its encodings and receive those from each rank.

    All ranks must agree on whether sizes are sent, so the two tables together cover every encoding of the exchange.

    Args:
        outgoing: For each rank, the encodings to send to it (uint8 vectors on ``device``).
        sizes_out: The sizes of ``outgoing`` that the receivers know; None for the others.
        sizes_in: The sizes of incoming encodings that this rank knows; None for the others.
        device: Device of all encodings.
        ranks: The participating ranks.
        purpose: The purpose that the bytes are counted for.
        bulk: See `ops.all_to_all`.

    Returns:
        For each rank, the encodings received from it, as views of one buffer.
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
    """Send the lengths that are None in ``sizes_out`` (int64 each), and return ``sizes_in`` with its None filled in."""
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
