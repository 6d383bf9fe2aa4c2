"""Presets, model folders that come back bit for bit, and generation that a seed determines."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_model import MAX_LENGTH, make

from gradwire import cli
from gradwire.data import tokenizer
from gradwire.errors import BadInput
from gradwire.models import folder, gpt2, lora, optimizer, sampling, saved


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("preset", "vocab", "length", "count"),
    [("micro", 256, 24, 21_728), ("tiny", 2048, 128, 675_328), ("62m", 50_257, 1024, 62_392_320)],
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
    with pytest.raises(BadInput, match=f"has {MAX_LENGTH} positions, the data need 25"):
        gpt2.build(str(small.model), 290, MAX_LENGTH + 1, seed=0)
    with pytest.raises(BadInput, match="has a vocabulary of 320 tokens, the data have 400"):
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
        (more_layers, r"do not match its config.json: transformer.h.2"),
    ],
)
def test_a_damaged_model_is_refused_with_its_folder(small, tmp_path, damage, message):
    model = gpt2.build("tiny", 300, 16, seed=1)
    folder.save(model.state_dict(), model.config, small.model, tmp_path / "m", {})
    damage(tmp_path / "m")
    with pytest.raises(BadInput, match=message) as error:
        folder.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(error.value)


def split_weights(path, **index):
    """Rename the weights and name them in an index, as transformers saves large models."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **index}))


def test_weights_in_several_files_are_read_by_their_index_unless_there_is_one_file(small, tmp_path):
    shutil.copytree(small.model, tmp_path / "m")
    whole = saved.digest(tmp_path / "m")
    split_weights(tmp_path / "m")
    weights = folder.load(tmp_path / "m").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in folder.load(small.model).state_dict().items())
    assert saved.digest(tmp_path / "m") == whole
    shutil.copy(small.model / "model.safetensors", tmp_path / "m")
    (tmp_path / "m" / "model-00001-of-00001.safetensors").write_bytes(b"is not read")
    assert saved.digest(tmp_path / "m") == whole, "what transformers reads is what is digested"
    folder.load(tmp_path / "m")


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "{folder}/model.safetensors", "pytorch_model.bin", "..", 5, ["x.safetensors"]],
)
def test_an_index_that_leads_elsewhere_is_refused(small, tmp_path, capsys, name):
    shutil.copytree(small.model, tmp_path / "other")
    shutil.copytree(small.model, tmp_path / "m")
    (tmp_path / "m" / "pytorch_model.bin").touch()
    name = name.format(folder=tmp_path / "other") if isinstance(name, str) else name
    split_weights(tmp_path / "m", weight_map={"transformer.wte.weight": name})
    words = ["perplexity", "--model_dir", str(tmp_path / "m"), "--data_path", str(small.shards)]
    assert cli.main(words) == 2
    assert f"index.json names {name!r}, which is not a safetensors file in that folder" in capsys.readouterr().err
    assert not (tmp_path / "perplexity.json").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors.index.json", [], "has no weight_map"),
        ("model.safetensors.index.json", {"weight_map": []}, "has no weight_map"),
        ("model.safetensors.index.json", {"weight_map": {"x": "m.safetensors"}}, "cannot be read"),  # no metadata
        ("config.json", {"transformers_weights": "m.safetensors"}, "names other weights as transformers_weights"),
        ("config.json", [], "cannot be read"),
    ],
)
def test_a_model_whose_json_is_unusable_is_refused(small, tmp_path, file, content, message):
    shutil.copytree(small.model, tmp_path / "m")
    shutil.copy(small.model / "model.safetensors", tmp_path / "m" / "m.safetensors")
    if file != "config.json":
        (tmp_path / "m" / "model.safetensors").unlink()
    elif content:
        content |= json.loads((tmp_path / "m" / file).read_text())
    (tmp_path / "m" / file).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=message):
        folder.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, settings: settings.update(betas=[0.9]), "not enough values"),
        (lambda tensors, settings: settings.update(betas="ab"), "could not convert"),
        (lambda tensors, settings: settings["step"].pop("w"), "KeyError: 'w'"),
        (lambda tensors, settings: settings.update(eps=[]), "TypeError"),
        (lambda tensors, settings: tensors.pop("exp_avg_sq/w"), "KeyError: 'w'"),
        (lambda tensors, settings: tensors.update({"exp_avg_sq/w": torch.ones(4)}), "do not match"),
        (lambda tensors, settings: tensors.update({"exp_avg_sq/v": torch.ones(3)}), "do not match"),
    ],
)
def test_moments_that_do_not_belong_together_are_refused(tmp_path, change, message):
    tensors = {"exp_avg/w": torch.ones(3), "exp_avg_sq/w": torch.full((3,), 2.0)}
    settings = {"step": {"w": 7}, "betas": [0.9, 0.99], "eps": 1e-8}
    save_file(tensors, tmp_path / optimizer.FILE, metadata={"adam": json.dumps(settings)})
    assert optimizer.load(tmp_path).step == {"w": 7}
    change(tensors, settings)
    save_file(tensors, tmp_path / optimizer.FILE, metadata={"adam": json.dumps(settings)})
    with pytest.raises(BadInput, match=f"is unusable: .*{message}"):
        optimizer.load(tmp_path)


def test_an_adapter_beside_a_model_is_refused(small, tmp_path):
    shutil.copytree(small.model, tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="an adapter beside a model"):
        saved.digest(tmp_path / "m")


@pytest.mark.parametrize("config", [[], {"base_model_name_or_path": 5}])
def test_an_adapters_configuration_must_be_one(tmp_path, config):
    (tmp_path / lora.CONFIG).write_text(json.dumps(config))
    (tmp_path / lora.WEIGHTS).touch()
    with pytest.raises(BadInput, match=r"base_model_name_or_path is not a string|must hold a JSON object"):
        lora.check(tmp_path, tmp_path)


def test_perplexity_reads_no_altered_shards(small, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(small.shards.parent, data)
    path = data / "shards/val/shard-00000.pt"
    shard = torch.load(path)
    shard["lengths"] -= (shard["lengths"] > 3).int()
    torch.save(shard, path)
    words = ["perplexity", "--model_dir", str(small.model), "--data_path", str(data)]
    assert cli.main([*words, "--output", str(tmp_path / "p.json")]) == 2
    assert "shard-00000.pt was modified" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_max_length_must_be_said(small, tmp_path):
    silent = "neither gradwire.json nor config.json .* gives the context length: set --max_length"
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
    done = subprocess.run(words, input="a sample\n", capture_output=True, text=True, encoding="utf-8", check=True)
    assert done.stdout.startswith("a sample") and done.stdout.endswith("\n")
    assert done.stderr == ""

    def here(*more):
        monkeypatch.setattr("sys.stdin", io.StringIO("a sample\n"))
        assert cli.main([*words[3:], *more]) == 0
        return capsys.readouterr().out

    assert here() == done.stdout
    assert here("--seed", "1") != done.stdout
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
