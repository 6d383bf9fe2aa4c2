"""Sources: every one keeps the contract, whoever wrote it; text files and saved datasets, read as they are."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

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
from gradwire.lm.data import corpus, sources, text_files
from gradwire.lm.data.corpus import Document, documents
from gradwire.lm.data.sources import SOURCES, Source, Stream
from gradwire.lm.data.sources import datasets as hub
from gradwire.lm.data.sources import text as sections

HEAD = "<html><head><title>T</title><style>p {}</style></head>"
PAGE = f"{HEAD}<body><h1>Big &amp; <i>small</i></h1><p>One\n two</p></body>"
FENCED = "```\n# no heading\n```"
MARKDOWN = f"intro\n\n# First #\nalpha\n{FENCED}\nSecond\n------\nbeta\n"
RST = "Top\n===\n\nalpha\n\n-----\nBelow\n-----\n\nbeta\n\n| table |\n=====\n"


class Numbers(Source):
    """A third party's source: so many documents."""

    name = "numbers"
    count: int
    odd: bool = Field(False, description="odd ones only")

    def open(self):
        made = ({"id": str(n), "text": f"the number {n}"} for n in range(self.odd, self.count, 1 + self.odd))
        return Stream("numbers", "1", corpus.parse(made, "numbers"))


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
def test_a_source_is_a_dataset_and_a_verb(name, tmp_path):
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
        ({"source": "text", "data_path": "x", "split_by": "files"}, "'split_by'. Did you mean 'split_at'"),
        ({"sorce": "text"}, "'sorce'. Did you mean 'source'"),
        ({"source": "text", "data_path": "x", "encoding": "utf-9"}, "Python knows no encoding of text 'utf-9'"),
        *(
            ({"source": "text", "data_path": "x", "encoding": name}, f"Python knows no encoding of text '{name}'")
            for name in ("base64", "rot13", "undefined", "idna", "unicode_escape")
        ),
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
    (tmp_path / "sub" / "page.html").write_text(PAGE)
    (tmp_path / "b.md").write_text(MARKDOWN)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\r\n") + gzip.compress("zwei é".encode()))
    (tmp_path / "c.rst.zst").write_bytes(pa.compress(RST.encode(), codec="zstd", asbytes=True))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "again.md").symlink_to("b.md")
    found, metadata = read(tmp_path)
    assert found == [
        ("a.txt.gz", "a.txt.gz", "one\nzwei é"),
        ("b.md", "b.md", MARKDOWN.strip("\n")),
        ("c.rst.zst", "Top", "alpha\n\n-----\nBelow\n-----\n\nbeta\n\n| table |\n====="),
        ("sub/page.html", "Big & small", "One two"),
    ]
    left_out = {"other_files_left_out": 1, "hidden_left_out": 1, "links_left_out": 1}
    assert metadata == {"files": 5, "files_in_utf-8": 5, "files_without_text": 1, **left_out}
    assert [id_ for id_, *_ in read(f"{tmp_path}/*/*.html")[0]] == ["sub/page.html"]
    assert [id_ for id_, *_ in read(tmp_path / "b.md")[0]] == ["b.md"]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            "markdown",
            MARKDOWN,
            [(1, "", "intro"), (3, "First", f"alpha\n{FENCED}"), (8, "Second", "beta")],
        ),
        ("rst", RST, [(1, "Top", "alpha"), (6, "Below", "beta\n\n| table |\n=====")]),
        ("html", PAGE, [(1, "Big & small", "One two")]),
        ("html", "<nav>a<nav>b</nav><p>c", [(1, "", "a\nb\nc")]),  # never closed: no text may be lost
        ("html", "<nav>a<footer>b</nav><p>c</footer>d<svg>e</svg></nav><script>f", [(1, "", "d")]),
        ("html", "<p>a<p>b\n<h2>C</h2>\n<pre>x\n  y</pre>", [(1, "", "a\nb"), (2, "C", "x\n  y")]),
        ("text", "# one\ntwo", [(1, "", "# one\ntwo")]),
        ("markdown", "# A\n\n## B\ntext\n# C\n", [(1, "A / B", "text"), (5, "", "# C")]),
        ("markdown", " \n", []),
    ],
)
def test_sections_lose_no_text_and_know_their_lines(form, text, expected):
    assert list(sections.split(text, form)) == [sections.Section(*section) for section in expected]
    if form != "html":
        kept = "".join(chain(*((title.replace(" / ", ""), body) for _, title, body in expected)))
        assert set(kept) >= set(text) - set("#=- \n")


