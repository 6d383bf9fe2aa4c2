"""Corpora: the three sources, the ids, and every bad input as one message with nothing half-written.

Of `document.py`, `download.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ijson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_samples import tokenize_words, values, write_corpus
from diagonals import swept

from gradwire.base.errors import BadInput
from gradwire.cli import main
from gradwire.lm.data import document
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.document import parse
from gradwire.lm.data.tokenize import shards_of

GOOD = json.dumps(values(3)).encode()
PART = b'{"title": "t", "text": "x y"}'

BAD = {
    "truncated": (GOOD[:-40], "not valid JSON in UTF-8"),
    "no end": (GOOD[:-1], "Is the file complete?"),
    "no array": (b'{"id": "a", "text": "x"}', "is not a JSON array (it starts with '{')"),
    "trailing garbage": (GOOD + b"]", "not valid JSON in UTF-8"),
    "empty file": (b" \n", "is empty"),
    "empty array": (b"[]", "contains no documents"),
    "no object": (b'[{"text": "x"}, ["y"]]', "document 1 (counted from 0) is an array"),
    "no text": (b'[{"text": "x"}, {"id": "b"}]', "document 1 (counted from 0, id 'b') has no text"),
    "blank text": (b'[{"id": "a", "text": " \\n"}]', "document 0 (counted from 0, id 'a') has no text"),
    "text no string": (b'[{"id": "a", "text": 3}]', "document 0 (counted from 0, id 'a') has no text"),
    "a weight": (b'[{"text": "x", "weight": -0.5}]', "has a 'weight', which the loss does not use any more"),
    "weights of spans": (
        b'[{"text": "x y", "target_spans": [[0, 1], [2, 3]], "target_weights": [1, 0]}]',
        "has a 'target_weights', which",
    ),
    "weight of a message": (
        b'[{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}]',
        "document 0 (counted from 0) has a 'weight'",
    ),
    "title no string": (b'[{"title": 0, "text": "x"}]', "has a number as title"),
    "id no string": (b'[{"id": [1], "text": "x"}]', "has an array as id"),
    "id a long number": (b'[{"id": 1e9999999, "text": "x"}]', "has a number of more than 4300 digits as id"),
    "id empty": (b'[{"id": "", "text": "x"}]', 'has "" as id'),
    "id true": (b'[{"id": true, "text": "x"}]', "has true as id"),
    "duplicate ids": (
        b'[{"id": "a", "text": "x"}, %b, {"id": "a", "text": "z"}]' % PART,
        "document 2 (counted from 0, id 'a') has the id of document 0",
    ),
    "duplicate by number": (
        b'[{"id": 7, "text": "x"}, {"id": "7", "text": "z"}]',
        "document 1 (counted from 0, id '7') has the id of document 0",
    ),
    "duplicate by index": (
        b'[{"id": "sample_1", "text": "x"}, %b]' % PART,
        "document 1 (counted from 0, id 'sample_1') has the id of document 0",
    ),
    "invalid UTF-8": (b'[{"text": "x"}, {"text": "\xff\xfe"}]', "invalid bytes in UTF8 string in document 1"),
    "surrogate": (b'[{"text": "\xed\xa0\x80"}]', "not valid JSON in UTF-8"),
    "an endless number": (
        b'[{"text": "x", "id": 1e%d}]' % 10**20,
        "a number of too large an exponent",
    ),
    "too small": (b"[%b]" % PART, "is too small"),
}


@pytest.mark.parametrize(
    ("case", "command"),
    [
        (case, command)
        for case in BAD
        for command in ("tokenize", "download")
        if (case, command) != ("too small", "download")
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(case, command, tmp_path, capsys):
    content, message = BAD[case]
    (tmp_path / "in.json").write_bytes(content)
    output = tmp_path / "out"
    download = ["download", "--source", "json", "--data_path", f"{tmp_path}/in.json", "--output", f"{output}/c.json"]
    words = download if command == "download" else tokenize_words(tmp_path / "in.json", output)
    assert main(words) == 2
    error = capsys.readouterr().err
    printed = [line for line in error.splitlines() if "fewer than --vocab_size" not in line]  # a note on a tiny corpus
    assert len(printed) == 1 and message in printed[0] and "in.json" in printed[0]
    assert {file.name for file in output.rglob("*")} - {".lock"} == {f"{command}.failed.json"}


def test_a_missing_corpus_is_bad_input(tmp_path, capsys):
    assert main(tokenize_words(tmp_path / "none.json", tmp_path / "out")) == 2
    assert "none.json" in capsys.readouterr().err


def test_jsonl_names_the_bad_line(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "text": "a"}\n{"id": 2, "text": "b"}\n{"id": 3, "te')
    with pytest.raises(BadInput, match=r"in document 2 "):
        list(documents(path))


def test_ids_titles_and_text(tmp_path):
    path = write_corpus(
        tmp_path / "c.json",
        [
            {"id": "α", "title": "T", "text": "body\n"},
            {"title": "no id", "text": "b"},
            {"id": 12, "title": None, "text": "c"},
            {"id": None, "text": "d"},
            {"id": 1.50, "title": "", "text": "e", "url": "ignored"},
            {"id": 12345678901234567890, "title": "x", "text": "f"},
        ],
    )
    found = list(documents(path))
    assert [d.id for d in found] == ["α", "sample_1", "12", "sample_3", "1.5", "12345678901234567890"]
    assert [d.text for d in found] == ["T\nbody\n", "no id\nb", "\nc", "\nd", "\ne", "x\nf"]


class Extractor:
    """An installed package's entry point."""

    name, value = "numbered", "package:function"

    def load(self):
        return lambda document: f"{document['journal']}/{document['number']}"


