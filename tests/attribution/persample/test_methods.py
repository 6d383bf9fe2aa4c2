"""Every way of computing per-sample gradients against one backward pass per sample, in float64.

Of `hooks.py`, `layer_factors.py`, `vmap.py`, `loop.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from gradwire.attribution.collect.rows import resolved
from gradwire.attribution.persample import hooks, layer_factors, loop, norms, vmap
from gradwire.attribution.persample.batch import PART, trainable, zeroed
from gradwire.attribution.persample.batch import squares as squares_of
from gradwire.attribution.persample.layer_factors import Direct, LayerFactor, OuterProduct, inner, square_norm
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import Batch
from gradwire.lm.models import causal, lora

VOCABULARY, LENGTH = 64, 9


def gpt() -> torch.nn.Module:
    return causal.build("micro", VOCABULARY, LENGTH, seed=0)


def partly_frozen() -> torch.nn.Module:
    model = gpt()
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].ln_1.weight.requires_grad_(False)
    return model


def llama() -> torch.nn.Module:
    """Linear layers without bias, RMSNorm, grouped heads, untied embeddings."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=False,
        )
    )


def adapted(tmp_path_factory=None) -> torch.nn.Module:
    pytest.importorskip("peft")
    model = lora.attach(gpt(), __import__("pathlib").Path("base"), rank=3, seed=1)
    for name, parameter in trainable(model).items():
        if "lora_B" in name:  # zero at first, which would hide A's gradient
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


MODELS = {"gpt2": gpt, "partly frozen": partly_frozen, "llama": llama, "lora": adapted}


def batch_of(*lengths: int) -> Batch:
    """Distinct samples of these lengths, right-padded; the second one's first two tokens are a prompt."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), LENGTH), generator=generator)
    labels = tokens.clone()
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
        labels[row, length:] = -100
    if len(lengths) > 1:
        labels[1, :3] = -100
        tokens[0, 2] = tokens[0, 0]  # a token that is read twice
    return Batch(tokens, labels, [f"s{row}" for row in range(len(lengths))])


def close(found, wanted, tolerance=1e-9):
    assert list(found) == list(wanted)
    for name in wanted:
        scale = wanted[name].abs().max().clamp(min=1e-12)
        assert (found[name] - wanted[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", [vmap, hooks])
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_method_gives_the_gradients_of_the_loop(build, method, reduction):
    model, batch = build().double(), batch_of(9, 6, 1, 4)
    wanted = loop.gradients(model, batch, reduction)
    found = method.gradients(model, batch, reduction)
    close(found.gradient, wanted.gradient, 1e-6 if build is llama else 1e-9)  # its norms are always in float32
    torch.testing.assert_close(found.loss, wanted.loss.double(), rtol=1e-6, atol=1e-7)
    assert found.n_targets.tolist() == wanted.n_targets.tolist() == [8, 3, 0, 3]
    assert all(not gradient[2].any() for gradient in found.gradient.values()), "a sample without a target"
    assert all(p.requires_grad for p in trainable(build().double()).values())


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_hooks_leave_the_model_as_it_was(build):
    model = build().train()
    before = {name: (p.detach().clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    hooks.gradients(model, batch_of(9, 6))
    assert model.training and not any(module._forward_hooks for module in model.modules())
    for name, parameter in model.named_parameters():
        value, required, gradient = before[name]
        assert torch.equal(parameter, value) and parameter.requires_grad is required and parameter.grad is gradient


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_norms_are_exact_without_the_gradients(build):
    model, batch = build().double(), batch_of(9, 6, 1, 4)
    met: dict[str, list[LayerFactor]] = {}
    ended: list[str] = []

    def take(name: str, use: LayerFactor, last: bool) -> None:
        assert name not in ended
        met.setdefault(name, []).append(use)
        ended.extend([name] * last)

    assert hooks.backward(model, batch, take).unseen == []
    wanted = loop.gradients(model, batch).gradient
    assert set(met) == set(wanted) == set(ended)
    for name, uses in met.items():
        exact = wanted[name].flatten(1).square().sum(1)
        torch.testing.assert_close(square_norm(uses), exact, rtol=1e-6 if build is llama else 1e-9, atol=1e-15)


def test_a_tied_weights_uses_are_not_independent():
    met: dict[str, list[LayerFactor]] = {}
    hooks.backward(gpt().double(), batch_of(9, 6, 5), lambda name, use, last: met.setdefault(name, []).append(use))
    both = met["transformer.wte.weight"]
    assert len(both) == 2 and [use.one_hot for use in both] == [False, True]
    apart = square_norm(both[:1]) + square_norm(both[1:])
    assert ((square_norm(both) / apart - 1).abs() > 1e-3).any(), "the cross term"


def test_inner_products_of_all_kinds_of_factors():
    generator = torch.Generator().manual_seed(0)
    for tokens, rows, columns in ((3, 7, 5), (11, 2, 3)):  # by Gram matrices, and by the gradient itself
        dense = [
            OuterProduct(
                rows, *(torch.randn(2, tokens, width, generator=generator).double() for width in (rows, columns))
            )
            for _ in range(2)
        ]
        ids = torch.randint(0, rows, (2, tokens), generator=generator)
        looked_up = OuterProduct(rows, ids, torch.randn(2, tokens, columns, generator=generator).double())
        for one in (*dense, looked_up):
            for other in (*dense, looked_up):
                wanted = (one.gradient() * other.gradient()).sum((1, 2))
                torch.testing.assert_close(inner(one, other), wanted, rtol=1e-9, atol=1e-12)
    value = Direct(torch.randn(2, 4, generator=generator).double())
    torch.testing.assert_close(square_norm([value, value]), 4 * value.value.square().sum(1))


def test_padding_rows_of_an_embedding_have_no_gradient():
    model = llama().double()
    model.model.embed_tokens.padding_idx = 5
    batch = batch_of(9, 6)
    batch.input_ids[0, 1] = 5
    close(hooks.gradients(model, batch).gradient, loop.gradients(model, batch).gradient, 1e-6)


class Odd(torch.nn.Module):
    """A layer that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x):
        return x * self.scale