def test_ids_of_sections_lead_to_the_line_of_the_heading(tmp_path):
    (tmp_path / "b.md").write_text(MARKDOWN)
    found, _ = read(tmp_path, split_at="headings")
    assert [(id_, title) for id_, title, _ in found] == [("b.md:1", "b.md"), ("b.md:3", "First"), ("b.md:8", "Second")]


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        ("naïve ☃".encode(), "naïve ☃", "utf-8"),
        ("naïve".encode("utf-8-sig"), "naïve", "utf-8-sig"),
        ("naïve ☃".encode("utf-16"), "naïve ☃", "utf-16"),
        ("naïve ☃".encode("utf-32"), "naïve ☃", "utf-32"),
        (b'<meta charset="koi8-r">' + "привет".encode("koi8-r"), '<meta charset="koi8-r">привет', "koi8-r"),
        ("naïve “quoted”".encode("windows-1252"), "naïve “quoted”", "windows-1252"),
        *(
            (head.encode() + "naïve “quoted”".encode("windows-1252"), f"{head}naïve “quoted”", "windows-1252")
            for name in ("undefined", "base64", "utf-16", "iso-8859-1", "unicode_escape", "nosuch", "aliases")
            for head in (f'<meta charset="{name}">', f'<meta charset="{name}"> ')  # UTF-16 has an even length
        ),
        (b"coding: latin-1\n\xe9\x81", "coding: latin-1\né\x81", "iso8859-1"),
    ],
)
def test_encodings_are_detected(data, text, encoding, tmp_path):
    (tmp_path / "a.txt").write_bytes(data)
    assert text_files.read(tmp_path / "a.txt") == (text, encoding)


