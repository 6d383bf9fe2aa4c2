"""docs/add-a-compressor.md does what it says: its class is found as a file and as another package's entry point."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "add-a-compressor.md").read_text(encoding="utf-8")

FINDS_IT = """
import sys
import pytest, torch
from gradwire import cli
from gradwire.comm.compressors import available, build, method_class, option_schema
from gradwire.bench.codecs.cases import cases
from gradwire.bench.config import Cell
from gradwire.base.errors import BadInput

assert method_class("dither").__module__ == sys.argv[1]
assert "dither" in available()
assert "dither" in [case.name for case in cases()]
assert option_schema("dither")["properties"]["levels"]["default"] == 7
assert Cell.parse("dither", {"levels": 5, "dense_steps": 2}).options == {"levels": 5}
assert Cell.parse("few", {"method": "topk+dither", "dither.levels": 3}).method == "topk+dither"
for wrong, message in (
    ({"level": 5}, "unknown option of dither 'level'. Did you mean 'levels'"),
    ({"levels": 9}, "dither option 'levels' is 9: it must be less than or equal to 7"),
):
    try:
        Cell.parse("dither", wrong)
        raise AssertionError(wrong)
    except BadInput as error:
        assert message in str(error), error
assert cli.main(["compressors", "dither"]) == 0
x = torch.tensor([[1.0, -0.25, 0.0], [0.5, 1 / 64, -1.0]])
wire = build("dither").encode(x, generator=torch.Generator())
assert torch.equal(build("dither").decode(wire, (2, 3)), x), "powers of two travel exactly"
parts = ["round_trip", "same_generator", "not_finite", "another_size", "declared_unbiased", "no_float"]
alone = "dither and not topk and not randomk and not threshold and not hadamard"
sys.exit(pytest.main(["tests/comm/compressors/test_conformance.py", "-p", "no:cacheprovider", "-k",
                      f"{alone} and ({' or '.join(parts)})"]))
"""


def block(language: str) -> str:
    """The one code block of that language on the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def as_a_file(folder: Path) -> str:
    """Put the class among the methods of a copy of the package; the class's module."""
    copy = shutil.copytree(Path(gradwire.__file__).parent, folder / "gradwire", ignore=shutil.ignore_patterns("*.pyc"))
    (copy / "comm" / "compressors" / "methods" / "dither.py").write_text(block("python"), encoding="utf-8")
    return "gradwire.comm.compressors.methods.dither"


def as_an_entry_point(folder: Path) -> str:
    """Put the class into a package with the page's entry point, as an installer would; the class's module."""
    ((group, offered),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    ((name, value),) = offered.items()
    module = value.partition(":")[0]
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(block("python"), encoding="utf-8")
    installed = folder / f"{file.parent.name}-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {file.parent.name}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    return module


WAYS = [as_a_file, as_an_entry_point]


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[dict]:
    """A process for each way, both at once."""
    started = {}
    for way in WAYS:
        folder = tmp_path_factory.mktemp(way.__name__)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        started[way] = subprocess.Popen(
            [sys.executable, "-c", FINDS_IT, way(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_the_pages_compressor_is_found_everywhere(running, way):
    printed, _ = running[way].communicate(timeout=240)
    assert running[way].returncode == 0, printed
    assert "dither (quantizer): Sends a sign and a power of two per element; unbiased." in printed
    assert "levels  integer >= 1, <= 7 [7]  powers of two" in printed
    (passed,) = re.findall(r"(\d+) passed", printed)
    assert int(passed) >= 6, printed  # one of each part at least