def test_ids_may_be_elsewhere_in_a_document(tmp_path, monkeypatch, capsys):
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps([{"doi": f"10.{n}", "journal": "J", "number": n, "text": "some text"} for n in (3, 4)]))

    def ids(*more):
        output = tmp_path / "corpus.json"
        words = ["download", "--source", "json", "--data_path", str(raw), "--output", str(output), *more]
        return main(words), [one["id"] for one in json.loads(output.read_text())]

    assert ids() == (0, ["sample_0", "sample_1"])
    assert ids("--id_from", "doi") == (0, ["10.3", "10.4"])
    monkeypatch.setattr(document, "entry_points", lambda group: [Extractor()] * (group == "gradwire.sample_ids"))
    assert ids("--id_from", "numbered") == (0, ["J/3", "J/4"])
    assert main(["download", "--source", "pydocs", "--id_from", "doi", "--output", str(tmp_path / "x.json")]) == 2
    assert "works with --source json only" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", ["c.json", "c.jsonl"])
def test_a_corpus_may_have_a_byte_order_mark_and_escapes(name, encoding, tmp_path):
    texts = [r"\ud83d is half, \\", '😀 a "quoted" 日本\n', "[{1234}]", "é" * 99]
    made = [{"id": text, "title": "\\", "text": text, "x": [[1.5, {}], n]} for n, text in enumerate(texts)]
    for escaped in (True, False):
        lines = [json.dumps(value, ensure_ascii=escaped) for value in made]
        form = "\n".join(lines) if name == "c.jsonl" else f"[{', '.join(lines)}]"
        (tmp_path / name).write_bytes(form.encode(encoding))
        assert [(one.id, one.body) for one in documents(tmp_path / name)] == [(text, text) for text in texts]


