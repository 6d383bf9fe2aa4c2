"""Sources: every one keeps the contract, whoever wrote it; text files and saved datasets, read as they are.

Of `sources/datasets.py`, `sources/json.py`, `sources/pydocs.py`, `sources/text.py`, `sources/wikipedia.py`.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from data_samples import values, write_corpus
from pydantic import Field

from gradwire.base import plugins
from gradwire.base.errors import BadInput
from gradwire.base.strict import checked, to_flags
from gradwire.bench.config import Dataset
from gradwire.cli import main
from gradwire.lm.data import sources
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.document import Document, parse
from gradwire.lm.data.sources import SOURCES, Source, Stream
from gradwire.lm.data.sources import datasets as hub
from gradwire.lm.data.sources.text import split_title

MARKDOWN = "# First #\nalpha\n\nSecond\n------\nbeta\n"
RST = "Top\n===\n\nalpha\n\n-----\nBelow\n-----\n\nbeta\n"


class Numbers(Source):
    """A third party's source: so many documents."""

    name = "numbers"
    count: int
    odd: bool = Field(False, description="odd ones only")

    def open(self):
        made = ({"id": str(n), "text": f"the number {n}"} for n in range(self.odd, self.count, 1 + self.odd))
        return Stream("numbers", "1", parse(made, "numbers"))


@pytest.fixture(autouse=True)
def third_party(monkeypatch):
    """One more entry point of an installed package."""
    entry, installed = EntryPoint("numbers", f"{__name__}:Numbers", SOURCES.group), plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda group: installed(group) + (entry,) * (group == SOURCES.group))
    monkeypatch.delitem(sys.modules, "gradwire.lm.data.download", raising=False)  # its flags are those of the sources


def saved(folder, rows, splits=False):
    """A dataset as `save_to_disk` writes it, without its progress bars."""
    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(rows)
    (datasets.DatasetDict({"train": table, "test": table}) if splits else table).save_to_disk(str(folder))
    return folder


def example(name: str, folder: Path) -> dict:
    """Options of a small source of each kind."""
    folder.mkdir(exist_ok=True)
    if name == "json":
        return {"data_path": str(write_corpus(folder / "c.json", values(5)))}
    if name == "text":
        (folder / "a.txt").write_text("some words")
        (folder / "b.md").write_text("# Title\nother words")
        return {"data_path": str(folder)}
    if name == "datasets":
        return {"data_path": str(saved(folder / "set", {"text": ["one", "two", "three"]}))}
    if name == "wikipedia":
        table = pa.table({"id": ["1", "2"], "title": ["A", "B"], "text": ["one", "two"]})
        pa.parquet.write_table(table, folder / "w.parquet")
        return {"data_path": str(folder / "w.parquet")}
    return {"numbers": {"count": 6, "odd": True}}.get(name, {})


# pydocs reads 20 MB of source: test_corpus.py has its tests.
every_source = pytest.mark.parametrize("name", sorted({*SOURCES.available(), "numbers"} - {"pydocs"}))


@every_source
def test_a_source_keeps_the_contract(name, tmp_path):
    source = sources.build(name, example(name, tmp_path / "in"))
    assert source.name == name and type(source).__doc__
    assert all(field.description for key, field in type(source).model_fields.items() if key != "count")
    first, second = source.open(), source.open()
    found = list(first.documents)
    assert found == list(second.documents) and first.revision == second.revision
    assert all(isinstance(document, Document) and document.id and document.body.strip() for document in found)
    assert len({document.id for document in found}) == len(found) > 1
    assert json.loads(json.dumps(source.content())) == source.content() == source.content()
    assert json.dumps(dict(first.metadata))
    assert source.label and "/" not in source.label
    with pytest.raises(BadInput):  # an option that it does not have, and a revision that it is not at
        sources.build(name, {**example(name, tmp_path / "in"), "no_option": 1})


@every_source
def test_a_source_is_a_dataset_and_a_command(name, tmp_path):
    options = example(name, tmp_path / "in")
    made = Dataset(source=name, **options)
    assert made.corpus_folder == Dataset(source=name, **options).corpus_folder
    assert made.corpus_folder != Dataset(source=name, max_mb=1, **options).corpus_folder
    words = to_flags(made, *options) if options else []
    output = tmp_path / "c.json"
    assert main(["download", "--source", name, *words, "--max_mb", "1", "--output", str(output)]) == 0
    assert list(documents(output)) == list(sources.build(name, options).open().documents)
    assert json.loads((tmp_path / "c.source.json").read_text())["source"] == name


