"""When kernels for a CPU compile, in which process, who hears of it, and who serves meanwhile.

Of `kernels/cpu/__init__.py`, `kernels/__init__.py`, `driver.py`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
import torch.distributed as dist
from numba.core.compiler_lock import global_compiler_lock
from samples import generator, normal, scattered

from gradwire.bench.training.environment import environment
from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.world import World
from gradwire.comm.compressors import build, driver, kernels
from gradwire.comm.compressors.kernels import cpu

HERE = torch.device("cpu")


def weighted(values, out):
    """A loop of the tests' own."""
    for i in range(out.size):
        out[i] = 3 * values[i] + i


def compiles_or_reads(rank, world_size, group, folder: str) -> tuple[int, int, str, list[float]]:
    """How often a rank compiled `weighted` and how often it read it from the disk, where, and what it computes."""
    before, cpu.CACHE = cpu.CACHE, folder
    try:
        loop = cpu.compiled(weighted)
        out = np.empty(3)
        dist.barrier(group)
        loop(np.array([1.5, -2.0, 7.0]), out)
    finally:
        cpu.CACHE = before
    stats = loop.stats
    return sum(stats.cache_misses.values()), sum(stats.cache_hits.values()), stats.cache_path, out.tolist()


def test_one_rank_compiles_and_the_others_read(world, tmp_path):
    ranks = world(3).run(compiles_or_reads, str(tmp_path))
    assert sorted(counts[:2] for counts in ranks) == [(0, 1), (0, 1), (1, 0)]
    assert all(Path(path).is_relative_to(tmp_path) and out == [4.5, -5.0, 23.0] for *_, path, out in ranks)


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "CACHE", str(tmp_path))
    with cpu.locked("weighted"):
        forked = os.fork()
        if not forked:
            time.sleep(30)
            os._exit(0)
    try:
        with (tmp_path / "weighted.lock").open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_a_process_forked_meanwhile_can_compile():
    compiling = threading.Event()

    def compile_slowly() -> None:
        with global_compiler_lock:
            compiling.set()
            time.sleep(0.3)

    thread = threading.Thread(target=compile_slowly)
    kernels.COMPILING.add(thread)
    try:
        thread.start()
        assert compiling.wait(30)
        forked = os.fork()
        if not forked:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            served = kernels.find(build("int8"), HERE) is not kernels.REFERENCE
            os._exit(0 if served and numba.njit(lambda x: x + 1)(2) == 3 else 1)
        assert os.waitpid(forked, 0)[1] == 0
    finally:
        thread.join()
        kernels.COMPILING.discard(thread)


@pytest.mark.parametrize(
    ("late", "main_lives", "compiled"), [(True, False, []), (True, True, [1]), (False, False, [1])]
)
def test_the_thread_compiles_no_more_when_the_process_ends(monkeypatch, tmp_path, late, main_lives, compiled):
    monkeypatch.setattr(cpu, "CACHE", str(tmp_path))
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: main_lives)
    calls = []

    def compile_one() -> None:
        with suppress(SystemExit):
            cpu.compile_alone(calls.append, "weighted", 1)

    thread = threading.Thread(target=compile_one)
    if late:
        kernels.COMPILING.add(thread)
    thread.start()
    thread.join()
    kernels.COMPILING.discard(thread)
    assert calls == compiled


