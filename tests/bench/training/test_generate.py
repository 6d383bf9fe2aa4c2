"""Generated text: it follows the model's probabilities, ends where it should, and is determined by the seed."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch
from small_model import MAX_LENGTH, make
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutput

from gradwire import cli
from gradwire.bench.training.generate import continuation
from gradwire.lm.data import tokenizer
from gradwire.lm.models import causal


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("generate"))


class Constant(GPT2LMHeadModel):
    """A language model with the same logits at every position."""

    def forward(self, input_ids, **_):
        return CausalLMOutput(logits=self.logits.expand(*input_ids.shape, -1).clone())


def constant(small, probabilities, positions=MAX_LENGTH):
    """A model that gives texts of one token their probabilities, and its tokenizer."""
    words = tokenizer.load(small.model)
    config = causal.load(small.model).config
    config.max_position_embeddings = positions
    model = Constant(config).eval()
    model.logits = torch.full((config.vocab_size,), -torch.inf)
    for text, probability in probabilities.items():
        token = words.eos_id if text is None else words.encode_batch([text])[0][0]
        model.logits[token] = math.log(probability)
    return model, words


def test_sampling_keeps_to_the_nucleus_and_follows_the_probabilities(small):
    model, words = constant(small, {"a": 0.1, "b": 0.5, "c": 0.15, "d": 0.25}, positions=1000)
    torch.manual_seed(0)
    text = continuation(model, words, "x", 900, 1.0, 0.7)
    assert set(text) == {"b", "d"}  # 0.5, then 0.25 to reach 0.7
    assert text.count("b") / 900 == pytest.approx(2 / 3, abs=0.06)
    assert set(continuation(model, words, "x", 20, 1.0, 1e-6)) == {"b"}
    cold = continuation(model, words, "x", 900, 0.5, 1.0)  # probabilities to the power of 2
    assert cold.count("b") / 900 == pytest.approx(0.25 / 0.345, abs=0.06)


def test_sampling_draws_from_all_tokens_of_the_tokenizer_and_no_others(small):
    model, _ = constant(small, {}, positions=1000)
    model.logits[:60] = torch.linspace(0, 1, 60)  # more than transformers' default top_k of 50
    model.logits[200:] = 9.0  # rows of the embedding without a token
    words = SimpleNamespace(vocab_size=200, eos_id=60, pad_id=60, encode_batch=lambda _: [[0]], decode=set)
    torch.manual_seed(0)
    assert continuation(model, words, "x", 900, 1.0, 1.0) == set(range(60))


@pytest.mark.parametrize("count", [5, 3 * MAX_LENGTH])
def test_greedy_continuations_are_those_of_the_argmax_over_the_model_s_window(small, count):
    model, words = causal.load(small.model), tokenizer.load(small.model)
    prompt = "gradient sample"
    for text in (prompt, prompt * 30):
        tokens = words.encode_batch([text])[0]
        start = len(tokens)
        for _ in range(count):
            logits = model(torch.tensor([tokens[-MAX_LENGTH:]])).logits[0, -1, : words.vocab_size]
            tokens.append(int(logits.argmax()))
            if tokens[-1] == words.eos_id:
                break
        assert continuation(model, words, text, count, 0.0, 1.0) == words.decode(tokens[start:])


def test_a_continuation_ends_at_the_end_of_text(small):
    model, words = constant(small, {None: 1.0})
    assert continuation(model, words, "gradient sample " * 30, 5, 0.0, 1.0) == ""
    assert continuation(model, words, "a", 5, 1.0, 1.0) == ""
    ids = SimpleNamespace(
        vocab_size=200, eos_id=words.eos_id, pad_id=60, encode_batch=lambda _: [[0] * 30], decode=list
    )
    assert continuation(model, ids, "", 5, 0.0, 1.0) == [words.eos_id], "nothing is generated after it"


def test_generate_reads_a_prompt_from_stdin_and_repeats_itself_by_seed(small, capfdbinary, monkeypatch):
    words = ["generate", "--model_dir", str(small.model), "--max_new_tokens", "12"]

    def generated(*more):
        monkeypatch.setattr("sys.stdin", io.StringIO("a sample\n"))
        assert cli.main([*words, *more]) == 0
        printed, errors = capfdbinary.readouterr()  # not as text, which would replace a carriage return
        assert errors == b""
        return printed

    first = generated()
    assert first.startswith(b"a sample") and first.endswith(b"\n")
    assert generated() == first
    assert generated("--seed", "1") != first
    assert generated("--temperature", "0") == generated("--temperature", "0", "--seed", "1")


def test_generate_refuses_an_empty_prompt(small, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(["generate", "--model_dir", str(small.model)]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


def test_generate_converses_at_a_terminal(small, capsys, monkeypatch):
    typed = iter(["a sample", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(["generate", "--model_dir", str(small.model), "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("a sample")