def test_sources_are_known_without_heavy_packages():
    program = "import sys; from gradwire.lm.data import sources; sources.options(); print(list(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert not {name for name in ("torch", "datasets", "pyarrow", "transformers") if f"'{name}'" in loaded}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"source": "txt"}, "unknown source 'txt'. Did you mean 'text'"),
        ({"source": "json"}, "source json, data_path: Field required"),
        ({"source": "pydocs", "data_path": "x"}, "unknown key of a dataset with source pydocs 'data_path'"),
        ({"source": "text", "data_path": "x", "encodings": "utf-8"}, "'encodings'. Did you mean 'encoding'"),
        ({"sorce": "text"}, "'sorce'. Did you mean 'source'"),
    ],
)
def test_a_wrong_source_or_option_is_answered_with_the_nearest(given, message):
    with pytest.raises(BadInput) as raised:
        checked(Dataset, given, "configuration")
    assert message in str(raised.value)


def test_a_corpus_folder_follows_content_not_place(tmp_path):
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("same")
    one, two = (Dataset(source="text", data_path=str(tmp_path / place)).corpus_folder for place in ("one", "two"))
    assert one.split("/")[1] == two.split("/")[1]
    (tmp_path / "two" / "a.txt").write_text("else")
    assert one.split("/")[1] != Dataset(source="text", data_path=str(tmp_path / "two")).corpus_folder.split("/")[1]


def read(folder, **options):
    stream = sources.build("text", {"data_path": str(folder), **options}).open()
    return [(one.id, one.title, one.body) for one in stream.documents], dict(stream.metadata)


def test_a_folder_is_its_text_files_by_path(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "PAGE.MD").write_text(MARKDOWN)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\n") + gzip.compress("zwei é".encode()))
    (tmp_path / "c.rst.gz").write_bytes(gzip.compress(RST.encode("utf-8-sig")))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("no")
    (tmp_path / "again.md").symlink_to("sub/PAGE.MD")
    (tmp_path / "nothing.md").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.md")
    found, metadata = read(tmp_path)
    assert found == [
        ("a.txt.gz", "a.txt.gz", "one\nzwei é"),
        ("again.md", "First", MARKDOWN.partition("\n")[2].strip("\n")),
        ("c.rst.gz", "Top", RST.partition("===")[2].strip("\n")),
        ("sub/PAGE.MD", "First", MARKDOWN.partition("\n")[2].strip("\n")),
    ]
    assert metadata == {"files": 5, "files_without_text": 1, "other_files_left_out": 3, "hidden_left_out": 1}
    assert [id_ for id_, *_ in read(f"{tmp_path}/*/*.MD")[0]] == ["sub/PAGE.MD"]
    assert [id_ for id_, *_ in read(f"{tmp_path}/**/*.txt")[0]] == [".git/d.txt"]
    assert [id_ for id_, *_ in read(tmp_path / "again.md")[0]] == ["again.md"]


@pytest.mark.parametrize(
    ("ending", "text", "expected"),
    [
        (".md", MARKDOWN, ("First", MARKDOWN.partition("\n")[2].strip("\n"))),
        (".md", "Second\n------\nbeta\n", ("Second", "beta")),
        (".md", "#hash\nbeta", ("", "#hash\nbeta")),
        (".rst", RST, ("Top", "alpha\n\n-----\nBelow\n-----\n\nbeta")),
        (".rst", "\n-----\nBelow\n-----\nbeta", ("Below", "beta")),
        (".rst", "longer than\n====\nits line", ("", "longer than\n====\nits line")),
        (".txt", "# one\ntwo", ("", "# one\ntwo")),
        (".md", "# A\n\n", ("", "# A")),
        (".md", " \n", ("", "")),
    ],
)
def test_the_heading_that_begins_a_text_is_its_title(ending, text, expected):
    assert split_title(text, ending) == expected


