"""Every block of every page is run or read by a test, or is in ``EXCEPT`` with a reason.

Command blocks (``sh``) of ``RUN`` run in a copy of the repository for each page, in the order of the page; the grids of
``SHORTENED`` have fewer runs there, and ``BEFORE`` makes what a page's reader has already. Nothing is installed: lines
that begin with ``pip install`` are left out. Where a block with ``text`` follows at once, the page shows what is
printed: these lines must be printed in that order, numbers aside; a line ``…`` matches any others. `make test-full`
runs them; what is in ``ELSEWHERE`` is run by what it names.

Python is run by `test_page_code`. YAML is checked as an experiment's file, JSON is read as a corpus, and TOML names a
group of entry points that the package looks for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import test_page_code
import yaml

from gradwire.attribution.store.checks import CUSTOM
from gradwire.bench.config import Cell, Experiment
from gradwire.bench.config.file import check, read
from gradwire.comm.compressors.registry import COMPRESSORS
from gradwire.comm.topology import STRATEGIES
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.sources import SOURCES
from gradwire.lm.models.presets import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCS)]
RUN = (
    "README.md",
    "docs/tutorial.md",
    "docs/running.md",
    "docs/gradients.md",
    "docs/how-to/from-your-scripts.md",
    "docs/how-to/links.md",
    "docs/how-to/own-data.md",
    "docs/how-to/own-script.md",
    "docs/how-to/report.md",
    "docs/how-to/commands.md",
)
LONG_S = 3600  # of the longest block
ELSEWHERE = {  # first line of a block: what runs it
    "pip install .": "tests/test_wheel.py",
    "gradwire tokenize --data_path train.jsonl --output_dir tokens --vocab_size 4096 --max_length 256": (
        "tests/attribution/collect/test_less.py"
    ),
    "gradwire launch --world_size 2 -- train --data_path train.jsonl --output_dir warmup \\": (
        "tests/attribution/collect/test_less.py"
    ),
    "python benchmarks/attribution/lds.py --data_path tokens/shards --max_samples 250 --steps 60 --batch_size 16"
    " --dim 2048 --output_dir judged": "tests/benchmarks/test_attribution.py, with fewer trainings",
}
COLLECT = "grads collect --model_dir run/final_model --data_path tokens/shards --projection factored"
BEFORE = {  # page: commands
    "docs/gradients.md": f"""
cp my.json corpus.json
gradwire tokenize --data_path corpus.json --output_dir tokens --vocab_size 512 --max_length 64 --val_fraction 0.1
gradwire train --data_path tokens/shards --output_dir run --steps 9
gradwire {COLLECT} --split val --output_path grads-val --dim 64 4096
gradwire grads aggregate --base_path grads-val --dim 4096
""",
    "docs/how-to/from-your-scripts.md": """
