"""Simulated ranks: threads of one process that take turns, over a process group that copies between their tensors.

What runs above is unchanged: models, codecs, collectives and merges are those of ranks with a process each. One thread
runs at a time, from one collective to the next, with its own default group and random state. Sums are added in the
order of gloo's ring, so on a CPU the results are those of as many gloo processes, to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.base.errors import RunFault
from gradwire.comm.torch_internals import finished_work, new_tables, set_tables_of_groups, tables_of_groups

T = TypeVar("T")

SIMULATED = "simulated"  # the name of the backend
SEGMENT = 2**20  # bytes of a message of gloo's ring at most
CPU = torch.device("cpu")


# Why: docs/decisions.md, "Simulated ranks take turns".
def simulate(world: int, run: Callable[[int], T], device: torch.device = CPU) -> list[T]:
    """Run a function on several ranks of this process, each with its own default process group.

    Args:
        world: Number of ranks.
        run: Called with each rank, in its thread.
        device: The device that all ranks compute on.

    Returns:
        The ranks' results.

    Raises:
        Exception: The first that a rank raises, when all have ended.
    """
    turns = Turns(world, device)
    results: dict[int, T] = {}
    threads_of_rank = torch.get_num_threads()

    def take(rank: int) -> None:
        torch.set_num_threads(threads_of_rank)  # a new thread takes the machine's number
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with torch.autograd.set_multithreading_enabled(False):  # a backward pass runs in the rank's thread
            results[rank] = run(rank)

    here = Global.read(device)
    groups = [SimulatedGroup(rank, turns) for rank in range(world)]
    threads = [
        threading.Thread(
            target=turns.play,
            args=(rank, here._replace(tables=new_tables(group, SIMULATED)), partial(take, rank)),
            name=f"gradwire-rank{rank}",
            daemon=True,  # so that an interrupt ends the process
        )
        for rank, group in enumerate(groups)
    ]
    for thread in threads:
        thread.start()
    turns.begin()
    for thread in threads:
        thread.join()
    here.restore(device)
    if turns.error is not None:
        raise turns.error
    return [results[rank] for rank in range(world)]


class Global(NamedTuple):
    """State that a process has once, and every rank needs for itself.

    Attributes:
        tables: torch's tables of process groups.
        random: The states of torch's default generators: the CPU's, and that of a CUDA device.
    """

    tables: Any
    random: tuple[Tensor, ...]

    @classmethod
    def read(cls, device: torch.device) -> Global:
        """Read the process's."""
        cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
        return cls(tables_of_groups(), (torch.get_rng_state(), *cuda))

    def restore(self, device: torch.device) -> None:
        """Make them the process's."""
        set_tables_of_groups(self.tables)
        torch.set_rng_state(self.random[0])
        for state in self.random[1:]:
            torch.cuda.set_rng_state(state, device)


class Abandoned(RunFault):
    """Ends a rank after another one has failed."""


