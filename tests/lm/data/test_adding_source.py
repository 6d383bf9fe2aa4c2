"""docs/how-to/add-a-source.md does what it says: its class is a source as those of the package are."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from gradwire.base import plugins
from gradwire.base.errors import BadInput
from gradwire.bench.config import Dataset
from gradwire.cli import main
from gradwire.lm.data import sources
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.sources import SOURCES

PAGE = (Path(__file__).parents[3] / "docs/how-to/add-a-source.md").read_text(encoding="utf-8")
EXPORT = 'id,title,text,state\n7,Broken,It does not start.,open\n8,Old,It was slow.,closed\n9,Odd,"A, b.",open\n'


def block(language: str) -> str:
    """The one code block of that language on the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


@pytest.fixture
def export(monkeypatch, tmp_path) -> Path:
    """The page's class as another package's, by the page's entry point; a tracker's export."""
    ((group, offered),) = tomllib.loads(block("toml"))["project"]["entry-points"].items()
    ((name, value),) = offered.items()
    module = ModuleType(value.partition(":")[0])
    monkeypatch.setitem(sys.modules, module.__name__.partition(".")[0], ModuleType("package"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(block("python"), module.__dict__)
    entry = EntryPoint(name, value, group)
    assert group == SOURCES.group
    monkeypatch.setattr(plugins, "entry_points", lambda asked: (entry,) if asked == group else ())
    monkeypatch.delitem(sys.modules, "gradwire.lm.data.download", raising=False)  # its flags are those of the sources
    file = tmp_path / "export.csv"
    file.write_text(EXPORT)
    return file


def test_the_pages_source_reads_documents(export, tmp_path):
    assert "tickets" in SOURCES.available()
    output = tmp_path / "corpus.json"
    assert main(["download", "--source", "tickets", "--data_path", str(export), "--output", str(output)]) == 0
    assert [(one.id, one.title, one.body) for one in documents(output)] == [
        ("7", "Broken", "It does not start."),
        ("9", "Odd", "A, b."),
    ]
    every = sources.build("tickets", {"data_path": str(export), "closed": True})
    assert [one.id for one in every.open().documents] == ["7", "8", "9"]
    folder = Dataset(source="tickets", data_path=str(export)).corpus_folder
    assert folder != Dataset(source="tickets", data_path=str(export), closed=True).corpus_folder
    export.write_text(EXPORT.replace("slow", "late"))
    assert folder != Dataset(source="tickets", data_path=str(export)).corpus_folder, "the content decides"


def test_the_pages_source_refuses_a_file_that_does_not_exist(export, tmp_path, capsys):
    words = ["download", "--source", "tickets", "--data_path", "nowhere.csv", "--output", str(tmp_path / "c.json")]
    assert main(words) == 2
    assert "data_path: there is no export nowhere.csv." in capsys.readouterr().err
    with pytest.raises(BadInput, match=r"there is no export nowhere\.csv"):
        _ = Dataset(source="tickets", data_path="nowhere.csv").corpus_folder
    with pytest.raises(BadInput, match="Did you mean 'closed'"):
        sources.build("tickets", {"data_path": str(export), "close": True})
