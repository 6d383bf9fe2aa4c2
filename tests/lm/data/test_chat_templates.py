"""Chats are read by the tokenizer's template: tokens and targets against transformers, token by token.

Of `data/chats.py`.
"""

from __future__ import annotations

import datetime
import json

import pytest
from chat_templates import (
    CHATML,
    FAMILIES,
    LLAMA,
    MISTRAL,
    REFUSED,
    make_tokenizer,
    marked,
    unmarked,
    write,
)
from transformers import AutoTokenizer

from gradwire import cli
from gradwire.base.errors import BadInput
from gradwire.lm.data import tokenize as making
from gradwire.lm.data.chats import Template
from gradwire.lm.data.shards import Shards, meta
from gradwire.lm.data.tokenizer import load

SYSTEM = {"role": "system", "content": "be brief, naïve 日本"}
ASKED = {"role": "user", "content": "where does  the gradient travel?"}
SAID = {"role": "assistant", "content": "over a wire,\n\n日本 naïve"}
AGAIN = {"role": "user", "content": "over a wire,\n\n日本 naïve"}  # as the assistant says
BLANK = {"role": "assistant", "content": " "}
SPELLED = {"role": "assistant", "content": "code; x = 3.14 <|im_end|></s> shards"}
SPACED = {"role": "assistant", "content": " and the shards \n"}
CHATS = {
    "one": [ASKED, SAID],
    "system": [SYSTEM, ASKED, SAID],
    "turns": [SYSTEM, ASKED, SAID, AGAIN, SAID, ASKED, SPACED],
    "asked": [ASKED, SAID, AGAIN],
    "spelled": [ASKED, SPELLED, ASKED, SAID],
    "long": [ASKED, {"role": "assistant", "content": "the gradient of shards " * 30}, AGAIN, SAID],
}
LENGTH = 48
TODAY = datetime.date(2024, 7, 26)  # in templates that ask for it


@pytest.fixture(autouse=True)
def dated(monkeypatch):
    """Transformers' clock stands at the date that gradwire gives templates."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", type("Clock", (), {"now": staticmethod(lambda: TODAY)}))


def tokenize(corpus, tokenizer, output, **given):
    """Tokenize a corpus whole; return the message of its refusal."""
    settings = {"vocab_size": 300, "max_length": LENGTH, "shard_size": 7, "val_fraction": 0.0, "dataset": "chats"}
    try:
        making.tokenize(corpus, output, tokenizer=str(tokenizer), **settings, **given)
    except BadInput as error:
        return str(error)
    return None


def read(folder):
    """Tokens and targets of each document, its samples one after the other."""
    split, found = Shards(folder / "shards", "all"), {}
    for sample in (split[at] for at in range(len(split))):
        tokens, flags = found.setdefault(sample.sample_id.partition("#")[0], ([], []))
        tokens += sample.input_ids.tolist()
        flags += [1] * len(sample.input_ids) if sample.is_target is None else sample.is_target.int().tolist()
    return found


def by_transformers(folder, template, messages):
    """Tokens and the assistant's, by a template with marks."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = marked(template)
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return out["input_ids"], out["assistant_masks"]


@pytest.mark.parametrize("form", [marked, unmarked])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_targets_are_those_of_transformers(tmp_path, family, form):
    make_tokenizer(tmp_path / "tokenizer", form(FAMILIES[family]))
    documents = [{"id": id_, "messages": messages} for id_, messages in CHATS.items()]
    assert tokenize(write(tmp_path / "c.jsonl", documents), tmp_path / "tokenizer", tmp_path / "out") is None
    found = read(tmp_path / "out")
    assert found.keys() == CHATS.keys()
    for id_, messages in CHATS.items():
        assert found[id_] == by_transformers(tmp_path / "tokenizer", FAMILIES[family], messages)
    samples = Shards(tmp_path / "out" / "shards", "all")
    assert max(len(samples[at].input_ids) for at in range(len(samples))) == LENGTH
    assert meta(tmp_path / "out" / "shards", "all")["chat_format"] == Template(form(FAMILIES[family]), {}).name


@pytest.mark.parametrize("form", [marked, unmarked])
def test_a_copied_tokenizer_reads_chats_as_the_first(tmp_path, form):
    make_tokenizer(tmp_path / "tokenizer", form(MISTRAL.replace("{{- bos", "{{- cls_token }}{{- bos")), bos_token=None)
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": CHATS["turns"]}])
    assert tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out") is None
    assert tokenize(corpus, tmp_path / "out" / "tokenizer", tmp_path / "again") is None
    assert read(tmp_path / "out") == read(tmp_path / "again")
    copied = AutoTokenizer.from_pretrained(tmp_path / "again" / "tokenizer")
    assert copied.apply_chat_template(CHATS["turns"], return_dict=True)["input_ids"] == read(tmp_path / "out")["one"][0]


