"""Presets, initial weights, and model folders that come back bit for bit.

Of `architecture.py`, `causal.py`, `lora.py`, `saved.py`.
"""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
from importlib.metadata import EntryPoint

import pytest
import torch
from changed_store import edit
from diagonals import swept
from safetensors.torch import load_file, save_file
from small_model import MAX_LENGTH, make
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from gradwire import cli
from gradwire.attribution.persample.norms import norms
from gradwire.base import plugins
from gradwire.base.errors import BadInput
from gradwire.bench.config import experiment
from gradwire.bench.training.generate import continuation
from gradwire.comm import parallel
from gradwire.lm.data import tokenizer
from gradwire.lm.data.batches import Batch
from gradwire.lm.models import architecture, causal, lora, optimizer, presets, saved


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("preset", "vocab", "length", "count"),
    [("micro", 256, 24, 21_728), ("tiny", 2048, 128, 675_328), ("62m", 50_257, 1024, 62_392_320)],
)
def test_presets_have_the_size_they_are_named_for(preset, vocab, length, count):
    config = architecture.configuration(presets.options(preset), vocab, length)
    model = architecture.on_meta(config)
    by_hand = config.vocab_size * config.n_embd + length * config.n_embd + 2 * config.n_embd
    by_hand += config.n_layer * (12 * config.n_embd**2 + 13 * config.n_embd)
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand == count
    assert config.vocab_size % 64 == 0 and vocab <= config.vocab_size < vocab + 64
    assert model.config._attn_implementation == "sdpa"
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_the_tiny_preset_is_cut_evenly_by_two_and_four_ranks():
    model = causal.build("tiny", 2048, 128, seed=0)
    assert all(parameter.shape[0] % 4 == 0 for parameter in model.parameters())


def test_a_saved_model_comes_back_bit_for_bit_with_its_tie(small, tmp_path):
    model = causal.build("tiny", 300, 16, seed=1)
    causal.save(model.state_dict(), model.config, small.model, tmp_path / "m", {"steps": 7})
    back = causal.load(tmp_path / "m")
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert back.lm_head.weight is back.transformer.wte.weight
    assert not back.training
    assert saved.max_length(tmp_path / "m") == 16
    assert json.loads((tmp_path / "m" / "gradwire.json").read_text()) == {"max_length": 16, "steps": 7}
    check = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "m", capture_output=True)
    named = {line.partition(b":")[0].decode() for line in check.stdout.splitlines()}
    assert check.returncode == 0 and named == {file.name for file in (tmp_path / "m").iterdir()} - {"SHA256SUMS"}
    assert tokenizer.load(tmp_path / "m").decode([70, 71])
    ids = torch.arange(10)[None]
    assert torch.equal(model.eval()(ids).logits, back(ids).logits)


def test_a_saved_model_is_built_upon_and_must_fit_the_data(small):
    assert causal.build(str(small.model), 290, MAX_LENGTH, seed=0).config.n_positions == MAX_LENGTH
    with pytest.raises(BadInput, match=f"has {MAX_LENGTH} positions, the data need 25"):
        causal.build(str(small.model), 290, MAX_LENGTH + 1, seed=0)
    with pytest.raises(BadInput, match="has a vocabulary of 320 tokens, the data have 400"):
        causal.build(str(small.model), 400, MAX_LENGTH, seed=0)


