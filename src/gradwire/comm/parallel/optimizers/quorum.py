"""Rounds of groups that may be lost and may join; torchft decides which ones there are.

A group is the ranks of a default process group, each with a `torchft.Manager`. Several ranks hold the model in shards,
and each averages its shard with those of its rank in the other groups. A round ends in four steps:

1. All groups say who they are, and whether they have trained in this round. Those that have average what changed.
2. If a group is lost meanwhile, each of the others takes back what its codec kept, and asks for a quorum. Those that
   are left repeat the average. A group that finds others with the mean in the quorum continues from the state of one.
3. The anchors move.
4. All groups ask for a quorum. A group that joins, or was left behind, receives the state of another one here, and
   trains in the next round. If it has joined groups that repeat an average, it waits for its end.

So a mean is one of whole pseudo-gradients, over all groups that have it, and all groups begin a round at equal anchors.
"""

from __future__ import annotations

import copy
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from threading import Timer
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.islands import QuorumReducer
from gradwire.comm.collectives.reducer import Given, check_options
from gradwire.comm.compressors import as_compressor
from gradwire.comm.parallel.checks import check_agreement, check_gradients, parameters_of
from gradwire.comm.parallel.model import COMPILED
from gradwire.comm.parallel.strategies.fsdp2 import FSDP2
from gradwire.comm.parallel.strategy import attach, is_prepared
from gradwire.comm.parallel.wrap import wrap
from gradwire.comm.torch_internals import abort_quorum_group, managed, quorum_group

PATIENCE_S = 10.0  # seconds of waiting for groups after which there is a message
ATTEMPTS = 20  # of one round's average
NOTHING = torch.zeros(1, dtype=torch.int64, device="cpu")
LOST = (RuntimeError, RunFault)  # what a collective raises if it lacks a rank


class Round(NamedTuple):
    """A round that this group has ended.

    Attributes:
        step: Its last optimizer step, counted from 0.
        groups: Numbers of the groups whose pseudo-gradients were averaged; none if this group missed the average.
    """

    step: int
    groups: tuple[int, ...]


class Joined(NamedTuple):
    """A state that this group has received.

    Attributes:
        step: Optimizer steps finished, which it continues from.
        source: Number of the group that sent it.
    """

    step: int
    source: int


