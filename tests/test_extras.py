"""The core installs few packages: what needs more names the extra that brings it.

Of `base/extras.py`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import HOMES
from gradwire.base.extras import EXTRAS

ROOT = Path(__file__).parents[1]
# Every Python process that finds this file has none of the extras' packages, as after a bare `pip install gradwire`.
WITHOUT_EXTRAS = (
    f"import sys; sys.modules.update(dict.fromkeys({[name for names in EXTRAS.values() for name in names]}))"
)
FLOORS = ("gradwire.lm", "gradwire.attribution", "gradwire.bench")
PUBLIC = [name for name, home in HOMES.items() if not home.startswith(FLOORS)]


@pytest.fixture
def core(tmp_path):
    """Run a command without the packages of the extras."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return run


def test_the_public_names_load_no_other_floor_and_no_package_of_an_extra(core):
    done = core(
        "-c", f"from gradwire import {', '.join(PUBLIC)}; import json, sys; print(json.dumps(list(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert not [name for name in json.loads(done.stdout) if name.startswith(FLOORS)]


def test_two_ranks_train_with_the_core_alone(core):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = core(*torchrun, str(ROOT / "examples/ddp.py"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", ["compressors", "doctor", "launch --help"])
def test_a_verb_of_the_core_needs_no_extra(core, words):
    done = core("-m", "gradwire", *words.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("train --help", "tokenizers", "bench"),
        ("tokenize --data_path a --output_dir b", "tokenizers", "attribution"),
        ("grads influence --help", "pyarrow", "attribution"),
        ("status results", "tokenizers", "bench"),
    ],
)
def test_a_missing_package_is_one_line_that_names_its_extra(core, words, package, extra):
    done = core("-m", "gradwire", *words.split())
    verb = " ".join(words.split()[: 2 if words.startswith(("grads", "bench")) else 1])
    assert done.returncode == 2
    assert done.stderr == f"gradwire {verb}: this needs {package}: pip install 'gradwire[{extra}]'.\n"


@pytest.mark.parametrize("floor", ["lm", "attribution"])
def test_an_import_of_a_floor_names_its_extra(core, floor):
    done = core("-c", f"import gradwire.{floor}")
    message = rf"ModuleNotFoundError: gradwire.{floor} needs \w+: pip install 'gradwire\[attribution\]'.\n"
    assert re.search(message, done.stderr)