def test_a_save_that_fails_leaves_the_old_folder_and_nothing_else(small, tmp_path):
    model = causal.build("tiny", 300, 16, seed=1)
    causal.save(model.state_dict(), model.config, small.model, tmp_path / "m", {})
    with pytest.raises(TypeError):
        causal.save(model.state_dict(), model.config, small.model, tmp_path / "m", {"bad": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    causal.load(tmp_path / "m")


def damage_weights(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "holds no model: model.safetensors is missing"),
        (lambda path: (path / "config.json").unlink(), "holds no model: config.json is missing"),
        (
            lambda path: (path / "config.json").rename(path / "adapter_config.json"),
            "holds a LoRA adapter: pass it as --lora_dir, and the model that it is of as --model_dir",
        ),
        (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
        (damage_weights, "cannot be read"),
        (lambda path: edit(path / "config.json", n_embd=64), "cannot be read"),
        (lambda path: edit(path / "config.json", n_head="two"), "cannot be read: Field 'n_head' expected int, got str"),
        (lambda path: edit(path / "config.json", n_layer=3), r"do not match its config.json: transformer.h.2"),
    ],
)
def test_a_damaged_model_is_refused_with_its_folder(small, tmp_path, damage, message):
    model = causal.build("tiny", 300, 16, seed=1)
    causal.save(model.state_dict(), model.config, small.model, tmp_path / "m", {})
    (tmp_path / "m" / "SHA256SUMS").unlink()  # a folder of transformers
    damage(tmp_path / "m")
    with pytest.raises(BadInput, match=message) as error:
        causal.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(error.value)


def flip(file, at):
    """Flip the lowest bit of a byte."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


READERS = {
    "perplexity": ["--data_path", "{shards}", "--output", "{out}/perplexity.json"],
    "generate": [],
    "norms": ["--data_path", "{shards}", "--output_dir", "{out}"],
    "grads collect": ["--data_path", "{shards}", "--output_path", "{out}", "--dim", "8"],
    "grads factors": ["--data_path", "{shards}", "--output_dir", "{out}"],
}


@pytest.mark.parametrize("command", READERS)
def test_every_command_refuses_a_model_with_a_flipped_bit(small, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", io.StringIO("wire"))
    shutil.copytree(small.model, tmp_path / "m")
    flip(tmp_path / "m" / "model.safetensors", -3)  # the lowest bits of a number: no loss would show it
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "perplexity.json").write_text("good")
    words = [word.format(shards=small.shards, out=tmp_path / "out") for word in READERS[command]]
    assert cli.main([*command.split(), "--model_dir", str(tmp_path / "m"), *words]) == 2
    printed = capsys.readouterr()
    assert f"{tmp_path}/m/model.safetensors is not as it was saved: its SHA-256 is not that in" in printed.err
    assert printed.out == "" and printed.err.count("\n") == 1
    assert (tmp_path / "out" / "perplexity.json").read_text() == "good"
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {
        "perplexity.json",
        f"{command}.failed.json".replace(" ", "_"),
    }


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "SHA256SUMS"])
def test_a_file_of_a_model_folder_that_no_memory_holds(small, tmp_path, capsys, name):
    shutil.copytree(small.model, tmp_path / "m", ignore=shutil.ignore_patterns("SHA256SUMS"))
    with (tmp_path / "m" / name).open("wb") as stream:
        stream.truncate(1 << 40)  # a TiB of zeros, and no block of the disk
    assert cli.main(["generate", "--model_dir", str(tmp_path / "m")]) == 2
    assert f"{tmp_path}/m/{name} has 1,099,511,627,776 bytes; at most" in capsys.readouterr().err


def with_code(small, path, architecture):
    """A copy of a model folder that brings code for its model, as many on the Hugging Face Hub do."""
    shutil.copytree(small.model, path)
    (path / "SHA256SUMS").unlink()
    config = json.loads((path / "config.json").read_text()) | {"model_type": architecture}
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (path / "config.json").write_text(json.dumps(config))
    code = "from transformers import GPT2Config as Config, GPT2LMHeadModel as Model\n"
    (path / "code.py").write_text(f"from pathlib import Path\nPath({str(path / 'ran')!r}).touch()\n{code}")


@pytest.mark.parametrize(("command", "known"), [("generate", True), ("generate", False), ("train", False)])
def test_code_in_a_model_folder_is_never_run(small, tmp_path, capsys, monkeypatch, command, known):
    model, out = tmp_path / "m", tmp_path / "run"
    with_code(small, model, "gpt2" if known else "mine")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # what transformers would take for a yes
    words = ["generate", "--model_dir", str(model), "--max_new_tokens", "2"]
    if command == "train":
        words = ["train", "--model", str(model), "--data_path", str(small.shards), "--output_dir", str(out)]
    assert cli.main(words) == (0 if known else 2)
    printed = capsys.readouterr()
    assert "trust_remote_code" not in printed.out + printed.err and not (model / "ran").exists()
    refused = f"{model} brings its own Python code (auto_map in config.json), which gradwire never runs"
    noted = f"NOTE: the Python code of {model} (auto_map in config.json) is not run; the model is transformers' gpt2."
    assert (printed.err.count(refused), printed.err.count(noted)) == ((0, 1) if known else (1, 0))


def with_weight(small, path, value):
    """A copy of a model folder with one weight replaced, and nothing that tells."""
    shutil.copytree(small.model, path)
    (path / "SHA256SUMS").unlink()
    tensors = load_file(path / "model.safetensors")
    tensors["transformer.wpe.weight"][0, 0] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "transformer.wpe.weight is not finite"),
        (-math.inf, "transformer.wpe.weight is not finite"),
        (3e38, "its weights are finite, and its logits overflow float32"),
    ],
)
def test_a_loss_that_is_no_number_leaves_a_good_perplexity_unless_its_run_diverged(
    small, tmp_path, capsys, value, reason
):
    with_weight(small, tmp_path / "m", value)
    (tmp_path / "perplexity.json").write_text("good")
    words = ["perplexity", "--model_dir", str(tmp_path / "m"), "--data_path", str(small.shards)]
    assert cli.main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert f"the loss of the model in {tmp_path}/m is nan, so it has no perplexity: {reason}" in printed.err
    assert (tmp_path / "perplexity.json").read_text() == "good"
    (tmp_path / "record.json").write_text('{"status": "diverged"}')  # null is its result
    assert cli.main(words) == 0
    assert "the run diverged; its perplexity is null" in capsys.readouterr().out
    wanted = {"avg_loss": None, "ppl": None, "n_targets": 36, "split": "val"}
    assert json.loads((tmp_path / "perplexity.json").read_text()) == wanted


@pytest.mark.parametrize("temperature", ["0", "0.8"])
@pytest.mark.parametrize(("value", "reason"), [(math.nan, "wpe.weight of the model"), (3e38, "logits are not finite")])
def test_a_model_that_is_no_number_generates_nothing(small, tmp_path, capsys, monkeypatch, temperature, value, reason):
    with_weight(small, tmp_path / "m", value)
    monkeypatch.setattr("sys.stdin", io.StringIO("wire"))
    assert cli.main(["generate", "--model_dir", str(tmp_path / "m"), "--temperature", temperature]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and reason in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "gradwire.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_changed_file_of_a_saved_model_is_refused_until_the_digests_are_gone(small, tmp_path, name):
    shutil.copytree(small.model, tmp_path / "m")
    with (tmp_path / "m" / name).open("a") as stream:
        stream.write("\n")  # which no parser sees
    read = tokenizer.load if name.startswith("tokenizer") else causal.load
    with pytest.raises(BadInput, match=f"{name} is not as it was saved.* delete SHA256SUMS if you changed"):
        read(tmp_path / "m")
    (tmp_path / "m" / "SHA256SUMS").unlink()
    read(tmp_path / "m")


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
    weights = causal.load(tmp_path / "m").state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in causal.load(small.model).state_dict().items())
    assert saved.digest(tmp_path / "m") == whole
    shutil.copy(small.model / "model.safetensors", tmp_path / "m")
    (tmp_path / "m" / "model-00001-of-00001.safetensors").write_bytes(b"is not read")
    assert saved.digest(tmp_path / "m") == whole, "what transformers reads is what is digested"
    causal.load(tmp_path / "m")


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
    shutil.copytree(small.model, tmp_path / "m", ignore=shutil.ignore_patterns("SHA256SUMS"))
    shutil.copy(small.model / "model.safetensors", tmp_path / "m" / "m.safetensors")
    if file != "config.json":
        (tmp_path / "m" / "model.safetensors").unlink()
    elif content:
        content |= json.loads((tmp_path / "m" / file).read_text())
    (tmp_path / "m" / file).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=message):
        causal.load(tmp_path / "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, settings: settings.update(betas=[0.9]), "not enough values"),
        (lambda tensors, settings: settings.update(betas="ab"), "could not convert"),
        (lambda tensors, settings: settings["step"].pop("w"), "KeyError: 'w'"),
        (lambda tensors, settings: settings.update(eps=[]), "TypeError"),
        (lambda tensors, settings: tensors.pop("exp_avg_sq/w"), "do not match"),
        (lambda tensors, settings: tensors.update({"exp_avg_sq/w": torch.ones(4)}), "do not match"),
        (lambda tensors, settings: tensors.update({"exp_avg_sq/v": torch.ones(3)}), "do not match"),
    ],
)
def test_moments_that_do_not_belong_together_are_refused(tmp_path, change, message):
    tensors = {"exp_avg/w": torch.ones(3), "exp_avg_sq/w": torch.full((3,), 2.0)}
    settings = {"step": {"w": 7}, "betas": [0.9, 0.99], "eps": 1e-8}
    save_file(tensors, tmp_path / optimizer.FILE, metadata={"adam": json.dumps(settings)})
    assert optimizer.load(tmp_path, torch.nn.Module()).step == {"w": 7}
    change(tensors, settings)
    save_file(tensors, tmp_path / optimizer.FILE, metadata={"adam": json.dumps(settings)})
    with pytest.raises(BadInput, match=f"is unusable: .*{message}"):
        optimizer.load(tmp_path, torch.nn.Module())


def test_an_adapter_next_to_a_model_is_refused(small, tmp_path):
    shutil.copytree(small.model, tmp_path / "m")
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="an adapter next to a model"):
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
        saved.max_length(tmp_path)
    (tmp_path / "gradwire.json").write_text("{}")
    with pytest.raises(BadInput, match=silent):
        saved.max_length(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert saved.max_length(tmp_path) == 77
    (tmp_path / "gradwire.json").write_text('{"max_length": 24}')
    assert saved.max_length(tmp_path) == 24


def former(preset, vocab_size, positions, seed):
    """The presets as gradwire first built them; other initial weights would change every result."""
    layers, width, heads = {"micro": (1, 32, 2), "tiny": (2, 128, 4), "62m": (6, 640, 10)}[preset]
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocab_size,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.02 * math.sqrt(768 / width),
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


@pytest.mark.parametrize("preset", ["micro", "tiny", pytest.param("62m", marks=pytest.mark.sweep)])
def test_presets_keep_their_initial_weights_and_configurations(preset):
    made, expected = causal.build(preset, 300, 16, seed=5), former(preset, 320, 16, 5)
    assert made.config.to_dict() == expected.config.to_dict()
    assert list(made.state_dict()) == list(expected.state_dict())
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in made.state_dict().items())


def by_hand(preset, vocab_size, positions):
    """The parameters of `small` and `llama-small`, counted from their description."""
    width, layers, inner = 256, 4, 688
    if preset == "small":
        return vocab_size * width + positions * width + layers * (12 * width**2 + 13 * width) + 2 * width
    return vocab_size * width + layers * (4 * width**2 + 3 * width * inner + 2 * width) + width


@pytest.mark.parametrize("preset", ["small", "llama-small"])
def test_the_small_presets_have_equal_sizes(preset):
    model = architecture.on_meta(causal.check(preset, 4090, 128))
    assert sum(parameter.numel() for parameter in model.parameters()) == by_hand(preset, 4096, 128)
    assert by_hand("small", 4096, 128) == pytest.approx(by_hand("llama-small", 4096, 128), rel=0.01)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2}


def of_width(architecture, width=32, **more):
    return json.dumps({"architecture": architecture, "hidden_size": width, **SIZES, **more})


THIN = {"intermediate_size": 48}


class ToyConfig(GPT2Config):
    """A third party's architecture."""

    model_type = "toy"


class ToyLM(GPT2LMHeadModel):
    config_class = ToyConfig


TOY = {"architecture": "toy", "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.fixture
def third_party(monkeypatch):
    """One more entry point of an installed package, whose import registers its architecture with transformers."""
    entry, installed = EntryPoint("toy-preset", f"{__name__}:TOY", presets.PRESETS.group), plugins.entry_points
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: installed(group) + (entry,) * (group == presets.PRESETS.group)
    )
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyLM, exist_ok=True)


