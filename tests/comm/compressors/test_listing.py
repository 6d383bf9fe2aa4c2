"""The lines of `gradwire compressors` about every method."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.cli import main
from gradwire.comm.compressors import build
from gradwire.comm.compressors.listing import MATRIX
from gradwire.comm.compressors.registry import available, option_schema


@pytest.mark.parametrize("name", available())
def test_a_method_is_shown_with_its_use_its_size_and_its_options(name, capsys):
    assert main(["compressors", name]) == 0
    head, use, wire, *options = capsys.readouterr().out.rstrip().splitlines()
    assert head.startswith(f"{name} (") and "Sends " in head
    assert use.strip().endswith(".") and len(use) < 130, "no sentence on when to take it"
    size = build(name).wire_bytes(MATRIX)
    assert wire.split()[0] == "Wire:" and (f" {size:,} bytes" in wire if size is not None else "the data" in wire)
    assert [line.split()[0] for line in options] == list(option_schema(name).get("properties", {}))


def test_the_readme_counts_the_methods():
    readme = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert f"`gradwire compressors` lists the {len(available())} methods" in readme