@pytest.mark.parametrize("form", [marked, unmarked])
def test_an_empty_answer_is_no_target_of_the_others_and_alone_is_refused(tmp_path, form):
    make_tokenizer(tmp_path / "tokenizer", form(LLAMA))
    empty = [ASKED, {"role": "assistant", "content": ""}, AGAIN, SAID]
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": empty}])
    assert tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out") is None
    tokens, flags = by_transformers(tmp_path / "tokenizer", LLAMA, empty)
    if form is unmarked:
        flags[flags.index(1)] = 0  # the mark that ends the empty answer
    assert read(tmp_path / "out")["one"] == (tokens, flags)
    corpus = write(tmp_path / "empty.jsonl", [{"id": "one", "messages": [ASKED, BLANK]}])
    error = tokenize(corpus, tmp_path / "tokenizer", tmp_path / "empty")
    assert "has an empty message 1 of the assistant and so nothing to learn" in error


@pytest.mark.parametrize("case", REFUSED)
def test_a_chat_that_the_template_does_not_keep_is_refused(tmp_path, case):
    template, message = REFUSED[case]
    make_tokenizer(tmp_path / "tokenizer", unmarked(template))
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": CHATS["turns"]}])
    error = tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out")
    assert error.count("\n") == 0 and message in error
    assert "c.jsonl: document 0 (counted from 0, id 'one')" in error
    assert not (tmp_path / "out").exists() or {file.name for file in (tmp_path / "out").iterdir()} <= {".lock"}


def test_marks_of_a_template_must_enclose_what_the_assistant_says(tmp_path):
    template = CHATML.replace("«", "").replace("»", "").replace("{{- '\\n' }}", "«{{- '\\n' }}»")
    make_tokenizer(tmp_path / "tokenizer", marked(template))
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": CHATS["one"]}])
    error = tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out")
    assert "has a message 1 (counted from 0) whose content the chat template changes" in error


def test_a_refusal_by_the_template_names_the_document(tmp_path):
    make_tokenizer(tmp_path / "tokenizer", unmarked(MISTRAL))
    fine, wrong = {"id": "fine", "messages": CHATS["one"]}, {"id": "wrong", "messages": [SYSTEM, SAID, ASKED, SAID]}
    error = tokenize(write(tmp_path / "c.jsonl", [fine, wrong]), tmp_path / "tokenizer", tmp_path / "out")
    assert "document 1 (counted from 0, id 'wrong')" in error and "roles must alternate" in error


def test_the_plain_format_is_a_choice_by_name(tmp_path):
    make_tokenizer(tmp_path / "tokenizer", unmarked(CHATML))
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": CHATS["one"]}])
    assert tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out", chat_format="plain") is None
    assert meta(tmp_path / "out" / "shards", "all")["chat_format"] == "plain"
    tokens, _ = read(tmp_path / "out")["one"]
    text = f"<|user|>\n{ASKED['content']}\n<|assistant|>\n{SAID['content']}"
    assert load(tmp_path / "out" / "tokenizer").decode(tokens) == text
    error = tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out")
    assert "holds shards made with chat_format plain, not template:" in error
    make_tokenizer(tmp_path / "none", None)
    error = tokenize(corpus, tmp_path / "none", tmp_path / "other", chat_format="template")
    assert "--chat_format template: the tokenizer has no chat template; choose plain" in error
    assert tokenize(corpus, tmp_path / "none", tmp_path / "other") is None
    assert meta(tmp_path / "other" / "shards", "all")["chat_format"] == "plain"


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.json", "named"])
def test_a_template_is_read_where_tokenizers_keep_it(tmp_path, place):
    made = make_tokenizer(tmp_path / "tokenizer", None)
    file = tmp_path / "tokenizer" / (place if place.endswith("json") else "tokenizer_config.json")
    known = json.loads(file.read_text()) if file.exists() else {}
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": unmarked(CHATML)}]
    file.write_text(json.dumps({**known, "chat_template": named if place == "named" else unmarked(CHATML)}))
    assert load(tmp_path / "tokenizer").template.name == Template(unmarked(CHATML), {}).name
    made.chat_template = unmarked(CHATML)
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": CHATS["one"]}])
    assert tokenize(corpus, tmp_path / "tokenizer", tmp_path / "out") is None
    assert read(tmp_path / "out")["one"][0] == made.apply_chat_template(CHATS["one"], return_dict=True)["input_ids"]


def test_a_downloaded_corpus_keeps_messages(tmp_path):
    corpus = write(tmp_path / "c.jsonl", [{"id": "one", "messages": [ASKED, SAID]}, {"id": "two", "text": "row"}])
    words = ["--source", "json", "--data_path", str(corpus), "--output", str(tmp_path / "corpus.json")]
    assert cli.main(["download", *words]) == 0
    assert json.loads((tmp_path / "corpus.json").read_text()) == [
        {"id": "one", "title": "", "messages": [ASKED, SAID]},
        {"id": "two", "title": "", "text": "row"},
    ]


def test_other_documents_are_read_as_without_a_template(tmp_path):
    texts = [{"id": "text", "text": "sum <|im_end|> row"}, {"id": "pair", "prompt": "a ", "completion": "wire"}]
    corpus, found = write(tmp_path / "c.jsonl", texts), []
    for name, template in (("with", unmarked(CHATML)), ("without", None)):
        make_tokenizer(tmp_path / name, template)
        assert tokenize(corpus, tmp_path / name, tmp_path / f"out-{name}") is None
        found.append((tmp_path / f"out-{name}" / "shards" / "all" / "shard-00000.pt").read_bytes())
    assert found[0] == found[1]
