"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_samples import values, write_corpus
from world import Pool, Turns, World

gc.disable()  # until all tests are imported
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for GPUs keeps no forked rank from using them
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for the CUDA forms; it has to be chosen before triton is imported

POOL = Pool(6)
LONGEST = ("test_training.py", "test_private.py")
MAY_LACK = ("CUDA", "GPU")  # what a machine that runs CI need not have


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin, so that no worker is left alone with one."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the ranks of `world` before the first test computes a gradient in this process."""
    gc.freeze()  # what was imported stays: no collection, here or in a fork, looks at a million objects again
    gc.enable()
    if session.config.option.collectonly or not any("world" in getattr(i, "fixturenames", ()) for i in session.items):
        return
    torch.set_num_threads(1)
    capture = session.config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()  # what ranks print is not the session's
    POOL.fork()
    capture.suspend_global_capture()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI nothing passes by being skipped, but for what `MAY_LACK` names."""
    POOL.stop()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true":
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", [])}
    if forbidden := sorted(reason for reason in reasons if not any(name in reason for name in MAY_LACK)):
        reporter.write_line(f"\nskipped although this is CI: {'; '.join(forbidden)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """A worker uses one core, as do the pool's ranks: more threads than idle cores cost far more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def world() -> Callable[[int], World]:
    """``world(n)``: the first n ranks of the session's pool of gloo processes."""
    return lambda size: World(POOL, size)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a small corpus, for runs of `small_runs`; few samples are for validation."""
    from gradwire.lm.data.tokenize import tokenize

    root = tmp_path_factory.mktemp("training")
    corpus = write_corpus(root / "corpus.json", values(60))
    sizes = {"vocab_size": 300, "max_length": 24, "shard_size": 50}
    tokenize(corpus, root, tokenizer="bpe", **sizes, val_fraction=0.05, dataset="small")
    return root / "shards"


@pytest.fixture
def turns(request: pytest.FixtureRequest) -> Callable[[int], World | Turns]:
    """``turns(n)``: n simulated ranks of this process, much cheaper than `world`, or the processes of `world`.

    It is for what need not run at once. The sweep takes processes, by ``TEST_RANKS=processes``.
    """
    return request.getfixturevalue("world") if os.environ.get("TEST_RANKS") == "processes" else Turns