# Why: docs/decisions.md, "A round ends with a quorum".
class Quorum:
    """A group's part in the quorums of a run; see the module.

    Args:
        manager: The manager.
        reducer: The reducer between groups.
        serve: Returns copies of what a group that joins needs.
        same: The values that must be equal in all groups, by name.

    Attributes:
        rounds: The rounds so far.
        joined: The states that this group has received so far: at the start, and whenever it was left behind.

    Raises:
        BadInput: As `number_of`.
    """

    def __init__(
        self, manager: Any, reducer: QuorumReducer, serve: Callable[[], dict[str, Any]], same: Mapping[str, str]
    ) -> None:
        self.number = number_of(manager)
        self.rounds: list[Round] = []
        self.joined: list[Joined] = []
        self._given = managed(manager)
        self._manager, self._reducer, self._serve = manager, reducer, serve
        self._same = {"gradwire": version("gradwire"), **same}
        self._averages = False  # whether this group has a pseudo-gradient that was not averaged
        self._groups: tuple[int, ...] = ()  # those whose pseudo-gradients are averaged
        self._received: dict[str, Any] | None = None  # the state of another group, to continue from
        manager.register_state_dict_fn("gradwire", self._receive, self._state)

    def join(self) -> dict[str, Any] | None:
        """Join the run, at the end of a round if it is under way; returns and raises as `meet`."""
        self._ask()
        # In a quorum at the manager's step 0 all groups take over the state of one, so joining is a step. It ends when
        # all have that state: a group serves until it commits.
        while self._manager.current_step() == 0 or self._manager.errored():
            if self._committed(failure_of(self._call_roll)):
                break
            self._ask()
        return self._settled()

    def close(self, average: Callable[[], None], digest: Tensor) -> None:
        """End a round: average until all groups that are left have the mean, or this one has missed it.

        Args:
            average: Averages by the reducer; it is called again if a group is lost.
            digest: A number that is equal where anchors are equal: int64 [1].

        Raises:
            BadInput: If another group has this one's number, or other anchors.
            RunFault: If there are too few groups in time, or `ATTEMPTS` averages failed.
        """
        codec = self._reducer.codec
        attempts, failure, self._averages, self._groups = 0, "", True, ()
        while self._averages and self._received is None:
            if attempts == ATTEMPTS:
                raise RunFault(f"{ATTEMPTS} averages of one round failed, the last one because: {failure}")
            attempts += 1
            kept = copy.deepcopy(codec.state_dict())
            failure = failure_of(lambda: self._average(average, digest))
            if self._committed(failure):
                self._averages = False
            else:
                codec.load_state_dict(kept)
                self._ask()
        missed, self._averages = self._averages, False
        if self._reducer.world > 1 and not missed:
            codec.drop_loose()
        self.rounds.append(Round(codec.step, () if missed else self._groups))

    def meet(self) -> dict[str, Any] | None:
        """Agree with the other groups on those of the next round.

        Returns:
            The state of another group, to continue from, if this one has joined or was left behind; else None.

        Raises:
            BadInput: If that group trains another model, or reduces differently; or another one has this one's number.
            RunFault: If there are too few groups in time.
        """
        if self._received is None:
            self._ask()
        return self._settled()

    def _settled(self) -> dict[str, Any] | None:
        """Return the state that was received; if its group still averages, the one that it has afterwards.

        Raises:
            RunFault: If that group is still averaging after `ATTEMPTS` quorums: all that trained may be lost.
        """
        attempts = 0
        while self._received is not None and self._received["averages"]:
            if attempts > ATTEMPTS:
                raise RunFault(
                    f"group {self.number} has the state of group {self._received['source']} in the middle of a round, "
                    f"and {attempts} quorums have not ended it: the groups that trained are lost. Start the run again."
                )
            attempts += 1
            if failure := failure_of(self._call_roll):
                self._committed(failure)
            self._ask()
        received, self._received = self._received, None
        if received is not None:
            self.joined.append(Joined(received["reducer"]["step"], received["source"]))
        return received

    def _committed(self, failure: str) -> bool:
        """Whether this group is done with an average; if not, groups that wait for it fail at once.

        gloo closes its connections with the last reference to a process group. So an error, which holds frames, is
        passed on as text.

        Raises:
            RunFault: If a group still receives the last round's state, or another rank of this group is lost.
        """
        if failure:
            self._manager.report_error(RuntimeError(failure))
            self._reducer.reduce_over(None)
            abort_quorum_group(self._manager)
        try:
            return bool(self._manager.should_commit())
        except TimeoutError as error:
            raise RunFault(
                f"group {self.number} could not end a round in the manager's timeout of "
                f"{self._given.timeout.total_seconds():g} s: a group that joined has not received its state, which "
                f"takes a longer timeout of torchft.Manager, or another rank of this group is lost."
            ) from error

    def _ask(self) -> None:
        """Ask for a quorum of enough groups, and have the reducer average over all of them.

        Raises:
            RunFault: If there is none in time.
        """
        least, patience = self._given.least, self._given.quorum_timeout.total_seconds()
        began = time.monotonic()
        with warned(f"gradwire: group {self.number} waits for a quorum of {least} groups or more."):
            while True:
                before, received = self._manager.state_dict(), self._received
                try:
                    self._manager.start_quorum()
                except (TimeoutError, RuntimeError) as error:
                    raise RunFault(
                        f"no quorum of {least} groups or more in {patience:g} s: are the lighthouse and the other "
                        f"groups there? The manager's quorum_timeout must exceed the time of a round. ({error})"
                    ) from error
                if self._failed():
                    self._manager.load_state_dict(before)
                    self._received = received
                if (there := self._manager.num_participants()) >= least:
                    break
                if time.monotonic() - began > patience:
                    raise RunFault(f"{there} groups after {patience:g} s, and the manager has a minimum of {least}.")
                time.sleep(1)
        if (group := quorum_group(self._manager)) is not self._reducer.group:
            self._reducer.reduce_over(group)

    def _failed(self) -> bool:
        """Whether a quorum has failed on a rank of this group; it then has on all, and each keeps what it had."""
        failed = any(ops.gather_objects(self._manager.errored() is not None, None))
        if failed and not self._manager.errored():
            self._manager.report_error(RuntimeError("the state of another group did not arrive on all ranks"))
        return failed

    def _average(self, average: Callable[[], None], digest: Tensor) -> None:
        """Average once over the groups of the quorum that have trained in this round; see `close`.

        Raises:
            BadInput: As `_call_roll`.
            RuntimeError: If a group is lost.
            RunFault: If one does not answer in time.
        """
        self._call_roll(digest)
        if self.number not in self._groups:
            raise RuntimeError("the state of another group did not arrive")
        average()
        self._reducer.agree()

    def _call_roll(self, digest: Tensor = NOTHING) -> None:
        """Learn which groups of the quorum have trained in this round; if this one has, the reducer averages over them.

        Args:
            digest: Of this group's anchors.

        Raises:
            BadInput: If another group has this one's number, or groups that have trained began at other anchors.
            RuntimeError: If a group is lost.
        """
        group = quorum_group(self._manager)
        if group is None:
            raise RuntimeError("the groups of the quorum could not connect")
        averages = self._averages and not self._manager.errored()  # else the state of another one did not arrive
        call = torch.tensor([self.number, averages, len(self.rounds), digest], dtype=torch.int64, device="cpu")
        numbers, trains, rounds, digests = ops.all_gather(call, group, "control", self._reducer.meter).unbind(1)
        twins = (numbers == self.number).nonzero().flatten().tolist()
        if len(twins) > 1:
            if group.rank() == min(twins, key=lambda rank: (int(rounds[rank]), -rank)):
                raise BadInput(
                    f"another group {self.number} trains already: give each group a replica_id with another number."
                )
            raise RuntimeError(f"two groups have the number {self.number}")
        trained = trains.nonzero().flatten().tolist()
        self._groups = tuple(numbers[trained].tolist())
        if len(digests[trained].unique()) > 1:
            raise BadInput(
                f"groups {', '.join(map(str, self._groups))} began the round at different anchors: build managers with "
                f"init_sync=True, and let only the optimizer change the parameters."
            )
        if averages and len(trained) < group.size():
            self._reducer.reduce_over(group.split_group(trained, group_name="trained"))

    def _state(self) -> dict[str, Any]:
        """Return what another group receives: this one's state, or the one that it has received and not yet loaded."""
        if self._received is not None:
            return self._received
        return {"same": self._same, "source": self.number, "averages": self._averages, **self._serve()}

    def _receive(self, received: dict[str, Any]) -> None:
        """Keep another group's state.

        Raises:
            BadInput: If that group trains another model, or reduces differently.
        """
        for key in [*received["same"], *self._same]:
            here, there = (same.get(key, "nothing") for same in (self._same, received["same"]))
            if here != there:
                raise BadInput(
                    f"group {self.number} does not fit the run that it joins: {key} is {here} here, and {there} in "
                    f"group {received['source']}."
                )
        self._received = received


