"""``gradwire launch --elastic MIN:MAX``: groups that may be lost and start again, on the CPU of one machine.

Each group is a process, and trains on its own between rounds. One that is lost starts again a few times, later each
time, and receives the state of another group. The run is over when a group has ended well: it has written the record.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

from gradwire.base.errors import BadInput, GradwireError, RunFault
from gradwire.base.extras import install
from gradwire.base.failures import RANK_FAILURES, rank_failures
from gradwire.base.flags import RANKS
from gradwire.bench.launch.fork import Template
from gradwire.bench.launch.lighthouse import LOG, lighthouse
from gradwire.bench.launch.ranks import LOOPBACK, environment, failure, on, places, rank_variables

GROUPS = "groups"  # folder of what each group has done, in the run's
RESTARTS = 3  # of a group
BACKOFF = 1.0  # seconds before a group's first restart, and twice as many before each next one
GRACE = 10.0  # seconds for the other groups to end when one has ended well


class Members(NamedTuple):
    """The groups of a run.

    Attributes:
        least: The fewest that train.
        most: The number of groups that share the data.
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"

    @classmethod
    def parse(cls, text: str) -> Members:
        """Parse ``MIN:MAX``.

        Raises:
            BadInput: If it is malformed, or torchft is not installed.
        """
        least, _, most = text.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most) <= RANKS.most):
            raise BadInput(f"--elastic {text}: give MIN:MAX, the fewest groups that train and all groups, such as 2:4.")
        if find_spec("torchft") is None:
            raise BadInput(f"--elastic needs torchft: {install('torchft')}.")
        return cls(int(least), int(most))


def start(command: Sequence[str], members: Members, folder: Path, patience: float, restarts: int) -> None:
    """Run a command in all groups, until one has ended well.

    Args:
        command: The full command line of ``gradwire train``.
        members: The groups.
        folder: The run's folder, without what an earlier run's groups have done.
        patience: Seconds that the groups of a quorum wait for others that are alive.
        restarts: Number of times that a group starts again.

    Raises:
        BadInput: If the command is invalid in so many groups that the others are too few.
        RunFault: If too many groups are lost, or the lighthouse, or a signal stops the run.
    """
    shutil.rmtree(folder / GROUPS, ignore_errors=True)
    network = {name: os.environ.get(name, device) for name, device in LOOPBACK.items()}
    with ExitStack() as stack:
        messages = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-launch-")))
        address, ends = stack.enter_context(lighthouse(members.least, patience))
        stack.enter_context(environment({**rank_variables(members.most), **network, **LOG}))
        groups, grace = list[GroupProcess](), 0.0
        try:
            for number in range(members.most):
                words = [*command, "--elastic", str(members), "--group_number", str(number), "--lighthouse", address]
                template = stack.enter_context(Template((), {}))
                groups.append(GroupProcess(number, words, template, messages / str(number), restarts))
            watch(groups, members.least, ends)
            grace = GRACE
        finally:
            finish(groups, grace)


class GroupProcess:
    """A group's process, and those that follow it.

    Args:
        number: The group's.
        command: Its full command line.
        template: Forks it.
        folder: Where it leaves its message.
        restarts: Number of times that it may start again.

    Attributes:
        due: When it starts again, by `time.monotonic`; None while it runs.
    """

    def __init__(self, number: int, command: Sequence[str], template: Template, folder: Path, restarts: int) -> None:
        self.number, self.template = number, template
        self._command, self._folder = command, folder
        self._pauses = [BACKOFF * 2**before for before in range(restarts)]
        self.due: float | None = None
        self.start()

    def fileno(self) -> int:
        """A file that can be read when the process has ended."""
        return self.template.fileno()

    def start(self) -> None:
        """Start the process."""
        self.due = None
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        (place,) = places(1, "127.0.0.1", 0)
        self.template.start(self._command, [{RANK_FAILURES: str(self._folder), **place}])

    def end(self) -> GradwireError | None:
        """Return why the process has failed, or None."""
        (code,) = self.template.wait()
        return failure(None, rank_failures(self._folder).get(0), code) if code else None

    def retry(self, reason: GradwireError) -> bool:
        """Plan a restart, and say so; return False after bad input, which would fail again, and too many restarts."""
        again = reason.exit_code != BadInput.exit_code and bool(self._pauses)
        plan = f"It starts again in {self._pauses[0]:g} s." if again else "It does not start again."
        if again:
            self.due = time.monotonic() + self._pauses.pop(0)
        print(f"gradwire launch: group {self.number}: {reason} {plan}", file=sys.stderr, flush=True)
        return again


def watch(groups: list[GroupProcess], least: int, lighthouse_ends: int) -> None:
    """Start groups that are lost again, until one has ended well; raises as `start`.

    Args:
        groups: All groups; those that have ended for good are removed.
        least: The fewest that train.
        lighthouse_ends: A file that can be read when the lighthouse has ended.
    """
    stops: list[bool] = []

    def stop() -> None:
        stops.append(True)
        for group in groups:
            group.template.stop()

    with on((signal.SIGINT, signal.SIGHUP, signal.SIGTERM), stop):
        while running := {group.fileno(): group for group in groups if group.due is None}:
            for ready in connection.wait([lighthouse_ends, *running], seconds_to_restart(groups)):
                if ready == lighthouse_ends:
                    raise RunFault("torchft's lighthouse has ended, and groups cannot meet without it; see its output.")
                group = running[int(str(ready))]
                reason = group.end()
                if reason is None or stops or not group.retry(reason):
                    groups.remove(group)
                if reason is None:
                    return
                if len(groups) < least and not stops:
                    raise lost(group, reason, len(groups), least)
            for group in [] if stops else groups:
                if group.due is not None and group.due <= time.monotonic():
                    group.start()
    if stops:
        raise RunFault("stopped by a signal; groups keep the run's state, and have left nothing to resume from.")
    raise RunFault("all groups are lost at once, and with them the run's state: start it again.")


def seconds_to_restart(groups: Sequence[GroupProcess]) -> float | None:
    """Return the time until the next restart; None if there is none."""
    dues = [group.due for group in groups if group.due is not None]
    return max(0.0, min(dues) - time.monotonic()) if dues else None


def finish(groups: Sequence[GroupProcess], grace: float) -> None:
    """Give groups that run ``grace`` seconds to end, and end those that have not."""
    running, deadline = {group.fileno(): group for group in groups if group.due is None}, time.monotonic() + grace
    while running and (ready := connection.wait([*running], max(0.0, deadline - time.monotonic()))):
        for number in ready:
            running.pop(int(str(number))).end()
    for group in running.values():
        group.template.stop()
    for group in running.values():
        group.end()


def lost(group: GroupProcess, reason: GradwireError, left: int, least: int) -> GradwireError:
    """Return the failure of a run whose last group to be lost is one too many."""
    kind = BadInput if reason.exit_code == BadInput.exit_code else RunFault
    few = f"too few groups are left ({left}, and the minimum is {least})"
    return kind(f"{few}; group {group.number}: {reason}", step=reason.step)