def test_auto_takes_hooks_where_every_layer_is_known(capsys):
    model = gpt()
    assert resolved("auto", model) == "hooks"
    model.transformer.ln_f = torch.nn.Sequential(model.transformer.ln_f, Odd())
    assert hooks.unsupported(model) == ["transformer.ln_f.1.scale"]
    assert resolved("auto", model) == "vmap"
    assert "uses vmap: hooks do not support the layer of transformer.ln_f.1.scale" in capsys.readouterr().err
    assert resolved("loop", model) == "loop"
    with pytest.raises(BadInput, match=r"does not support the layer of transformer.ln_f.1.scale"):
        resolved("hooks", model)
    batch = batch_of(9, 6)
    close(vmap.gradients(model.double(), batch).gradient, loop.gradients(model, batch).gradient)


class Like(torch.nn.Module):
    """Almost an RMS norm."""

    def __init__(self, power: float = 1.0, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7))
        self.eps, self.power, self.factor = 1e-6, power, factor

    def forward(self, x):
        return self.weight**self.power * torch.nn.functional.rms_norm(x, (7,), None, self.factor * self.eps)


@pytest.mark.parametrize("method", [loop, vmap, hooks])
def test_samples_of_one_token_have_zero_gradients(method):
    tokens = torch.tensor([[3], [5]])
    found = method.gradients(gpt(), Batch(tokens, tokens.clone(), ["a", "b"]))
    assert found.loss.tolist() == found.n_targets.tolist() == [0, 0]
    assert not any(gradient.any() for gradient in found.gradient.values())


def test_rows_without_targets_are_zero_even_where_they_are_nan():
    values = torch.tensor([[1.0, 2.0], [torch.nan, 3.0], [4.0, torch.inf]])
    found = zeroed(values, torch.tensor([False, True, True]))
    assert found.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert zeroed(values, torch.tensor([False] * 3)) is values


def test_squared_norms_of_long_rows():
    values = torch.randn(3, 2 * PART["cpu"] + 7, generator=torch.Generator().manual_seed(0))
    values[1] *= 1e-3
    torch.testing.assert_close(squares_of(values), values.double().square().sum(1), rtol=1e-12, atol=0)


