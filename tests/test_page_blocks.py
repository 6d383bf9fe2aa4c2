"""Every block of every page is run or read by a test, or is in ``EXCEPT`` with a reason.

Commands are run by `test_commands`, which has exceptions of its own, and Python by `test_page_code`. Here YAML is
checked as an experiment's file, JSON is read as a corpus, and TOML names a group of entry points that the package looks
for.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import test_commands
import test_page_code
import yaml

from gradwire.bench.config import Cell, Experiment
from gradwire.bench.workflow.experiment import check, read
from gradwire.comm.compressors.registry import COMPRESSORS
from gradwire.comm.topology import STRATEGIES
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.sources import SOURCES
from gradwire.lm.models.presets import PRESETS

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in DOCS)]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GROUPS = {plugins.group for plugins in (COMPRESSORS, SOURCES, STRATEGIES, PRESETS)}
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
    ("docs/how-to/add-a-source.md", '"""Tickets'): "tests/lm/data/test_adding_source.py",
    ("docs/clusters.md", "pip install -r"): "it needs a cluster; tests/slurm runs experiments on one of this machine",
    ("docs/clusters.md", "#SBATCH"): "it needs a cluster; tests/slurm/test_nodes.py",
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
    ("docs/how-to/configure.md", "results/<name>"): "a list of files; tests/bench/workflow",
}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str


BLOCKS = [Block(page, *found) for page in PAGES for found in FENCE.findall((ROOT / page).read_text(encoding="utf-8"))]


def of(language: str) -> list:
    """The blocks of a language, to be parameters of a test."""
    found = [block for block in BLOCKS if block.language == language]
    return [pytest.param(block, id=f"{block.page}-{number}") for number, block in enumerate(found)]


def excepted(block: Block) -> list[tuple[str, str]]:
    """The entries of ``EXCEPT`` that are about a block."""
    return [key for key in EXCEPT if key[0] == block.page and block.text.startswith(key[1])]


def is_tested(block: Block) -> bool:
    """Whether a test runs or reads a block."""
    run = {"sh": test_commands.PAGES, "python": test_page_code.PAGES}
    return block.language in ("yaml", "json", "toml", "text") or block.page in run.get(block.language, ())


def test_every_block_is_tested_or_has_a_reason():
    """`text` is what a command prints, which `test_commands` compares, or a formula."""
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