def test_a_number_may_have_more_digits_than_python_reads(tmp_path):
    """In a separate process: ijson ended one that kept Python's limit by a signal."""
    digits = "9" * 5000
    (tmp_path / "c.json").write_text(f'[{{"id": "a", "text": "words", "n": {digits}}}]')
    program = (
        "import sys; from gradwire.lm.data.corpus import documents; from pathlib import Path;"
        "print(*(d.given['n'] for d in documents(Path(sys.argv[1]))))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "c.json"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, digits), done.stderr


def test_white_space_before_an_array_may_be_long(tmp_path):
    (tmp_path / "c.json").write_text("\n" * 100_000 + json.dumps(values(3)))
    assert len(list(documents(tmp_path / "c.json"))) == 3


HALVES = (r"\ud83d", r"\uD83D!", r"\udE00", r"\ude00\ud83d", r"\ud83d\n\ude00", r"\\\ud83d")


@pytest.mark.parametrize("stride", [29, *swept(7)])
@pytest.mark.parametrize(("half", "name"), [*((half, "c.json") for half in HALVES), (HALVES[0], "c.jsonl")])
def test_half_a_pair_in_a_file_is_refused_wherever_it_is(half, name, tmp_path, stride):
    whole = r"\ud83d\ude00 \\ud83d \\\\"
    file = tmp_path / name
    for length in [0, *range(65536 - 80, 65536 + 40, stride)]:  # ijson reads 64 KiB at a time
        for middle in (whole, half):
            lines = [f'{{"text": "{text}"}}' for text in (whole, "x" * length + middle, whole)]
            file.write_text("\n".join(lines) if name == "c.jsonl" else f"[{','.join(lines)}]")
            read = documents(file)
            assert next(read).body == "😀 \\ud83d \\\\"
            if middle == whole:
                assert [len(document.body) for document in read] == [length + 11, 11]
            else:
                with pytest.raises(BadInput, match=r"half of a surrogate pair, in document 1 \(counted from 0\)"):
                    list(read)


def test_half_a_pair_from_any_source_is_refused():
    with pytest.raises(BadInput, match=r"here: document 1 \(counted from 0\) has '\\ude00', half of a surrogate pair"):
        list(parse([{"text": "x"}, {"text": "cut \ude00"}], "here"))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_corpus_is_a_regular_file(kind, tmp_path, capsys):
    corpus = tmp_path / "c.json"
    os.mkfifo(corpus) if kind == "pipe" else corpus.symlink_to("/dev/zero")
    said = f"{corpus} is a {kind}, not a regular file"
    download = ["download", "--source", "json", "--output", f"{tmp_path}/out.json", "--data_path", str(corpus)]
    for words in (download, tokenize_words(corpus, tmp_path / "out")):
        assert main(words) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(BadInput, match=said):
        shards_of(corpus, tokenizer="bpe")


def test_jsonl_gives_the_same_documents_as_an_array(tmp_path):
    array = write_corpus(tmp_path / "c.json", values(20))
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join(json.dumps(value) for value in values(20)) + "\n")
    assert list(documents(array)) == list(documents(lines))


def test_the_slow_ijson_backend_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ijson, "backend", "python")
    with pytest.raises(BadInput, match="yajl2_c"):
        list(documents(write_corpus(tmp_path / "c.json", values(3))))


@pytest.mark.full
def test_pydocs_is_real_english_and_always_the_same(tmp_path, capsys):
    assert "mailbox" not in sys.modules  # a module of the library that nothing here imports
    for name in ("a.json", "b.json"):
        assert main(["download", "--source", "pydocs", "--output", str(tmp_path / name)]) == 0
    assert "mailbox" not in sys.modules
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    found = {document.id: document for document in documents(tmp_path / "a.json")}
    assert 2000 <= len(found) <= 4000
    assert found["pydocs/json.dumps"].text.startswith("json.dumps\nSerialize ``obj``")
    assert "pydocs/topics/assert" in found
    assert len({document.body for document in found.values()}) == len(found)
    origin = json.loads((tmp_path / "a.source.json").read_text())
    assert origin["documents"] == len(found) and origin["revision"] == sys.version.split()[0]
    assert origin["metadata"].keys() == {"short_texts_left_out", "repeated_texts_left_out"}
    # one document per line, and the file is an ordinary JSON array
    assert len((tmp_path / "a.json").read_text().splitlines()) == len(found) + 2
    assert len(json.loads((tmp_path / "a.json").read_text())) == len(found)