GZIP = gzip.compress(b"first member, " * 99) + gzip.compress(b"second")
ZSTD = pa.compress(b"text " * 999, codec="zstd", asbytes=True)
BAD_FILES = {
    "binary": ("a.txt", bytes(range(256)), "a.txt is not text"),
    "no encoding": ("a.txt", b"\x81\x8d text", "a.txt is not text"),
    "control characters": ("a.txt", b"\xe9\x01 text", "a.txt is not text"),
    "truncated gzip": ("a.md.gz", GZIP[:-5], "a.md.gz is not a whole gzip file"),
    "broken gzip member": ("a.md.gz", GZIP[:-7] + bytes([GZIP[-7] ^ 1]) + GZIP[-6:], "is not a whole gzip file (CRC"),
    "no gzip": ("a.md.gz", b"plain text", "a.md.gz is not a whole gzip file"),
    "truncated zstd": ("a.rst.zst", ZSTD[: len(ZSTD) // 2], "a.rst.zst is not a whole zstd file"),
    "all blank": ("a.txt", b" \n", "contains no documents"),
    "no text file": ("a.png", b"\x89PNG", "holds no text files (.txt,"),
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


def test_a_text_that_decompresses_to_more_than_fits_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LARGEST", 5 * 10**6)
    bomb = bytes(64 * 10**6)
    packed = {".gz": gzip.compress(bomb, 1), ".zst": pa.compress(bomb, codec="zstd", asbytes=True), "": bomb}
    for ending, data in packed.items():
        file = tmp_path / f"a.txt{ending}"
        file.write_bytes(data[:-99])  # whoever reads it to the end says that it is not whole
        with pytest.raises(BadInput, match=f"a.txt{ending} holds more than 5 MB, decompressed"):
            text_files.read(file)


def test_the_mark_at_the_beginning_is_no_text_in_a_given_encoding_either(tmp_path):
    (tmp_path / "a.txt").write_bytes("naïve".encode("utf-8-sig"))
    assert read(tmp_path, encoding="utf-8")[0] == [("a.txt", "a.txt", "naïve")]


def linked(folder):
    """Texts that links alone lead to, and links that lead back or to the same again."""
    for name in ("in/sub/deep", "in/.git", "out/below"):
        (folder / name).mkdir(parents=True)
    for name in ("in/a.txt", "in/sub/b.txt", "in/sub/deep/c.txt", "in/.git/d.txt", "out/e.txt", "out/below/f.txt"):
        (folder / name).write_text(f"words of {name}")
    links = {"ahead": "../out", "again": "../out/below", "self": ".", "up": "..", "sub/same": "deep"}
    for name, target in {**links, "file.txt": "../out/e.txt", "twice.txt": "../out/e.txt", "a2.txt": "a.txt"}.items():
        (folder / "in" / name).symlink_to(target)
    return folder / "in"


def test_texts_behind_links_are_read_once_and_what_is_left_out_is_counted(tmp_path):
    folder = linked(tmp_path)
    (folder / "LOUD.TXT.GZ").write_bytes(gzip.compress(b"loud words"))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    found, metadata = read(folder)
    texts = {id_: body for id_, _, body in found}
    assert sorted(texts.values()) == [
        "loud words",
        *(f"words of {name}" for name in ("in/a.txt", "in/sub/b.txt", "in/sub/deep/c.txt")),
        *(f"words of {name}" for name in ("out/below/f.txt", "out/e.txt")),
    ]
    assert {"LOUD.TXT.GZ", "a.txt", "sub/b.txt", "sub/deep/c.txt", "ahead/e.txt"} < texts.keys()
    # self, up, sub/same, again or what is below ahead; file.txt, twice.txt, a2.txt
    assert {name: count for name, count in metadata.items() if "left_out" in name} == {
        "links_left_out": 6 + ("again/f.txt" not in texts),
        "hidden_left_out": 1,
        "other_files_left_out": 1,
    }


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [
        ("*.txt", ["a.txt", "file.txt"]),
        ("**/*.txt", [".git/d.txt", "a.txt", "again/f.txt", "ahead/e.txt", "sub/b.txt", "sub/deep/c.txt"]),
        ("*/[ef].txt", ["again/f.txt", "ahead/e.txt"]),
        ("**/below/**", ["ahead/below/f.txt"]),
        ("s?b/**", ["sub/b.txt", "sub/deep/c.txt"]),
        ("**/deep/c.txt", ["sub/deep/c.txt"]),
        ("sub/*/../b.txt", ["deep/../b.txt"]),
    ],
)
def test_a_glob_gives_what_the_shell_gives_once(pattern, ids, tmp_path):
    assert [id_ for id_, *_ in read(f"{linked(tmp_path)}/{pattern}")[0]] == ids


@pytest.mark.parametrize("pattern", ["x**y", "***", "**x/*.txt", "*/a**"])
def test_a_glob_that_means_nothing_is_refused(pattern, tmp_path):
    with pytest.raises(BadInput, match=r"the glob has '.*', but \*\* must be alone between slashes"):
        read(f"{linked(tmp_path)}/{pattern}")


@contextmanager
def without_privileges():
    """As a user for whom permissions count."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("closed", "mode", "path", "named"),
    [
        ("in", 0, "in", "in"),
        ("in/sub/deep", 0, "in", "in/sub/deep"),
        ("in/sub/deep", 0o444, "in", "in/sub/deep/c.txt"),
        ("out/below", 0, "in", "in/again"),
        ("in/sub/deep", 0, "in/**/*.txt", "in/sub/deep"),
        ("in/sub", 0, "in/*/*.txt", "in/sub"),
        ("in/sub", 0, "in/sub/b.txt", "in/sub/b.txt"),
        ("in/sub/b.txt", 0, "in", "in/sub/b.txt"),
        ("in/.git", 0, "in", None),
        ("in/sub/deep", 0, "in/*/*.txt", None),
    ],
)
def test_what_cannot_be_read_is_named_not_left_out(closed, mode, path, named):
    with TemporaryDirectory() as place:  # not below pytest's folder, which is closed itself
        Path(place).chmod(0o755)
        linked(Path(place))
        (Path(place) / closed).chmod(mode)
        with without_privileges():
            if named is None:
                assert read(f"{place}/{path}")[0]
            else:
                with pytest.raises(BadInput, match=rf"{place}/{named}(:| cannot be read:) Permission denied"):
                    read(f"{place}/{path}")
        (Path(place) / closed).chmod(0o755)


def test_a_name_that_is_not_utf_8_is_named_unless_it_is_left_out(tmp_path, capsys):
    for name in (b"\xe9t\xe9.txt", b"\xff.png"):
        (tmp_path / os.fsdecode(name)).write_text("words")
    (tmp_path / "a.txt").write_text("words")
    words = ["download", "--source", "text", "--output", str(tmp_path / "c.json"), "--data_path"]
    for path in (str(tmp_path), f"{tmp_path}/*.txt"):
        assert main([*words, path]) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and rf"the name of {tmp_path}/\xe9t\xe9.txt is not UTF-8" in printed
    assert [id_ for id_, *_ in read(f"{tmp_path}/a*")[0]] == ["a.txt"]
    (tmp_path / os.fsdecode(b"\xe9t\xe9.txt")).rename(tmp_path / "été.txt")
    assert [id_ for id_, *_ in read(tmp_path)[0]] == ["a.txt", "été.txt"]


@pytest.mark.parametrize(("path", "kind"), [("pipe.txt", "pipe"), ("/dev/null", "device"), ("/dev/zero", "device")])
def test_a_pipe_or_device_is_named_as_that(path, kind, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    for source in ("text", "json", "datasets", "wikipedia"):
        with pytest.raises(BadInput, match=f"{tmp_path / path} is a {kind}, not a regular file"):
            list(sources.build(source, {"data_path": str(tmp_path / path)}).open().documents)


@pytest.mark.parametrize(("path", "message"), [("nowhere", "no folder or file"), ("*.rst", "no file that matches")])
def test_a_path_to_nothing_is_refused(path, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        sources.build("text", {"data_path": str(tmp_path / path)}).open()


@pytest.mark.parametrize("path", ["in", "in/*", "in/**/*.txt"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("nothing"), lambda path: path.symlink_to(path)]
)
def test_what_is_no_regular_file_is_refused_and_not_opened(make, path, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("words")
    make(tmp_path / "in" / "b.txt")
    output = tmp_path / "c.json"
    assert main(["download", "--source", "text", "--data_path", str(tmp_path / path), "--output", str(output)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"{tmp_path}/in/b.txt is not a regular file" in printed
    (tmp_path / "in" / "b.txt").rename(tmp_path / "in" / "b.png")
    assert [id_ for id_, *_ in read(tmp_path / "in")[0]] == ["a.txt"]


def test_a_text_in_another_encoding_than_given_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xe9")
    with pytest.raises(BadInput, match=r"a.txt is not utf-8: unexpected end of data at byte 0"):
        read(tmp_path, encoding="utf8")
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
