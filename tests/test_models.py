"""Presets, model folders that come back bit for bit, and generation that a seed determines."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch
from small_model import MAX_LENGTH, make

from gradwire import cli
from gradwire.data import tokenizer
from gradwire.errors import BadInput
from gradwire.models import folder, gpt2, sampling


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("preset", "vocab", "length", "count"), [("tiny", 2048, 128, 675_328), ("62m", 50_257, 1024, 62_392_320)]
)
def test_presets_have_the_size_they_are_named_for(preset, vocab, length, count):
    config = gpt2.configuration(preset, vocab, length)
    with torch.device("meta"):
        model = gpt2.GPT2LMHeadModel(config)
    by_hand = config.vocab_size * config.n_embd + length * config.n_embd + 2 * config.n_embd
    by_hand += config.n_layer * (12 * config.n_embd**2 + 13 * config.n_embd)
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand == count
    assert config.vocab_size % 64 == 0 and vocab <= config.vocab_size < vocab + 64
    assert model.config._attn_implementation == "sdpa"
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_the_tiny_preset_is_cut_evenly_by_two_and_four_ranks():
    model = gpt2.build("tiny", 2048, 128, seed=0)
    assert all(parameter.shape[0] % 4 == 0 for parameter in model.parameters())


def test_the_seed_determines_the_weights_and_the_global_random_state_is_kept():
    before = torch.get_rng_state()
    first, again, other = (gpt2.build("tiny", 300, 16, seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(BadInput, match=r"unknown model preset .*'tinny'. Did you mean 'tiny'"):
        gpt2.build("tinny", 300, 16, 0)


def test_a_saved_model_comes_back_bit_for_bit_with_its_tie(small, tmp_path):
    model = gpt2.build("tiny", 300, 16, seed=1)
    folder.save(model.state_dict(), model.config, small.model, tmp_path / "m", {"steps": 7})
    back = folder.load(tmp_path / "m")
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert back.lm_head.weight is back.transformer.wte.weight
    assert not back.training
    assert folder.max_length(tmp_path / "m") == 16
    assert json.loads((tmp_path / "m" / "gradwire.json").read_text()) == {"max_length": 16, "steps": 7}
    assert tokenizer.load(tmp_path / "m").decode([70, 71])
    ids = torch.arange(10)[None]
    assert torch.equal(model.eval()(ids).logits, back(ids).logits)


def test_a_saved_model_is_built_upon_and_must_fit_the_data(small):
    assert gpt2.build(str(small.model), 290, MAX_LENGTH, seed=0).config.n_positions == MAX_LENGTH
    with pytest.raises(BadInput, match=f"reads {MAX_LENGTH} tokens, the data have 25"):
        gpt2.build(str(small.model), 290, MAX_LENGTH + 1, seed=0)
    with pytest.raises(BadInput, match="knows 320 tokens, the data have 400"):
        gpt2.build(str(small.model), 400, MAX_LENGTH, seed=0)


def test_a_save_that_fails_leaves_the_old_folder_and_nothing_else(small, tmp_path):
    model = gpt2.build("tiny", 300, 16, seed=1)
    folder.save(model.state_dict(), model.config, small.model, tmp_path / "m", {})
    with pytest.raises(TypeError):
        folder.save(model.state_dict(), model.config, small.model, tmp_path / "m", {"bad": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    folder.load(tmp_path / "m")


def damage_weights(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def other_width(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_embd": 64}))


def more_layers(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_layer": 3}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "holds no model: model.safetensors is missing"),
        (lambda path: (path / "config.json").unlink(), "holds no model: config.json is missing"),
        (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
        (damage_weights, "cannot be read"),
        (other_width, "cannot be read"),
        (more_layers, r"do not fit its config.json: transformer.h.2"),
    ],
)
def test_a_damaged_model_is_refused_with_its_folder(small, tmp_path, damage, message):
    model = gpt2.build("tiny", 300, 16, seed=1)
    folder.save(model.state_dict(), model.config, small.model, tmp_path / "m", {})
    damage(tmp_path / "m")
    with pytest.raises(BadInput, match=message) as error:
        folder.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(error.value)


def test_max_length_must_be_said(small, tmp_path):
    silent = "neither gradwire.json nor config.json .* says how many tokens the model reads: give --max_length"
    with pytest.raises(BadInput, match=silent):
        folder.max_length(tmp_path)
    (tmp_path / "gradwire.json").write_text("{}")
    with pytest.raises(BadInput, match=silent):
        folder.max_length(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert folder.max_length(tmp_path) == 77
    (tmp_path / "gradwire.json").write_text('{"max_length": 24}')
    assert folder.max_length(tmp_path) == 24


def test_sampling_keeps_to_the_nucleus_and_follows_the_probabilities():
    logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    generator = torch.Generator().manual_seed(0)
    draws = [sampling.draw(logits, 1.0, 0.7, generator) for _ in range(3000)]
    assert set(draws) == {1, 3}  # 0.5, then 0.25 to reach 0.7
    assert draws.count(1) / 3000 == pytest.approx(2 / 3, abs=0.04)
    assert sampling.draw(logits, 0.0, 1.0, generator) == 1
    assert {sampling.draw(logits, 1.0, 1e-6, generator) for _ in range(20)} == {1}


def test_a_continuation_passes_the_models_window_and_ends_at_the_end_of_text(small):
    model, words = folder.load(small.model), tokenizer.load(small.model)
    prompt = "gradient sample " * 30
    text = sampling.continuation(model, words, prompt, 5, 0.0, 1.0, torch.Generator())
    last = torch.tensor([words.encode_batch([prompt])[0][-MAX_LENGTH:]])
    first = model(last).logits[0, -1, : words.vocab_size].argmax()
    assert text.startswith(words.decode([int(first)]))

    class AlwaysEnds(torch.nn.Module):
        config, device = model.config, torch.device("cpu")

        def forward(self, ids, use_cache):
            logits = torch.zeros(*ids.shape, model.config.vocab_size)
            logits[..., words.eos_id] = 1
            return type("Output", (), {"logits": logits})

    assert sampling.continuation(AlwaysEnds(), words, prompt, 5, 0.0, 1.0, torch.Generator()) == ""


def test_generate_reads_a_prompt_from_stdin_and_repeats_itself_by_seed(small, capsys, monkeypatch):
    words = [sys.executable, "-m", "gradwire", "generate", "--model_dir", str(small.model), "--max_new_tokens", "12"]
    told = subprocess.run(words, input="a sample\n", capture_output=True, text=True, encoding="utf-8", check=True)
    assert told.stdout.startswith("a sample") and told.stdout.endswith("\n")
    assert told.stderr == ""

    def here(*more):
        monkeypatch.setattr("sys.stdin", io.StringIO("a sample\n"))
        assert cli.main([*words[3:], *more]) == 0
        return capsys.readouterr().out

    assert here() == told.stdout
    assert here("--seed", "1") != told.stdout
    assert here("--temperature", "0") == here("--temperature", "0", "--seed", "1")


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        (["--temperature", "-1"], "x", "--temperature is -1.0"),
        (["--top_p", "0"], "x", "--top_p is 0.0"),
        (["--max_new_tokens", "0"], "x", "--max_new_tokens is 0"),
        ([], "", "the prompt is empty"),
    ],
)
def test_generate_refuses_bad_input(small, capsys, monkeypatch, flags, stdin, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    assert cli.main(["generate", "--model_dir", str(small.model), *flags]) == 2
    assert message in capsys.readouterr().err


def test_generate_converses_at_a_terminal(small, capsys, monkeypatch):
    typed = iter(["a sample", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    assert cli.main(["generate", "--model_dir", str(small.model), "--max_new_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("a sample")