def test_max_mb_stops_before_the_limit_and_says_so(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "in.json", values(50))
    download = ["download", "--source", "json", "--data_path", str(corpus), "--output", str(tmp_path / "out.json")]
    assert main([*download, "--max_mb", "0.005"]) == 0
    assert "stopped at --max_mb 0.005" in capsys.readouterr().err
    assert 4000 < (tmp_path / "out.json").stat().st_size <= 5000
    assert (
        list(documents(tmp_path / "out.json")) == list(documents(corpus))[: len(list(documents(tmp_path / "out.json")))]
    )
    assert main([*download, "--max_mb", "0.00001"]) == 2


@pytest.mark.parametrize("source", ["pydocs", "json"])
def test_another_revision_is_refused(source, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "in.json", values(3))
    data = ["--data_path", str(corpus)] if source == "json" else []
    words = ["download", "--source", source, *data, "--output", str(tmp_path / "o.json"), "--revision", "other"]
    assert main(words) == 2
    assert "--revision is other" in capsys.readouterr().err


def test_wikipedia_loads_a_parquet_of_its_columns(tmp_path, capsys):
    rows = {"id": ["12", "25", "39"], "url": ["u", "v", "w"], "title": ["A", "B", "Ç"], "text": ["one two", "b", "ç\n"]}
    pq.write_table(pa.table(rows), tmp_path / "wiki.parquet")
    words = ["download", "--source", "wikipedia", "--max_mb", "1", "--data_path", str(tmp_path / "wiki.parquet")]
    assert main([*words, "--output", str(tmp_path / "c.json")]) == 0
    assert [(d.id, d.text) for d in documents(tmp_path / "c.json")] == [
        ("12", "A\none two"),
        ("25", "B\nb"),
        ("39", "Ç\nç\n"),
    ]

    pq.write_table(pa.table({"id": ["1"], "body": ["x"]}), tmp_path / "wiki.parquet")
    assert main([*words, "--output", str(tmp_path / "d.json")]) == 2
    assert "has no column text, title" in capsys.readouterr().err
    assert not (tmp_path / "d.json").exists()


@pytest.mark.parametrize("damage", ["text", "empty", "middle"])
def test_wikipedia_refuses_a_file_that_is_no_whole_parquet(damage, tmp_path, capfd):
    file = tmp_path / "wiki.parquet"
    table = pa.table({"id": [str(n) for n in range(3000)], "title": ["t"] * 3000, "text": ["some text"] * 3000})
    pq.write_table(table, file, compression="none", use_dictionary=False)
    whole = file.read_bytes()
    broken = {"text": b"hello" * 99, "empty": b"", "middle": whole[:5000] + b"\xff" * 20_000 + whole[25_000:]}[damage]
    file.write_bytes(broken)
    words = ["download", "--source", "wikipedia", "--max_mb", "9", "--data_path", str(file)]
    assert main([*words, "--output", str(tmp_path / "c.json")]) == 2
    printed = capfd.readouterr().err.strip()
    assert "wiki.parquet cannot be read as a Parquet file: " in printed and "\n" not in printed
    assert {path.name for path in tmp_path.iterdir()} == {"wiki.parquet", "download.failed.json"}


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_wikipedia_offline_says_so_quickly(offline, tmp_path):
    command = [sys.executable, "-m", "gradwire", "download", "--source", "wikipedia", "--max_mb", "1"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "c.json")],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    assert (
        "cannot reach the Hugging Face Hub" in done.stderr
        and "--source pydocs" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert not (tmp_path / "c.json").exists()


def test_wikipedia_wants_a_size(tmp_path, capsys):
    assert main(["download", "--source", "wikipedia", "--output", str(tmp_path / "c.json")]) == 2
    assert "--max_mb" in capsys.readouterr().err


def test_a_checked_corpus_may_be_drawn_from_changing_threads(tmp_path):
    expected = values(20)
    drawn = documents(write_corpus(tmp_path / "corpus.json", expected))
    with ThreadPoolExecutor(1) as other:
        ids = [next(drawn).id, *(other.submit(next, drawn).result().id for _ in range(5)), *(doc.id for doc in drawn)]
    assert ids == [value["id"] for value in expected]
