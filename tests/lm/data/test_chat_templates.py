"""A tokenizer's own chat template is not applied to chats, and that is said."""

from __future__ import annotations

import json

import pytest
from small_model import make

from gradwire import cli
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import load

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATS = [
    {
        "id": f"chat {number}",
        "messages": [
            {"role": "user", "content": f"gradient {'wire ' * number}"},
            {"role": "assistant", "content": f"shard {number}"},
        ],
    }
    for number in range(20)
]
TEXTS = [{"id": f"text {number}", "title": "<|user|>", "text": f"sum {'row ' * number}"} for number in range(20)]
SPANS = [
    {"id": "mine", "text": "<|im_start|>user\nrow<|im_end|>\n<|im_start|>assistant\nsum", "target_spans": [[53, 56]]}
]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer's folder."""
    return make(tmp_path).corpus.parent / "data" / "tokenizer"


def put(folder, place):
    """Put a chat template where transformers reads it."""
    if place == "tokenizer_config.json":
        config = json.loads((folder / place).read_text())
        (folder / place).write_text(json.dumps({**config, "chat_template": CHATML}))
    elif place:
        (folder / place).write_text(CHATML)


def tokenized(corpus, folder, output, capsys):
    """What is said of tokenizing a corpus."""
    words = ["--data_path", str(corpus), "--tokenizer", str(folder), "--output_dir", str(output), "--max_length", "128"]
    capsys.readouterr()
    assert cli.main(["tokenize", *words, "--val_fraction", "0.3"]) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize("downloaded", [False, True])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", None])
def test_a_chat_template_that_is_not_applied_is_warned_of(folder, tmp_path, capsys, place, downloaded):
    put(folder, place)
    corpus = tmp_path / "chats.json"
    corpus.write_text(json.dumps([*TEXTS, *CHATS]))
    if downloaded:
        words = ["--data_path", str(corpus), "--output", str(tmp_path / "downloaded.json")]
        assert cli.main(["download", "--source", "json", *words]) == 0
        corpus = tmp_path / "downloaded.json"
    said = tokenized(corpus, folder, tmp_path / "tokens", capsys)
    if place is None:
        assert said == ""
    else:
        assert said == (
            f"gradwire: WARNING: {corpus} has chats, and the chat template in {folder / place} is not applied: a "
            "message is read as `<|role|>`, a line break and its content. Losses are of that form, not of the "
            "template's.\n"
        )
    splits = [Shards(tmp_path / "tokens" / "shards", name) for name in ("train", "val")]
    samples = [split[position] for split in splits for position in range(len(split))]
    tokens = next(sample.input_ids.tolist() for sample in samples if sample.sample_id == "chat 3")
    assert load(folder).decode(tokens) == "<|user|>\ngradient wire wire wire \n<|assistant|>\nshard 3"


@pytest.mark.parametrize("documents", [TEXTS, [*TEXTS, *SPANS]], ids=["texts", "spans"])
def test_other_documents_need_no_template(folder, tmp_path, capsys, documents):
    put(folder, "chat_template.jinja")
    (tmp_path / "texts.json").write_text(json.dumps(documents))
    assert tokenized(tmp_path / "texts.json", folder, tmp_path / "tokens", capsys) == ""
