"""Targets: tokens against bytes, losses and gradients against autograd.

Of `data/chats.py`, `document.py`.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise

import blocks
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected
from data_samples import tokenize_words, values, write_corpus
from tokenizers import processors

from gradwire import cli
from gradwire.attribution.collect.rows import RowMaker
from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.store import store
from gradwire.lm.data import shards, sources
from gradwire.lm.data.batches import IGNORED, collate, train_batches
from gradwire.lm.data.chats import PLAIN
from gradwire.lm.data.corpus import documents
from gradwire.lm.data.shards import Shards, target_counts
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.models import causal

LENGTH = 24
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "where does the gradient travel?"},
    {"role": "assistant", "content": "over a wire, naïve 日本"},
    {"role": "user", "content": " and the shards "},
    {"role": "assistant", "content": "the shards too"},
]
SPANS = {"text": "shards  of the wire", "target_spans": [[0, 6], [7, 9], [9, 16]]}  # a token in two spans
DOCUMENTS = [
    {"id": "pair", "prompt": "the gradient of code", "completion": " travels over 日本"},
    {"id": "rejected", "prompt": "the gradi", "completion": "ent of the wire"},
    {"id": "chat", "messages": CHAT},
    {"id": "one", "messages": [*CHAT[:3], {"role": "user", "content": "so?", "name": None}, CHAT[4]]},
    {"id": "spans", **SPANS},
    {"id": "plain", "title": "read too", "text": "日本 naïve wire; " * 14},
    {"id": "no-prompt", "prompt": "", "completion": "x = 3.14"},
    {"id": "long-prompt", "prompt": "日本 naïve wire; " * 14, "completion": "and\n"},  # a sample without a target
    {"id": "asked", "messages": CHAT[:4]},  # the user's last word is no target, nor is the end of the text
    {"id": "usual", "prompt": "of", "completion": " a wire"},
    *({"id": f"more-{i}", "prompt": f"{i} shards of", "completion": f" the wire {i}"} for i in range(12)),
    *({**one, "id": f"plain-{i}"} for i, one in enumerate(values(4, 30))),
]
TEXTS = {  # of some documents, with what is to be predicted in brackets
    "pair": "the gradient of code[ travels over 日本]",
    "no-prompt": "[x = 3.14]",
    "chat": (
        "<|system|>\nbe brief\n<|user|>\nwhere does the gradient travel?\n<|assistant|>\n[over a wire, naïve 日本\n]"
        "<|user|>\n and the shards \n<|assistant|>\n[the shards too]"
    ),
    "asked": (
        "<|system|>\nbe brief\n<|user|>\nwhere does the gradient travel?\n<|assistant|>\n[over a wire, naïve 日本\n]"
        "<|user|>\n and the shards "
    ),
    "spans": "[shards] [ o][f the w]ire",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The corpus, its shards folder, and an untrained model."""
    base = tmp_path_factory.mktemp("targets")
    corpus = write_corpus(base / "corpus.json", DOCUMENTS)
    assert cli.main(tokenize_words(corpus, base / "data", max_length=LENGTH, shard_size=9)) == 0
    words = load_tokenizer(base / "data" / "tokenizer")
    model = causal.build("micro", words.vocab_size, LENGTH, seed=3)
    causal.save(model.state_dict(), model.config, base / "data" / "tokenizer", base / "model", {"steps": 0})
    return corpus, base / "data" / "shards", base / "model"


def all_samples(folder):
    return {sample.sample_id: sample for split in ("train", "val") for sample in Shards(folder, split)}


