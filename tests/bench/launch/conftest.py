"""Launches in the test's own process, whose forked ranks have torch already."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import launches
import pytest

from gradwire import cli
from gradwire.bench.commands import Entry
from gradwire.bench.launch import fork, leases, ranks
from gradwire.bench.launch import launch as launching

PRELOAD = ("gradwire.comm.parallel", "gradwire.bench.training.measure", "rank_command")


@pytest.fixture(scope="session", autouse=True)
def locks(tmp_path_factory) -> None:
    """Leases that no run of this machine's users holds."""
    launches.CLEAN[leases.FOLDER] = str(tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="session")
def template() -> str:
    """The socket of a template for all launches; it ends with this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{launches.PROBE.parent}:{os.environ.get('PYTHONPATH', '')}")
        fork.share(PRELOAD, ranks.rank_variables(2))
    return os.environ.pop(fork.SHARED)


@pytest.fixture
def launch(template, monkeypatch, capfd) -> Callable[..., CompletedProcess[str]]:
    """`gradwire launch` with the arguments of `launches.words`: its exit code, and what it and its ranks print."""
    for name in os.environ.keys() - launches.CLEAN.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv(fork.SHARED, template)
    monkeypatch.setenv(leases.FOLDER, launches.CLEAN[leases.FOLDER])
    monkeypatch.setitem(cli.COMMANDS, "probe", Entry("rank_command", "do what a test says"))
    monkeypatch.setattr(launching, "RANK", (sys.executable, str(launches.PROBE)))

    def launched(*args, launcher: str = "fork", **options) -> CompletedProcess[str]:
        words = launches.words(*args, launcher=launcher, **options)
        return CompletedProcess(words, cli.main(words), *capfd.readouterr())

    return launched