MODELS = ["micro", "toy-preset", of_width("llama", **THIN), of_width("opt", ffn_dim=48, word_embed_proj_dim=32)]
OTHER_MODELS = [
    *sorted({*presets.PRESETS.available()} - {"62m", *MODELS}),
    of_width("qwen3", **THIN, head_dim=16),
    of_width("bloom"),
    of_width("glm", **THIN, head_dim=16),  # its usual padding token is outside a small vocabulary
]


@pytest.mark.parametrize("name", [*MODELS, *swept(*OTHER_MODELS)])
def test_a_model_keeps_the_contract(name, third_party, small, tmp_path):
    random = torch.get_rng_state()
    model = causal.build(name, 290, MAX_LENGTH, seed=2)
    assert torch.equal(torch.get_rng_state(), random)
    again, other = causal.build(name, 290, MAX_LENGTH, seed=2), causal.build(name, 290, MAX_LENGTH, seed=3)
    state = model.state_dict()
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in state.items())
    assert any(not torch.equal(tensor, other.state_dict()[key]) for key, tensor in state.items())
    assert {p.dtype for p in model.parameters()} == {torch.float32} and model.config.vocab_size == 320
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    blocks = parallel.model.blocks(model)
    assert len(blocks) == model.config.num_hidden_layers and len({type(block) for block in blocks}) == 1
    sizes = parallel.block_sizes(model)
    assert sum(sizes) == sum(p.numel() for p in model.parameters()) and 0 < sizes[1] == sizes[-1]

    causal.save(state, model.config, small.model, tmp_path / "m", {})
    back = causal.load(tmp_path / "m")
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in state.items())
    assert causal.build(str(tmp_path / "m"), 290, MAX_LENGTH, seed=9).state_dict().keys() == state.keys()
    with torch.random.fork_rng():
        assert isinstance(continuation(back, tokenizer.load(tmp_path / "m"), "gradient", 30, 1.0, 0.9), str)
        batch = Batch(torch.randint(290, (3, 7)), torch.randint(290, (3, 7)), ["a", "b", "c"])
    squares = {how: norms(back.eval(), batch, method=how).square for how in ("auto", "loop")}
    torch.testing.assert_close(squares["auto"], squares["loop"], rtol=1e-4, atol=0)