def bytes_of(tokens, words):
    """The bytes that each token of a byte-level tokenizer stands for, from GPT-2's table of printable characters."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {chr(byte): byte for byte in kept}
    shown |= {chr(256 + at): byte for at, byte in enumerate(byte for byte in range(256) if byte not in kept)}
    return [bytes(shown[character] for character in words.backend.id_to_token(token)) for token in tokens]


def load(path):
    return causal.load(path).double()


def test_the_text_and_its_targets_are_those_of_the_template(made):
    found = {one.id: one for one in documents(made[0])}
    for id_, marked in TEXTS.items():
        text, spans = found[id_].text, found[id_].spans
        for start, end in reversed(spans):
            text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
        assert text == marked
    assert found["plain-1"].spans is None and found["plain-1"].text.startswith("Title 1\n")


def test_a_downloaded_corpus_has_the_same_targets(made, tmp_path):
    words = ["--source", "json", "--data_path", str(made[0]), "--output", str(tmp_path / "out.json")]
    assert cli.main(["download", *words]) == 0
    assert [*documents(tmp_path / "out.json")] == [*documents(made[0])]


def wanted(document, tokens, words):
    """Whether each token is a target by the bytes of the spans, adding up the lengths of tokens."""
    parts, body = bytes_of(tokens, words), document.text
    if document.spans is None:
        return [True] * (len(parts) + 1)
    of_bytes = [False] * len(body.encode())
    for start, end in document.spans:
        first, last = len(body[:start].encode()), len(body[:end].encode())
        of_bytes[first:last] = [True] * (last - first)
    edges = [0, *accumulate(map(len, parts))]
    return [*(any(of_bytes[start:end]) for start, end in pairwise(edges)), of_bytes[-1]]


def test_tokens_are_targets_by_their_bytes(made):
    corpus, folder_, _ = made
    words, found = load_tokenizer(folder_.parent / "tokenizer"), all_samples(folder_)
    for document in documents(corpus):
        parts = [found[id_] for id_ in found if id_ == document.id or id_.startswith(f"{document.id}#")]
        *tokens, end = [token for part in parts for token in part.input_ids.tolist()]
        assert end == words.eos_id and tokens == words.encode_batch([document.text])[0]
        assert [flag for part in parts for flag in flags_of(part)] == wanted(document, tokens, words)


def test_spaces_belong_to_their_tokens_also_where_a_tokenizer_trims_them(made):
    words = load_tokenizer(made[1].parent / "tokenizer")
    words.backend.post_processor = processors.ByteLevel(trim_offsets=True)  # GPT-2's
    text = "the  wire, 日本 \n of<|endoftext|> "
    tokens, places = words.encode_places([text])[0]
    assert tokens == words.encode_batch([text])[0]
    edges = [0, *accumulate(map(len, bytes_of(tokens, words)))]
    for place, (start, end) in zip(places, pairwise(edges), strict=True):
        characters = [
            at for at in range(len(text)) if len(text[:at].encode()) < end > start < len(text[: at + 1].encode())
        ]
        assert place == (characters[0], characters[-1] + 1)


def test_labels_and_every_count_of_targets_agree(made):
    _, folder, _ = made
    counted = 0
    for split in ("train", "val"):
        opened = Shards(folder, split)
        together = collate([opened[at] for at in range(len(opened))], opened.meta["pad_id"], len(opened) + 1)
        for row, sample in enumerate(all_samples(folder)[id_] for id_ in together.sample_id if id_):
            wanted = [
                int(token) if flag else IGNORED for token, flag in zip(sample.input_ids, flags_of(sample), strict=True)
            ]
            assert together.labels[row].tolist() == wanted + [IGNORED] * (together.labels.shape[1] - len(wanted))
            assert sample.n_targets == sum(label != IGNORED for label in wanted[1:])
        labels = together.labels[:, 1:]
        assert together.n_targets == sum(opened[at].n_targets for at in range(len(opened)))
        size, pad = opened.meta["vocab_size"], opened.meta["pad_id"]
        tables = [*shards.tables(opened.folder, opened.meta)]
        counts = sum(target_counts(table, size, pad) for table in tables)
        assert counts.tolist() == torch.bincount(labels[labels != IGNORED], minlength=size).tolist()
        counted += sum("is_target" in table for table in tables)
        assert any("is_target" in table for table in tables)
    assert counted


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        (values(30), set()),
        ([{"prompt": "the", "completion": f" wire {i}"} for i in range(30)], {"is_target"}),
    ],
)
def test_shards_state_targets_only_where_not_every_token_is_one(tmp_path, given, stated):
    assert cli.main(tokenize_words(write_corpus(tmp_path / "c.json", given), tmp_path / "out")) == 0
    for file in (tmp_path / "out").rglob("shard-*.pt"):
        assert set(torch.load(file, weights_only=True)) == {"input_ids", "lengths", "sample_ids"} | stated


def by_hand(model, sample, reduction="mean"):
    """A sample's loss and its gradient, in float64 from the log-probabilities of one target at a time."""
    places = [at for at in range(1, len(sample.input_ids)) if flags_of(sample)[at]]
    if not places:
        return None, 0, torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    log_p = model(sample.input_ids[None]).logits[0].log_softmax(-1)
    loss = -sum(log_p[place - 1, sample.input_ids[place]] for place in places)
    loss = loss / len(places) if reduction == "mean" else loss
    parts = torch.autograd.grad(loss, [*model.parameters()])
    return loss.item(), len(places), torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", [hooks, vmap, loop])
