"""Prompts are read and not predicted: targets of tokens against bytes, and losses and gradients against autograd."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import accumulate, pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from data_samples import tokenize_words, values, write_corpus
from tokenizers import processors

from gradwire import cli
from gradwire.attribution.collect.rows import RowMaker
from gradwire.attribution.store import store
from gradwire.bench.judge import recall
from gradwire.lm.data import shards, sources, targets
from gradwire.lm.data.batches import IGNORED, collate
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
DOCUMENTS = [
    {"id": "pair", "title": "not read", "prompt": "the gradient of code", "completion": " travels over 日本"},
    {"id": "glued", "prompt": "the gradi", "completion": "ent of the wire"},  # a token across the border
    {"id": "no-prompt", "prompt": "", "completion": "x = 3.14"},
    {"id": "long-prompt", "prompt": "日本 naïve wire; " * 14, "completion": "and\n"},
    {"id": "chat", "messages": CHAT},
    {"id": "asked", "messages": CHAT[:4]},  # the user's last word is no target, nor is the end of the text
    {"id": "spans", "text": "shards  of the wire", "target_spans": [[7, 9], [14, 16]]},  # spaces, and part of a token
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
    "spans": "shards [ o]f the[ w]ire",
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


def wanted_targets(text, spans, tokens, words):
    """Which tokens have a byte of the targets' characters, by adding up the lengths of tokens."""
    edges = [0, *accumulate(map(len, bytes_of(tokens, words)))]
    inside = np.zeros(len(text.encode()), dtype=bool)
    for start, end in spans:
        inside[len(text[:start].encode()) : len(text[:end].encode())] = True
    return [bool(inside[start:end].any()) for start, end in pairwise(edges)]


def test_the_text_and_its_targets_are_those_of_the_template(made):
    found = {one.id: one for one in documents(made[0])}
    for id_, marked in TEXTS.items():
        text, spans = found[id_].text, found[id_].spans
        for start, end in reversed(spans):
            text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
        assert text == marked
    assert found["plain-1"].spans is None and found["plain-1"].text.startswith("Title 1\n")


def test_tokens_are_targets_where_a_byte_of_theirs_is(made):
    corpus, folder, _ = made
    words, found = load_tokenizer(causal.parent / "tokenizer"), all_samples(folder)
    for document in documents(corpus):
        parts = [found[id_] for id_ in found if id_ == document.id or id_.startswith(f"{document.id}#")]
        *tokens, end = [token for part in parts for token in part.input_ids.tolist()]
        assert end == words.eos_id and tokens == words.encode_batch([document.text])[0]
        flags = [flag for one in parts for flag in (one.is_target if one.is_target is not None else one.input_ids > -1)]
        if document.spans is None:
            assert all(flags)
            continue
        *inside, ends = map(bool, flags)
        assert inside == wanted_targets(document.text, document.spans, tokens, words)
        assert ends == (document.id not in ("asked", "spans"))
        assert any(inside) and (document.id == "no-prompt" or not all(inside))


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
            flags = sample.is_target if sample.is_target is not None else torch.ones(len(sample.input_ids), dtype=bool)
            wanted = [int(token) if flag else IGNORED for token, flag in zip(sample.input_ids, flags, strict=True)]
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


def test_shards_of_plain_text_have_no_targets_of_their_own(tmp_path):
    assert cli.main(tokenize_words(write_corpus(tmp_path / "c.json", values(30)), tmp_path / "out")) == 0
    for file in (tmp_path / "out").rglob("shard-*.pt"):
        assert set(torch.load(file, weights_only=True)) == {"input_ids", "lengths", "sample_ids"}


