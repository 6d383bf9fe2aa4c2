"""Links of a given rate between the ranks of one machine: ``gradwire launch --link 100mbit``.

Each rank, or with ``--link between-100mbit`` each island of ranks, has its own network namespace with one interface. A
veth pair connects it to a bridge, the switch, and ``tc tbf`` shapes both ends of the pair: a full-duplex cable of that
rate. Ranks of an island share its address, so what they send each other goes through the loopback device.

The launcher first moves to a new network and mount namespace (without root, also a user namespace) and builds the
testbed there. The kernel removes it when the last process inside exits, however that exits. Nothing outside changes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.topology import between_islands, link_rate

LINK, INTERFACE = "GRADWIRE_LINK", "GRADWIRE_INTERFACE"  # a rank's link and network interface
INSIDE = "GRADWIRE_TESTBED"  # set once the launcher has moved
NAMESPACES = "GRADWIRE_NAMESPACES"  # the ranks in each namespace, and the folder of the namespaces' files: 1:/tmp/x
TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
UNSHARE: tuple[list[str], ...] = ([], ["--user", "--map-root-user"])  # as root, and rootless
DEVICE = "eth0"  # in each namespace
KINDS = ("user", "net", "mnt")  # a user namespace gives the right to join the others
SWITCH, FIRST = IPv4Address("10.231.255.254"), IPv4Address("10.231.0.1")
PORT = 29500  # free in an empty namespace
FRAME, FRAME_BETWEEN = 1500, 9000  # bytes of a frame: Ethernet's, and the jumbo frames of data centres
BURST = 16_000  # the smallest burst, in bytes
LARGEST_BURST = 2**31  # tc counts bytes in 32 bits
TRY = """
ip link add switch type bridge
ip link add port type veth peer name eth0
tc qdisc add dev eth0 root tbf rate 100mbit burst 16kb latency 50ms
unshare --net true
"""


# Why: docs/decisions.md, "A link is a cable to a switch".
class Offer(NamedTuple):
    """Support for links on this machine.

    Attributes:
        options: Permitted options of ``unshare``; None if links are not supported.
        reason: Why links are not supported; empty if they are.
    """

    options: list[str] | None
    reason: str


def probe() -> Offer:
    """Try what a testbed needs, in temporary namespaces."""
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return Offer(None, f"{', '.join(missing)} not installed")
    reasons = []
    for options in UNSHARE:
        command = ["unshare", *options, "--net", "--mount", "sh", "-ec", TRY]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            return Offer(options, "")
        reasons.append((tried.stderr.strip().splitlines() or ["no reason given"])[-1])
    return Offer(None, "; rootless: ".join(reasons))


def enter(link: str) -> None:
    """Restart this process in its own namespaces; return at once if it is already there.

    Raises:
        BadInput: If ``link`` is an invalid rate, or namespaces are not permitted here.
    """
    link_rate(link)
    if INSIDE in os.environ:
        return
    offer = probe()
    if offer.options is None:
        raise BadInput(
            f"--link {link}: this machine does not permit network namespaces ({offer.reason}); run as root or "
            "where user namespaces are permitted, or omit --link."
        )
    how = "user namespace" if offer.options else "root"
    print(f"gradwire launch: links of {link} by tc tbf ({how})", file=sys.stderr, flush=True)
    sys.stdout.flush()
    command = ["unshare", *offer.options, "--net", "--mount", sys.executable, *sys.orig_argv[1:]]
    os.execvpe(command[0], command, os.environ | {INSIDE: link})


class Testbed:
    """Ranks in network namespaces that a switch connects.

    Args:
        link: The link, whose rate each namespace's cable has.
        islands: Number of namespaces.
        ranks: Number of ranks in each.
        folder: The folder for the namespaces' files.
    """

    def __init__(self, link: str, islands: int, ranks: int, folder: Path) -> None:
        self.link = link
        self.ranks = ranks
        self.frame = FRAME_BETWEEN if between_islands(link) else FRAME
        self.folder = folder
        _run("ip link set lo up")
        _run("ip link add switch type bridge")
        _run(f"ip addr add {SWITCH}/16 dev switch")
        _run("ip link set switch up")
        for number in range(islands):
            self._add(number)

    def _add(self, number: int) -> None:
        """Create a namespace and its cable."""
        namespace, port = self.folder / f"namespace{number}", f"port{number}"
        namespace.touch()
        inside = f"nsenter --net={namespace}"
        _run(f"unshare --net={namespace} true")
        _run(f"ip link add {port} mtu {self.frame} type veth peer name {DEVICE} mtu {self.frame} netns {namespace}")
        _run(f"ip link set {port} master switch addrgenmode none up")
        _run(f"tc qdisc add dev {port} root {shaping(self.link)}")
        _run(f"{inside} ip link set lo up")
        _run(f"{inside} ip link set {DEVICE} addrgenmode none up")
        _run(f"{inside} ip addr add {FIRST + number}/16 dev {DEVICE}")
        _run(f"{inside} tc qdisc add dev {DEVICE} root {shaping(self.link)}")

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the ranks: the link, the network interface and the namespaces."""
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), DEVICE)
        return {LINK: self.link, INTERFACE: DEVICE, NAMESPACES: f"{self.ranks}:{self.folder}", **interfaces}

    def meeting_point(self, launcher: object) -> tuple[str, int]:
        """Address and port of the rendezvous: torchrun's agent at the switch, else rank 0."""
        return str(SWITCH if launcher == "torchrun" else FIRST), PORT


def join() -> None:
    """Move this rank to its namespace, if the launcher built a testbed; a rank without one stays."""
    if NAMESPACES in os.environ:
        ranks, _, folder = os.environ[NAMESPACES].partition(":")
        namespace = Path(folder, f"namespace{int(os.environ['RANK']) // int(ranks)}")
        _enter(os.open(namespace, os.O_RDONLY))


def join_process(folder: Path) -> None:
    """Join the namespaces of a process where they are not this one's.

    Args:
        folder: Its ``/proc/<pid>/ns``.

    Raises:
        OSError: If the kernel refuses.
    """
    others = [kind for kind in KINDS if (folder / kind).readlink() != Path("/proc/self/ns", kind).readlink()]
    opened = [os.open(folder / kind, os.O_RDONLY) for kind in others]  # before the view of the files changes
    for file in opened:
        _enter(file)


def _enter(file: int) -> None:
    """Enter the namespace of an open file, and close it; Python has `os.setns` since 3.12 only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
    os.close(file)


@contextmanager
def testbed(link: str, islands: int, ranks: int = 1) -> Iterator[Testbed]:
    """Build the testbed in the namespaces that `enter` created, with ``ranks`` ranks in each.

    Raises:
        RunFault: If a command fails that worked in `probe`.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-link-") as folder:
        try:
            yield Testbed(link, islands, ranks, Path(folder))
        finally:
            for namespace in Path(folder).iterdir():  # after a failed build, the last one may not be mounted
                subprocess.run(["umount", namespace], capture_output=True, check=False)


def shaping(link: str) -> str:
    """The queueing discipline at one end of a cable.

    The burst is a millisecond's worth of bytes, at least a few packets. With less, the kernel's timer cannot sustain
    the rate; with more, small messages would be free.
    """
    rate = link_rate(link)
    return f"tbf rate {rate:.0f}bit burst {min(max(BURST, int(rate / 8 / 1000)), LARGEST_BURST)} latency 100ms"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFault(f"cannot build the links: `{command}` failed: {done.stderr.strip()}")
