"""A group of a run that goes on when one is lost, and the files by which the groups know what all of them have done.

Each start of a group writes ``groups/<number>.<start>.jsonl``, a line per optimizer step: its row of ``steps.parquet``,
with the time of its beginning and the round that it ended, if any. So what a lost group has done is known, too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import torch.distributed as dist

from gradwire.base.errors import BadInput, RunFault
from gradwire.base.files import read_json, write_json
from gradwire.bench.launch.elastic import GROUPS, Members
from gradwire.bench.training.environment import environment
from gradwire.bench.training.measure import Row
from gradwire.bench.training.settings import Options
from gradwire.comm.collectives.world import World, host_store
from gradwire.comm.parallel.optimizers.quorum import Quorum

CONNECT = 10.0  # seconds for the lighthouse to answer
LOOK_EVERY = 0.1  # seconds between looks at the other groups' files

Lines = Mapping[tuple[int, int], Sequence[Row]]
"""The lines of the files, by a group's number and start."""


@dataclass(frozen=True)
class Group(World):
    """A group's view of its run: ``rank`` is its number, and ``world_size`` the number of groups that share the data.

    Collectives of the default process group are this group's alone.

    Attributes:
        least: The fewest groups that train.
        lighthouse: The address of torchft's lighthouse.
        run_folder: The run's folder.
        timeout: Seconds to wait for another group.
        quorum_timeout: Seconds to wait for ``least`` groups.
        store: This group's store, by which the others connect to it.
        start: How many times this group has started before.
        late: Whether groups had taken steps when it started.
    """

    least: int
    lighthouse: str
    run_folder: Path
    timeout: float
    quorum_timeout: float
    store: dist.TCPStore
    start: int
    late: bool

    @classmethod
    def of(cls, options: Options, world: World) -> Group:
        """Return the group that the flags describe.

        Args:
            options: The flags.
            world: The process group of its one rank.

        Raises:
            BadInput: If a flag is missing or out of range, there are several ranks, or nobody answers at the
                lighthouse's address.
        """
        assert options.elastic is not None
        members, number, files = Members.parse(options.elastic), options.group_number, options.output_dir / GROUPS
        if world.world_size > 1:
            raise BadInput(f"--elastic: a group has one rank, and this one has {world.world_size}.")
        if number is None or options.lighthouse is None:
            raise BadInput("--elastic needs --group_number and --lighthouse, which `gradwire launch --elastic` gives.")
        if number >= members.most:
            raise BadInput(f"--group_number {number}: --elastic {members} has groups 0 to {members.most - 1}.")
        return cls(
            rank=number,
            local_rank=world.local_rank,
            world_size=members.most,
            backend=world.backend,
            device=world.device,
            least=members.least,
            lighthouse=options.lighthouse,
            run_folder=options.output_dir,
            timeout=options.timeout,
            quorum_timeout=options.quorum_timeout,
            store=host_store(address_towards(options.lighthouse), 0),
            start=len([*files.glob(f"{number}.*.jsonl")]),
            late=any(path.stat().st_size for path in files.glob("*.jsonl")),
        )

    @property
    def folder(self) -> Path:
        """The folder of all groups' files."""
        return self.run_folder / GROUPS

    @property
    def file(self) -> Path:
        """The file of this start."""
        return self.folder / f"{self.rank}.{self.start}.jsonl"

    def manager(self) -> Any:
        """Return a manager that is connected to the lighthouse.

        Groups that start at the same time wait for each other here, but no longer than the timeout.
        """
        from torchft import Manager, ProcessGroupGloo

        logging.getLogger("torchft").setLevel(logging.ERROR)  # it warns that there is no NCCL
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of a state that is received
        timeout, address = timedelta(seconds=self.timeout), self.store.host
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            min_replica_size=self.least,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=self.quorum_timeout),
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self.store.port,
            lighthouse_addr=self.lighthouse,
            replica_id=f"group_{self.rank}",
            hostname=address,
        )
        write_json(self.run_folder / "environment" / f"rank{self.rank}.json", environment(self))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.touch()
        deadline = time.monotonic() + self.timeout
        while len(numbers(self.folder)) < self.world_size and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
        return manager

    def check_joined(self, step: int) -> None:
        """Check that a group which joins a run has received its state.

        Raises:
            RunFault: If it begins at step 0 although steps were taken before.
        """
        if self.late and step == 0:
            raise RunFault(
                f"no group that had the run's state is left: start the run again, without the files of {self.folder}."
            )

    def note(self, row: Row, began: float, quorum: Quorum) -> None:
        """Write the row of a step that began at a time, in seconds since 1970."""
        ended = next((last._asdict() for last in quorum.rounds[-1:] if last.step == row["step"]), None)
        line = json.dumps(row | {"began": began, "round": ended})
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    @cached_property
    def lock(self) -> IO[str] | None:
        """The lock to write the record, for which groups wait in turn; None if another group has written it."""
        stream = (self.folder / "record.lock").open("a+", encoding="utf-8")
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        return None if stream.read() else stream

    def recorded(self) -> None:
        """Tell the groups that wait for the lock that the record is there."""
        assert self.lock is not None
        self.lock.write("written\n")
        self.lock.flush()

    def lines(self) -> Lines:
        """Return the lines of all files; one that a lost group has not completed is left out."""
        files = {tuple(map(int, path.name.split(".")[:2])): path for path in self.folder.glob("*.jsonl")}
        return {
            (number, start): [json.loads(line) for line in files[number, start].read_text("utf-8").split("\n")[:-1]]
            for number, start in sorted(files)
        }


