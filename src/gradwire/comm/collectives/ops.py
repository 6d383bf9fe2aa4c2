"""Metered wrappers of `torch.distributed`; every data collective of the package goes through them.

They work on gloo with CPU and CUDA tensors and on NCCL, and return when the result may be used on the current stream.
See `comm.collectives.meter` for ``purpose`` and the byte counts; the group None is the default group.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import RunFault
from gradwire.comm.closed_forms import rank_bytes, share
from gradwire.comm.collectives.meter import METER, Meter
from gradwire.comm.collectives.simulated import simulated

Group: TypeAlias = dist.ProcessGroup | None

BULK = 2**16  # bytes from which a part of an all-to-all between CPU ranks travels in several messages
PARTS = 4  # messages of such a part at least: with fewer, one direction of a link waits for the other
SMALLEST, LARGEST = 2**15, 2**18  # bytes of a message of several: each costs a tenth of a millisecond
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def rank_in(group: Group) -> int:
    """Return this rank's number in a group, which need not be one of `torch.distributed.new_group`."""
    return dist.get_rank() if group is None else group.rank()


def nbytes(x: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return x.numel() * x.element_size()


@contextmanager
def unlogged() -> Iterator[None]:
    """Raise a failed collective's own error: to log it, torch looks its group up, and fails for one of torchft."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__context__, RuntimeError):
            raise
        raise error.__context__ from None


@contextmanager
def called(meter: Meter, op: str, purpose: str, sent: int = 0, **span: Any) -> Iterator[None]:
    """Meter a collective in the context; the error of one that times out has the remedy.

    Raises:
        RunFault: If another rank did not take part in time.
    """
    with meter.span(op, purpose, sent, **span):
        try:
            with unlogged():
                yield
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise RunFault(
                f"{op} ({purpose}) timed out: another rank is gone, or does not make the same calls. Every rank "
                f"reduces the same gradients in the same order, and every rank calls finish() once per optimizer step."
            ) from error


def all_reduce(
    x: Tensor, op: str = "sum", group: Group = None, purpose: str = "control", meter: Meter = METER
) -> Tensor:
    """Reduce ``x`` over the ranks, in place; ``op`` is ``sum``, ``max`` or ``min``. Returns ``x``."""
    _all_reduce(x, op, group, purpose, meter, async_op=False)
    return x


class Pending(NamedTuple):
    """An asynchronous all-reduce."""

    x: Tensor
    work: dist.Work
    purpose: str
    meter: Meter

    def wait(self) -> Tensor:
        """Return the reduced tensor, ready on the current stream; only the time of this wait is counted."""
        with called(self.meter, "all_reduce", self.purpose, device=self.x.device, calls=0):
            self.work.wait()
        return self.x


def all_reduce_async(
    x: Tensor, op: str = "sum", group: Group = None, purpose: str = "control", meter: Meter = METER
) -> Pending:
    """Start an `all_reduce`; do not use ``x`` before ``wait`` of the returned `Pending`."""
    return Pending(x, _all_reduce(x, op, group, purpose, meter, async_op=True), purpose, meter)


def _all_reduce(x: Tensor, op: str, group: Group, purpose: str, meter: Meter, *, async_op: bool) -> Any:
    world = dist.get_world_size(group)
    sent = rank_bytes("all_reduce", nbytes(x), share(nbytes(x), world, rank_in(group)), world)
    with called(meter, "all_reduce", purpose, sent, device=x.device):
        return dist.all_reduce(x, REDUCTIONS[op], group=group, async_op=async_op)


def all_gather(
    x: Tensor, group: Group = None, purpose: str = "control", meter: Meter = METER, *, bulk: bool = False
) -> Tensor:
    """Stack every rank's ``x``, all of one shape, in rank order: ``[world, *x.shape]``.

    ``bulk`` is for bytes (uint8, contiguous), as in `all_to_all`.
    """
    world = dist.get_world_size(group)
    gathered = torch.empty((world, *x.shape), dtype=x.dtype, device=x.device)
    with called(meter, "all_gather", purpose, (world - 1) * nbytes(x), device=x.device):
        if bulk and x.device.type == "cpu" and not simulated(group):
            _chunked([x.view(-1)] * world, list(gathered.view(world, -1)), group)
        else:
            dist.all_gather(list(gathered), x.contiguous(), group=group)
    return gathered


def reduce_scatter(x: Tensor, group: Group = None, purpose: str = "control", meter: Meter = METER) -> Tensor:
    """Sum this rank's row of ``x`` over the ranks: ``[world, n]`` to ``[n]``, in the precision of ``x``."""
    row = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    with called(meter, "reduce_scatter", purpose, (x.shape[0] - 1) * nbytes(row), device=x.device):
        dist.reduce_scatter_tensor(row, x.view(-1), group=group)
    return row


def all_to_all(
    x: Tensor,
    sizes_out: Sequence[int],
    sizes_in: Sequence[int],
    group: Group = None,
    purpose: str = "control",
    meter: Meter = METER,
    *,
    bulk: bool = False,
) -> Tensor:
    """Send a part of ``x`` to each rank and receive one from each.

    Args:
        x: Vector of bytes (uint8, contiguous), the parts in rank order.
        sizes_out: Bytes for each rank; this rank's own part is copied, not sent.
        sizes_in: Bytes from each rank.
        group: The ranks.
        purpose: The purpose that the bytes are counted for.
        meter: The meter that counts them.
        bulk: Send in several messages, for parts of more than `BULK` bytes; must be equal on all ranks.

    Returns:
        uint8 ``[sum(sizes_in)]``, the parts in rank order.
    """
    received = torch.empty(sum(sizes_in), dtype=x.dtype, device=x.device)
    with called(meter, "all_to_all", purpose, x.numel() - sizes_out[rank_in(group)], device=x.device):
        if bulk and x.device.type == "cpu" and not simulated(group):
            _chunked(x.split(list(sizes_out)), received.split(list(sizes_in)), group)
        else:
            dist.all_to_all_single(received, x, list(sizes_in), list(sizes_out), group=group)
    return received


def _chunked(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: Group) -> None:
    """All-to-all in small messages, so that both directions of a link are busy at once.

    gloo's own sends one large message each way, often sequentially (benchmarks/strategies.md).
    """
    world, rank = dist.get_world_size(group), rank_in(group)
    incoming[rank].copy_(outgoing[rank])
    works = []
    for shift in range(1, world):  # rank r starts with r + 1 and r - 1, so that no rank is the first peer of all
        to, of = (rank + shift) % world, (rank - shift) % world
        sends, receives = messages(outgoing[to]), messages(incoming[of])
        for tag in range(max(len(sends), len(receives))):
            if tag < len(sends) and sends[tag].numel():
                works.append(dist.isend(sends[tag], group=group, group_dst=to, tag=tag))
            if tag < len(receives) and receives[tag].numel():
                works.append(dist.irecv(receives[tag], group=group, group_src=of, tag=tag))
    for work in works:
        assert work is not None
        work.wait()


def messages(part: Tensor) -> tuple[Tensor, ...]:
    """Cut a part; the receiver, who knows its size, cuts alike."""
    return part.split(min(LARGEST, max(SMALLEST, -(-part.numel() // PARTS))))


def broadcast(
    x: Tensor, source: int = 0, group: Group = None, purpose: str = "control", meter: Meter = METER
) -> Tensor:
    """Copy group rank ``source``'s ``x`` to all ranks, in place; the source counts the bytes. Returns ``x``."""
    sent = (dist.get_world_size(group) - 1) * nbytes(x) if rank_in(group) == source else 0
    with called(meter, "broadcast", purpose, sent, device=x.device):
        dist.broadcast(x, group=group, group_src=source)
    return x


def gather_objects(value: Any, group: Group = None, meter: Meter = METER) -> list[Any]:
    """Return every rank's ``value``, in rank order, on every rank; for measurements at the end of a run."""
    world = dist.get_world_size(group)
    gathered: list[Any] = [None] * world
    with called(meter, "all_gather", "control", (world - 1) * len(pickle.dumps(value))):
        dist.all_gather_object(gathered, value, group=group)
    return gathered
