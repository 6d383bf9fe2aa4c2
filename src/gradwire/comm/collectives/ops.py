"""Metered wrappers of `torch.distributed`; every data collective of the package goes through them.

They work on gloo with CPU and CUDA tensors and on NCCL, and return when the result may be used on the current stream.
See `comm.collectives.meter` for ``purpose`` and the byte counts; the group None is the default group.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.closed_forms import rank_bytes, share
from gradwire.comm.collectives.meter import METER, Cost, Meter
from gradwire.comm.torch_internals import named_group, timeout_of

Group: TypeAlias = dist.ProcessGroup | None
Parts: TypeAlias = tuple[Tensor, ...]  # one of each rank

LARGEST = 2**20  # bytes of a message over gloo: the two directions of a link take turns with larger ones
SLICE = timedelta(seconds=0.2)  # in which a wait notices a signal
SLICE_OVER = "Operation timed out!"  # torch's message
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def rank_in(group: Group) -> int:
    """Return this rank's number in a group, which need not be one of `torch.distributed.new_group`."""
    return dist.get_rank() if group is None else group.rank()


def ranks_of(group: Group) -> list[int]:
    """Return the ranks of a group by their numbers in the default group."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def nbytes(x: Tensor) -> int:
    """Return the size of a tensor's elements in bytes."""
    return x.numel() * x.element_size()


@contextmanager
def unlogged() -> Iterator[None]:
    """Raise the original error of a collective; torch's logging of errors fails for process groups of torchft."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__context__, RuntimeError):
            raise
        raise error.__context__ from None


@contextmanager
def called(meter: Meter, op: str, purpose: str, sent: int = 0, **span: Any) -> Iterator[Cost]:
    """Meter a collective in the context; the error of one that times out has the remedy.

    Raises:
        RunFault: If another rank did not take part in time.
    """
    with meter.span(op, purpose, sent, **span) as cost:
        try:
            with unlogged():
                yield cost
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise
            raise RunFault(
                f"{op} ({purpose}) timed out: another rank is gone, or does not make the same calls. Every rank "
                f"reduces the same gradients in the same order, and takes as many optimizer steps as the others."
            ) from error


class Pending(NamedTuple):
    """A collective that has begun.

    Attributes:
        result: Its result, not to be used before `wait`.
        works: torch's handles, one for each part of the messages.
        op: The operation.
        purpose: The purpose that its cost is counted for.
        meter: The meter that counts it.
        cost: Its cost so far.
        arrive: Called when all parts are there.
        kept: The tensors that were passed; if gloo's thread were the last to free one, it would wait for Python's lock.
    """

    result: Tensor
    works: Sequence[dist.Work]
    op: str
    purpose: str
    meter: Meter
    cost: Cost
    arrive: Callable[[], object] = lambda: None
    kept: object = None

    @property
    def complete(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(work.is_completed() for work in self.works)

    def wait(self, *, slices: bool = False) -> Tensor:
        """Return the result, ready on the current stream; only the time of this wait is counted.

        ``slices`` is for gloo's collectives: a signal such as an interrupt ends the wait.
        """
        with called(self.meter, self.op, self.purpose, device=self.result.device, calls=0) as cost:
            for work in self.works:
                if slices:
                    wait_in_slices(work)
                else:
                    work.wait()
            self.arrive()
        self.cost.seconds += cost.seconds
        return self.result


def wait_in_slices(work: dist.Work) -> None:
    """Wait for a collective of gloo, and give Python its turn to handle signals."""
    while True:
        try:
            work.wait(SLICE)
            return
        except RuntimeError as error:
            if SLICE_OVER not in str(error):  # the collective's own; it may also end right after its slice
                raise


def begin_all_reduce(
    x: Tensor, op: str = "sum", group: Group = None, purpose: str = "control", meter: Meter = METER
) -> Pending:
    """Begin an `all_reduce`; do not use ``x`` before ``wait`` of the returned `Pending`."""
    world = dist.get_world_size(group)
    sent = rank_bytes("all_reduce", nbytes(x), share(nbytes(x), world, rank_in(group)), world)
    with called(meter, "all_reduce", purpose, sent, device=x.device) as cost:
        work = dist.all_reduce(x, REDUCTIONS[op], group=group, async_op=True)
    return Pending(x, [work], "all_reduce", purpose, meter, cost)


def all_reduce(
    x: Tensor, op: str = "sum", group: Group = None, purpose: str = "control", meter: Meter = METER
) -> Tensor:
    """Reduce ``x`` over the ranks, in place; ``op`` is ``sum``, ``max`` or ``min``. Returns ``x``."""
    return begin_all_reduce(x, op, group, purpose, meter).wait()


def begin_all_gather(x: Tensor, group: Group = None, purpose: str = "control", meter: Meter = METER) -> Pending:
    """Begin an `all_gather`."""
    world = dist.get_world_size(group)
    gathered = torch.empty((world, *x.shape), dtype=x.dtype, device=x.device)
    with called(meter, "all_gather", purpose, (world - 1) * nbytes(x), device=x.device) as cost:
        parts = parts_of(nbytes(x), x.device)
        rows = [[*part] for part in gathered.view(world, x.numel()).tensor_split(parts, dim=1)]
        given = x.contiguous().view(-1).tensor_split(parts)
        works = [
            dist.all_gather(of_ranks, part, group=group, async_op=True)
            for of_ranks, part in zip(rows, given, strict=True)
        ]
    return Pending(gathered, works, "all_gather", purpose, meter, cost, kept=(rows, given))


def all_gather(x: Tensor, group: Group = None, purpose: str = "control", meter: Meter = METER) -> Tensor:
    """Stack every rank's ``x``, all of one shape, in rank order: ``[world, *x.shape]``."""
    return begin_all_gather(x, group, purpose, meter).wait()


