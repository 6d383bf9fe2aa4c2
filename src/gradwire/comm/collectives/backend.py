"""A backend of `torch.distributed` that compresses the gradients of whatever runs on it.

A process group sees buffers, not parameters. So it takes quantizers, which encode a buffer wherever a framework cuts
it, and keeps nothing of a step for the next: no residuals, no bases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, lru_cache, partial, partialmethod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import BadInput
from gradwire.comm.closed_forms import FLOAT32_BYTES
from gradwire.comm.collectives.layout import Kind, Layout
from gradwire.comm.collectives.meter import METER, Cost, Meter
from gradwire.comm.collectives.ops import nbytes
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.collectives.reducer import Given, Reducer
from gradwire.comm.compressors import as_compressor, build
from gradwire.comm.compressors.base import Compressor, Quantizer
from gradwire.comm.compressors.reduction import encoding_of
from gradwire.comm.compressors.rotation import Rotated
from gradwire.comm.torch_internals import set_backend

Coded: TypeAlias = Callable[[Tensor, Tensor], dist.Work]  # of an output and an input
Exact: TypeAlias = Callable[[list[Tensor], list[Tensor]], dist.Work]  # of outputs and inputs

OTHERS = frozenset(dist.Backend.backend_list)  # gloo, nccl, …
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
REFUSED = (
    "a backend sees buffers, and {} needs parameters, of which it or its residuals keep something: take a quantizer "
    "such as int8 or bf16, or gradwire.compress_gradients."
)


def register_backend(
    compressor: Given, name: str = "gradwire", *, parameters: str | None = None, smallest: int = 2**14
) -> None:
    """Add a backend to `torch.distributed` whose process groups compress gradients; every rank calls this first.

    `all_reduce` and `reduce_scatter_tensor` of float types, by sum or mean, go through the compressor. An all-reduce
    has the same result on all ranks, bit for bit. All else passes through gloo as it is: integers, other operations,
    small tensors, broadcasts, objects. `CompressedGroup.traffic` counts both. Tensors are the CPU's.

    Args:
        compressor: A quantizer such as ``gradwire.Int8(block=128)``, its name, or a mapping of its ``method`` and
            options.
        name: The backend's name, for `init_process_group`, `new_group` and the ``backend_override`` of a mesh.
        parameters: Encoding of what `all_gather_into_tensor` gathers, a key of
            `gradwire.comm.compressors.reduction.ENCODINGS` except ``int4-diff``; None sends it as it is. All ranks use
            decoded values, of their own part too.
        smallest: Elements of the smallest tensor that is compressed; of float32, 64 KiB.

    Raises:
        BadInput: If the compressor is unknown or no quantizer, the encoding is unknown or sends differences, or there
            is a backend of that name.
    """
    if name.lower() in OTHERS:
        raise BadInput(f"there is a backend {name} already: give another name.")
    coder = as_compressor(compressor)
    encoding = None if parameters in (None, "none") else encoding_of(parameters)
    if not isinstance(coder, Quantizer | Rotated):
        raise BadInput(REFUSED.format(coder.name))
    if encoding is not None and encoding.differences:
        raise BadInput(REFUSED.format(parameters))
    gathered = None if encoding is None else build(encoding.method, **encoding.options)

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> CompressedGroup:
        return CompressedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), coder, gathered, smallest)

    dist.Backend.register_backend(name, create, devices=["cpu"])


class CompressedGroup(dist.ProcessGroup):
    """A process group of such a backend.

    Args:
        backend: Sends what is not compressed, and encodings of parameters; the reducer has connections for itself.
        compressor: The compressor of gradients.
        parameters: The compressor of what is gathered; None sends it as it is.
        smallest: Elements of the smallest buffer that is compressed.
    """

    def __init__(
        self, backend: dist.Backend, compressor: Compressor, parameters: Compressor | None, smallest: int
    ) -> None:
        super().__init__(backend.rank(), backend.size())
        self._exact = dist.ProcessGroup(backend.rank(), backend.size())
        for group in (self, self._exact):
            set_backend(group, backend)
        self._compressor, self._parameters, self._smallest = compressor, parameters, smallest
        self._gathered, self._raw = Meter(METER), 0  # of parameters: bytes sent, and those as float32
        self._calls, self._bytes = Counter[str](), Counter[str]()  # of what passes as it is

    @cached_property
    def _reducer(self) -> Reducer:
        """The reducer, which needs a group that torch knows."""
        return Reducer(self._compressor, self, algorithm="exchange", nonfinite="propagate")

    @property
    def traffic(self) -> dict[str, Any]:
        """Bytes of this rank since the start: ``raw`` is what float32 would have sent, ``sent`` what was sent.

        Those of gradients, and under ``parameters`` those of compressed all-gathers. ``exact`` has what passed as it
        is, by collective: ``calls``, and ``bytes`` of its tensors, of the outputs where they are larger.
        """
        gathered = {"raw": self._raw, "sent": self._gathered.sent("parameters")}
        exact = {op: {"calls": calls, "bytes": self._bytes[op]} for op, calls in self._calls.items()}
        return {**self._reducer.traffic, "parameters": gathered, "exact": exact}

    def _all_reduce(self, call: str, tensors: list[Tensor], options: Any) -> dist.Work:
        """Reduce in place."""
        exact = getattr(self._exact, call)
        return self._reduce("all_reduce", tensors, tensors, options, lambda tensors, _: exact(tensors, options))

    allreduce = partialmethod(_all_reduce, "allreduce")
    allreduce_coalesced = partialmethod(_all_reduce, "allreduce_coalesced")

    def reduce_scatter_single(self, row: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        """Reduce, and keep this rank's row."""
        return self.reduce_scatter_single_coalesced([row], [tensor], options)

    def reduce_scatter_single_coalesced(self, rows: list[Tensor], tensors: list[Tensor], options: Any) -> dist.Work:
        """Reduce, and keep this rank's row of each."""
        exact = self._exact.reduce_scatter_tensor_coalesced
        return self._reduce("reduce_scatter", rows, tensors, options, lambda rows, x: exact(rows, x, options))

    def all_gather_single(self, gathered: Tensor, row: Tensor, options: Any) -> dist.Work:
        """Copy every rank's row to all."""
        return self.all_gather_single_coalesced([gathered], [row], options)

    def all_gather_single_coalesced(self, gathered: list[Tensor], rows: list[Tensor], options: Any) -> dist.Work:
        """Copy every rank's rows to all."""
        exact = self._exact.allgather_into_tensor_coalesced
        coded = None if self._parameters is None else partial(self._gather, self._parameters, options)
        return self._run("all_gather", gathered, rows, coded, lambda gathered, rows: exact(gathered, rows, options))

    # The names before torch 2.13.
    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced
    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def _pass(self, op: str, *given: Any) -> dist.Work:
        """Call a collective that is never compressed."""
        self._count(op, *given)
        work: dist.Work = getattr(self._exact, op)(*given)
        return work

    allgather, broadcast = partialmethod(_pass, "allgather"), partialmethod(_pass, "broadcast")
    gather, scatter = partialmethod(_pass, "gather"), partialmethod(_pass, "scatter")
    reduce, reduce_scatter = partialmethod(_pass, "reduce"), partialmethod(_pass, "reduce_scatter")
    alltoall, all_to_all_single = partialmethod(_pass, "alltoall"), partialmethod(_pass, "all_to_all_single")
    send, recv = partialmethod(_pass, "send"), partialmethod(_pass, "recv")
    recv_anysource = partialmethod(_pass, "recv_anysource")
    allgather_coalesced = partialmethod(_pass, "allgather_coalesced")
    alltoall_base = partialmethod(_pass, "alltoall_base")  # all_to_all_single before torch 2.13

    # What a subclass inherits, torch calls with Python's lock held, and gloo's thread may wait for that lock while it
    # has the group's, for which the call waits: every collective has a method here.
    def barrier(self, opts: Any) -> dist.Work:
        """Wait for all ranks."""
        return self._exact.barrier(opts)

    def monitored_barrier(self, *given: Any, **options: Any) -> None:
        """Wait for all ranks, and name one that does not come."""
        self._exact.monitored_barrier(*given, **options)

    def _reduce(self, kind: Kind, outputs: list[Tensor], inputs: list[Tensor], options: Any, exact: Exact) -> dist.Work:
        """Reduce tensors: a sum or a mean through the reducer."""
        op = options.reduceOp.op
        coded = partial(self._mean, kind, 1 if op == AVG else self.size()) if op in (SUM, AVG) else None
        return self._run(kind, outputs, inputs, coded, exact)

    def _run(
        self, op: str, outputs: list[Tensor], inputs: list[Tensor], coded: Coded | None, exact: Exact
    ) -> dist.Work:
        """Call a collective: the compressed form for large tensors of float types, the exact one for the others."""
        works: list[dist.Work] = []
        rest: tuple[list[Tensor], list[Tensor]] = ([], [])
        for output, given in zip(outputs, inputs, strict=True):
            numel = max(output.numel(), given.numel())
            if coded is not None and self.size() > 1 and given.is_floating_point() and numel >= self._smallest:
                works.append(coded(output, given))
            else:
                rest[0].append(output)
                rest[1].append(given)
        if rest[0]:
            self._count(op, *rest)
            works.append(exact(*rest))
        return works[0] if len(works) == 1 else Several(works)

    def _mean(self, kind: Kind, scale: int, output: Tensor, given: Tensor) -> dist.Work:
        """Begin to reduce a tensor to ``scale`` times the mean."""

        def deliver(mean: Tensor) -> None:
            output.detach().copy_(mean.mul_(scale).view(output.shape))

        begin = self._reducer.begin_all_reduce if kind == "all_reduce" else self._reducer.begin_reduce_scatter
        return Reduction(begin(given.reshape(-1), layout_of(kind, given.numel(), self.size()), deliver), output)

    def _gather(self, coder: Compressor, options: Any, gathered: Tensor, row: Tensor) -> dist.Work:
        """Begin to gather the encodings of a tensor; values that are not finite arrive as such."""
        wire = coder.encode(row.reshape(-1), flag=torch.zeros(1, dtype=torch.uint8, device="cpu"))
        wires = wire.new_empty((self.size(), wire.numel()))
        self._raw += (self.size() - 1) * FLOAT32_BYTES * row.numel()
        self._gathered.add("all_gather", "parameters", Cost((self.size() - 1) * wire.numel(), calls=1))

        def decode(_: object) -> list[Tensor]:
            for part, encoding in zip(gathered.detach().view(self.size(), -1), wires, strict=True):
                part.copy_(coder.decode(encoding, row.numel()))
            return [gathered]

        work = self._exact.allgather_into_tensor_coalesced([wires.view(-1)], [wire], options)
        return FutureWork(work.get_future().then(decode))

    def _count(self, op: str, *given: Any) -> None:
        """Count a call that passes its tensors as they are."""
        self._calls[op] += 1
        self._bytes[op] += max(map(total_nbytes, given))


