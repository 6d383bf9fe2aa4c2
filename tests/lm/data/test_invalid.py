"""All invalid documents of a file in one report, and leaving them out by name."""

from __future__ import annotations

import json

import pytest
from changed_store import collected
from chat_templates import CHATML, unmarked
from data_samples import files_of, tokenize_words, values
from small_model import make

from gradwire import cli
from gradwire.attribution.store import store
from gradwire.lm.data.shards import meta

ASKED = {"role": "user", "content": "where?"}
WRONG = [
    ({"id": "empty", "messages": [ASKED, {"role": "assistant", "content": " "}]}, "has an empty message 1 of the"),
    ({"id": "doc-7", "text": "again"}, "has the id of document 1; ids must be unique"),
    ({"text": ""}, "has no text"),
    (["y"], "is an array, not an object"),
    ({"id": 12, "text": "x", "title": 2}, "has a number as title"),
]
FINE = values(40)
PLACES = (2, 5, 6, 9, 30)  # where the invalid documents are among the others


def mixed():
    documents = list(FINE)
    for place, (document, _) in zip(PLACES, WRONG, strict=True):
        documents.insert(place, document)
    return documents


def write(path, documents):
    """A file of lines with a blank line before the fourth, or an array."""
    lines = [json.dumps(document) for document in documents]
    lines[3] = f"\n{lines[3]}" if path.suffix == ".jsonl" else lines[3]
    path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]")
    return path


@pytest.mark.parametrize("name", ["c.json", "c.jsonl"])
@pytest.mark.parametrize("command", ["tokenize", "download"])
def test_a_report_has_every_invalid_document(tmp_path, capsys, command, name):
    corpus = write(tmp_path / name, mixed())
    download = ["download", "--source", "json", "--data_path", str(corpus), "--output"]
    download += [str(tmp_path / "out" / "c.json")]
    assert cli.main(download if command == "download" else tokenize_words(corpus, tmp_path / "out")) == 2
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first.endswith(f"{name}: 5 documents are invalid:") and last.endswith("leave them out by --skip_invalid.")
    for place, line, (document, reason) in zip(PLACES, lines, WRONG, strict=True):
        id_ = document.get("id") if isinstance(document, dict) else None
        known = f", id '{id_}'" if isinstance(id_, str) else ""
        assert line.startswith(f"  document {place} (counted from 0{known}) {reason}")
    assert not any("shard" in file or "c.json" in file for file in files_of(tmp_path / "out"))


def test_a_long_report_ends(tmp_path, capsys):
    corpus = write(tmp_path / "c.jsonl", [{"text": ""}] * 1234)
    assert cli.main(tokenize_words(corpus, tmp_path / "out")) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "1,234 documents are invalid" in lines[0] and lines[-2] == "  and 1,214 more" and len(lines) == 23
    assert cli.main([*tokenize_words(corpus, tmp_path / "out"), "--skip_invalid"]) == 2
    assert "1,234 documents are invalid" in capsys.readouterr().err


def test_skipped_documents_are_counted_and_the_others_unchanged(tmp_path, capsys):
    found = []
    for name, documents, words in (("all", mixed(), ["--skip_invalid"]), ("fine", FINE, [])):
        corpus = write(tmp_path / f"{name}.jsonl", documents)
        assert cli.main([*tokenize_words(corpus, tmp_path / name), *words]) == 0
        found.append({key: file for key, file in files_of(tmp_path / name).items() if "shard-" in key or "json" in key})
        found[-1].pop("tokenizer/origin.json")
    assert found[0] == found[1]
    assert "left out by --skip_invalid:" in (said := capsys.readouterr().err) and "5 documents are invalid" in said
    assert [meta(tmp_path / name / "shards", "val")["left_out"] for name in ("all", "fine")] == [5, 0]
    assert cli.main(tokenize_words(tmp_path / "all.jsonl", tmp_path / "all")) == 2
    assert "holds shards made with skip_invalid True, not False" in capsys.readouterr().err


def test_a_download_counts_what_it_skips(tmp_path):
    words = ["--source", "json", "--data_path", str(write(tmp_path / "c.jsonl", mixed())), "--skip_invalid"]
    assert cli.main(["download", *words, "--output", str(tmp_path / "out.json")]) == 0
    assert [one["id"] for one in json.loads((tmp_path / "out.json").read_text())] == [one["id"] for one in FINE]
    assert json.loads((tmp_path / "out.source.json").read_text())["metadata"] == {"invalid_left_out": 5}


def test_a_store_of_valid_documents_is_validated_against_its_corpus(tmp_path, capsys):
    """Also where the chat template alone finds documents invalid."""
    small = make(tmp_path)
    template = (
        unmarked(CHATML) + "{%- if messages[0].role == 'assistant' %}{{- raise_exception('no question') }}{% endif %}"
    )
    (small.model / "chat_template.jinja").write_text(template)
    said = {"role": "assistant", "content": "a wire"}
    chats = [{"id": f"chat/{n}", "messages": [ASKED, said] if n % 3 else [said]} for n in range(9)]
    corpus = write(tmp_path / "mixed.jsonl", [*mixed(), *chats])
    words = ["--projection", "sjlt", "--cache_dir", str(tmp_path / "cache")]
    collected(small.model, corpus, tmp_path / "run", 32, *words, "--skip_invalid")
    assert "of 46 documents, 8 invalid ones left out in" in capsys.readouterr().out
    assert cli.main(["grads", "validate", "--output_dir", str(tmp_path / "run"), "--dim", "32"]) == 0
    ids = {id_.partition("#")[0] for id_ in store.read_ids(tmp_path / "run" / "dim32" / "all_ids.pkl")}
    assert ids == {*(one["id"] for one in FINE), *(f"chat/{n}" for n in range(9) if n % 3)}