def test_every_method_differentiates_the_loss_of_the_targets(made, method, reduction):
    opened, model = Shards(made[1], "train"), load(made[2])
    found = method.gradients(model, collate([*opened], opened.meta["pad_id"], len(opened)), reduction)
    rows = torch.cat([part.flatten(1) for part in found.gradient.values()], dim=1)
    for row, loss, sample in zip(rows, found.loss.tolist(), opened, strict=True):
        expected, _, gradient = by_hand(model, sample, reduction)
        torch.testing.assert_close(row, gradient.double(), rtol=1e-6, atol=1e-9)
        assert loss == pytest.approx(expected or 0.0, rel=1e-6)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_collected_rows_are_gradients_of_the_loss_of_the_targets(made, tmp_path, loss):
    _, folder_, model_dir = made
    model = load(model_dir)
    size = sum(parameter.numel() for parameter in model.parameters())
    words = ["--loss", loss, "--projection", "none", "--metadata", "n_tokens,n_valid"]
    path = collected(model_dir, folder_, tmp_path / "run", size, *words)
    assert cli.main(["grads", "validate", "--output_dir", str(tmp_path / "run"), "--recompute", "5"]) == 0
    block = blocks.read(store.all_names(path))
    flagged = list[str]()
    for id_, row, noted in zip(block.ids, block.rows.double(), block.meta.to_pylist(), strict=True):
        expected, count, gradient = by_hand(model, sample := all_samples(folder_)[id_], loss)
        torch.testing.assert_close(row, gradient.double(), rtol=0, atol=1e-5)
        assert (noted["n_targets"], noted["n_valid"], noted["n_tokens"]) == (count, count, len(sample.input_ids))
        assert (noted["flag"], noted["norm"] == 0) == (("no_target", True) if expected is None else (None, False))
        flagged += [id_] if expected is None else []
        assert noted["loss"] == (None if expected is None else pytest.approx(expected, rel=1e-4, abs=1e-5))
    assert "long-prompt#0" in flagged and len(flagged) < len(block.ids) / 2


def test_the_method_is_checked_on_samples_that_count(made, tmp_path, monkeypatch):
    looked_at = []
    monkeypatch.setattr(RowMaker, "check", lambda self, samples, at: looked_at.extend(samples[one] for one in at))
    given = [{**DOCUMENTS[0], "id": f"{at}"} for at in range(5)]
    prompted = {"id": "long-prompt", "prompt": "日本 naïve wire; " * 14, "completion": "and\n"}
    corpus = write_corpus(tmp_path / "c.json", [prompted, *given])
    words = ["--model_dir", made[2], "--data_path", corpus, "--output_path", tmp_path / "run", "--dim", 9]
    assert cli.main(["grads", "collect", *map(str, words), "--cache_dir", str(tmp_path / "cache")]) == 0
    first, second = looked_at  # the first samples of the prompt have no target
    assert first.sample_id.startswith("long-prompt#") and first.n_targets and second.sample_id == "0"


