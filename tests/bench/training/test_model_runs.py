"""Training other models than GPT-2, and in bf16: under every strategy, with bytes counted as in the closed form."""

from __future__ import annotations

import io
import json
import pickle
from itertools import product

import blocks
import pytest
import torch
from diagonals import swept
from small_runs import losses, run, words
from transformers import AutoModelForCausalLM

from gradwire import cli
from gradwire.bench.training.objective import loss_sum
from gradwire.comm.topology import STRATEGIES as KNOWN
from gradwire.lm.data import tokenizer
from gradwire.lm.data.batches import eval_batches, train_batches
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

LLAMA = json.dumps(
    {
        "architecture": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # grouped heads
        "tie_word_embeddings": False,
    }
)
# 320 tokens in two tables that are not tied, two layers of two square and two half-wide matrices, a gated MLP, norms.
LLAMA_NUMEL = 2 * 320 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
METHODS = {"int8": {}, "topk": {"density": 0.1, "error_feedback": True}}
STRATEGIES = [strategy for strategy in KNOWN.available() if strategy != "hsdp"]  # two ranks make no islands


def check_bytes(record: dict, numel: int, steps: int) -> None:
    """Raw bytes by hand: with W = 2, (W - 1) / W · 4n on each of two ranks, twice for an all-reduce."""
    phases = 1 if record["strategy"].startswith("fsdp") else 2
    assert record["parameters"] == numel
    assert record["bytes_raw_total"] == steps * phases * 4 * numel
    assert 0 < record["bytes_compressed_total"] == record["bytes_closed_form_total"] < record["bytes_raw_total"]


def train(world, shards, folder, model, strategy, method, steps=3, size=2, **more):
    cell = {"comm_compress": method, "comm_config_json": json.dumps(METHODS.get(method, {}))}
    given = {"model": model, "strategy": strategy, "steps": steps, "eval_every": 0, "verify_sync": 1, **cell, **more}
    (rows, record), *others = world(size).run(run, words(shards, folder, **given))
    assert all(losses(rows) == losses(other) for other, _ in others)
    return rows, record


@pytest.mark.parametrize(("strategy", "method"), [("fsdp1", "topk"), *swept(("ddp", "int8"))])
def test_a_llama_trains_under_other_strategies(world, shards, tmp_path, strategy, method):
    _, record = train(world, shards, tmp_path, LLAMA, strategy, method)
    check_bytes(record, LLAMA_NUMEL, 3)
    assert (record["model"], record["architecture"], record["status"]) == (LLAMA, "llama", "ok")


def check_generation(saved, monkeypatch, capsys) -> None:
    """`generate` against the most likely token of transformers' own model, one after another."""
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("a sample"))
    assert cli.main(["generate", "--model_dir", str(saved), "--temperature", "0", "--max_new_tokens", "7"]) == 0
    known, model = tokenizer.load(saved), AutoModelForCausalLM.from_pretrained(saved)
    tokens = known.encode_batch(["a sample"])[0]
    for _ in range(7):
        logits = model(torch.tensor([tokens])).logits[0, -1, : known.vocab_size]
        tokens.append(int(logits.argmax()))
    assert known.eos_id not in tokens
    assert capsys.readouterr().out.strip() == known.decode(tokens).strip()


def check_gradients(saved, shards, output) -> None:
    """`grads collect` of whole gradients against transformers' own loss and autograd, with ids in the data's order."""
    place = output / "rank_0" / f"dim{LLAMA_NUMEL}"
    asked = ["--projection", "none", "--dim", str(LLAMA_NUMEL), "--max_samples", "3", "--device", "cpu"]
    collect = ["grads", "collect", "--model_dir", str(saved), "--data_path", str(shards), "--output_path", str(output)]
    assert cli.main([*collect, *asked]) == 0
    rows, split = blocks.read_rows(place / "all_orig.pt"), Shards(shards, "train")
    assert pickle.loads((place / "all_ids.pkl").read_bytes()) == [split[at].sample_id for at in range(3)]
    model = AutoModelForCausalLM.from_pretrained(saved)
    for at, row in enumerate(rows):
        model.zero_grad()
        tokens = split[at].input_ids[None]
        model(tokens, labels=tokens).loss.backward()
        expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)


def test_a_saved_llama_trains_on_gives_its_perplexity_generates_and_has_gradients(
    world,
    shards,
    tmp_path,
    capsys,
    monkeypatch,
):
    _, record = train(world, shards, tmp_path / "one", LLAMA, "fsdp2", "int8")
    first = tmp_path / "one" / "final_model"
    check_generation(first, monkeypatch, capsys)
    check_gradients(first, shards, tmp_path / "gradients")
    perplexity = ["perplexity", "--model_dir", str(first), "--data_path", str(shards), "--batch_size", "2"]
    assert cli.main(perplexity) == 0
    assert json.loads((tmp_path / "one" / "perplexity.json").read_text())["ppl"] == pytest.approx(record["val_ppl"])
    rows, again = train(world, shards, tmp_path / "two", str(first), "ddp", "topk", lr_warmup_steps=1000)
    check_bytes(again, LLAMA_NUMEL, 3)
    split = Shards(shards, "train")
    started = loss_of_step(causal.load(first), split)
    assert rows[0]["loss"] == pytest.approx(started, rel=1e-5), "it starts from the saved weights"


