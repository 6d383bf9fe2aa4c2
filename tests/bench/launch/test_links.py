"""`gradwire launch --link`: real namespaces and real shaping, and nothing left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import CLEAN, command, failure, started

from gradwire.bench.launch import links
from gradwire.bench.launch.fork import SHARED, share

MEGABYTE = 4 * (2**18 + 1)
OFFER = links.probe()
needs_links = pytest.mark.skipif(OFFER.options is None, reason=f"no links here: {OFFER.reason}")
ISLANDS = ("--strategy", "hsdp", "--islands", "2")
POWERLESS = ("setpriv", "--bounding-set=-sys_admin,-net_admin")  # root in name only: no namespace, no interface


def shaped(test):
    """A test on shaped links."""
    return pytest.mark.full(needs_links(test))


def transfer(output: Path, *flags: str, launcher: str = "torchrun", before: tuple[str, ...] = ()) -> dict[int, dict]:
    """The measurements of both ranks when they averaged a megabyte."""
    output.mkdir(exist_ok=True)
    words = command(output, {"0": "transfer", "1": "transfer"}, *flags, launcher=launcher)
    done = subprocess.run([*before, *words], env=CLEAN, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {rank: json.loads((output / f"transfer{rank}.json").read_text()) for rank in (0, 1)}


def what_is_there() -> list[str]:
    """Interfaces here, and processes in another network namespace than this one."""
    own = Path("/proc/self/ns/net").readlink()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/net").readlink() != own:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return sorted([*found, *(device.name for device in Path("/sys/class/net").iterdir())])


@shaped
@pytest.mark.parametrize(("launcher", "mbit"), [("fork", 50), ("torchrun", 80), ("spawn", 20)])
def test_a_link_keeps_its_rate_and_its_interface_counts(tmp_path, launcher, mbit):
    before = what_is_there()
    ranks = transfer(tmp_path, "--link", f"{mbit}mbit", launcher=launcher)
    for found in ranks.values():
        assert found["link"] == f"{mbit}mbit"
        assert found["seconds"] > 0.97 * (MEGABYTE - links.BURST) * 8 / (1e6 * mbit)  # no faster than the rate
        # An all-reduce of two ranks sends the buffer once, each way; headers and acknowledgements come on top.
        assert 1.02 < found["bytes"] / MEGABYTE < 1.12
    assert 1.0 < ranks[0]["broadcast"] / MEGABYTE < 1.12  # what goes out is counted, and not what comes in
    assert 0 < ranks[1]["broadcast"] / MEGABYTE < 0.1
    assert what_is_there() == before


@shaped
@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_a_cable_between_islands_carries_only_what_leaves_them(tmp_path, launcher):
    before = what_is_there()
    flags = ("--world_size", "4", "--link", "between-200mbit")
    words = command(tmp_path, dict.fromkeys("0123", "islands"), *flags, launcher=launcher, probe=ISLANDS)
    done = subprocess.run(words, env=CLEAN, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        found = json.loads((tmp_path / f"islands{rank}.json").read_text())
        assert found["link"] == "between-200mbit"
        assert 0 < found["inside"] / MEGABYTE < 0.02  # of barriers
        # Two all-reduces between two ranks, one for each shard, each of which sends its buffer once.
        assert 2.0 < found["between"] / MEGABYTE < 2.1  # within 5 %
    assert what_is_there() == before


@pytest.mark.sweep
def test_without_a_link_no_interface_is_a_ranks_own(launch, tmp_path):
    assert launch(tmp_path, {"0": "transfer", "1": "transfer"}).returncode == 0
    for rank in (0, 1):
        found = json.loads((tmp_path / f"transfer{rank}.json").read_text())
        assert (found["link"], found["bytes"], found["broadcast"]) == ("none", None, None)


@shaped
def test_a_testbed_that_cannot_be_built_is_one_message(tmp_path):
    """The second rank's `ip` fails; the first rank's namespace is there already."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ip").write_text(
        f'#!/bin/sh\ncase "$*" in *port1*) echo "no more ports" >&2; exit 1;; esac\nexec {shutil.which("ip")} "$@"\n'
    )
    (folder / "ip").chmod(0o755)
    environment = CLEAN | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command(tmp_path, {}, "--link", "1gbit"), env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("gradwire launch: cannot build the links: `ip link add port1")
    assert last.endswith("no more ports")
    assert "Traceback" not in done.stderr