def test_norms_and_fused_rows_are_those_of_the_loss_of_the_targets(made, tmp_path):
    words = ["--model_dir", made[2], "--data_path", made[1]]
    assert cli.main(["norms", *map(str, words), "--output_dir", str(tmp_path)]) == 0
    model, found = load(made[2]), all_samples(made[1])
    expected = {id_: by_hand(model, one) for id_, one in found.items()}
    for row in pq.read_table(tmp_path / "norms.parquet").to_pylist():
        assert row["norm"] == pytest.approx(float(expected[row["id"]][2].norm()), rel=1e-4, abs=1e-6)
    words += ["--output_path", tmp_path / "run", "--dim", 64, "--projection", "factored", "--method", "hooks"]
    assert cli.main(["grads", "collect", *map(str, words)]) == 0
    block = blocks.read(store.all_names(tmp_path / "run" / "rank_0" / "dim64"))
    for id_, norm in zip(block.ids, block.meta["norm"].to_pylist(), strict=True):
        assert norm == pytest.approx(float(expected[id_][2].norm()), rel=1e-4, abs=1e-6)


def test_training_and_perplexity_are_over_the_targets(made, tmp_path):
    _, folder_, model_dir = made
    words = ["--data_path", folder_, "--output_dir", tmp_path / "run", "--model", "micro", "--steps", 6, "--seed", 0]
    assert cli.main(["train", *map(str, words), "--batch_size", "4", "--warmup_steps", "0", "--device", "cpu"]) == 0
    opened = Shards(folder_, "train")
    batch = next(train_batches(opened, 4, 0, 1, 0))
    model = causal.build("micro", opened.meta["vocab_size"], LENGTH, seed=0).double()
    alone = [by_hand(model, all_samples(folder_)[id_], "sum")[:2] for id_ in batch.sample_id]
    row = pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist()[0]
    count = sum(number for _, number in alone)
    assert row["tokens"] == count < sum(len(all_samples(folder_)[id_].input_ids) - 1 for id_ in batch.sample_id)
    assert row["loss"] == pytest.approx(sum(loss or 0.0 for loss, _ in alone) / count, rel=1e-5)

    words = ["--model_dir", model_dir, "--data_path", folder_, "--output", tmp_path / "p.json"]
    assert cli.main(["perplexity", *map(str, words)]) == 0
    quality, of_val, model = json.loads((tmp_path / "p.json").read_text()), Shards(folder_, "val"), load(model_dir)
    alone = [by_hand(model, one, "sum")[:2] for one in of_val]
    mean = sum(loss or 0.0 for loss, _ in alone) / sum(count for _, count in alone)
    assert quality["avg_loss"] == pytest.approx(mean, rel=1e-5)


def test_a_query_is_compared_by_the_gradient_of_its_targets(made, tmp_path, capsys):
    _, folder_, model_dir = made
    model, found = load(model_dir), all_samples(folder_)
    size = sum(parameter.numel() for parameter in model.parameters())
    path = collected(model_dir, folder_, tmp_path / "run", size, "--projection", "none")
    asked = write_corpus(tmp_path / "asked.json", [DOCUMENTS[0]])
    capsys.readouterr()
    words = ["--store", path, "--data_path", asked, "--metric", "dot", "--json"]
    assert cli.main(["grads", "query", *map(str, words), "--top_k", "99", "--cache_dir", str(tmp_path)]) == 0
    gradient_of_query = by_hand(model, found["pair"])[2]
    for hit in json.loads(capsys.readouterr().out)["top"]:
        gradient = by_hand(model, found[hit["sample_id"]])[2]
        assert hit["score"] == pytest.approx(float(gradient_of_query @ gradient.double()), rel=1e-3, abs=1e-4)