@pytest.fixture
def read_only_home(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files of a user whose caches cannot be written."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_ranks_of_a_user_who_cannot_write_a_cache_share_a_folder(read_only_home):
    shared = Path(cpu.cache_folder())
    assert shared == Path(cpu.cache_folder())
    assert shared.parent.parent == read_only_home / f"gradwire-{os.getuid()}"
    assert stat.S_IMODE(shared.parent.parent.stat().st_mode) == 0o700
    assert shared.name == Path(cpu.CACHE).name


def test_a_folder_that_others_may_write_is_not_shared(read_only_home):
    shared = read_only_home / f"gradwire-{os.getuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    first, second = (Path(cpu.cache_folder()) for _ in range(2))
    assert first != second
    assert first.parent == second.parent == read_only_home


def compile_in(seconds: float, *names: str) -> None:
    for name in names:
        assert cpu.compile_alone(lambda signature: time.sleep(seconds) or signature, name, "float64(float64)")


@pytest.fixture
def impatient(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "SILENT_S", 0.05)
    monkeypatch.setattr(cpu, "_announced", False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("rank", "seconds", "lines"), [(None, 0.3, 1), ("0", 0.3, 1), ("1", 0.3, 0), ("0", 0, 0)])
def test_rank_0_says_once_what_takes_long(impatient, monkeypatch, capfd, tmp_path, rank, seconds, lines):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    compile_in(seconds, "weighted.encode", "weighted.decode")
    time.sleep(0.1)
    said = capfd.readouterr().err.splitlines()
    begins = "gradwire: preparing kernels for this processor, weighted.encode first"
    expected = f"{begins}: compiled once, then read from {tmp_path}"
    assert said == [expected] * lines


def all_calls(compressor) -> list[torch.Tensor]:
    """What a compressor encodes, keeps and decodes: as int32, which tells zeros of either sign apart."""
    segments, values = scattered(compressor, [(257,), (7, 11), (1,), (33, 40)])
    residual, total = normal(values.numel(), 5), normal(values.numel(), 6)
    draws = [generator(20 + i) for i in range(len(segments))]
    wire, placed = compressor.encode_many(
        values, segments, torch.zeros(segments.nbytes, dtype=torch.uint8), generators=draws, residual=residual
    )
    compressor.decode_add(wire, placed, total)
    alone = compressor.encode(normal((33, 40), 7), generator=generator(3))
    return [wire, residual.view(torch.int32), total.view(torch.int32), alone]


@pytest.fixture
def slow_compiler(monkeypatch):
    """A compilation that waits for an event; what it saw of `kernels.find` is in the list."""
    go, seen = threading.Event(), []

    def compile_late(compressors, *rest) -> None:
        assert go.wait(30)
        seen.extend(kernels.find(compressor, HERE) is kernels.REFERENCE for compressor in compressors)

    monkeypatch.setattr(driver, "COMPILED", set())
    monkeypatch.setattr(driver, "encode_and_decode", compile_late)
    yield go, seen
    go.set()
    for thread in tuple(kernels.COMPILING):
        thread.join()


@pytest.mark.parametrize(
    ("name", "options"), [("int8", {"rounding": "stochastic"}), ("onebit", {}), ("topk", {"density": 0.3})]
)
def test_the_reference_serves_with_the_same_bits_until_the_kernel_is_there(slow_compiler, name, options):
    go, seen = slow_compiler
    compressor = build(name, **options)
    kernel = kernels.find(compressor, HERE)
    by_kernel = all_calls(compressor)
    driver.compile_kernels([compressor, build("terngrad")])
    assert kernels.find(compressor, HERE) is kernels.REFERENCE is not kernel
    meanwhile = all_calls(compressor)
    go.set()
    driver.rehearse([], [], HERE, feedback=False)  # waits
    assert seen == [False]
    assert kernels.find(compressor, HERE) is kernel
    assert all(map(torch.equal, by_kernel, meanwhile))
    driver.compile_kernels([compressor])
    assert not kernels.COMPILING, "once in a process"


def test_kernels_that_do_not_compile_leave_the_reference_and_a_warning(monkeypatch):
    def fail(*given) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(driver, "COMPILED", set())
    monkeypatch.setattr(kernels, "FAILED", [])
    compressor = build("int8")
    by_kernel = all_calls(compressor)
    with monkeypatch.context() as failing, pytest.warns(RuntimeWarning) as warned:
        failing.setattr(driver, "encode_and_decode", fail)
        for _ in range(2):
            driver.compile_kernels([compressor])
            for thread in tuple(kernels.COMPILING):
                thread.join()
    [warning] = warned
    reason = "OSError: [Errno 28] No space left on device"
    assert str(warning.message).startswith(f"kernels for this processor do not compile ({reason}): compression takes")
    assert kernels.find(compressor, HERE) is kernels.REFERENCE
    assert all(map(torch.equal, by_kernel, all_calls(compressor)))
    assert environment(World(0, 0, 1, "gloo", HERE))["kernels_failed"] == reason


def compiled_for(rank, world_size, group, options: dict) -> tuple[set[str], bool]:
    """The compressors whose kernels a reducer compiles when its strategy prepares it; whether they have them then."""
    before = driver.COMPILED, driver.encode_and_decode
    driver.COMPILED, driver.encode_and_decode = set(), lambda *given: None
    try:
        reducer = Reducer(**options)
        reducer.prepare("all_reduce", 100, HERE)
        wanted = {compressor.name for compressor in driver.COMPILED}
        driver.rehearse([], [], HERE, feedback=False)
        return wanted, not kernels.COMPILING
    finally:
        driver.COMPILED, driver.encode_and_decode = before


def test_a_reducer_compiles_what_it_encodes_with(world):
    given = {"compressor": "topk+int8", "error_feedback": True, "residual_dtype": "bf16"}
    assert world(2).run(compiled_for, given) == [({"topk+int8", "bf16", "none"}, True)] * 2
    assert world(2).run(compiled_for, {"compressor": "fp16", "algorithm": "native"}) == [(set(), True)] * 2
    assert world(1).run(compiled_for, given) == [(set(), True)]