def test_a_corpus_of_text_files_keeps_its_revision(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.rst").write_text(RST)
    (tmp_path / "sub" / "b.rst").write_text(MARKDOWN)
    stream = sources.build("text", {"data_path": f"{tmp_path}/**/*.rst"}).open()
    assert stream.revision == "0a4c3c2cc21f762ec390be13a379931ce932f3cc1ea9c7cf8ca5b55ee5cab55d"


GZIP = gzip.compress(b"first member, " * 99) + gzip.compress(b"second")
BAD_FILES = {
    "binary": ("a.txt", bytes(range(256)), "a.txt cannot be read as text in utf-8"),
    "truncated gzip": ("a.md.gz", GZIP[:-5], "a.md.gz is not a whole gzip file"),
    "broken gzip member": ("a.md.gz", GZIP[:-7] + bytes([GZIP[-7] ^ 1]) + GZIP[-6:], "is not a whole gzip file (CRC"),
    "no gzip": ("a.md.gz", b"plain text", "a.md.gz is not a whole gzip file"),
    "all blank": ("a.txt", b" \n", "contains no documents"),
    "no text file": ("a.png", b"\x89PNG", "no folder that holds any (.txt,"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_message_and_leaves_nothing(case, tmp_path, capsys):
    name, data, message = BAD_FILES[case]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    output = tmp_path / "out" / "c.json"
    assert main(["download", "--source", "text", "--data_path", str(tmp_path / "in"), "--output", str(output)]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and message in printed[0] and str(tmp_path / "in") in printed[0]
    assert [file.name for file in output.parent.iterdir()] == ["download.failed.json"]


@pytest.mark.parametrize("pattern", ["x**y", "**x/*.txt", "*/a**"])
def test_a_glob_that_means_nothing_is_refused(pattern, tmp_path):
    with pytest.raises(BadInput, match="is no glob"):
        read(f"{tmp_path}/{pattern}")


def test_a_name_that_is_not_utf_8_is_escaped_in_the_id(tmp_path):
    (tmp_path / os.fsdecode(b"\xe9t\xe9.txt")).write_text("words")
    assert read(tmp_path)[0][0][0] == r"\xe9t\xe9.txt"


@pytest.mark.parametrize(("path", "kind"), [("pipe.txt", "pipe"), ("/dev/null", "device"), ("/dev/zero", "device")])
def test_a_pipe_or_device_is_named_as_that(path, kind, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for source in ("text", "json", "datasets", "wikipedia"):
        with pytest.raises(BadInput, match=f"{tmp_path / path} is a {kind}, not a regular file"):
            list(sources.build(source, {"data_path": str(tmp_path / path)}).open().documents)


@pytest.mark.parametrize("path", ["nowhere", "*.rst"])
def test_a_path_to_nothing_is_refused(path, tmp_path):
    with pytest.raises(BadInput, match="is no text file"):
        sources.build("text", {"data_path": str(tmp_path / path)}).open()


def test_a_text_in_another_encoding_than_given_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xe9")
    with pytest.raises(BadInput, match=r"a.txt cannot be read as text in utf-8 .*unexpected end of data"):
        read(tmp_path)
    with pytest.raises(BadInput, match=r"unknown encoding: utf-9.*give its encoding as `encoding`"):
        read(tmp_path, encoding="utf-9")
    assert read(tmp_path, encoding="latin-1")[0][0][2] == "é"


ROWS = {"body": ["one", " ", "three", None], "key": ["a", "b", "c", "d"], "head": ["A", "B", "C", "D"]}


def table(path, **options):
    stream = sources.build("datasets", {"data_path": str(path), **options}).open()
    return [(one.id, one.title, one.body) for one in stream.documents], dict(stream.metadata)


def test_a_saved_dataset_gives_the_chosen_columns(tmp_path):
    one, two = saved(tmp_path / "one", ROWS), saved(tmp_path / "two", ROWS, splits=True)
    kept = {"rows_without_text": 2}
    assert table(one, text_column="body") == ([("train/0", "", "one"), ("train/2", "", "three")], kept)
    chosen = {"text_column": "body", "id_column": "key", "title_column": "head"}
    assert table(two, split="test", **chosen) == ([("a", "A", "one"), ("c", "C", "three")], kept)


def broken_arrow(folder):
    next(folder.glob("*.arrow")).write_bytes(b"\xff" * 20)


def not_utf_8(folder):
    file = next(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes().replace(b"three", b"thr\xe9e"))


def pipe(folder):
    file = next(folder.glob("*.arrow"))
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("options", "damage", "message"),
    [
        ({}, None, "has no column text; it has body, key, head"),
        ({"text_column": "body", "id_column": "doi"}, None, "has no column doi; it has body, key, head"),
        ({"text_column": "body"}, broken_arrow, "cannot be read"),
        ({"text_column": "body"}, lambda folder: (folder / "state.json").unlink(), "state.json is missing"),
        ({"text_column": "body"}, lambda folder: (folder / "state.json").write_text("[1]"), "must hold a JSON object"),
        (
            {"text_column": "body"},
            not_utf_8,
            "row [0-2] .counted from 0. or one after it is not UTF-8: .* 0xe9 in posit",
        ),
        ({"text_column": "body"}, pipe, "arrow is a pipe, not a regular file"),
    ],
)
def test_a_bad_dataset_is_one_message(options, damage, message, tmp_path):
    folder = saved(tmp_path / "one", ROWS)
    if damage:
        damage(folder)
    with pytest.raises(BadInput, match=message) as raised:
        table(folder, **options)
    assert str(folder) in str(raised.value)


def test_a_saved_dataset_may_have_ids_that_are_floats_and_a_file_whose_name_is_not_utf_8(tmp_path):
    folder = saved(tmp_path / "one", {"text": ["one", "two"], "key": [1.5, -2e20]})
    (folder / os.fsdecode(b"\xe9")).write_text("x")
    assert table(folder, id_column="key")[0] == [("1.5", "", "one"), ("-200000000000000000000", "", "two")]


def test_a_saved_split_is_read_by_its_own_name_only(tmp_path):
    unnamed, both = saved(tmp_path / "unnamed", ROWS), saved(tmp_path / "both", ROWS, splits=True)
    datasets.Dataset.from_dict(ROWS, split="test").save_to_disk(str(tmp_path / "named"))
    assert table(tmp_path / "named", split="test", text_column="body")[0][0] == ("test/0", "", "one")
    for folder, split, message in (
        (unnamed, "nosuch", "holds the split train alone; give `split: train`"),
        (tmp_path / "named", "train", "holds the split test alone; give `split: test`"),
        (both, "tset", r"both: unknown split 'tset'. Did you mean 'test'\? Available: test, train"),
        (both, "../unnamed", "unknown split '../unnamed'"),
    ):
        with pytest.raises(BadInput, match=message):
            table(folder, split=split, text_column="body")


def test_a_dataset_of_the_hub_is_streamed_at_the_commit_of_its_revision(tmp_path, monkeypatch, capsys):
    calls, commit = [], "7" * 40
    monkeypatch.setattr(hub, "commit", lambda *args: calls.append(args) or commit)

    def streamed(**asked):
        calls.append(asked)
        if asked["split"] == "nosuch":
            raise ValueError("Bad split: nosuch. Available splits: ['train', 'test'].\nmore")
        return datasets.Dataset.from_dict(ROWS).to_iterable_dataset()

    monkeypatch.setattr(hub, "streamed", streamed)
    output = tmp_path / "c.json"
    words = ["download", "--source", "datasets", "--data_path", "somebody/texts", "--configuration", "raw"]
    words += ["--text_column", "body", "--revision", "v3", "--output", str(output), "--split"]
    assert main([*words, "test"]) == 0
    (name, revision, without_network), asked = calls
    assert (name, revision) == ("somebody/texts", "v3") and "local folder" in without_network
    assert asked == {"path": "somebody/texts", "name": "raw", "split": "test", "revision": commit}
    assert [(one.id, one.body) for one in documents(output)] == [("test/0", "one"), ("test/2", "three")]
    origin = json.loads((tmp_path / "c.source.json").read_text())
    assert origin["revision"] == commit and origin["metadata"] == {"rows_without_text": 2}
    capsys.readouterr()
    assert main([*words, "nosuch"]) == 2
    said = "somebody/texts, raw, split nosuch: Bad split: nosuch. Available splits: ['train', 'test']"
    assert capsys.readouterr().err == f"gradwire download: {said}.\n"


def test_a_dataset_that_is_nowhere_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(BadInput, match="neither a folder nor a dataset's name on the Hub"):
        table(tmp_path / "no" / "where")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="cannot reach the Hugging Face Hub for nobody/nothing"):
        table("nobody/nothing")