def test_a_configuration_without_weights_is_initialized_from_the_seed(tmp_path):
    causal.build("micro", 290, 16, seed=0).config.save_pretrained(tmp_path)
    made, expected = (causal.build(name, 290, 16, seed=4).state_dict() for name in (str(tmp_path), "micro"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in made.items())


def write_config(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (of_width("lama"), "unknown architecture 'lama'.* the nearest are: llama, "),
        (of_width("vit"), "architecture 'vit' has no causal language model"),
        (of_width("llama", hiden_act="silu"), "unknown option of architecture llama 'hiden_act'. Did you mean"),
        (of_width("llama", width=33), "The hidden size .33. is not a multiple of the number of attention heads"),
        (of_width("llama", hidden_act=3), "hidden_act"),
        (of_width("llama", **THIN, vocab_size=4000), "a vocabulary of 4000 tokens, above the tokenizer's 320"),
        (of_width("llama", **THIN, vocab_size=100), "a vocabulary of 100 tokens, the data have 290"),
        (of_width("llama", **THIN, max_position_embeddings=8), "has 8 positions, the data need 24"),
        (of_width("bert", **THIN), "is not causal: a token changes the predictions before it"),
        (of_width("llama", width=65536, num_hidden_layers=128), "give smaller sizes"),
        ('{"hidden_size": 32}', "need an architecture"),
        ('{"architecture": ', "--model is not valid JSON"),
    ],
)
def test_a_model_that_cannot_be_is_one_message(model, message):
    with pytest.raises(BadInput, match=message):
        causal.build(model, 290, MAX_LENGTH, seed=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vit"}, "'vit' has no causal language model"),
        ({"model_type": "lama"}, "unknown architecture in .*config.json: 'lama'. Of .*, the nearest are: llama, "),
        ({"model_type": "llama", "hidden_size": 33}, "cannot be read: The hidden size .33. is not a multiple"),
        ({"model_type": "gpt2", "vocab_size": 50257}, "vocabulary of 50257 tokens, above the tokenizer's 320"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_message(config, message, tmp_path):
    write_config(tmp_path, **config)
    with pytest.raises(BadInput, match=message) as raised:
        causal.build(str(tmp_path), 290, MAX_LENGTH, seed=0)
    assert message.startswith("'vit'") or str(tmp_path) in str(raised.value)


def test_a_models_options_are_checked_in_a_configuration():
    grid = {"name": "x", "compressors": {"none": {}}, "grid": {}}
    made = experiment({**grid, "model": {"architecture": "llama", "hidden_size": 64}})
    assert json.loads(made.model_text) == {"architecture": "llama", "hidden_size": 64}
    for model, message in (
        ("tinny", "unknown model preset .*'tinny'. Did you mean 'tiny'"),
        ({"architecture": "llama", "hiden_size": 3}, "Did you mean 'hidden_size'"),
        ({"hidden_size": 3}, "need an architecture"),
    ):
        with pytest.raises(BadInput, match=message):
            experiment({**grid, "model": model})


def test_blocks_are_the_repeated_module_with_the_most_parameters():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    model = torch.torch.nn.Module()
    model.embeddings = torch.nn.ModuleList([torch.nn.Embedding(9, 8), torch.nn.Embedding(4, 8)])
    model.layers = torch.nn.ModuleList([Block(), Block()])
    assert parallel.model.blocks(model) == list(model.layers)
    assert parallel.block_sizes(model) == [13 * 8, 4 * 72, 4 * 72]
    assert parallel.model.blocks(torch.nn.Linear(2, 2)) == []
    model.layers = torch.nn.ModuleDict({"0": Block(), "1": Block()})  # as torchtitan has them
    assert parallel.model.blocks(model) == list(model.layers.values())
    model.layers = torch.nn.Sequential(Block(), Block())
    assert parallel.model.blocks(model) == list(model.layers)
    model.layers = torch.nn.ModuleList([model.layers[0]] * 3)  # one block with shared weights
    assert parallel.model.blocks(model) == [model.layers[0]]


def test_modules_of_a_dict_or_a_sequence_that_do_not_repeat_are_no_blocks():
    linear, mixed = torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    for model in (mixed, torch.nn.Sequential(linear, linear), torch.nn.Sequential(mixed, mixed)):
        assert parallel.model.blocks(model) == []
    heads = torch.nn.ModuleDict({"mean": torch.nn.Linear(8, 2), "spread": torch.nn.Linear(8, 2)})
    layers = torch.nn.ModuleList([mixed, mixed])
    nested = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(9, 8), "layers": layers, "heads": heads})
    assert parallel.model.blocks(nested) == [mixed], "a dict of all parts is not a list of blocks"