class Reduction(dist.Work):
    """A reduction to a mean, which goes on in `wait`."""

    def __init__(self, handle: Handle, output: Tensor) -> None:
        super().__init__()
        self._handle = handle
        self._output = output

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the mean; raise what the reduction raised. The group's timeout holds, not this one."""
        self._handle.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a future that has the result: a reduction does not go on while its caller waits for one."""
        future = torch.futures.Future[list[Tensor]]()
        try:
            self._handle.wait()
            future.set_result([self._output])
        except Exception as error:
            future.set_exception(error)
        return future.then(lambda done: done.value())  # what `then` returns fails in C++ too


class Several(dist.Work):
    """Several collectives."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raise what one of them raised."""
        return all(work.wait() for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of all."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


class FutureWork(dist.Work):
    """A collective that finishes with a future, whose error `wait` raises; torch's own work of a future drops it."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the tensors; raise what the collective raised. The group's timeout holds, not this one."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future."""
        return self._future


@lru_cache(maxsize=1024)
def layout_of(kind: Kind, numel: int, world: int) -> Layout:
    """Return the layout of a buffer as one vector; a reduce-scatter needs its rows as they are."""
    form = [("buffer", (numel,))]
    return Layout.cut(form, world) if kind == "reduce_scatter" else Layout.packed(form, world)


def total_nbytes(given: Any) -> int:
    """Return the bytes of a tensor, or of lists of tensors; 0 of anything else."""
    if isinstance(given, Tensor):
        return nbytes(given)
    return sum(map(total_nbytes, given)) if isinstance(given, list) else 0