def failure_of(work: Callable[[], None]) -> str:
    """Do something with other groups; return "", or the text of what it raised because one was lost."""
    try:
        work()
    except LOST as error:
        return str(error) or type(error).__name__
    return ""


def number_of(manager: Any) -> int:
    """Return the number of a manager's group, at the end of its ``replica_id``.

    Raises:
        BadInput: If it is no manager of torchft, its quorums are asynchronous, or the name has no number.
    """
    if not hasattr(manager, "start_quorum"):
        raise BadInput(f"manager is a torchft.Manager, not {type(manager).__name__}.")
    name, asynchronous, *_ = managed(manager)
    if asynchronous:
        raise BadInput(
            "build the torchft.Manager with use_async_quorum=False: a round's groups are fixed between rounds."
        )
    digits = name[len(name.rstrip("0123456789")) :]
    if not digits:
        raise BadInput(
            f"the torchft.Manager has replica_id {name!r}, without a number at its end: give each group one, such as "
            f"group_0."
        )
    return int(digits)


def digest_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number that depends on all bits of float32 tensors: int64 [1]."""
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().data, digest)
    return torch.tensor([digest], dtype=torch.int64, device="cpu")


def prepare_group(
    model: nn.Module, compressor: Given, manager: Any, options: Mapping[str, Any]
) -> tuple[nn.Module, QuorumReducer]:
    """Prepare a model that this group trains, and build the reducer between groups.

    Raises:
        BadInput: As `number_of` and `QuorumReducer`; or if the group has several ranks, and the model is not in shards
            over all of them.
    """
    number, size = number_of(manager), dist.get_world_size()
    check_options(compressor := as_compressor(compressor), **options)
    model = getattr(model, COMPILED, model)
    sharded = [isinstance(p, DTensor) and p.device_mesh.mesh.tolist() == [*range(size)] for p in model.parameters()]
    if size > 1 and not all(sharded):
        raise BadInput(
            f"a group of {size} ranks trains one model: call fully_shard on it, over a mesh of these ranks alone, "
            f"before the optimizer is built."
        )
    if not is_prepared(model):
        if isinstance(model, FSDPModule):
            check_gradients(model)
            attach(model, strategy := FSDP2(None, next(model.parameters()).device))
            strategy.averages = False
        else:
            model = wrap(model, "naive", average=False)
    reducer = QuorumReducer(compressor, number * size + dist.get_rank(), **options)
    check_agreement(None, reducer, parameters_of(model), number=number)
    return model, reducer


@contextmanager
def warned(message: str) -> Iterator[None]:
    """Warn if the context takes longer than `PATIENCE_S`."""
    timer = Timer(PATIENCE_S, warnings.warn, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