def by_hand(model, sample):
    """The mean loss over a sample's targets and its gradient, in float64 from the log-probabilities."""
    places = [at for at in range(1, len(sample.input_ids)) if sample.is_target is None or sample.is_target[at]]
    if not places:
        return None, 0, 0.0
    log_p = model(sample.input_ids[None]).logits[0].log_softmax(-1)
    loss = -sum(log_p[place - 1, sample.input_ids[place]] for place in places) / len(places)
    parts = torch.autograd.grad(loss, [*model.parameters()])
    return loss.item(), len(places), torch.cat([part.flatten() for part in parts]).numpy()


@pytest.fixture(scope="module")
def collected(made, tmp_path_factory):
    """Whole gradients of the training split, by two batches."""
    run, (_, folder, model) = tmp_path_factory.mktemp("collected") / "run", made
    size = sum(parameter.numel() for parameter in load(model).parameters())
    words = ["--model_dir", model, "--data_path", folder, "--output_path", run, "--dim", size, "--projection", "none"]
    assert cli.main(["grads", "collect", *map(str, words), "--metadata", "n_tokens,n_valid"]) == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(size)]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--recompute", "5"]) == 0
    return run / f"dim{size}"


def load(path):
    return causal.load(path).double()


def test_collected_rows_are_gradients_of_the_targets(made, collected):
    _, folder, model = made
    model, block = load(model), store.read(store.all_names(collected))
    table = {row["sample_id"]: row for row in block.meta.to_pylist()}
    flagged = []
    for id_, row in zip(block.ids, block.rows.double().numpy(), strict=True):
        loss, count, gradient = by_hand(model, sample := all_samples(folder)[id_])
        np.testing.assert_allclose(row, gradient, atol=2e-6)
        noted = table[id_]
        assert (noted["n_targets"], noted["n_valid"], noted["n_tokens"]) == (count, count, len(sample.input_ids))
        if loss is None:
            assert (noted["flag"], noted["loss"], noted["norm"]) == ("no_target", None, 0)
            flagged.append(id_)
        else:
            assert noted["flag"] is None and noted["loss"] == pytest.approx(loss, rel=1e-5)
    assert "long-prompt#0" in flagged and len(flagged) < len(block.ids) / 2


def test_norms_perplexity_and_query_use_the_targets_alone(made, collected, tmp_path, capsys):
    corpus, folder, model_dir = made
    model, found = load(model_dir), all_samples(folder)
    words = ["--model_dir", model_dir, "--data_path", folder]
    assert cli.main(["norms", *map(str, words), "--output_dir", str(tmp_path)]) == 0
    for row in pq.read_table(tmp_path / "norms.parquet").to_pylist():
        loss, count, gradient = by_hand(model, found[row["id"]])
        assert row["n_valid"] == count
        assert row["norm"] == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-4, abs=0)
        assert row["loss"] == (None if loss is None else pytest.approx(loss, rel=1e-5))

    assert cli.main(["perplexity", *map(str, words), "--output", str(tmp_path / "p.json")]) == 0
    quality, of_val = json.loads((tmp_path / "p.json").read_text()), Shards(folder, "val")
    alone = [by_hand(model, of_val[at])[:2] for at in range(len(of_val))]
    total = sum(count for _, count in alone)
    assert quality["n_targets"] == total
    assert quality["avg_loss"] == pytest.approx(sum(loss * count for loss, count in alone if count) / total, rel=1e-5)

    asked = write_corpus(tmp_path / "asked.json", [DOCUMENTS[0]])
    capsys.readouterr()
    words = ["--store", collected, "--data_path", asked, "--metric", "dot", "--json", "--top_k", 100]
    assert cli.main(["grads", "query", *map(str, words), "--cache_dir", str(tmp_path / "cache")]) == 0
    _, _, query = by_hand(model, found["pair"])
    for one in json.loads(capsys.readouterr().out)["top"]:
        gradient = by_hand(model, found[one["sample_id"]])[2]
        assert one["score"] == pytest.approx(float(np.sum(query * gradient)), rel=1e-3, abs=1e-4)
    assert corpus.is_file()


