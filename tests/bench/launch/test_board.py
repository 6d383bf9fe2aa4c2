"""`make train` and TensorBoard for a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from gradwire import cli

ROOT = Path(__file__).parents[3]
TRAIN = "--data_path corpus.json --cache_dir tokens --max_length 32 --output_dir run --model micro --vocab_size 290"
TRAIN += " --batch_size 2 --steps 100000 --device cpu --no-profile --eval_every 0"


def test_tensorboard_in_a_simulated_network_is_refused(tmp_path, capsys):
    train = ["--", "train", "--data_path", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    assert cli.main(["launch", "--tensorboard", "--world_size", "2", "--link", "10mbit", *train]) == 2
    assert "cannot be reached in the simulated network of --link 10mbit" in capsys.readouterr().err


def until(found: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def answer(address: str) -> list[str] | None:
    """The runs that TensorBoard shows; None if nobody answers."""
    with suppress(URLError), urlopen(f"{address}data/runs", timeout=10) as page:
        return json.load(page)
    return None


@pytest.mark.full
def test_make_train_shows_gpus_progress_and_tensorboard_until_ctrl_c(tmp_path):
    """Ctrl-C reaches the whole group of a terminal's command: `make`, its shell, `tee` and the launcher."""
    for name in ("requirements.lock", "pyproject.toml", "bin/gradwire", "bin/.ready"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bin/gradwire").write_text(f'#!/bin/sh\nexec {sys.executable} -m gradwire "$@"\n')
    (tmp_path / "bin/gradwire").chmod(0o755)
    texts = [f"document {number} says {number * number}" for number in range(60)]
    corpus = [{"id": f"d{number}", "title": "", "text": text} for number, text in enumerate(texts)]
    (tmp_path / "corpus.json").write_text(json.dumps(corpus))
    command = ["make", "-f", str(ROOT / "Makefile"), "train", "BIN=bin", "READY=bin/.ready", f"ARGS={TRAIN}"]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # of `make test-full`: a make inside it prints its folder
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment["PYTHONPATH"] = str(ROOT / "src")
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as running:
        try:
            until(lambda: [*tmp_path.glob("logs/train-*.log")])
            (log,) = tmp_path.glob("logs/train-*.log")
            until(lambda: re.search(r"^step \d+/100000, loss .* left$", log.read_text(), re.M))
            (address,) = re.findall(r"TensorBoard is at (http://localhost:\d+/)", log.read_text())
            until(lambda: answer(address) == ["logs/tensorboard"])
            os.killpg(running.pid, signal.SIGINT)
            printed, _ = running.communicate(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert re.search(r"^GPUs +", printed, re.M) and printed.endswith(log.read_text())
    assert "stopped" in log.read_text() and [*tmp_path.glob("run/checkpoints/*")]
    assert answer(address) is None