def begin_reduce_scatter(x: Tensor, group: Group = None, purpose: str = "control", meter: Meter = METER) -> Pending:
    """Begin to sum this rank's row of ``x`` over the ranks: ``[world, n]`` to ``[n]``, in the precision of ``x``."""
    row = torch.empty(x.shape[1:], dtype=x.dtype, device=x.device)
    given = x.view(-1)
    with called(meter, "reduce_scatter", purpose, (x.shape[0] - 1) * nbytes(row), device=x.device) as cost:
        work = dist.reduce_scatter_tensor(row, given, group=group, async_op=True)
    return Pending(row, [work], "reduce_scatter", purpose, meter, cost, kept=given)


def begin_all_to_all(
    x: Tensor,
    sizes_out: Sequence[int],
    sizes_in: Sequence[int],
    group: Group = None,
    purpose: str = "control",
    meter: Meter = METER,
    *,
    parts: int = 1,
) -> Pending:
    """Begin to send a part of ``x`` to each rank and to receive one from each.

    Args:
        x: Vector of bytes (uint8, contiguous), the parts in rank order.
        sizes_out: Bytes for each rank; this rank's own part is copied, not sent.
        sizes_in: Bytes from each rank.
        group: The ranks.
        purpose: The purpose that the bytes are counted for.
        meter: The meter that counts them.
        parts: Messages per pair of ranks, the same for all: see `parts_of`.

    Returns:
        The collective, whose result is uint8 ``[sum(sizes_in)]``, the parts in rank order.
    """
    received = torch.empty(sum(sizes_in), dtype=x.dtype, device=x.device)
    sent = x.numel() - sizes_out[rank_in(group)]
    coming, going, arriving, leaving = list[Parts](), list[Parts](), [received], [x]
    sizes = [(list(sizes_in), list(sizes_out))]
    if parts > 1:
        coming, going = cut(received, sizes_in, parts), cut(x, sizes_out, parts)
        arriving, leaving = ([*map(torch.cat, messages)] for messages in (coming, going))
        sizes = [([*map(len, to)], [*map(len, of)]) for to, of in zip(coming, going, strict=True)]
    with called(meter, "all_to_all", purpose, sent, device=x.device) as cost:
        works = [
            dist.all_to_all_single(message, given, *lengths, group=group, async_op=True)
            for message, given, lengths in zip(arriving, leaving, sizes, strict=True)
        ]

    def arrive() -> None:
        for message, to in zip(arriving, coming, strict=False):  # a message in one part is there already
            for place, part in zip(to, message.split([*map(len, to)]), strict=True):
                place.copy_(part)

    return Pending(received, works, "all_to_all", purpose, meter, cost, arrive, kept=(arriving, leaving))


def cut(x: Tensor, sizes: Sequence[int], parts: int) -> list[Parts]:
    """Cut each rank's part of a vector into messages; return those of all ranks that travel together."""
    return [*zip(*(part.tensor_split(parts) for part in x.split(list(sizes))), strict=True)]


def parts_of(size: int, device: torch.device) -> int:
    """Return in how many messages of gloo so many bytes travel to a rank."""
    return max(1, -(-size // LARGEST)) if device.type == "cpu" else 1


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


# Process groups that only their members make, and not all ranks together.


# Why: docs/decisions.md, "A group has a name that its members agree on".
def new_group(
    ranks: Sequence[int],
    known: Sequence[Group],
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Make a process group; all of its members call this together.

    Args:
        ranks: The members, in the order of their numbers in the group.
        known: Groups through which the members agree on a name: one of the same members, or one for each dimension of
            their mesh.
        timeout: Of its collectives; None is that of the first known group.
        backend: The backend; None is the default group's.
    """
    name = f"gradwire {uuid4()}"
    for group in known:  # after the first dimension ranks have the name of those with coordinate 0 there, and so on
        name = gather_objects(name, group)[0]
    return named_group(name, ranks, timeout or timeout_of(known[0]), backend)


def copied(group: Group) -> dist.ProcessGroup:
    """Return a new gloo group of the same ranks, with the same timeout."""
    return new_group(dist.get_process_group_ranks(group), [group], backend="gloo")


class Shared:
    """A process group that a copy of its user has in common with it; in a file it is the default group.

    Args:
        group: The ranks; None is the default group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        """Return this one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickles.

        Raises:
            BadInput: For another group, which a program that loads it need not have.
        """
        if self.group not in (None, dist.group.WORLD):
            raise BadInput(
                f"ranks {ranks_of(self.group)} are a process group that cannot be pickled, only the default group "
                f"can: save the state_dict() of the model and of its optimizer."
            )
        return Shared, (None,)