def test_a_step_trains_on_the_targets_alone(made, tmp_path):
    _, folder, _ = made
    words = ["--data_path", folder, "--output_dir", tmp_path / "run", "--model", "micro", "--steps", 6, "--seed", 0]
    assert cli.main(["train", *map(str, words), "--batch_size", "4", "--warmup_steps", "0", "--device", "cpu"]) == 0
    from gradwire.lm.data.batches import train_batches

    opened = Shards(folder, "train")
    batch = next(train_batches(opened, 4, 0, 1, 0))
    row = pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist()[0]
    model = causal.build("micro", opened.meta["vocab_size"], LENGTH, seed=0).double()
    alone = [by_hand(model, all_samples(folder)[id_])[:2] for id_ in batch.sample_id]
    count = sum(number for _, number in alone)
    assert row["tokens"] == count < sum(len(all_samples(folder)[id_].input_ids) - 1 for id_ in batch.sample_id)
    assert row["loss"] == pytest.approx(sum(loss * number for loss, number in alone if number) / count, rel=1e-5)


BAD = {
    "no completion": ({"prompt": "a"}, "needs a string 'completion' beside"),
    "no prompt": ({"completion": "a"}, "needs a string 'prompt' beside"),
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


def test_a_downloaded_corpus_keeps_its_targets(tmp_path):
    source = write_corpus(tmp_path / "in.json", DOCUMENTS)
    words = ["--source", "json", "--data_path", str(source), "--output", str(tmp_path / "out.json")]
    assert cli.main(["download", *words]) == 0
    assert [*documents(tmp_path / "out.json")] == [*documents(source)]


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
    assert chats == [(f"train/{row}", *targets.of_messages(rows["chat"][row])) for row in (0, 2)]
    for options in ({"prompt_column": "ask"}, {"messages_column": "chat", "text_column": "ask"}):
        with pytest.raises(sources.BadInput, match=r"source datasets: .*(belong together|exclude one another)"):
            read(**options)


def test_data_without_any_target_is_refused(tmp_path, capsys):
    one = {"text": "xyz", "target_spans": [[0, 1]]}  # the first token of a sample is never predicted
    assert cli.main(tokenize_words(write_corpus(tmp_path / "c.json", [one] * 9), tmp_path / "out")) == 2
    assert "no sample in train has a target" in capsys.readouterr().err


def test_the_method_is_checked_on_samples_that_have_targets(made, tmp_path, monkeypatch):
    looked_at = []

    def check(self, samples, positions):
        looked_at.extend(samples[at].n_targets for at in positions)

    monkeypatch.setattr(RowMaker, "check", check)
    corpus = write_corpus(tmp_path / "c.json", [DOCUMENTS[3], DOCUMENTS[0]])  # the first one begins with its prompt
    words = ["--model_dir", made[2], "--data_path", corpus, "--output_path", tmp_path / "run", "--dim", 9]
    assert cli.main(["grads", "collect", *map(str, words), "--cache_dir", str(tmp_path / "cache")]) == 0
    assert len(looked_at) == 2 and all(looked_at)


def test_planted_copies_have_the_targets_of_their_query(made, tmp_path):
    train, val = (Shards(made[1], split) for split in ("train", "val"))
    args = Namespace(seed=0, queries=1, copies=2, documents=3)
    planted = recall.plant(train, val, 5, args)
    recall.write(tmp_path / "data" / "shards", train, 5, planted)
    found = all_samples(tmp_path / "data" / "shards")
    for number, kind in enumerate(("exact", "edited")):
        flags = recall.encoded_of(val[number]).is_target or [True] * len(val[number].input_ids)
        for id_ in (f"query/{number}", f"{kind}/{number}/0", f"{kind}/{number}/1"):
            assert (recall.encoded_of(found[id_]).is_target or [True] * len(flags)) == flags
    for position in range(5):
        one = train[position]
        assert found[one.sample_id].n_targets == one.n_targets
    assert any(found[train[position].sample_id].n_targets < len(train[position].input_ids) - 1 for position in range(5))
