"""`gradwire launch`: checks before any rank, exit codes, one message, nothing left behind.

Of `base/parent_watch.py`, `launch/ranks.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from diagonals import swept
from launches import CLEAN, command, failure, left_behind, started, wait_until

from gradwire import cli
from gradwire.base.errors import BadInput, RunFault
from gradwire.base.failures import lost_peer
from gradwire.bench.launch.fork import SHARED, _wait
from gradwire.bench.launch.ranks import ALLOCATOR, THREADS, Ended, RankFailure, first_cause, rank_variables, spawn
from gradwire.comm.collectives import world


def free_port() -> str:
    """A port that nobody uses, below those that the kernel gives to connections meanwhile."""
    while True:
        port = random.randint(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


@pytest.mark.parametrize("launcher", ["fork", "torchrun", *swept("spawn")])
def test_ranks_know_their_place_and_share_the_cores(launch, tmp_path, launcher):
    port = free_port()
    done = launch(tmp_path, {}, "--master_port", port, launcher=launcher)
    assert (done.returncode, done.stderr) == (0, "")
    ranks = started(tmp_path)
    assert {(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in ranks.values()} == {("0", "0", "2"), ("1", "1", "2")}
    assert {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks.values()} == {("127.0.0.1", port)}
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert {r[name] for r in ranks.values() for name in THREADS} == {share}


def listening(port: int = 0, pids: Iterable[int] = ()) -> set[str]:
    """The addresses where somebody listens at this port, or one of these processes at any."""
    handles = [handle for pid in pids for handle in Path(f"/proc/{pid}/fd").glob("*") if handle.is_symlink()]
    sockets = {str(handle.readlink()) for handle in handles}
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:]:
            (address, _, local), state, inode = line.split()[1].partition(":"), line.split()[3], line.split()[9]
            if state == "0A" and (int(local, 16) == port or f"socket:[{inode}]" in sockets):
                whole = len(address) == 8
                found.add(socket.inet_ntoa(bytes.fromhex(address)[::-1]) if whole else address)
    return found


def test_a_given_number_of_threads_is_kept(tmp_path):
    environment = CLEAN | {"OMP_NUM_THREADS": "5", "MKL_NUM_THREADS": "9"}  # as Snakemake sets them for a whole job
    subprocess.run(command(tmp_path, {}), env=environment, check=True, timeout=60)
    assert {r[name] for r in started(tmp_path).values() for name in THREADS} == {"5"}


@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_bad_input_of_a_rank_is_reported_once_and_keeps_its_code(launch, tmp_path, launcher):
    ended = launch(tmp_path, {1: "refuse"}, launcher=launcher)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "gradwire launch: rank 1: an option is bad.\n"
    written = failure(tmp_path)
    assert (written["rank"], written["exit_code"], written["last_step"]) == (1, 2, 7)
    assert written["reason"] == "rank 1: an option is bad."


@pytest.mark.parametrize("launcher", ["fork", *swept("spawn", "torchrun")])
def test_a_thread_in_native_code_does_not_abort_a_rank_that_has_ended(launch, tmp_path, launcher):
    ended = launch(tmp_path, {0: "linger", 1: "linger"}, launcher=launcher)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_unexpected_error_is_one_message_and_one_traceback_kept(launch, tmp_path):
    ended = launch(tmp_path, {0: "stumble", 1: "stumble"})
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count(f"gradwire launch: {failure(tmp_path)['reason']}\n") == 1
    assert failure(tmp_path)["traceback"].count("Traceback") == 1
    assert "ZeroDivisionError: no such luck" in failure(tmp_path)["reason"]


class Rank:
    """A rank that shows these exit codes, one per look; its sentinel may be ready before its code is."""

    def __init__(self, sentinel: socket.socket, codes: list[int | None]) -> None:
        self.sentinel = sentinel
        self._codes = codes

    @property
    def exitcode(self) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_a_failed_rank_is_noticed_at_whichever_look_its_code_appears(looks):
    channel, launcher = socket.socketpair()
    lives, holder = socket.socketpair()
    gone, end = socket.socketpair()
    end.close()
    ranks = [Rank(lives, [None]), Rank(gone, [None] * looks + [2])]
    waiting = threading.Thread(target=_wait, args=(ranks, channel), daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    for open_socket in (channel, launcher, lives, holder, gone):
        open_socket.close()


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.sweep)])
def test_a_killed_rank_is_named_and_not_the_peer_that_lost_it(launch, tmp_path, launcher):
    ended = launch(tmp_path, {0: "reduce", 1: "reduce"}, launcher=launcher)
    assert ended.returncode == 3
    assert ended.stderr == "gradwire launch: rank 1: was killed by SIGKILL (out of memory?) and left no message.\n"
    assert failure(tmp_path)["rank"] == 1


@pytest.mark.parametrize(
    ("strategy", "size", "launcher"),
    [
        ("ddp", 2, "fork"),
        pytest.param("naive", 2, "fork", marks=pytest.mark.sweep),
        pytest.param("bucket", 3, "spawn", marks=pytest.mark.sweep),
        pytest.param("fsdp2", 2, "torchrun", marks=pytest.mark.sweep),
    ],
)
def test_a_rank_killed_in_a_backward_pass_ends_the_others(launch, tmp_path, strategy, size, launcher):
    """They wait for a bucket in flight, in an exchange of their hooks, in all-reduces, in a hook of FSDP."""
    ranks = dict.fromkeys(range(size), strategy)
    ended = launch(tmp_path, ranks, "--world_size", str(size), launcher=launcher)
    assert time.time() - json.loads((tmp_path / "killed.json").read_text()) < 60
    assert ended.returncode == 3
    message = f"rank {size - 1}: was killed by SIGKILL (out of memory?) and left no message."
    assert ended.stderr == f"gradwire launch: {message}\n"
    assert len(started(tmp_path)) == size and not left_behind(tmp_path)


@pytest.mark.parametrize("launcher", ["fork", pytest.param("spawn", marks=pytest.mark.sweep)])
def test_ranks_keep_the_memory_of_freed_tensors(launch, tmp_path, launcher):
    ended = launch(tmp_path, dict.fromkeys(range(2), "allocate"), launcher=launcher)
    assert (ended.returncode, ended.stderr) == (0, "")
    for rank, environment in started(tmp_path).items():
        assert {name: environment[name] for name in ALLOCATOR} == ALLOCATOR
        shares = json.loads((tmp_path / f"allocated{rank}.json").read_text())
        assert len(shares) == 2 and max(shares) < 0.5  # all pages are new where the allocator returns them


def test_an_allocator_of_the_users_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    assert rank_variables(2).items() >= {**ALLOCATOR, "MALLOC_ARENA_MAX": "3"}.items()


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.full)])
def test_ranks_meet_on_loopback_alone(template, tmp_path, launcher):
    """Both wait for ever in a process group, whose store and whose own connections listen."""
    words = command(tmp_path, {0: "gather", 1: "gather"}, launcher=launcher)
    running = subprocess.Popen(words, env=CLEAN | {SHARED: template})
    try:
        wait_until(lambda: len(list(tmp_path.glob("joined*.json"))) == 2)
        ranks = [rank["pid"] for rank in started(tmp_path).values()]
        assert listening(pids=[running.pid, *ranks]) == {"127.0.0.1"}
    finally:
        running.terminate()
        running.wait()


def test_a_rank_that_fails_does_not_wait_for_its_collective(launch, tmp_path):
    began = time.monotonic()
    ended = launch(tmp_path, {0: "desert", 1: "desert"})
    assert (ended.returncode, ended.stderr) == (2, "gradwire launch: rank 1: an option is bad.\n")
    assert time.monotonic() - began < 30  # the collective itself would wait for 60 s


def test_spawned_ranks_end_with_the_first_that_fails():
    script = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)"
    began = time.monotonic()
    assert spawn([sys.executable, "-c", script], 2, "127.0.0.1", 0) == Ended({0: -signal.SIGTERM, 1: 3})
    assert time.monotonic() - began < 30


def test_preflight_ends_it_before_any_rank_starts(launch, tmp_path):
    ended = launch(tmp_path, {}, probe=("--bad_data",))
    assert ended.returncode == 2
    assert ended.stderr == "gradwire launch: the data is too small for 2 ranks.\n"
    assert (failure(tmp_path)["rank"], failure(tmp_path)["exit_code"]) == (None, 2)
    assert not started(tmp_path)


def test_a_size_of_its_own_must_agree(launch, tmp_path):
    ended = launch(tmp_path, {}, probe=("--world_size", "3"))
    assert ended.returncode == 2 and "--world_size 3 for the command" in ended.stderr
    assert launch(tmp_path, {}, probe=("--world_size", "2")).returncode == 0


def test_a_port_in_use_is_named(launch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = launch(tmp_path, {}, "--master_port", port)
    assert ended.returncode == 2
    assert f"--master_port {port}" in ended.stderr and "Use another port" in ended.stderr
    assert ended.stderr.count("\n") == 1 and not started(tmp_path)


def test_a_second_attempt_at_bad_input_ends_at_once(launch, tmp_path):
    assert launch(tmp_path, {0: "refuse", 1: "refuse"}).returncode == 2
    for file in tmp_path.glob("started*.json"):
        file.unlink()
    again = launch(tmp_path, {}, "--attempt", "2")
    assert again.returncode == 2 and "an option is bad." in again.stderr
    assert not started(tmp_path)
    assert launch(tmp_path, {}, "--attempt", "1").returncode == 0


def test_a_second_attempt_at_a_fault_runs_and_removes_the_failure_file(launch, tmp_path):
    assert launch(tmp_path, {0: "kill"}).returncode == 3
    assert failure(tmp_path)["exit_code"] == 3
    assert launch(tmp_path, {}, "--attempt", "2").returncode == 0
    assert not list(tmp_path.glob("*.failed.json"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--gpus", "1"], "2 ranks need a GPU each and 1 were granted"),
        (["--world_size", "auto"], "a rank per GPU, and probe runs on the CPU: give a number"),
        (["--world_size", "auto", "--nodes", "2"], "counts this machine's GPUs: give a number with --nodes 2"),
        (["--tensorboard"], "--tensorboard shows a training; probe is none"),
        (["--master_addr", "192.0.2.1"], "192.0.2.1"),
        (["--nodes", "3"], "--nodes 3 cannot share --world_size 2 evenly"),
        (["--nodes", "2"], "--launcher fork supports one machine only"),
        (["--nodes", "2", "--launcher", "torchrun"], "not a Slurm job"),
        (["--nodes", "2", "--launcher", "torchrun", "--link", "10mbit"], "within one machine"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rank_starts(launch, tmp_path, flags, complaint):
    ended = launch(tmp_path, {}, *flags)
    assert ended.returncode == 2 and complaint in ended.stderr and not started(tmp_path)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [(3, "3 ranks need a GPU each and 2 were granted"), (0, "torch sees no GPU here: give a number")],
)
def test_auto_is_a_rank_for_each_gpu(tmp_path, monkeypatch, capsys, gpus, said):
    monkeypatch.setattr(world, "detect_gpus", lambda: gpus)
    train = ["train", "--data_path", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    assert cli.main(["launch", "--world_size", "auto", "--gpus", "2", "--", *train]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("launcher", "deed", "number", "code"),
    [
        ("fork", "wait", signal.SIGTERM, 3),
        ("torchrun", "save", signal.SIGINT, 75),
        *swept(("fork", "save", signal.SIGINT, 75), ("spawn", "save", signal.SIGINT, 75)),
    ],
)
def test_a_signal_ends_all_ranks(tmp_path, launcher, deed, number, code):
    """Meanwhile torchrun's store listens where it was asked to only."""
    words = command(tmp_path, {0: deed, 1: deed}, launcher=launcher)
    running = subprocess.Popen(words, env=CLEAN, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(started(tmp_path)) == 2)
    if launcher == "torchrun":
        assert listening(int(started(tmp_path)["0"]["MASTER_PORT"])) == {"127.0.0.1"}
    running.send_signal(number)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == code
    assert stderr.count("\n") == 1 and ("checkpoint" if deed == "save" else "stopped by a signal") in stderr
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(("killed", "code"), [("template", 3), ("launcher", -signal.SIGKILL)])
def test_forked_ranks_end_with_their_template_and_their_launcher(tmp_path, killed, code):
    running = subprocess.Popen(
        command(tmp_path, {0: "wait", 1: "wait"}, launcher="fork"), env=CLEAN, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(started(tmp_path)) == 2)
    (template,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    os.kill(int(template) if killed == "template" else running.pid, signal.SIGKILL)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == code
    assert killed == "launcher" or "the process that forks the ranks exited early" in stderr
    wait_until(lambda: not left_behind(tmp_path))


SHARING = """
import json, subprocess, sys
from gradwire.bench.launch.fork import share
share(("counted",), {})
for launch in map(json.loads, sys.argv[1:]):
    done = subprocess.run(launch["command"], cwd=launch["folder"], capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stderr]))
"""


def test_launchers_share_a_template_that_imports_once_and_ends_with_its_owner(tmp_path):
    (tmp_path / "counted.py").write_text(f"print(1, file=open({str(tmp_path / 'imports')!r}, 'a'))")
    launches = []
    for number, ranks in enumerate(({}, {1: "refuse"})):
        folder = tmp_path / f"launch{number}"
        folder.mkdir()
        words = command(Path("out"), ranks, launcher="fork")  # relative to the launcher's folder
        launches.append(json.dumps({"command": words, "folder": str(folder)}))
    environment = {**CLEAN, "PYTHONPATH": f"{tmp_path}:{CLEAN.get('PYTHONPATH', '')}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SHARING, *launches], env=environment, capture_output=True, text=True, timeout=60
    )
    assert list(map(json.loads, done.stdout.splitlines())) == [
        [0, ""],
        [2, "gradwire launch: rank 1: an option is bad.\n"],
    ], done.stderr
    assert len(started(tmp_path / "launch0/out")) == 2
    assert (tmp_path / "imports").read_text() == "1\n"
    wait_until(lambda: not list(tmp_path.glob("gradwire-template-*")))


def failed(code: int, at: float, lost_peer: bool = False, timed_out: bool = False) -> dict:
    return {
        "reason": f"code {code}.",
        "exit_code": code,
        "last_step": 4,
        "time": at,
        "lost_peer": lost_peer,
        "timed_out": timed_out,
        "traceback": "",
    }


@pytest.mark.parametrize(
    ("codes", "messages", "rank", "code"),
    [
        ({0: 3, 2: -9}, {0: failed(3, 1.0, lost_peer=True)}, 2, 3),  # killed, and a peer noticed
        ({0: 2, 1: 3}, {0: failed(2, 2.0), 1: failed(3, 1.0, lost_peer=True)}, 0, 2),  # a peer was quicker to say so
        ({0: 2, 1: 1}, {0: failed(2, 2.0), 1: failed(1, 1.0)}, 1, 1),  # two that failed by themselves: the earlier
        ({0: -6, 1: 2}, {1: failed(2, 1.0)}, 1, 2),  # what a library does to a peer
        ({0: -15, 1: 75, 2: -9}, {1: failed(75, 1.0)}, 2, 3),  # asked to end after another was killed
        ({0: 75, 1: 4}, {0: failed(75, 1.0)}, 1, 3),  # or after another exited without a word
        ({0: 3, 1: 3}, {0: failed(3, 2.0, lost_peer=True), 1: failed(3, 1.0, lost_peer=True)}, 1, 3),  # out of step
        ({0: 3, 1: 1}, {0: failed(3, 1.0, lost_peer=True)}, 1, 3),  # a rank that could not even start Python
    ],
)
def test_the_first_cause_wins(codes, messages, rank, code):
    cause = first_cause(Ended(codes), messages)
    assert isinstance(cause, RankFailure)
    assert (cause.rank, cause.exit_code) == (rank, code)
    assert str(cause).startswith(f"rank {rank}: ")


def test_a_rank_that_others_waited_for_in_vain_hung_unless_it_was_killed():
    waited = {0: failed(3, 1.0, lost_peer=True, timed_out=True)}
    cause = first_cause(Ended({0: 3, 1: -9}), waited)
    assert (cause.rank, cause.exit_code) == (1, 3)
    assert "rank 1: hung: rank 0 timed out waiting for it (code 3.)" in str(cause)
    lost = {0: failed(3, 1.0, lost_peer=True)}
    assert "was killed by SIGKILL" in str(first_cause(Ended({0: 3, 1: -9}), lost))


def test_a_stop_is_resumable_if_a_rank_says_so():
    cause = first_cause(Ended({0: -15}, stopped=True), {1: failed(75, 1.0)})
    assert (cause.exit_code, cause.step) == (75, 4)
    assert first_cause(Ended({0: -15, 1: -15}, stopped=True), {}).exit_code == 3


def test_only_what_another_rank_caused_counts_as_a_lost_peer():
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37059.")
    wrapped = RunFault("step 3 failed.")
    wrapped.__cause__ = gloo
    assert lost_peer(gloo) and lost_peer(wrapped)
    assert not lost_peer(BadInput("a bad option")) and not lost_peer(ConnectionResetError("a web server went away"))
