"""Every command block of ``PAGES`` runs, in a copy of the repository for each page, in the order of the page.

The grids of ``SHORTENED`` have fewer runs there: that a command works does not take its whole experiment. ``BEFORE``
makes what a page's reader has already. Nothing is installed: lines that begin with ``pip install`` are left out.

A block is a fence with the language ``sh``. Where one with ``text`` follows it at once, the page shows what is printed:
these lines must be printed in that order, numbers aside; a line ``…`` matches any others. `make test-full` runs
them; what is in ``ELSEWHERE`` is run by what it names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/running.md",
    "docs/gradients.md",
    "docs/how-to/links.md",
    "docs/how-to/own-data.md",
    "docs/how-to/own-script.md",
    "docs/how-to/report.md",
    "docs/how-to/verbs.md",
)
LONG_S = 3600  # of the longest block
ELSEWHERE = {  # first line of a block: what runs it
    "make test": ".ci/run",
    "pip install .": "tests/test_wheel.py",
    "gradwire tokenize --data_path train.jsonl --output_dir tokens --vocab_size 4096 --max_length 256": (
        "tests/attribution/collect/test_less.py"
    ),
    "gradwire grads lds --data_path tokens/shards --max_samples 250 --steps 60 --batch_size 16 --dim 2048"
    " --output_dir judged": "tests/bench/judge/test_attribution.py, with fewer trainings",
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
    "docs/how-to/own-data.md": "cp my.json corpus.json",
}
SHORTENED = {  # experiment: its grid in the copy
    "configs/links.yaml": [
        {"strategies": ["ddp", "fsdp2"], "links": ["1gbit", "100mbit"], "compressors": ["none", "int8"]},
        {"strategies": ["ddp", "fsdp2"], "world_sizes": [1], "compressors": ["none"]},
    ]
}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d.,]*")


class Block(NamedTuple):
    """Commands of a page, and what the page says that they print."""

    page: str
    line: int
    commands: str
    printed: str | None

    @property
    def first(self) -> str:
        """The first line."""
        return self.commands.splitlines()[0].partition("  #")[0].rstrip()

    @property
    def elsewhere(self) -> bool:
        """Whether it is not run here."""
        return self.first in ELSEWHERE


def blocks(page: str) -> list[Block]:
    """A page's blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] == "sh":
            adjacent = following and following[1] == "text" and text[fence.end() : following.start()].strip() == ""
            printed = following[2] if following and adjacent else None
            found.append(Block(page, text.count("\n", 0, fence.start()) + 1, fence[2], printed))
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
HERE = [
    pytest.param(block, id=f"{block.page}:{block.line}", marks=pytest.mark.full)
    for block in BLOCKS
    if not block.elsewhere
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Callable[[Block], str]:
    """What a block printed; those that it may build on are run before, each once."""
    folders: dict[str, Path] = {}
    printed: dict[Block, str] = {}

    def run(block: Block) -> str:
        if block.page not in folders:
            folders[block.page] = checkout(tmp_path_factory.mktemp("checkout"))
            execute(BEFORE.get(block.page, ""), folders[block.page])
        for earlier in blocks(block.page):
            if earlier not in printed and not earlier.elsewhere:
                printed[earlier] = execute(earlier.commands, folders[block.page])
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
    for name in ("requirements.lock", "pyproject.toml"):
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
    """The first line that a page shows and a command did not print, in that order; None if there is none."""
    lines = iter([masked(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        if line.strip() not in ("", "…") and masked(line) not in lines:  # `in` moves the iterator on
            return line
    return None


@pytest.mark.timeout(LONG_S)
@pytest.mark.parametrize("block", HERE)
def test_the_commands_run_and_print_what_the_page_shows(ran, block):
    printed = ran(block)
    if block.printed is not None:
        assert missing(block.printed, printed) is None, printed


def test_every_block_has_its_place():
    assert {block.first for block in BLOCKS} >= set(ELSEWHERE)
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()
    assert "test: kernels" in (ROOT / "Makefile").read_text().splitlines()


def test_a_line_that_is_not_printed_is_found():
    printed = "one 1\ntwo 22.5 ms\nthree"
    assert missing("one 7\n…\nthree", printed) is None
    assert missing("two 3 ms\none 1", printed) == "one 1"
    assert missing("two 3 s", printed) == "two 3 s"


def test_a_failing_command_ends_its_block(tmp_path):
    with pytest.raises(AssertionError, match="no such thing"):
        execute("echo 'no such thing' >&2; false | cat; touch after", tmp_path)
    assert not (tmp_path / "after").exists()
