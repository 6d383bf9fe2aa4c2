"""The core installs few packages: what needs more names the extra that brings it.

Of `base/extras.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import HOMES
from gradwire.base.extras import EXTRAS

ROOT = Path(__file__).parents[1]
FLOORS = ("gradwire.lm", "gradwire.attribution", "gradwire.bench")
PUBLIC = [name for name, home in HOMES.items() if not home.startswith(FLOORS)]
CORE = ("compressors", "doctor", "launch --help")  # commands that need no extra
LACKING = {  # commands, a package that is missing, and its extra
    "train --help": ("tokenizers", "bench"),
    "tokenize --data_path a --output_dir b": ("tokenizers", "attribution"),
    "grads influence --help": ("pyarrow", "attribution"),
    "status results": ("tokenizers", "bench"),
}
# One process for all tests, because importing torch takes seconds. It has none of the extras' packages, as after a bare
# `pip install gradwire`, and writes what happens to the file that it is given.
SCRIPT = f"""if True:
    import contextlib, importlib, io, json, os, runpy, sys

    sys.modules.update(dict.fromkeys({[name for names in EXTRAS.values() for name in names]}))
    import gradwire
    assert not {{"torch", "numpy", "pydantic"}} & set(sys.modules), "an import of the package loads none of them"
    assert dir(gradwire) == sorted([*gradwire.HOMES, "__version__"]), "the public names and nothing else"
    messages = {{}}
    for wrong in ("compress", "compres_gradients", "Diloco", "topk", "__wrapped__"):
        try:
            getattr(gradwire, wrong)
        except AttributeError as error:
            messages[wrong] = str(error)
    assert not {{"torch", "pydantic"}} & set(sys.modules)
    from gradwire import {", ".join(PUBLIC)}
    seen = {{"messages": messages, "modules": list(sys.modules), "floors": {{}}, "commands": {{}}}}

    ranks = []
    for rank in range(2):
        if not (child := os.fork()):
            store = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "WORLD_SIZE": "2", "RANK": str(rank)}}
            os.environ.update(store)
            runpy.run_path({str(ROOT / "examples" / "ddp.py")!r}, run_name="__main__")
            os._exit(0)
        ranks.append(child)
    seen["ranks"] = [os.waitpid(child, 0)[1] for child in ranks]

    for floor in ("lm", "attribution"):
        try:
            importlib.import_module("gradwire." + floor)
        except ModuleNotFoundError as error:
            seen["floors"][floor] = str(error)
    from gradwire.cli import main
    for words in {[*CORE, *LACKING]}:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
            try:
                code = main(words.split())
            except SystemExit as stop:
                code = stop.code
        seen["commands"][words] = code, printed.getvalue()
    open(sys.argv[1], "w").write(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Behaviour without the packages of the extras."""
    folder = tmp_path_factory.mktemp("core")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "seen.json", port],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_the_public_names_load_no_other_floor_and_no_package_of_an_extra(core):
    assert not [name for name in core["modules"] if name.startswith(FLOORS)]


def test_a_wrong_name_is_an_attribute_error_with_the_nearest_one(core):
    assert "has no attribute 'compress'" in core["messages"]["compress"]
    for wrong, right in {"compres_gradients": "compress_gradients", "Diloco": "DiLoCo", "topk": "TopK"}.items():
        assert f"Did you mean {right!r}" in core["messages"][wrong]
    assert "__wrapped__" in core["messages"]


def test_two_ranks_train_with_the_core_alone(core):
    assert core["ranks"] == [0, 0]


@pytest.mark.parametrize("words", CORE)
def test_a_command_of_the_core_needs_no_extra(core, words):
    code, printed = core["commands"][words]
    assert code == 0, printed


@pytest.mark.parametrize("words", LACKING)
def test_a_missing_package_is_one_line_that_names_its_extra(core, words):
    package, extra = LACKING[words]
    command = " ".join(words.split()[: 2 if words.startswith("grads") else 1])
    message = f"gradwire {command}: this needs {package}: pip install 'gradwire[{extra}]'.\n"
    assert core["commands"][words] == [2, message]


@pytest.mark.parametrize("floor", ["lm", "attribution"])
def test_an_import_of_a_floor_names_its_extra(core, floor):
    message = rf"gradwire.{floor} needs \w+: pip install 'gradwire\[attribution\]'."
    assert re.fullmatch(message, core["floors"][floor])
