"""docs/how-to/add-a-check.md does what it says: `grads validate` runs its function on a store."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from gradwire import cli
from gradwire.attribution.store import checks, store

PAGE = (Path(__file__).parents[3] / "docs/how-to/add-a-check.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The one code block of that language on the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def offered(monkeypatch) -> ModuleType:
    """The page's module as another package's, by the page's entry point."""
    ((group, entries),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    ((name, value),) = entries.items()
    module = ModuleType(value.partition(":")[0])
    monkeypatch.setitem(sys.modules, module.__name__.partition(".")[0], ModuleType("package"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(block("python"), module.__dict__)
    entry = EntryPoint(name, value, group)
    monkeypatch.setattr(checks, "entry_points", lambda group: [entry] * (group == entry.group))
    return module


def entry(run: Path) -> dict:
    return json.loads((run / "validation.json").read_text())["checks"][-1]


@pytest.mark.full
def test_validate_runs_the_pages_check(offered, small, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["--model_dir", small.model, "--data_path", small.shards, "--max_samples", 5, "--output_path", run]
    assert cli.main(["grads", "collect", *map(str, words), "--dim", "8"]) == 0
    validate = ["grads", "validate", "--output_dir", str(run), "--check_ranks"]
    assert cli.main(validate) == 0
    assert entry(run) == {"name": "samples and losses", "passed": True, "detail": str(run)}
    held_out = store.read_ids(run / "rank_0/dim8/all_ids.pkl")[3]
    (run / "held_out.txt").write_text(f"another\n{held_out}\n")
    offered.LARGEST = 0.0
    assert cli.main(validate) == 1
    assert f"all_ids.pkl: {held_out!r} is held out" in entry(run)["detail"]
    assert "6 problems in all" in entry(run)["detail"] and "all_meta.parquet: the loss of" in entry(run)["detail"]
    capsys.readouterr()
    del offered.examined.__globals__["LARGEST"]
    assert cli.main(validate) == 2
    assert "the check samples and losses (my_package.checks:examined) raised NameError" in capsys.readouterr().err
