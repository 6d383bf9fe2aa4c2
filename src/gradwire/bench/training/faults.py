"""The faults that a cell asks for: when this group is killed, when it returns, and how slow it is."""

from __future__ import annotations

import os
import signal
import time

from gradwire.base.errors import BadInput
from gradwire.bench.config.cell import Faults
from gradwire.bench.training.group import Group
from gradwire.bench.training.settings import Settings
from gradwire.comm.communication import preset
from gradwire.comm.parallel.optimizers.diloco import Rounds

LOOK_EVERY = 0.5  # seconds between looks at what the other groups have done


class GroupFaults:
    """The faults of this group.

    Args:
        settings: The run; a cell without ``faults`` has none.
        group: This group.

    Attributes:
        times: How many times as long its local steps take.

    Raises:
        BadInput: If it shall be killed in a round that the run does not have.
    """

    def __init__(self, settings: Settings, group: Group) -> None:
        communication, steps = settings.cell.communication, settings.training.steps
        options = {**preset(communication.comm_optimizer).options, **communication.options}
        faults = settings.cell.faults or Faults()
        self._group, self._missed, self._rounds = group, faults.rejoin_after, Rounds(options["H"], steps)
        self._killed_in = sorted(kill.round for kill in faults.kill if kill.rank == group.rank)
        for number in self._killed_in:
            if self._rounds.began(number) >= steps:
                raise BadInput(f"faults: the {steps} steps of the run do not reach round {number}, counted from 0.")
        self._last_steps = {self._middle(number) for number in self._killed_in[group.start :]}
        self.times = max((slow.times for slow in faults.slow if slow.rank == group.rank), default=1.0)

    def wait_to_return(self) -> None:
        """After a kill, wait for the last round that this group misses, at whose end it joins."""
        if self._missed is None or not 0 < self._group.start <= len(self._killed_in):
            return
        killed_in = self._killed_in[self._group.start - 1]
        while self._reached() < self._rounds.began(killed_in + self._missed - 1):
            time.sleep(LOOK_EVERY)

    def kill(self, step: int) -> None:
        """Kill this process if that is due before a step."""
        if step in self._last_steps:
            os.kill(os.getpid(), signal.SIGKILL)

    def _middle(self, number: int) -> int:
        """A step in the middle of a round."""
        return (self._rounds.began(number) + self._rounds.began(number + 1)) // 2

    def _reached(self) -> int:
        """The number of steps that the first of all groups has taken."""
        return max((row["step"] + 1 for rows in self._group.lines().values() for row in rows), default=0)
