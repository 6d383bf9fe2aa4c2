"""Links of a chosen rate between the ranks of one machine: ``gradwire launch --link 100mbit``.

Each rank gets a network namespace of its own. Its one interface is joined by a veth pair to a bridge, the switch, and
both ends of the pair are shaped by ``tc tbf``: a full-duplex cable of that rate to each rank.

First of all the launcher moves into a network and a mount namespace of its own (where it is not root, in a user
namespace too) and builds everything in there. So nothing has to be torn down: the kernel does it with the last process
inside, however that ends, and no testbed can be left over. Nothing outside is changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

from gradwire.errors import BadInput, RunFault
from gradwire.units import bits_per_second

LINK, INTERFACE = "GRADWIRE_LINK", "GRADWIRE_INTERFACE"  # tell a rank its link and its interface
INSIDE = "GRADWIRE_TESTBED"  # set where the launcher has moved already
TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2"}
WAYS: tuple[list[str], ...] = ([], ["--user", "--map-root-user"])  # as root, and rootless
DEVICE = "eth0"  # in each rank's namespace
SWITCH, FIRST = IPv4Address("10.231.255.254"), IPv4Address("10.231.0.1")
PORT = 29500  # free in a namespace that is empty
BURST = 16_000  # bytes that may leave a cable's end at once, at least
LARGEST_BURST = 2**31  # tc counts them in 32 bits
TRY = """
ip link add switch type bridge
ip link add port type veth peer name eth0
tc qdisc add dev eth0 root tbf rate 100mbit burst 16kb latency 50ms
unshare --net true
"""


class Offer(NamedTuple):
    """What this machine can do.

    Attributes:
        way: Options of ``unshare`` that are allowed here; None if none are.
        reason: Why there can be no link; empty if there can.
        delay: Whether the kernel could add a delay (``netem``), beside the rate.
    """

    way: list[str] | None
    reason: str
    delay: bool


def probe() -> Offer:
    """Try, in namespaces that are gone afterwards, what a testbed needs."""
    missing = [f"{tool} ({package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return Offer(None, f"{', '.join(missing)} not installed", False)
    reasons = []
    for way in WAYS:
        tried = _inside(way, TRY)
        if tried.returncode == 0:
            netem = _inside(way, f"{TRY}tc qdisc add dev port root netem delay 1ms")
            return Offer(way, "", netem.returncode == 0)
        reasons.append((tried.stderr.strip().splitlines() or ["no reason given"])[-1])
    return Offer(None, "; rootless: ".join(reasons), False)


def _inside(way: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", *way, "--net", "--mount", "sh", "-ec", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def enter(link: str) -> None:
    """Move this process into namespaces of its own; it starts anew in there and comes here a second time.

    Raises:
        BadInput: If ``link`` is no rate, or namespaces are not allowed here.
    """
    bits_per_second(link)
    if INSIDE in os.environ:
        return
    offer = probe()
    if offer.way is None:
        raise BadInput(
            f"--link {link}: this machine allows no network namespaces of our own ({offer.reason}); run it as root, or "
            "where user namespaces are allowed, or leave --link out."
        )
    delay = "netem adds a delay" if offer.delay else "this kernel has no netem, so no delay could be added"
    how = "user namespace" if offer.way else "root"
    print(f"gradwire launch: links of {link} by tc tbf ({how}; {delay})", file=sys.stderr, flush=True)
    sys.stdout.flush()
    command = ["unshare", *offer.way, "--net", "--mount", sys.executable, *sys.orig_argv[1:]]
    os.execvpe(command[0], command, os.environ | {INSIDE: link})


class Testbed:
    """Ranks in namespaces of their own, joined by a switch.

    Args:
        link: The rate of each rank's cable.
        world_size: Number of ranks.
        folder: Where the namespaces' files go.
    """

    def __init__(self, link: str, world_size: int, folder: Path) -> None:
        self.link = link
        self.folder = folder
        _run("ip link set lo up")
        _run("ip link add switch type bridge")
        _run(f"ip addr add {SWITCH}/16 dev switch")
        _run("ip link set switch up")
        for rank in range(world_size):
            self._add(rank)

    def _add(self, rank: int) -> None:
        """A rank's namespace and its cable."""
        namespace, port = self.folder / f"rank{rank}", f"port{rank}"
        namespace.touch()
        inside = f"nsenter --net={namespace}"
        _run(f"unshare --net={namespace} true")
        _run(f"ip link add {port} type veth peer name {DEVICE} netns {namespace}")
        _run(f"ip link set {port} master switch addrgenmode none up")
        _run(f"tc qdisc add dev {port} root {shaping(self.link)}")
        _run(f"{inside} ip link set lo up")
        _run(f"{inside} ip link set {DEVICE} addrgenmode none up")
        _run(f"{inside} ip addr add {FIRST + rank}/16 dev {DEVICE}")
        _run(f"{inside} tc qdisc add dev {DEVICE} root {shaping(self.link)}")

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` in its rank's namespace; the variable RANK says which that is."""
        return ["sh", "-c", 'exec nsenter --net="$0/rank$RANK" "$@"', str(self.folder), *words]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that ranks need: what they run on, and which interface is theirs."""
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), DEVICE)
        return {LINK: self.link, INTERFACE: DEVICE, **interfaces}

    def meeting_point(self, launcher: str) -> tuple[str, int]:
        """Where the ranks meet: torchrun's agent listens at the switch, else rank 0 does."""
        return str(SWITCH if launcher == "torchrun" else FIRST), PORT


@contextmanager
def testbed(link: str, world_size: int) -> Iterator[Testbed]:
    """Build the testbed in the namespaces that `enter` moved to.

    Raises:
        RunFault: If a command that `probe` found to work fails.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-link-") as folder:
        try:
            yield Testbed(link, world_size, Path(folder))
        finally:
            for namespace in Path(folder).iterdir():  # where building broke off, the last one may not be mounted
                subprocess.run(["umount", namespace], capture_output=True, check=False)


def shaping(link: str) -> str:
    """The queueing discipline of one end of a cable.

    What may leave at once after a pause is a millisecond's worth, and at least a few packets: with less the kernel's
    timer cannot keep the rate, with more small messages would travel for nothing.
    """
    rate = bits_per_second(link)
    return f"tbf rate {rate:.0f}bit burst {min(max(BURST, int(rate / 8 / 1000)), LARGEST_BURST)} latency 100ms"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFault(f"cannot build the links: `{command}` failed: {done.stderr.strip()}")
