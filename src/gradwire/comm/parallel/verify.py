"""Checks of a running job: all ranks reach a step, and hold the same values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.base.errors import RunFault
from gradwire.base.units import plural
from gradwire.comm.collectives import ops
from gradwire.comm.parallel.model import local, named_buffers, named_parameters
from gradwire.comm.parallel.optimizers import Communicating
from gradwire.comm.parallel.strategy import strategy_of

PATIENCE_S = 30.0  # shorter than the process group's timeout, which does not name the missing rank


class SyncCheck:
    """``--verify_sync``: every few steps, checks for missing ranks before a step and for differences after it.

    Args:
        model: The model returned by `comm.parallel.wrap`.
        optimizer: Its optimizer.
        every: Steps between two checks; 0 disables them.
        patience_s: Seconds that the ranks wait for each other.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, every: int, patience_s: float = PATIENCE_S) -> None:
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.patience_s = patience_s
        self._owed = False  # a comparison was due while the optimizer let the replicas drift
        self._group = meeting_group(strategy_of(model).group, patience_s) if every else None

    def before(self, step: int) -> None:
        """Wait for all ranks before a step that is checked.

        Raises:
            RunFault: If a rank times out; rank 0 names it, the others name rank 0.
        """
        if self._due(step):
            barrier(f"optimizer step {step}", self._group, self.patience_s)

    def after(self, step: int) -> None:
        """Compare the ranks after a step that is checked.

        While the optimizer lets the replicas drift, their parameters are left out, and the next step that synchronizes
        them is checked as well.

        Raises:
            RunFault: On all ranks, if they differ; it names the first tensor that does.
        """
        due, in_step = self._due(step), getattr(self.optimizer, "in_step", True)
        owed, self._owed = due or self._owed, (due or self._owed) and not in_step
        if not (due or (owed and in_step)):
            return
        if difference := first_difference(self.model, self.optimizer, drifting=not in_step):
            raise RunFault(f"after optimizer step {step} {difference}.", step=step + 1)

    def _due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0


def meeting_group(group: ops.Group, patience_s: float) -> dist.ProcessGroup:
    """Return a gloo group of the same ranks for `barrier`; only gloo reports which ranks are missing."""
    # The other ranks use only the group's timeout; it is longer, so that rank 0 reports first.
    timeout = timedelta(seconds=2 * patience_s)
    return ops.new_group(ops.ranks_of(group), [group], timeout=timeout, backend="gloo")


def barrier(where: str, group: ops.Group, patience_s: float = PATIENCE_S) -> None:
    """Wait for every rank.

    Args:
        where: The next thing that the ranks do, for the message.
        group: The group that `meeting_group` returned.
        patience_s: Seconds that rank 0 waits.

    Raises:
        RunFault: If a rank times out: rank 0 names it, the others can only name rank 0.
    """
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=patience_s), wait_all_ranks=True)
    except RuntimeError as error:
        message = str(error).strip().splitlines()[0]
        raise RunFault(f"not all ranks reached {where} within {patience_s:g} s: {message}") from error


def first_difference(model: nn.Module, optimizer: Optimizer | None = None, *, drifting: bool = False) -> str | None:
    """Describe the first difference between the ranks, or return None. Every rank must call it; the result is equal.

    Compares the tensors of `replicated` bit by bit, and each replica of ``int4-diff`` over the ranks that share it.
    """
    strategy = strategy_of(model)
    difference = difference_between(list(replicated(model, optimizer, drifting)), strategy.copies)
    if strategy.replicas:
        replicas = [
            (f"the replica that begins with {name}", replica.values) for name, replica in strategy.replicas.items()
        ]
        difference = difference_between(replicas, strategy.shards) or difference
    return next((met for met in ops.gather_objects(difference, strategy.group) if met), None)


def difference_between(items: Sequence[tuple[str, Tensor]], group: ops.Group) -> str | None:
    """Describe the first difference between the ranks of a group, or return None; equal on all of them."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    members = ops.ranks_of(group)
    words = [digest(name.encode()) ^ digest(data(tensor)) for name, tensor in items]
    # Only lists of one length can be stacked, so compare lengths first.
    for numbers, names in (([len(items)], ["the number of its tensors"]), (words, [name for name, _ in items])):
        table = ops.all_gather(torch.tensor(numbers, dtype=torch.int64, device=device), group).cpu()
        differs = table != table[0]
        if differs.any():
            columns = differs.any(dim=0).nonzero().flatten().tolist()
            ranks = differs[:, columns[0]].nonzero().flatten().tolist()
            differing = f"{plural('rank', len(ranks))} {', '.join(str(members[rank]) for rank in ranks)}"
            more = f" ({len(columns)} of {len(numbers)} tensors differ)" if len(columns) > 1 else ""
            return f"{names[columns[0]]} on {differing} differs from rank {members[0]}'s{more}"
    return None


def replicated(model: nn.Module, optimizer: Optimizer | None, drifting: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield what must be equal on all ranks, by name.

    These are replicated parameters (unless they are ``drifting``), buffers, the optimizer's number of steps and
    learning rates, and what else an optimizer that communicates shares. Under ``hsdp`` the ranks with the same shard
    are compared. A shard of ``fsdp1`` or ``fsdp2`` exists only once, so it is not compared; a diverged rank may still
    show in the optimizer, for example by a skipped step.
    """
    strategy = strategy_of(model)
    if strategy.alone and not drifting:
        yield from ((name, local(parameter)) for name, parameter in named_parameters(model))
    yield from named_buffers(model)
    if isinstance(optimizer, Communicating):
        yield from optimizer.shared()
    if optimizer is not None:
        steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        yield (
            "the optimizer's number of steps",
            torch.tensor(max(steps, default=0.0), dtype=torch.float32, device="cpu"),
        )
        for index, group in enumerate(optimizer.param_groups):
            yield (
                f"the learning rate of parameter group {index}",
                torch.tensor(float(group["lr"]), dtype=torch.float64, device="cpu"),
            )


def data(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def digest(content: bytes | memoryview) -> int:
    """Return a 64-bit hash as a signed integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