BAD = {
    "no completion": ({"prompt": "a"}, "needs a string 'completion' as well as"),
    "no prompt": ({"completion": "a"}, "needs a string 'prompt' as well as"),
    "blank completion": ({"prompt": "a", "completion": " \n"}, "has a blank completion"),
    "both": ({"prompt": "a", "completion": "b", "messages": CHAT}, "has both 'messages' and 'prompt'"),
    "no list": ({"messages": "hello"}, "needs 'messages' that are a list of objects"),
    "no content": ({"messages": [{"role": "assistant"}]}, "has a message 0 (counted from 0) whose role or content"),
    "nobody answers": ({"messages": CHAT[:2]}, "has no message of the assistant"),
    "blank text": ({"text": "", "prompt": "a", "completion": "b"}, "has no text"),
    "spans of nothing": ({"text": "abc", "target_spans": []}, "needs 'target_spans' that are a list"),
    "spans that overlap": ({"text": "abc", "target_spans": [[0, 2], [1, 3]]}, "has 'target_spans' that overlap"),
    "a span beyond": (
        {"text": "abc", "target_spans": [[1, 4]]},
        "has 'target_spans' that overlap, are empty, or leave its text of 3 characters",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_document_is_one_message(case, tmp_path, capsys):
    document, message = BAD[case]
    corpus = write_corpus(tmp_path / "in.json", [{"text": "fine"}, document])
    assert cli.main(tokenize_words(corpus, tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"in.json: document 1 (counted from 0) {message}" in error
    assert not (tmp_path / "out" / "shards").exists()


def test_a_dataset_gives_prompts_or_chats(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "ask": ["a ", "b ", "c "],
        "answer": ["one", " ", None],
        "chat": [CHAT, CHAT[:2], CHAT[:4]],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")

    def read(**options):
        stream = sources.build("datasets", {"data_path": str(tmp_path / "saved"), **options}).open()
        return [(one.id, one.text, one.spans) for one in stream.documents], dict(stream.metadata)

    pairs = read(prompt_column="ask", completion_column="answer")
    assert pairs == ([("train/0", "a one", ((2, 5),))], {"rows_without_completion": 2})
    chats, missing = read(messages_column="chat")
    assert missing == {"rows_without_answer": 1}
    assert [id_ for id_, _, _ in chats] == ["train/0", "train/2"]
    for (_, text, spans), row in zip(chats, (0, 2), strict=True):
        assert (text, spans) == PLAIN.read(rows["chat"][row])[:2]
    for options in ({"prompt_column": "ask"}, {"messages_column": "chat", "text_column": "ask"}):
        with pytest.raises(sources.BadInput, match=r"source datasets: .*(belong together|exclude one another)"):
            read(**options)


def test_data_without_any_target_is_refused(tmp_path, capsys):
    one = {"text": "xyz", "target_spans": [[0, 1]]}  # the first token of a sample is never predicted
    assert cli.main(tokenize_words(write_corpus(tmp_path / "c.json", [one] * 9), tmp_path / "out")) == 2
    assert "no sample in train has a target" in capsys.readouterr().err


def test_damaged_targets_are_refused(made, tmp_path):
    opened = Shards(made[1], "train")
    table = torch.load(opened.folder / "shard-00000.pt")
    for wrong in (table["is_target"][:, 1:], table["is_target"].int()):
        torch.save({**table, "is_target": wrong.clone()}, tmp_path / "shard-00000.pt")
        with pytest.raises(shards.BadInput, match="is_target is not a bool matrix"):
            shards.table(tmp_path, opened.meta, 0)


def flags_of(sample):
    return [True] * len(sample.input_ids) if sample.is_target is None else sample.is_target.tolist()
