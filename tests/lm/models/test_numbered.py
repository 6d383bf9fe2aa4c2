"""Moments of Hugging Face's Trainer: by name those of its optimizer in memory, or one message.

Of `lm/models/optimizer.py`.
"""

from __future__ import annotations

import json

import blocks
import pytest
import torch
from small_model import MAX_LENGTH, make
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gradwire import cli
from gradwire.attribution.persample import loop
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal, lora, optimizer

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
COMMON = {"max_position_embeddings": MAX_LENGTH, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make(tmp_path_factory.mktemp("numbered"))


def model_of(kind, vocab_size):
    torch.manual_seed(5)
    if kind == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size, n_positions=MAX_LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=None,
                eos_token_id=None, loss_type="ForCausalLMLoss",
            )
        )  # fmt: skip
    sizes = {**SIZES, **COMMON, "num_hidden_layers": 2, "vocab_size": vocab_size}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=False))
    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))  # with norms of queries and keys


def trained(model, small, output, **options):
    """A Trainer after three steps, with its checkpoint."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    shards = Shards(small.shards, "train")
    full = [shards[at].input_ids for at in range(len(shards)) if len(shards[at].input_ids) == MAX_LENGTH]
    arguments = TrainingArguments(
        str(output), max_steps=3, save_steps=3, per_device_train_batch_size=3, learning_rate=1e-2, weight_decay=0.1,
        adam_beta1=0.85, adam_beta2=0.97, adam_epsilon=1e-7, use_cpu=True, report_to=[], disable_tqdm=True,
        dataloader_pin_memory=False, logging_steps=10, **options,
    )  # fmt: skip
    words = PreTrainedTokenizerFast.from_pretrained(small.shards.parent / "tokenizer")
    samples = [{"input_ids": ids, "labels": ids} for ids in full]
    trainer = Trainer(model, arguments, train_dataset=samples, processing_class=words)
    trainer.train()
    return trainer, output / "checkpoint-3"


def in_memory(trainer):
    """Adam's state by parameter name, from the optimizer's own objects."""
    inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {name: inner.state[p] for name, p in trainer.model.named_parameters() if p.requires_grad}


def check(found, wanted):
    assert set(found.exp_avg) == set(found.exp_avg_sq) == set(wanted)
    for name, of in wanted.items():
        assert of["exp_avg"].any(), name
        assert torch.equal(found.exp_avg[name], of["exp_avg"]) and torch.equal(found.exp_avg_sq[name], of["exp_avg_sq"])
        assert found.step[name] == int(of["step"]) == 3
    assert found.betas == (0.85, 0.97) and found.eps == 1e-7


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_the_moments_of_a_checkpoint_are_those_of_the_trainers_optimizer(kind, small, tmp_path):
    trainer, checkpoint = trained(model_of(kind, 290), small, tmp_path)
    assert len(trainer.optimizer.param_groups) == 2 and all(group["params"] for group in trainer.optimizer.param_groups)
    check(optimizer.load(checkpoint, causal.load(checkpoint)), in_memory(trainer))


def test_rows_of_a_checkpoint_are_steps_of_its_optimizer(small, tmp_path, capsys):
    trainer, checkpoint = trained(model_of("gpt2", 290), small, tmp_path)
    model, state = causal.load(checkpoint), in_memory(trainer)
    size = sum(parameter.numel() for parameter in model.parameters())
    run = tmp_path / "run"
    words = ["--model_dir", checkpoint, "--data_path", small.shards, "--output_path", run, "--dim", size]
    words += ["--projection", "none", "--grad_type", "adam", "--max_samples", 3]
    assert cli.main(["grads", "collect", *map(str, words)]) == 0
    assert cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(size)]) == 0
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--recompute", "2"]) == 0
    shards = Shards(small.shards, "train")
    for row, sample in zip(blocks.read_rows(run / f"dim{size}" / "all_orig.pt"), shards, strict=False):
        found = loop.gradients(model, collate([sample], 0, 1)).gradient
        steps = []
        for name, gradient in found.items():
            m = 0.85 * state[name]["exp_avg"] + 0.15 * gradient[0]
            v = 0.97 * state[name]["exp_avg_sq"] + 0.03 * gradient[0] ** 2
            steps.append(((m / (1 - 0.85**4)) / ((v / (1 - 0.97**4)).sqrt() + 1e-7)).flatten())
        wanted = torch.cat(steps)
        assert (row - wanted).norm() < 2e-3 * wanted.norm()
    (checkpoint / optimizer.NUMBERED).unlink()
    capsys.readouterr()
    assert cli.main(["grads", "collect", *map(str, [*words[:4], "--output_path", tmp_path / "no", *words[6:]])]) == 2
    assert "has no optimizer.safetensors or optimizer.pt" in capsys.readouterr().err


def test_the_moments_of_an_adapter_are_found_next_to_it(small, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        causal.load(small.model),
        peft.LoraConfig(
            r=2, lora_alpha=4, lora_dropout=0.1, task_type="CAUSAL_LM", target_modules=["c_attn", "c_proj"]
        ),
    )
    trainer, checkpoint = trained(adapted, small, tmp_path)
    model = lora.attach(causal.load(small.model), small.model, adapter=checkpoint)
    check(optimizer.load(checkpoint, model), in_memory(trainer))
    run = tmp_path / "run"
    words = ["--model_dir", small.model, "--data_path", small.shards, "--output_path", run, "--dim", 32]
    words += ["--lora_dir", checkpoint, "--grad_type", "adam", "--adam_variant", "less", "--max_samples", 4]
    assert cli.main(["grads", "collect", *map(str, words)]) == 0
    noted = json.loads((run / "collect.json").read_text())
    assert noted["optimizer_digest"] == optimizer.digest(checkpoint)
    assert cli.main(["grads", "validate", "--output_dir", str(run), "--check_ranks", "--recompute", "2"]) == 0


def state_of(model, groups, kind=torch.optim.AdamW, **options):
    """The state dict of an optimizer after one step, as `torch.save` writes it."""
    made = kind(groups, lr=1e-3, **options)
    tokens = torch.arange(24).view(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    made.step()
    return made.state_dict(), {name: made.state.get(p, {}) for name, p in model.named_parameters()}


def numbered_groups(model, first):
    return [
        {"params": [p for name, p in model.named_parameters() if first(name, p)]},
        {"params": [p for name, p in model.named_parameters() if not first(name, p)], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    "groups",
    [
        lambda model: model.parameters(),
        lambda model: [*model.named_parameters()][::-1],  # names, in an order of the script's own
        lambda model: numbered_groups(model, lambda name, p: p.ndim >= 2),
    ],
)
def test_other_scripts_have_one_group_or_names(groups, tmp_path):
    model = model_of("llama", 40)
    state, wanted = state_of(model, groups(model))
    torch.save(state, tmp_path / optimizer.NUMBERED)
    found = optimizer.load(tmp_path, model)
    assert set(found.exp_avg) == set(wanted)
    assert all(torch.equal(found.exp_avg[name], of["exp_avg"]) for name, of in wanted.items())


def message(model, tmp_path, state):
    torch.save(state, tmp_path / optimizer.NUMBERED)
    with pytest.raises(BadInput) as raised:
        optimizer.load(tmp_path, model)
    assert str(tmp_path / optimizer.NUMBERED) in str(raised.value)
    return str(raised.value)


def test_what_cannot_be_matched_is_refused(tmp_path):
    model = model_of("gpt2", 40)
    state, _ = state_of(model, numbered_groups(model, lambda name, p: "ln_" not in name))
    said = message(model, tmp_path, state)
    assert "no order of Trainer or of a single group fits" in said and "save the optimizer's state with names" in said
    whole, _ = state_of(model, model.parameters())
    assert "28 parameters in groups of 28, the model has 1" in message(
        torch.nn.Linear(3, 2, bias=False), tmp_path, whole
    )
    first = next(iter(whole["state"].values()))
    first["exp_avg"] = first["exp_avg"].T.contiguous()
    assert "no order" in message(model, tmp_path, whole)
    assert "not the state of Adam" in message(model, tmp_path, state_of(model, model.parameters(), torch.optim.SGD)[0])
    apart = numbered_groups(model, lambda name, p: p.ndim >= 2)
    apart[0]["betas"] = (0.8, 0.9)
    assert "different betas" in message(model, tmp_path, state_of(model, apart)[0])
    assert "is not an optimizer's state" in message(model, tmp_path, {"model": torch.ones(2)})
    (tmp_path / optimizer.NUMBERED).write_bytes(b"no such thing")
    with pytest.raises(BadInput, match="is not an optimizer's state"):
        optimizer.load(tmp_path, model)


class Ambiguous(torch.nn.Module):
    """Trainer's groups are [scale] and [norm, table], those of other scripts [table] and [scale, norm]."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.norm = torch.nn.LayerNorm(3, bias=False)
        self.table = torch.nn.LayerNorm((3, 3), bias=False)

    def groups(self):
        return [{"params": [self.scale]}, {"params": [self.norm.weight, self.table.weight]}]


def test_an_order_that_is_not_the_only_one_is_refused(tmp_path):
    model = Ambiguous()
    made = torch.optim.AdamW(model.groups(), lr=0.1)
    model.norm.weight.grad = torch.ones(3)
    made.step()  # number 1 alone has moments: of the norm, or of the scale, which has the same shape
    assert "several orders fit" in message(model, tmp_path, made.state_dict())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    torch.save(made.state_dict(), tmp_path / optimizer.NUMBERED)
    assert optimizer.load(tmp_path, model).step == {"scale": 1, "norm.weight": 2, "table.weight": 1}