python -c "import json; [print(json.dumps(one)) for one in json.load(open('my.json'))[:40]]" > train.jsonl
head -n 3 train.jsonl > anatomy.jsonl
gradwire train --data_path train.jsonl --output_dir run --steps 9 --max_length 128
cp -r run/final_model model
""",
    "docs/how-to/own-data.md": "cp my.json corpus.json",
}
SHORTENED = {  # experiment: its grid in the copy
    "configs/links.yaml": [
        {"strategies": ["ddp", "fsdp2"], "links": ["1gbit", "100mbit"], "compressors": ["none", "int8"]},
        {"strategies": ["ddp", "fsdp2"], "world_sizes": [1], "compressors": ["none"]},
    ]
}
GROUPS = {CUSTOM, *(plugins.group for plugins in (COMPRESSORS, SOURCES, STRATEGIES, PRESETS))}
EXPERIMENT = {"name": "page", "compressors": {"none": {}}, "grid": {"strategies": ["fsdp2"], "world_sizes": [2]}}
EXCEPT = {  # page, and how the block begins: why no test runs it as it is, or what does so in another way
    ("README.md", " import torch.distributed"): "a change of a script; docs/how-to/own-script.md has its lines",
    ("CONTRIBUTING.md", ".venv/bin/pre-commit install"): "it writes into .git",
    ("docs/add-a-compressor.md", '"""Natural'): "tests/comm/compressors/test_adding.py",
    (
        "docs/add-a-compressor.md",
        "gradwire compressors dither",
    ): "tests/comm/compressors/test_adding.py, with the class",
    ("docs/add-a-compressor.md", "python -m pytest"): "tests/comm/compressors/test_adding.py, with the class",
    ("docs/how-to/add-a-check.md", '"""Checks'): "tests/attribution/store/test_adding_check.py",
    ("docs/how-to/add-a-source.md", '"""Tickets'): "tests/lm/data/test_adding_source.py",
    ("docs/clusters.md", "pip install -r"): "it needs a cluster; tests/slurm runs experiments on one of this machine",
    ("docs/clusters.md", "#SBATCH --nodes"): "it needs a cluster; tests/slurm/test_nodes.py",
    ("docs/containers.md", "make image"): "it needs podman; tests/container",
    ("docs/containers.md", "make run PROFILE"): "it needs an image; tests/container",
    ("docs/containers.md", ".venv/bin/python containers"): "it needs podman; tests/container",
    ("docs/evidence.md", "make run"): "it takes six minutes and shaped links",
    (
        "docs/private-training.md",
        "$ gradwire launch",
    ): "tests/bench/training/test_private.py has its flags, and more steps",
    (
        "docs/running.md",
        "gradwire launch --world_size 2 -- train ...",
    ): "`...`; tests/bench/training/test_checkpoints.py",
    ("docs/running.md", "make run CONFIG=configs/gpus.yaml"): "it needs GPUs; its grid: tests/bench/config",
    ("docs/explanation/lost-machines.md", "torchft_lighthouse"): "tests/faults/test_quorum.py starts one",
    ("docs/explanation/lost-machines.md", "from datetime"): "it needs several groups; tests/helpers/quorum_group.py",
    ("docs/how-to/torchtitan.md", "for number, part"): "lines of examples/with_torchtitan.py, of which a test sees to",
    ("docs/how-to/configure.md", "results/<name>"): "a list of files; tests/bench/workflow",
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.,]*")


class Block(NamedTuple):
    """A fenced block of a page, and what the page shows as its output."""

    page: str
    line: int
    language: str
    text: str
    printed: str | None

    @property
    def elsewhere(self) -> bool:
        """Whether another test runs these commands."""
        return first_line(self) in ELSEWHERE


def first_line(block: Block) -> str:
    return block.text.splitlines()[0].partition("  #")[0].rstrip()


