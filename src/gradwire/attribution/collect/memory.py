"""Work on as many samples at once as fit in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gradwire.attribution.persample.batch import out_of_memory
from gradwire.base.errors import RunFault
from gradwire.comm.collectives import ops
from gradwire.lm.data.batches import Batch

Result = TypeVar("Result")


def halving(
    positions: Sequence[int],
    size: int,
    work: Callable[[Sequence[int]], Result],
    release: Callable[[], None],
    sharded: bool,
) -> tuple[list[Result], int]:
    """Run ``work`` on ``size`` samples at a time, on half as many if memory runs out.

    Args:
        positions: The samples.
        size: How many to begin with.
        work: Called with some of them.
        release: Frees memory after a failure.
        sharded: Whether other ranks run the same batches, so that this one cannot use smaller ones alone.

    Returns:
        The results, and the size that fitted.
    """
    results: list[Result] = []
    done = 0
    while done < len(positions):
        chosen = positions[done : done + size]
        try:
            results.append(work(chosen))
            done += len(chosen)
            continue
        except RuntimeError as error:
            if not out_of_memory(error) or len(chosen) == 1 or sharded:
                raise
        size = len(chosen) // 2
        release()  # outside the handler, which keeps the failed tensors alive
        print(f"gradwire grads collect: out of memory; reducing to {size} samples at once", file=sys.stderr)
    return results, size


@contextmanager
def sufficient(samples: Callable[[], int | None], device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error that cannot be avoided by halving into a RunFault about ``samples()`` samples."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise RunFault(
            f"{samples()} samples do not fit into the memory of {device}: use a smaller --batch_size or "
            "--save_interval, a smaller model, or --strategy fsdp2 on more ranks."
        ) from error


def saved_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the bytes that a forward pass saves for the backward pass."""
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += ops.nbytes(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch.input_ids, use_cache=False)
    return total


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return 1024 * available // ranks