def parts(lines: Lines, mine: Row, folder: Path) -> list[Row]:
    """Return what each group has measured, as `results.write` gathers it from ranks.

    Args:
        lines: As `Group.lines` returns.
        mine: What this group has measured; its memory stands for all.
        folder: The run's folder.
    """
    rows: dict[int, list[Row]] = {}
    for (number, _), taken in lines.items():
        rows.setdefault(number, []).extend(taken)
    last = mine["rows"][-1]
    rows[last["rank"]][-1] |= last  # evaluated since
    environments = {number: read_json(folder / "environment" / f"rank{number}.json") for number in rows}
    return [
        {"rows": rows[number], "environment": environments[number], "memory": mine["memory"]} for number in sorted(rows)
    ]


def numbers(folder: Path) -> set[str]:
    """Return the numbers of the groups that have started."""
    return {path.name.partition(".")[0] for path in folder.glob("*.jsonl")}


def address_towards(lighthouse: str) -> str:
    """Return this machine's address in the lighthouse's network.

    Raises:
        BadInput: If nobody answers there.
    """
    try:
        place = urlsplit(lighthouse)
        with socket.create_connection((place.hostname or "", place.port or 0), CONNECT) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise BadInput(
            f"--lighthouse {lighthouse}: nobody answers there ({error}). Start `torchft_lighthouse`, and give "
            f"http://HOST:PORT."
        ) from None


def history(lines: Lines, groups: int) -> Row:
    """Return the record's fields of a run in groups.

    A group trains in local steps; in the rest of its time it encodes, sends, waits, or starts.

    - ``rounds``: the last step of each, counted from 0, the groups in its mean, attempts, seconds from the end of local
      training to the mean, and bytes, of all groups.
    - ``restarts``: of all groups.
    - ``training_s``: seconds from the first step's beginning to the last one's end.
    - ``stalled_s``: those in which no group trained.
    - ``goodput``: time of local steps that a mean counts, over ``groups`` times ``training_s``.

    Args:
        lines: As `Group.lines` returns.
        groups: Number of groups that share the data.
    """
    ends: dict[int, list[Row]] = {}
    useful, last, spans = 0.0, 0.0, list[tuple[float, float]]()
    for (number, _), rows in lines.items():
        trained = 0.0
        for row in rows:
            end = row["began"] + row["step_ms"] / 1000
            last = max(last, end)
            if (ended := row["round"]) is not None:
                end -= ended["seconds"] if row["optimizer_ms"] is None else row["optimizer_ms"] / 1000
            spans.append((row["began"], end))
            trained += end - row["began"]
            if ended is None:
                continue
            if number in ended["groups"]:
                useful += trained
            trained = 0.0
            ends.setdefault(ended["step"], []).append(ended)
    whole = last - min(spans)[0]
    return {
        "rounds": [
            {
                "step": step,
                "groups": max(ended["groups"] for ended in ends[step]),  # of one that has missed it: none
                "attempts": max(ended["attempts"] for ended in ends[step]),
                "seconds": max(ended["seconds"] for ended in ends[step]),
                "bytes": sum(ended["sent"] for ended in ends[step]),
            }
            for step in sorted(ends)
        ],
        "restarts": len(lines) - len({number for number, _ in lines}),
        "training_s": whole,
        "stalled_s": whole - covered(spans),
        "goodput": useful / (groups * whole),
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of some spans."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
