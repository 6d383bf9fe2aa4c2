"""Ranks on several nodes: ``gradwire launch --nodes N`` in a Slurm allocation.

The launcher hosts the c10d store for the rendezvous, and ``srun`` starts this module once per node as torchrun's agent
for that node's ranks. Each node writes how its ranks ended to a file next to the ranks' messages, in a shared folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.base.errors import DONE, FAULT, BadInput, GradwireError, RunFault
from gradwire.base.failures import RANK_FAILURES, rank_failures
from gradwire.base.files import read_json, write_json, write_text
from gradwire.base.parent_watch import PARENT
from gradwire.bench.launch.ranks import Ended, agent, environment, first_cause, on, rank_variables

STEP = "step"  # the file with the job step's id
LAST_WORDS = 10  # seconds for the other nodes to report after the first node has ended
SRUN = ("srun", "--ntasks-per-node=1", "--cpu-bind=none", f"--wait={LAST_WORDS}", "--unbuffered")
ITS_OWN = ("srun: ", "slurmstepd")  # prefixes of lines that Slurm writes, not a rank


def check_allocation(nodes: int) -> None:
    """Check that this is a Slurm job with ``srun``.

    Raises:
        BadInput: If not.
    """
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise BadInput(
            f"--nodes {nodes} starts the ranks with srun, but this is not a Slurm job with srun on its PATH: run it in "
            f"one (sbatch --nodes={nodes}, or snakemake --workflow-profile profiles/slurm), outside of a container."
        )


def start(command: Sequence[str], world_size: int, nodes: int, folder: Path, port: int = 0) -> None:
    """Run ``command`` on ``world_size`` ranks, split evenly over the nodes of this Slurm job, and wait for them.

    Args:
        command: The full command line of a rank.
        world_size: Number of ranks on all nodes.
        nodes: Number of nodes.
        folder: A shared folder; it holds the messages of ranks and nodes while they run.
        port: The port that the launcher listens on; 0 picks a free one.

    Raises:
        RankFailure: If a rank failed; the others have ended too.
        RunFault: If ``srun`` could not start the ranks, or a signal stopped them and none can be resumed.
    """
    from gradwire.comm.collectives.world import host_store

    folder.mkdir(parents=True, exist_ok=True)
    to_sigterm = on((signal.SIGINT, signal.SIGHUP), lambda: signal.raise_signal(signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix=".launch-", dir=folder.resolve()) as messages, to_sigterm:
        store = host_store("", port)
        here = [sys.executable, "-m", __name__, *map(str, (world_size // nodes, nodes, store.port))]
        with environment({RANK_FAILURES: messages}):
            end = srun([*SRUN, f"--nodes={nodes}", f"--ntasks={nodes}", *here, *command], Path(messages))
        if end.code or end.stopped:
            raise _cause(end, Path(messages))


class End(NamedTuple):
    """How ``srun`` ended.

    Attributes:
        code: Its exit code, the largest of all nodes.
        stopped: Whether a signal stopped the launcher, which stopped the ranks.
        words: Slurm's own messages.
    """

    code: int
    stopped: bool
    words: list[str]


def srun(command: Sequence[str], folder: Path) -> End:
    """Run a job step. Forward the ranks' stderr; keep Slurm's messages in case there is no other reason."""
    stops: list[bool] = []
    words = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as step:

        def stop() -> None:
            stops.append(True)
            if (folder / STEP).exists():  # srun itself would kill the ranks
                subprocess.run(["scancel", "--signal=TERM", (folder / STEP).read_text()], check=False)
            else:
                step.terminate()

        with on((signal.SIGTERM,), stop):
            assert step.stderr is not None
            for line in step.stderr:
                if line.startswith(ITS_OWN):
                    words.append(line.strip())
                else:
                    sys.stderr.write(line)
            code = step.wait()
    return End(code, bool(stops and code), words)


def _cause(end: End, folder: Path) -> GradwireError:
    """The root cause, from what ranks and nodes wrote to ``folder``."""
    nodes = [read_json(path) for path in folder.glob("node*.json")]
    failures = rank_failures(folder)
    codes = {int(rank): code for node in nodes for rank, code in node["codes"].items()}
    stopped = end.stopped or (bool(nodes) and all(node["stopped"] for node in nodes))
    if stopped or failures or codes:
        return first_cause(Ended(codes, stopped), failures)
    return RunFault(f"srun ended with code {end.code}: {'; '.join(end.words) or 'no reason given'}.")


def main(words: Sequence[str]) -> int:
    """Start this node's ranks, wait for them, and write how they ended.

    Args:
        words: Ranks on this node, number of nodes, port of the launcher's store, and the command line of a rank.
    """
    ranks_here, nodes, port, *command = words
    folder = Path(os.environ[RANK_FAILURES])
    if os.environ["SLURM_NODEID"] == "0":
        write_text(folder / STEP, f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}")
    endpoint = f"{os.environ['SLURM_LAUNCH_NODE_IPADDR']}:{port}"
    with environment({PARENT: str(os.getpid()), **rank_variables(int(ranks_here))}):
        options = {"rdzv_backend": "c10d", "rdzv_configs": {"is_host": "false"}}
        ended = agent(command, int(ranks_here), endpoint, int(nodes), **options)
    write_json(
        folder / f"node{os.environ['SLURM_NODEID']}.json", {"codes": dict(ended.codes), "stopped": ended.stopped}
    )
    return FAULT if ended.codes or ended.stopped else DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
