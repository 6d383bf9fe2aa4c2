"""A real Slurm on this machine: munge, one controller and two nodes with two GPUs each that exist on paper.

As a context (``with cluster():``) or in a shell (``python tests/slurm/cluster.py COMMAND ...`` runs a command in it).
It needs root, and Debian's packages slurm-wlm and munge. Everything lives in one temporary folder; /etc/slurm, where
Slurm's commands look, gets links to it. Afterwards daemons, links and folder are gone. What a killed cluster left is
removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
PROGRAMS = (*DAEMONS, "sbatch", "squeue")
FOLDER = "gradwire-slurm-"  # what its folder's name begins with
PARTITION = "main"
NODES, CPUS, GPUS = ("n1", "n2"), 4, 2
PORT = 16817  # of the controller; the nodes' follow
ETC = Path("/etc/slurm")
STARTED = 30  # seconds for all nodes to be idle
STOPPED = 15  # seconds for a daemon to end by itself

SLURM = """
ClusterName=gradwire
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/spool.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
MinJobAge=3600
KillWait=5
MailProg=/bin/true
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName={partition} Nodes=ALL Default=YES MaxTime=60 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN\n"
)
GRES = "AutoDetect=off\nName=gpu File={folder}/nvidia[0-{last}]\n"
CGROUP = "CgroupPlugin=cgroup/v1\n"


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "only root can start Slurm's daemons"


@contextmanager
def cluster() -> Iterator[Path]:
    """Bring it up; yields its folder, where the daemons' logs are."""
    if why := missing():
        raise RuntimeError(f"no Slurm here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it is taken down then, too
    with ExitStack() as stack:
        stack.enter_context(locked(ETC))
        remove_leftovers(ETC)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=FOLDER)))
        folder.chmod(0o755)  # munge wants everyone to get to its socket
        for file, text in configuration(folder).items():
            (folder / file).write_text(text)
            stack.enter_context(linked(ETC / file, folder / file))
        gpus(folder)
        munge = ["--key-file", "--socket", "--pid-file", "--log-file", "--seed-file"]
        files = ["munge.key", "munge.socket", "munged.pid", "munged.log", "munged.seed"]
        key(folder / "munge.key")
        flags = [f"{flag}={folder / file}" for flag, file in zip(munge, files, strict=True)]
        stack.enter_context(daemon(["munged", "--foreground", *flags], folder))
        wait_for((folder / "munge.socket").exists, "munged")
        stack.enter_context(daemon(["slurmctld", "-D", "-c"], folder))
        for node in NODES:
            stack.enter_context(daemon(["slurmd", "-D", "-N", node], folder, node))
        stack.callback(cancel_jobs)
        wait_for(all_idle, "the nodes")
        yield folder


def configuration(folder: Path) -> dict[str, str]:
    """Slurm's files by name."""
    (folder / "controller").mkdir()
    for node in NODES:
        (folder / f"spool.{node}").mkdir()
    nodes = "".join(
        NODE.format(name=node, port=PORT + 1 + index, cpus=CPUS, gpus=GPUS) for index, node in enumerate(NODES)
    )
    head, partition = SLURM.format(folder=folder, port=PORT, partition=PARTITION).split("PartitionName", 1)
    return {
        "slurm.conf": f"{head}{nodes}PartitionName{partition}",
        "gres.conf": GRES.format(folder=folder, last=GPUS - 1),
        "cgroup.conf": CGROUP,
    }


def key(path: Path) -> None:
    """A munge key that nobody else may read."""
    path.touch(mode=0o600)
    path.write_bytes(os.urandom(1024))


def gpus(folder: Path) -> None:
    """Character devices that Slurm counts as GPUs: they are copies of /dev/null."""
    for index in range(GPUS):
        os.mknod(folder / f"nvidia{index}", 0o600 | 0o020000, os.makedev(1, 3))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which ends with this process; an error if another cluster holds it."""
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another cluster of these tests is running: it has locked {folder}") from error
        yield
    finally:
        os.close(handle)


def remove_leftovers(etc: Path) -> None:
    """Remove links, daemons and folder of a cluster that was killed. The caller holds the lock on ``etc``."""
    links = [link for link in etc.iterdir() if link.is_symlink() and link.readlink().parent.name.startswith(FOLDER)]
    for folder in {link.readlink().parent for link in links}:
        for pid in folder.glob("*.pid"):
            kill_daemon(int(pid.read_text()))
        shutil.rmtree(folder, ignore_errors=True)
    for link in links:
        link.unlink()


def kill_daemon(pid: int) -> None:
    """Kill the process if it is one of Slurm's daemons; the number may be another program's by now."""
    with suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/comm").read_text().strip() in DAEMONS:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def linked(link: Path, target: Path) -> Iterator[None]:
    """A link that is gone afterwards; a file that is there already is somebody's Slurm, and is left alone."""
    link.symlink_to(target)
    try:
        yield
    finally:
        link.unlink()


@contextmanager
def daemon(command: list[str], folder: Path, name: str = "") -> Iterator[None]:
    """A daemon in a separate session, ended with all that it started."""
    with (folder / f"{command[0]}{name}.out").open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOPPED)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def all_idle() -> bool:
    """Whether every node waits for jobs."""
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
    return done.stdout.split() == ["idle"] * len(NODES)


def cancel_jobs() -> None:
    """End what still runs, and wait for it: job steps outlive the daemons."""
    subprocess.run(["scancel", "--partition", PARTITION], check=False)
    wait_for(lambda: not queued(), "jobs to end")


def queued() -> str:
    """The jobs that wait or run."""
    command = ["squeue", "-h", "-o", "%i", "--states=PENDING,RUNNING,COMPLETING,CONFIGURING"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds; an error that names ``what`` if it does not in time."""
    deadline = time.monotonic() + STARTED
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what} in vain for {STARTED} s")
        time.sleep(0.1)


if __name__ == "__main__":
    with cluster() as where:
        print(f"Slurm's logs: {where}", flush=True)
        sys.exit(subprocess.run(sys.argv[1:], check=False).returncode)