def blocks(page: str) -> list[Block]:
    """A page's blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in pairwise([*fences, None]):
        adjacent = following and following[1] == "text" and text[fence.end() : following.start()].strip() == ""
        printed = following[2] if following and adjacent else None
        found.append(Block(page, text.count("\n", 0, fence.start()) + 1, fence[1], fence[2], printed))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.language == "sh" and block.page in RUN]
HERE = [
    pytest.param(block, id=f"{block.page}:{block.line}", marks=pytest.mark.full)
    for block in COMMANDS
    if not block.elsewhere
]


def of(language: str) -> list:
    """The blocks of a language, to be parameters of a test."""
    found = [block for block in BLOCKS if block.language == language]
    return [pytest.param(block, id=f"{block.page}-{number}") for number, block in enumerate(found)]


def excepted(block: Block) -> list[tuple[str, str]]:
    """The entries of ``EXCEPT`` that are about a block."""
    return [key for key in EXCEPT if key[0] == block.page and block.text.startswith(key[1])]


def is_tested(block: Block) -> bool:
    """Whether a test runs or reads a block."""
    run = {"sh": RUN, "python": {*test_page_code.PAGES, *test_page_code.OF_SAMPLES, *test_page_code.PROGRAMS}}
    return block.language in ("yaml", "json", "toml", "text") or block.page in run.get(block.language, ())


def test_every_block_is_tested_or_has_a_reason():
    """`text` is what a command prints, which is compared below, or a formula."""
    assert [block for block in BLOCKS if not is_tested(block) and not excepted(block)] == []
    used = {key for block in BLOCKS for key in excepted(block)}
    assert used == EXCEPT.keys(), "an exception that is none"


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_valid(block, tmp_path):
    given = yaml.safe_load(block.text)
    if given.keys() <= {"extends", *Experiment.model_fields}:
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        (tmp_path / "page.yaml").write_text(yaml.safe_dump(given if "extends" in given else EXPERIMENT | given))
        assert check(read(tmp_path / "page.yaml")).runs()
    else:  # cells
        assert all(Cell.parse(label, cell).method for label, cell in given.items())


@pytest.mark.parametrize("block", of("json"))
def test_json_is_a_corpus(block, tmp_path):
    (tmp_path / "corpus.json").write_text(block.text)
    assert [one.id for one in documents(tmp_path / "corpus.json")] == [one["id"] for one in json.loads(block.text)]


def test_a_chat_reads_as_the_page_shows(tmp_path):
    page = "docs/how-to/own-data.md"
    (tmp_path / "corpus.json").write_text(next(b.text for b in BLOCKS if b.page == page and "messages" in b.text))
    (shown,) = [block.text for block in BLOCKS if block.page == page and block.language == "text"]
    assert [one.body for one in documents(tmp_path / "corpus.json")][-1] == shown.rstrip("\n")


@pytest.mark.parametrize("block", of("toml"))
def test_toml_is_an_entry_point(block):
    assert tomllib.loads(block.text)["project"]["entry-points"].keys() <= GROUPS


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[Block], str]:
    """The output of a block; those that it may build on are run before, each once."""
    folders: dict[str, Path] = {}
    printed: dict[Block, str] = {}

    def run(block: Block) -> str:
        if block.page not in folders:
            folders[block.page] = checkout(tmp_path_factory.mktemp("checkout"))
            execute(BEFORE.get(block.page, ""), folders[block.page])
        for earlier in (other for other in COMMANDS if other.page == block.page):
            if earlier not in printed and not earlier.elsewhere:
                printed[earlier] = execute(earlier.text, folders[block.page])
            if earlier == block:
                return printed[block]
        raise AssertionError(block)

    return run


def checkout(folder: Path) -> Path:
    """A copy of the repository's files with the environment, and a corpus of the reader's own."""
    made = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]

    def left_out(where: str, names: list[str]) -> set[str]:
        paths = {name: str(Path(where, name).relative_to(ROOT)) for name in names}
        return {name for name in names for one in (".git", *made) if fnmatch(name, one) or paths[name] == one}

    shutil.copytree(ROOT, folder, ignore=left_out, dirs_exist_ok=True)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        os.utime(folder / name, (0, 0))  # make shall not install this copy into the environment
    for path, grid in SHORTENED.items():
        experiment = yaml.safe_load((folder / path).read_text())
        (folder / path).write_text(yaml.safe_dump({**experiment, "grid": grid}))
    words = ["gradient", "sample", "wire", "rank", "shard", "token", "byte", "sum", "mean", "row"]
    texts = [" ".join(words[(i * j + j) % 10] for j in range(40 + i % 7)) for i in range(200)]
    own = [{"id": f"own/{i}", "title": f"Title {i}", "text": text} for i, text in enumerate(texts)]
    (folder / "my.json").write_text(json.dumps(own))
    return folder


def execute(commands: str, folder: Path) -> str:
    """Run a block as bash would, ending at its first failing command; its standard output."""
    commands = "\n".join(line for line in commands.splitlines() if not line.startswith("pip install"))
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**os.environ, "PATH": tools, "PYTHONPATH": str(folder / "src"), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def masked(line: str) -> str:
    """A line without its numbers, spaces and rules, which differ from run to run."""
    return re.sub(r"[\s-]+", " ", NUMBER.sub("#", line)).strip()


def missing(shown: str, printed: str) -> str | None:
    """The first line that a page shows and a command did not print, in that order; None if there is none.

    A line that ends with "…" shows how a printed one begins.
    """
    lines = iter([masked(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        start = masked(line.removesuffix("…"))
        if start and not any(text == start or (line.endswith("…") and text.startswith(start)) for text in lines):
            return line  # `any` moves the iterator on
    return None


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("block", HERE)
def test_the_commands_run_and_print_what_the_page_shows(ran, block):
    printed = ran(block)
    if block.printed is not None:
        assert missing(block.printed, printed) is None, printed


def test_every_block_has_its_place():
    assert set(map(first_line, COMMANDS)) >= set(ELSEWHERE)


def test_a_line_that_is_not_printed_is_found():
    printed = "one 1\ntwo 22.5 ms\nthree"
    assert missing("one 7\n…\nthree", printed) is None
    assert missing("two 3 ms\none 1", printed) == "one 1"
    assert missing("two 3 s", printed) == "two 3 s"
    assert missing("one …\ntwo 3 …\nthree", printed) is None
    assert missing("two 3 s …", printed) == "two 3 s …"


def test_a_failing_command_ends_its_block(tmp_path):
    with pytest.raises(AssertionError, match="no such thing"):
        execute("echo 'no such thing' >&2; false | cat; touch after", tmp_path)
    assert not (tmp_path / "after").exists()