class Turns:
    """Lets one rank run at a time, each until it waits for the others in a collective.

    Args:
        world: Number of ranks.
        device: The ranks' device.
    """

    def __init__(self, world: int, device: torch.device) -> None:
        self.world, self.device = world, device
        self.error: BaseException | None = None  # the first of any rank
        self._go = [threading.Semaphore(0) for _ in range(world)]
        self._met: dict[int, tuple[str, Any]] = {}  # the collective that a rank waits in, and what it gives
        self._ended: set[int] = set()

    def begin(self) -> None:
        """Give rank 0 the first turn."""
        self._go[0].release()

    def play(self, rank: int, state: Global, work: Callable[[], object]) -> None:
        """Do the work of a rank in its turns; its thread calls this."""
        self._go[rank].acquire()
        try:
            state.restore(self.device)
            if self.error is None:
                work()
        except BaseException as error:
            self.error = self.error or error
        self._ended.add(rank)
        self._pass_on(rank)

    def meet(self, rank: int, op: str, given: Any, collective: Callable[[list[Any]], None]) -> None:
        """Wait until all ranks call ``op``; the last one runs ``collective`` on what they give, in rank order.

        Raises:
            RunFault: If another rank has failed or ended, or calls another collective.
        """
        self._check()
        self._met[rank] = op, given
        if len(self._met) == self.world:
            called = [self._met[rank] for rank in range(self.world)]
            self._met.clear()
            if len(ops := {op for op, _ in called}) > 1:
                raise RunFault(f"ranks are out of step: in one collective they call {' and '.join(sorted(ops))}.")
            collective([given for _, given in called])
            return
        state = Global.read(self.device)
        self._pass_on(rank)
        self._go[rank].acquire()
        state.restore(self.device)
        self._check()

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on; after an error every rank can."""
        left = [(rank + shift) % self.world for shift in range(1, self.world + 1)]
        left = [waiting for waiting in left if waiting not in self._ended]
        able = [waiting for waiting in left if waiting not in self._met]
        if left and not able and self.error is None:
            self.error = RunFault(
                f"ranks have ended ({', '.join(map(str, sorted(self._ended)))}), and others wait for them in "
                f"{self._met[left[0]][0]}."
            )
        if able := able if self.error is None else left:
            self._go[able[0]].release()

    def _check(self) -> None:
        if self.error is not None:
            raise Abandoned(f"another rank has failed: {self.error}") from self.error


class SimulatedGroup(dist.ProcessGroup):
    """A simulated rank's view of the process group of all.

    Args:
        rank: The rank.
        turns: The turns of all ranks.
    """

    def __init__(self, rank: int, turns: Turns) -> None:
        super().__init__(rank, turns.world)
        self._rank, self._turns = rank, turns

    def size(self) -> int:
        """Number of ranks."""
        return self._turns.world

    def getBackendName(self) -> str:
        """The backend's name."""
        return SIMULATED

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        """Reduce in place."""
        reduce = reductions()[options.reduceOp.op]
        return self._meet("all_reduce", tensors, partial(all_reduced, reduce))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        """Copy the source's tensors."""
        return self._meet("broadcast", tensors, partial(sent, options.rootRank))

    def allgather(self, gathered: list[list[Tensor]], tensors: list[Tensor], options: Any) -> dist.Work:
        """Copy every rank's tensors to all."""
        return self._meet("all_gather", (gathered, tensors), all_gathered)

    def all_gather_single(self, gathered: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        """Copy every rank's tensor into one of all."""
        return self.allgather([[*gathered.view(self.size(), *tensor.shape)]], [tensor], options)

    def reduce_scatter_single(self, row: Tensor, tensor: Tensor, options: Any) -> dist.Work:
        """Reduce, and keep this rank's row."""
        reduce = reductions()[options.reduceOp.op]
        return self._meet("reduce_scatter", (row, tensor), partial(reduce_scattered, reduce))

    def all_to_all_single(
        self, received: Tensor, tensor: Tensor, sizes_in: list[int], sizes_out: list[int], options: Any
    ) -> dist.Work:
        """Exchange parts of the given sizes, or equal ones."""
        parts = [
            whole.split(sizes or whole.shape[0] // self.size())
            for whole, sizes in ((received, sizes_in), (tensor, sizes_out))
        ]
        return self._meet("all_to_all", parts, exchanged)

    def barrier(self, options: Any) -> dist.Work:
        """Wait for all ranks."""
        return self._meet("barrier", None, lambda given: None)

    # The names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _meet(self, op: str, given: Any, collective: Callable[[list[Any]], None]) -> dist.Work:
        self._turns.meet(self._rank, op, given, torch.no_grad()(collective))
        return finished_work(given)


def reductions() -> dict[dist.ReduceOp.RedOpType, Callable[[Sequence[Tensor]], Tensor]]:
    """Return the reductions of one tensor of each rank, by torch's operation."""
    return {
        dist.ReduceOp.SUM: ring_sum,
        dist.ReduceOp.MAX: lambda ranks: torch.stack([*ranks]).amax(dim=0),
        dist.ReduceOp.MIN: lambda ranks: torch.stack([*ranks]).amin(dim=0),
    }


def ring_sum(ranks: Sequence[Tensor]) -> Tensor:
    """Add one tensor of each rank, in gloo's order: part p of W begins with rank p - 1, and goes down to rank p."""
    world, flat = len(ranks), [tensor.reshape(-1) for tensor in ranks]
    total = torch.empty_like(flat[0])
    for part, place in enumerate(ring_parts(total.numel(), total.element_size(), world)):
        order = [(part - shift) % world for shift in range(1, world + 1)]
        total[place] = flat[order[0]][place]
        for rank in order[1:]:
            total[place] += flat[rank][place]
    return total.view(ranks[0].shape)


def ring_parts(numel: int, size: int, world: int) -> list[slice]:
    """Cut a vector as gloo's ring does, into messages of at most `SEGMENT` bytes, as many for each rank.

    Args:
        numel: Elements.
        size: Bytes of an element.
        world: Number of ranks.
    """
    messages = max(-(-numel * size // (SEGMENT // size * size)), 2 * world)
    of_rank = -(-messages // world)
    elements = -(-numel // (of_rank * world)) * of_rank
    return [slice(min(numel, rank * elements), min(numel, (rank + 1) * elements)) for rank in range(world)]


def all_reduced(reduce: Callable[[Sequence[Tensor]], Tensor], given: list[list[Tensor]]) -> None:
    """All-reduce lists of tensors in place."""
    for tensors in zip(*given, strict=True):
        reduced = reduce(tensors)
        for tensor in tensors:
            tensor.copy_(reduced)


def sent(source: int, given: list[list[Tensor]]) -> None:
    """Copy a rank's list of tensors to the others'."""
    for tensors in zip(*given, strict=True):
        for tensor in tensors:
            if tensor is not tensors[source]:
                tensor.copy_(tensors[source])


def all_gathered(given: list[tuple[list[list[Tensor]], list[Tensor]]]) -> None:
    """Copy every rank's tensors to all."""
    for lists, _ in given:
        for place, gathered in enumerate(lists):
            for copy, (_, tensors) in zip(gathered, given, strict=True):
                copy.copy_(tensors[place])


def reduce_scattered(reduce: Callable[[Sequence[Tensor]], Tensor], given: list[tuple[Tensor, Tensor]]) -> None:
    """Reduce, and give each rank its row."""
    reduced = reduce([tensor for _, tensor in given])
    for (row, _), part in zip(given, reduced.view(len(given), -1), strict=True):
        row.copy_(part.view(row.shape))


def exchanged(given: list[list[Sequence[Tensor]]]) -> None:
    """Copy the parts for each rank from all ranks."""
    for receiver, (received, _) in enumerate(given):
        for part, (_, parts) in zip(received, given, strict=True):
            part.copy_(parts[receiver])


def simulated(group: dist.ProcessGroup | None) -> bool:
    """Whether a group's ranks are simulated; None is the default group."""
    return isinstance(group or dist.group.WORLD, SimulatedGroup)