def test_an_rms_norm_is_known_by_what_it_computes():
    assert layer_factors.rule_of(Like()) is layer_factors.rms_normalisation
    assert layer_factors.rule_of(Like(power=2.0)) is layer_factors.rule_of(Like(factor=3.0)) is None


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
DEEP = {**SMALL, "intermediate_size": 24, "max_position_embeddings": LENGTH}
ROTARY = {**DEEP, "num_key_value_heads": 1}
BART = {"decoder_ffn_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 2, "is_encoder_decoder": False}
LOCAL = {"num_layers": 1, "num_heads": 2, "attention_types": [[["local"], 1]], "window_size": 4}
GPTJ = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "n_positions": LENGTH}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
FOREIGN = {  # model_type: its configuration, and a layer that computes otherwise than its base class
    "gemma": ({**ROTARY, "head_dim": 8}, None),  # its norms multiply by 1 + weight, its embedding by a constant
    "mistral": (ROTARY, None),
    "granite": (ROTARY, None),
    "glm": ({**ROTARY, "head_dim": 8}, None),
    "qwen3": ({**ROTARY, "head_dim": 8}, None),  # a norm of each head
    "olmo2": (ROTARY, None),
    "gemma2": ({**ROTARY, "head_dim": 8}, None),  # its attention caps logits, in float32
    "gpt_neo": ({"vocab_size": VOCABULARY, "hidden_size": 16, "max_position_embeddings": LENGTH, **LOCAL}, None),
    "gptj": ({"vocab_size": VOCABULARY, **GPTJ}, None),
    "opt": ({**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": LENGTH}, "fc1"),
    "biogpt": (DEEP, "biogpt.embed_positions"),
    "bart": ({"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": LENGTH, **BART}, "embed_positions"),
    "qwen2_moe": ({**ROTARY, **EXPERTS}, "experts.down_proj"),
    "phi": ({**DEEP, "qk_layernorm": True}, None),  # its norms see [B, T, heads, features]
}


def foreign(kind: str) -> torch.nn.Module:
    """Models whose layers compute otherwise than their classes say."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, pad_token_id=1, **FOREIGN[kind][0]))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return model if kind == "qwen2_moe" else model.double()  # its experts' kernel knows no float64


def squares(found) -> torch.Tensor:
    return sum(gradient.double().flatten(1).square().sum(1) for gradient in found.gradient.values())


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_layer_is_known_by_what_it_computes(kind, capfd, monkeypatch):
    # Gemma 2 takes its softmax in float32, which some processors round by the row's length: it differs with padding.
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=None, dtype=None: softmax(x, dim))
    model, batch = foreign(kind), batch_of(9, 6, 1, 4)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    exact = loop.gradients(model, batch)
    found = norms.norms(model, batch)
    tolerance = 1e-5 if kind == "qwen2_moe" else 1e-9
    torch.testing.assert_close(found.square, squares(exact), rtol=tolerance, atol=1e-15)
    torch.testing.assert_close(found.loss, exact.loss.to(found.loss), rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    seen = hooks.backward(model, batch, lambda name, use, last: None)
    unknown = FOREIGN[kind][1]
    assert bool(seen.unseen) is bool(unknown)
    if unknown is None:
        close(hooks.gradients(model, batch).gradient, exact.gradient, 1e-9 if kind == "phi" else 1e-6)  # float32 norms
    else:
        assert any(unknown in name for name in seen.unseen)
        with pytest.raises(BadInput, match=f"--method hooks does not see every use of {seen.unseen[0]}"):
            norms.norms(model, batch, method="hooks")
    for method in ("vmap", "loop") if kind in ("gemma", "gemma2", "gpt_neo", "gptj") else ():
        torch.testing.assert_close(norms.norms(model, batch, method=method).square, squares(exact), rtol=1e-5, atol=0)


class Reused(torch.nn.Module):
    """A model that uses one layer twice, one past itself, and drops what a third gives."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(VOCABULARY, 12), torch.nn.Linear(12, 12)
        self.dropped, self.functional = torch.nn.Linear(12, 3), functional

    def forward(self, input_ids, use_cache=False):
        x = self.layer(input=torch.tanh(self.layer(self.embedding(input_ids))))
        self.dropped(x)
        weight = self.embedding.weight if self.functional else self.embedding.weight.detach()
        return SimpleNamespace(logits=torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("functional", [False, True])
def test_every_use_of_a_parameter_counts(functional):
    """One that a layer claims and that is used past it, too, would have half a gradient."""
    torch.manual_seed(0)
    model, batch = Reused(functional).double(), batch_of(9, 6, 4)
    exact = loop.gradients(model, batch)
    torch.testing.assert_close(norms.norms(model, batch).square, squares(exact), rtol=1e-9, atol=0)
    if functional:
        with pytest.raises(BadInput, match=r"does not see every use of embedding\.weight"):
            hooks.gradients(model, batch)
    else:
        close(hooks.gradients(model, batch).gradient, exact.gradient)


def test_what_vmap_cannot_trace_goes_by_the_loop(monkeypatch, capfd):
    def untraceable(*_):
        raise RuntimeError("vmap: data-dependent control flow")

    model, batch = foreign("opt"), batch_of(9, 6)
    wanted = squares(loop.gradients(model, batch))
    monkeypatch.setattr(vmap, "gradients", untraceable)
    torch.testing.assert_close(norms.norms(model, batch).square, wanted, rtol=1e-9, atol=0)
    assert "by the loop: hooks do not see every use of them, and vmap fails: vmap: data-" in capfd.readouterr().err
