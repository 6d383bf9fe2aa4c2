"""The doctor on this machine.

Of `base/machine.py`.
"""

from __future__ import annotations

import re
import socket

import pytest
import torch

from gradwire import cli
from gradwire.bench import doctor
from gradwire.comm.collectives import world


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "samples"), [(2, 16), (3, 24)])
def test_ranks_collect_and_every_row_is_proven(ranks, samples, capsys, monkeypatch):
    """Three GPUs are counted, and three ranks train on the CPU."""
    monkeypatch.setattr(world, "detect_gpus", lambda: 0 if ranks == 2 else ranks)
    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    assert cli.main(["doctor", "--multi_gpu"]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed and "processors" in printed
    assert printed.count("ok  ") == 4 and "failed" not in printed
    assert f"train a model on {ranks} ranks" in printed and f"collect {samples} gradients on {ranks} ranks" in printed


@pytest.mark.parametrize(("gpus", "ranks", "backend"), [(8, 8, "auto"), (1, 2, "gloo"), (0, 2, "gloo")])
def test_every_gpu_is_checked(gpus, ranks, backend, monkeypatch):
    steps = {}
    monkeypatch.setattr(doctor, "step", lambda title, words: steps.update({title: words}))
    doctor.multi_gpu(gpus, 0)
    started = [words for words in steps.values() if words[0] == "launch"]
    assert [words[words.index("--world_size") + 1] for words in started] == 2 * [str(ranks)]
    assert [words[words.index("--backend") + 1] for words in started] == 2 * [backend]


def test_what_is_missing_is_named_with_the_way_to_get_it_and_is_no_failure(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["doctor"]) == 0
    there, missing = capsys.readouterr().out.split("optional, not found")
    for name, advice in {
        "links": "root or user namespaces",
        "containers": "containers/get-apptainer",
        "Slurm": "login node",
    }.items():
        assert any(line.startswith(name) and " no" in line for line in there.splitlines())
        assert any(line.split()[0] == name and advice in line for line in missing.splitlines() if line)


def test_what_is_there_is_not_missing(capsys):
    assert cli.main(["doctor"]) == 0
    there, _, missing = capsys.readouterr().out.partition("optional, not found")
    assert re.search(r"^extras +attribution, bench", there, re.M)
    assert "bench" not in missing


def test_a_port_in_use_is_reported(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["doctor", "--multi_gpu", "--master_port", str(port)]) == 1
    captured = capsys.readouterr()
    assert "failed       train a model on 2 ranks" in captured.out
    assert str(port) in captured.err