@shaped
@pytest.mark.parametrize("shared", [False, True])
def test_an_ordinary_user_can(tmp_path, monkeypatch, shared):
    """Without the power to make a network namespace, but with user namespaces allowed."""
    assert subprocess.run([*POWERLESS, "unshare", "--net", "true"], capture_output=True).returncode != 0
    if reason := subprocess.run([*POWERLESS, "unshare", "--user", "true"], capture_output=True, text=True).stderr:
        pytest.skip(f"no user namespaces here: {reason}")
    if shared:  # its forks join the launcher's namespaces
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        share((), {})
        monkeypatch.setitem(CLEAN, SHARED, os.environ.pop(SHARED))
    assert transfer(tmp_path, "--link", "100mbit", launcher="fork", before=POWERLESS)[0]["link"] == "100mbit"


@shaped
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(tmp_path, number):
    before = what_is_there()
    words = command(tmp_path, {"0": "wait", "1": "wait"}, "--link", "100mbit", launcher="spawn")
    launcher = subprocess.Popen(words, env=CLEAN, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("started*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(what_is_there()) > len(before)
    launcher.send_signal(number)
    launcher.wait(60)
    if number == signal.SIGKILL:  # it could not end its ranks; a terminal or a scheduler would
        os.killpg(launcher.pid, signal.SIGKILL)
    while what_is_there() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert what_is_there() == before


@pytest.mark.parametrize("rate", ["fast", "-1mbit"])
def test_a_rate_that_is_none(launch, tmp_path, rate):
    done = launch(tmp_path, {}, f"--link={rate}")
    assert done.returncode == 2
    assert f"invalid rate {rate!r}" in done.stderr
    assert failure(tmp_path)["exit_code"] == 2
    assert not started(tmp_path)


@pytest.mark.parametrize(
    ("link", "world", "probe", "message"),
    [
        ("between-fast", "4", ISLANDS, "invalid rate 'fast'"),
        (
            "between-1gbit",
            "4",
            ("--strategy", "fsdp2"),
            "islands is 1: strategy hsdp, or a link between islands, needs",
        ),
        ("1gbit", "4", ("--strategy", "fsdp2", "--islands", "2"), "fsdp2 has islands only on a link between them"),
        ("between-1gbit", "3", ISLANDS, "2 islands do not divide 3 ranks"),
    ],
)
def test_a_link_between_islands_that_there_are_not(launch, tmp_path, link, world, probe, message, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # without `unshare`: a launch that went on would complain of it
    done = launch(tmp_path, {}, "--link", link, "--world_size", world, probe=probe)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert message in done.stderr
    assert failure(tmp_path)["exit_code"] == 2


def test_missing_tools_are_named(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("unshare", "nsenter", "sh"):
        (folder / tool).symlink_to(shutil.which(tool))
    environment = CLEAN | {"PATH": str(folder)}
    words = command(tmp_path, {}, "--link", "100mbit")
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "ip (iproute2), tc (iproute2) not installed" in done.stderr
    assert not list(tmp_path.glob("started*"))


def test_no_permission_is_reported(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in links.TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or sys.executable)
    (folder / "unshare").unlink()
    (folder / "unshare").write_text("#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n")
    (folder / "unshare").chmod(0o755)
    environment = CLEAN | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command(tmp_path, {}, "--link", "1gbit"), env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "does not permit network namespaces" in done.stderr
    assert "Operation not permitted" in done.stderr