def loss_of_step(model, split, mixed=False):
    """The first step's mean loss per target over two ranks of two samples, computed by torch alone."""
    batches = [next(iter(train_batches(split, 2, rank, 2, 0))) for rank in range(2)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        total = sum(loss_sum(model, batch) for batch in batches)
    return float(total / sum(batch.n_targets for batch in batches))


@pytest.mark.parametrize("model", ["micro", pytest.param(LLAMA, marks=pytest.mark.sweep)])
def test_bf16_is_autocast_with_float32_weights_under_every_strategy(world, shards, tmp_path, model):
    split, val = Shards(shards, "train"), Shards(shards, "val")
    fresh = causal.build(model, split.meta["vocab_size"], split.meta["max_length"], seed=0)
    exact, mixed = (loss_of_step(fresh, split, mixed) for mixed in (False, True))
    assert abs(mixed - exact) > 1e-5, "bf16 shows"
    curves = {}
    for strategy in ("ddp", "fsdp1", "fsdp2") if model == "micro" else STRATEGIES:
        rows, record = train(world, shards, tmp_path / strategy, model, strategy, "none", precision="bf16")
        assert rows[0]["loss"] == pytest.approx(mixed, rel=2e-6)
        assert (record["precision"], record["gradient_dtype"], record["evaluation_precision"]) == (
            "bf16",
            "float32",
            "fp32",
        )
        saved = causal.load(tmp_path / strategy / "final_model")
        assert {tensor.dtype for tensor in saved.state_dict().values()} == {torch.float32}
        found = [evaluate_alone(saved, val, mixed) for mixed in (False, True)]
        assert record["val_loss"] == pytest.approx(found[0], rel=1e-6) != pytest.approx(found[1], rel=1e-6)
        curves[strategy] = losses(rows)
    reference = curves.pop("ddp")
    for strategy, curve in curves.items():
        assert curve == pytest.approx(reference, rel=1e-4), strategy


def evaluate_alone(model, split, mixed):
    """The validation loss of a model in this process."""
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        for batch in eval_batches(split, 2, 0, 1):
            total += float(loss_sum(model, batch))
            count += batch.n_targets
    return total / count


@pytest.mark.sweep
def test_bf16_sends_the_same_bytes(world, shards, tmp_path):
    each = [train(world, shards, tmp_path / p, "micro", "fsdp2", "int8", precision=p)[1] for p in ("fp32", "bf16")]
    names = ("bytes_raw_total", "bytes_compressed_total", "bytes_parameters_raw_total", "compression_ratio")
    assert [each[0][name] for name in names] == [each[1][name] for name in names]
    assert each[0]["loss_digest"] != each[1]["loss_digest"] and each[0]["identity"] != each[1]["identity"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.sweep)])
def test_bf16_gradients_of_bf16_training_are_half_the_bytes(world, shards, tmp_path, strategy):
    rows, record = train(world, shards, tmp_path / "bf16", "micro", strategy, "bf16", precision="bf16")
    assert 2 * record["bytes_compressed_total"] == record["bytes_raw_total"]
    assert record["bytes_closed_form_total"] == record["bytes_compressed_total"]
    assert (record["precision"], record["gradient_dtype"], record["compressor"]) == ("bf16", "float32", "bf16")
    exact, _ = train(world, shards, tmp_path / "none", "micro", strategy, "none", precision="bf16")
    assert losses(rows) == pytest.approx(losses(exact), rel=1e-3) and losses(rows) != losses(exact)


def numel(preset: str) -> int:
    """The parameters of a preset with 320 tokens and 24 positions, by hand."""
    if preset == "llama-small":
        return 320 * 256 + 4 * (4 * 256**2 + 3 * 256 * 688 + 2 * 256) + 256
    layers, width = {"tiny": (2, 128), "small": (4, 256)}[preset]
    return (320 + 24 + 2) * width + layers * (12 * width**2 + 13 * width)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("strategy", "preset", "method", "precision"),
    product(STRATEGIES, ("tiny", "small", "llama-small"), METHODS, ("fp32", "bf16")),
)
def test_every_model_under_every_strategy(world, shards, tmp_path, strategy, preset, method, precision):
    _, record = train(world, shards, tmp_path, preset, strategy, method, precision=precision)
    check_bytes(record, numel(preset), 3)
    assert record["val_ppl"] < 400 and record["precision"] == precision


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("preset", "method", "precision"), product(("tiny", "small", "llama-small"), METHODS, ("fp32", "bf16"))
)
def test_every_model_in_two_islands_of_two_ranks(world, shards, tmp_path, preset, method, precision):
    """Raw bytes between islands by hand: two ranks all-reduce a shard, 2 · (2 - 1) / 2 · 4n / 2 on each of four."""
    given = {"size": 4, "islands": 2, "precision": precision}
    _, record = train(world, shards, tmp_path, preset, "hsdp", method, **given)
    n = record["parameters"]
    assert n == numel(preset) and record["val_ppl"] < 400 and record["precision"] == precision
    assert record["bytes_between_raw_total"] == 3 * 4 * 4 * n // 2
    assert 0 < record["bytes_between_total"] == record["bytes_between_closed_form_total"]
    assert record["bytes_between_total"] < record["bytes_between_raw_total"]
    assert record["bytes_inside_total"] == record["bytes_inside_closed_form_total"]
    assert record["bytes_compressed_total"] == record["bytes_closed_form_total"]
    assert record["bytes_inside_total"] - record["bytes_parameters_total"] == 3 * 2 * 4 * n, "a reduce-scatter each"
