"""Calls that compile a compressor's kernels, and load its modules, before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch

from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.driver import Onto
from gradwire.comm.compressors.segments import Segments

MOST = 2**14  # elements of a tensor
MESSAGES = 2
ONTO: tuple[Onto, ...] = ("zero", "sum", "blank")


def rehearse(
    compressors: Iterable[Compressor], shapes: Iterable[tuple[int, ...]], device: torch.device, *, feedback: bool
) -> None:
    """Encode and decode random tensors, one after the other and all at once, as reductions do.

    Nothing is kept, and the global random state is not touched.

    Args:
        compressors: The compressors.
        shapes: Shapes of parameters; of each one, the first rows are enough.
        device: The device.
        feedback: Whether an encoding is also made with a residual.
    """
    forms = [*dict.fromkeys(map(cut, shapes))]
    starts = accumulate(map(math.prod, forms), initial=0)
    tensors = [*zip(starts, forms, strict=False)]
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(sum(map(math.prod, forms)), generator=generator, dtype=torch.float32, device=device)
    for compressor in dict.fromkeys(compressors):
        for start, form in tensors:
            x = values[start : start + math.prod(form)].view(form)
            compressor.decode(compressor.encode(x, generator=generator), form)
        segments = Segments.of(compressor, tensors)
        for residual in [None, torch.zeros_like(values)][: 1 + feedback]:
            wire, placed = compressor.encode_many(
                values,
                segments,
                generators=[generator] * len(tensors),
                flags=torch.zeros(len(tensors), dtype=torch.uint8, device=device),
                residual=residual,
            )
            for onto in ONTO:
                compressor.decode_add(wire.expand(MESSAGES, -1).contiguous(), placed, values.clone(), onto=onto)


def cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The form that a compressor sees of a parameter, with as many rows as `MOST` elements have, at least one."""
    form = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape),)
    return min(form[0], max(1, MOST // max(1, math.prod(form[1:])))), *form[1:]
