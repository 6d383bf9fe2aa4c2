"""Chats by a template, from training to queries: losses and gradients against autograd on transformers' tokens."""

from __future__ import annotations

import json

import blocks
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import collected
from chat_templates import CHATML, make_tokenizer, marked, unmarked, write
from transformers import AutoTokenizer

from gradwire import cli
from gradwire.attribution.query import score
from gradwire.attribution.query.searcher import Searcher
from gradwire.attribution.store import provenance, store
from gradwire.lm.data.chats import Template
from gradwire.lm.models import causal

LENGTH = 96
FORMAT = Template(unmarked(CHATML), {}).name
SUBJECTS = ("the gradient", "a wire", "naïve shards", "日本", "code; x = 3.14")


def chat(number):
    """A chat of one or two turns, some with a system's message."""
    subject, other = SUBJECTS[number % 5], SUBJECTS[(number * 3 + 1) % 5]
    turns = [{"role": "user", "content": f"where is {subject}?"}, {"role": "assistant", "content": f"over {other}"}]
    system = [{"role": "system", "content": "be brief"}] if number % 3 == 0 else []
    return [*system, *turns * (1 + number % 2)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The chats, a model whose tokenizer has the template, and a store of the chats' gradients."""
    base = tmp_path_factory.mktemp("chats")
    chats = write(base / "chats.jsonl", [{"id": f"chat/{n}", "messages": chat(n)} for n in range(7)])
    make_tokenizer(base / "tokenizer", unmarked(CHATML))
    words = ["--data_path", chats, "--tokenizer", base / "tokenizer", "--output_dir", base / "data"]
    sizes = ["--max_length", LENGTH, "--val_fraction", "0.3"]
    assert cli.main(["tokenize", *map(str, [*words, *sizes])]) == 0
    model = causal.build("micro", 350, LENGTH, seed=3)
    causal.save(model.state_dict(), model.config, base / "data" / "tokenizer", base / "model", {"steps": 0})
    collected(base / "model", chats, base / "run", 4096, "--projection", "sjlt", "--cache_dir", str(base / "cache"))
    return chats, base / "model", base / "run" / "dim4096"


def by_hand(model_dir, messages):
    """The mean loss over what the assistant says, and its gradient's norm, in float64 on transformers' tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = marked(CHATML)
    out = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    tokens, said = torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"]).bool()
    model = causal.load(model_dir).double()
    log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    loss = -log_p.gather(1, tokens[1:, None])[said[1:]].mean()
    parts = torch.autograd.grad(loss, [*model.parameters()])
    return loss.item(), int(said[1:].sum()), torch.cat([part.flatten() for part in parts]).norm().item()


def test_losses_norms_and_rows_are_those_of_the_template(made, tmp_path):
    chats, model_dir, dim = made
    manifest = provenance.read_manifest(dim)
    assert manifest.chat_format == FORMAT
    words = ["--model_dir", model_dir, "--data_path", chats]
    words += ["--cache_dir", tmp_path / "cache", "--output_dir", tmp_path]
    assert cli.main(["norms", *map(str, words)]) == 0
    norms = {row["id"]: row for row in pq.read_table(tmp_path / "norms.parquet").to_pylist()}
    rows = {row["sample_id"]: row for row in pq.read_table(store.all_names(dim).meta).to_pylist()}
    assert norms.keys() == rows.keys() and len(rows) == 7
    for number in range(7):
        loss, targets, norm = by_hand(model_dir, chat(number))
        found, row = norms[f"chat/{number}"], rows[f"chat/{number}"]
        assert found["n_valid"] == targets
        assert [found["loss"], found["norm"], row["norm"]] == pytest.approx([loss, norm, norm], rel=1e-5)


def test_queries_read_chats_as_the_store(made, tmp_path, capsys):
    chats, model_dir, dim = made
    searcher = Searcher(dim, {}, "cpu")
    for number in (2, 5):
        answer = searcher.nearest(searcher.store.row(f"chat/{number}")[None], "cosine", "mean", 1)
        one = write(tmp_path / f"{number}.jsonl", [{"messages": chat(number)}])
        words = ["--store", dim, "--data_path", one, "--cache_dir", tmp_path / f"cache-{number}", "--json"]
        assert cli.main(["grads", "query", *map(str, words)]) == 0
        top = json.loads(capsys.readouterr().out)["top"]
        assert (top[0]["sample_id"], top[0]["score"]) == (answer[0]["sample_id"], pytest.approx(1, abs=1e-5))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(chats.read_text())
    words = ["--data_path", plain, "--tokenizer", model_dir]
    words += ["--output_dir", tmp_path / "plain", "--val_fraction", "0.3"]
    assert cli.main(["tokenize", *map(str, words), "--max_length", str(LENGTH), "--chat_format", "plain"]) == 0
    words = ["--store", dim, "--data_path", tmp_path / "plain" / "shards"]
    assert cli.main(["grads", "query", *map(str, words)]) == 2
    assert "has chats in the format plain, not template" in capsys.readouterr().err


def test_stores_of_two_formats_are_not_compared(made, tmp_path, capsys):
    chats, model_dir, dim = made
    options = ["--projection", "sjlt", "--cache_dir", str(tmp_path / "cache"), "--chat_format", "plain"]
    collected(model_dir, chats, tmp_path / "run", 4096, *options)
    plain = tmp_path / "run" / "dim4096"
    assert provenance.read_manifest(plain).chat_format == "plain"
    assert not (blocks.read_rows(plain / "all_orig.pt") == blocks.read_rows(dim / "all_orig.pt")).all()
    capsys.readouterr()
    words = ["--train", dim, "--validation", plain, "--output_dir", tmp_path / "selected"]
    assert cli.main(["grads", "influence", *map(str, words)]) == 2
    assert "have chats in different formats, plain and template:" in capsys.readouterr().err


def test_queries_of_scores_are_read_as_the_samples():
    given = {"model_dir": "m", "data_path": "a", "query_path": "b", "output_dir": "o"}
    asked = score.of_queries(score.Options(**given, chat_format="plain", skip_invalid=True))
    assert (str(asked.data_path), asked.chat_format, asked.skip_invalid) == ("b", "plain", True)


def test_a_trained_model_keeps_the_template(made, tmp_path):
    _, model_dir, _ = made
    chats = write(tmp_path / "chats.jsonl", [{"id": f"chat/{n}", "messages": chat(n)} for n in range(60)])
    words = ["--data_path", chats, "--tokenizer", model_dir, "--cache_dir", tmp_path / "cache", "--output_dir"]
    sizes = {"max_length": LENGTH, "model": "micro", "steps": 2, "warmup_steps": 1, "batch_size": 2, "strategy": "ddp"}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert cli.main(["train", *map(str, words), str(tmp_path / "run"), *flags, "--no-profile"]) == 0
    kept = AutoTokenizer.from_pretrained(tmp_path / "run" / "final_model")
    assert kept.chat_template == unmarked(CHATML)
