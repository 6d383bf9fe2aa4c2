"""The rest of a killed cluster is removed; a running one is left alone. It needs no Slurm."""

from __future__ import annotations

import shutil
import signal
import subprocess

import cluster
import pytest


def test_what_a_killed_cluster_left_is_removed(tmp_path):
    etc, folder, other = (tmp_path / name for name in ("etc", "gradwire-slurm-a1b2", "of_somebody"))
    for each in (etc, folder, other):
        each.mkdir()
    for path in (folder / "slurm.conf", other / "gres.conf"):
        path.touch()
        (etc / path.name).symlink_to(path)
    (etc / "plugstack.conf").touch()
    sleep = shutil.which("sleep")
    shutil.copy(sleep, folder / "slurmd")
    daemon, reused = (subprocess.Popen([program, "60"]) for program in (folder / "slurmd", sleep))
    (folder / "slurmd.n1.pid").write_text(f"{daemon.pid}\n")
    (folder / "munged.pid").write_text(f"{reused.pid}\n")  # a number that another program has by now
    try:
        cluster.remove_leftovers(etc)
        assert daemon.wait(10) == -signal.SIGKILL
        with pytest.raises(subprocess.TimeoutExpired):
            reused.wait(0.5)
        assert {path.name for path in etc.iterdir()} == {"gres.conf", "plugstack.conf"}
        assert not folder.exists()
        assert other.exists()
    finally:
        for process in (daemon, reused):
            process.kill()
            process.wait()


def test_a_second_cluster_is_refused_while_one_runs(tmp_path):
    with cluster.locked(tmp_path), pytest.raises(RuntimeError, match="another cluster"), cluster.locked(tmp_path):
        raise AssertionError("both have the lock")
    with cluster.locked(tmp_path):
        pass
