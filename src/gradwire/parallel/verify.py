"""Checks for whoever doubts a run: have all ranks arrived, and do they hold the same numbers?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.collectives import ops
from gradwire.errors import RunFault
from gradwire.parallel.state import named_parameters, unwrapped
from gradwire.parallel.strategy import strategy_of

PATIENCE_S = 30.0  # shorter than the process group's own timeout, which names nobody


class SyncCheck:
    """``--verify_sync``: every so many steps, who is missing before the step and what differs after it.

    Args:
        model: What `parallel.wrap` returned.
        optimizer: Its optimizer.
        every: Steps between two checks; 0 switches them off, and nothing is done.
        patience_s: How long the ranks wait for each other.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, every: int, patience_s: float = PATIENCE_S) -> None:
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.patience_s = patience_s
        self._owed = False  # a comparison was due while replicas were apart on purpose
        self._group = meeting_group(strategy_of(model).group, patience_s) if every else None

    def before(self, step: int) -> None:
        """Wait for all ranks, if the step that begins is to be checked.

        Raises:
            RunFault: If a rank does not come in time; rank 0 names it, the others name rank 0.
        """
        if self._due(step):
            barrier(f"optimizer step {step}", self._group, self.patience_s)

    def after(self, step: int) -> None:
        """Compare the ranks, if the step that ended is to be checked.

        Where an optimizer lets the replicas drift, the next step that brings them together is checked instead.

        Raises:
            RunFault: On all ranks alike, if they differ; it names the first tensor that does.
        """
        self._owed |= self._due(step)
        if not self._owed or not getattr(self.optimizer, "in_step", True):
            return
        self._owed = False
        if difference := first_difference(self.model, self.optimizer):
            raise RunFault(f"after optimizer step {step} {difference}.", step=step + 1)

    def _due(self, step: int) -> bool:
        return self.every > 0 and (step + 1) % self.every == 0


def meeting_group(group: ops.Group, patience_s: float) -> dist.ProcessGroup:
    """A gloo group of the same ranks for `barrier`: only gloo can tell who is missing."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    # Those that wait for rank 0's answer heed only the group's own timeout; rank 0 is to speak before them.
    timeout = timedelta(seconds=2 * patience_s)
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)


def barrier(where: str, group: ops.Group, patience_s: float = PATIENCE_S) -> None:
    """Wait until every rank is here.

    Args:
        where: What the ranks are about to do, for the message.
        group: What `meeting_group` made of them.
        patience_s: How long rank 0 waits.

    Raises:
        RunFault: If one did not come in time: rank 0 names it, the others can only tell of rank 0.
    """
    try:
        dist.monitored_barrier(group, timeout=timedelta(seconds=patience_s), wait_all_ranks=True)
    except RuntimeError as error:
        told = str(error).strip().splitlines()[0]
        raise RunFault(f"not all ranks reached {where} within {patience_s:g} s: {told}") from error


def first_difference(model: nn.Module, optimizer: Optimizer | None = None) -> str | None:
    """What differs first between the ranks, in words, or None; every rank calls it and gets the same answer.

    Compared is what `replicated` lists, bit by bit.
    """
    group = strategy_of(model).group
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    items = list(replicated(model, optimizer))
    words = [digest(name.encode()) ^ digest(data(tensor)) for name, tensor in items]
    # Only lists of one length can be laid side by side, so lengths are compared first.
    for own, names in (([len(items)], ["the number of its tensors"]), (words, [name for name, _ in items])):
        table = ops.all_gather(torch.tensor(own, dtype=torch.int64, device=device), group).cpu()
        differs = table != table[0]
        if differs.any():
            columns = differs.any(dim=0).nonzero().flatten().tolist()
            ranks = differs[:, columns[0]].nonzero().flatten().tolist()
            others = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            more = f" ({len(columns)} of {len(own)} tensors differ)" if len(columns) > 1 else ""
            return f"{names[columns[0]]} on {others} is not what rank 0 has{more}"
    return None


def replicated(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """What has to be equal on all ranks, by name.

    Those are the parameters, where they are whole on every rank; the buffers; and of the optimizer how many steps it
    has made and its learning rates. A shard of ``fsdp1`` or ``fsdp2`` exists once, so there is nothing to compare it
    with: there a rank that went its own way shows in the optimizer, for example by having skipped a step.
    """
    strategy = strategy_of(model)
    if strategy.kind == "all_reduce" or dist.get_world_size(strategy.group) == 1:
        yield from named_parameters(model)
    for name, buffer in model.named_buffers():
        yield unwrapped(name), buffer
    if optimizer is not None:
        steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        yield "the optimizer's number of steps", torch.tensor(max(steps, default=0.0))
        for index, group in enumerate(optimizer.param_groups):
            yield f"the learning rate of parameter group {index}", torch.tensor(float(group["lr"]), dtype=torch.float64)


def data(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def digest(content: bytes | memoryview) -> int:
    """A hash of 64 bits, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
