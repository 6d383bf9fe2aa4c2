"""Norms of models that change outputs or inputs in place, and in layouts of other dimensions, against the loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_methods import squares
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from gradwire.attribution.persample import hooks, loop, norms
from gradwire.base.errors import BadInput, RunFault
from gradwire.lm.data.batches import Batch

VOCABULARY, WIDTH = 13, 6


def batch_of(samples: int, read: int) -> Batch:
    """Samples of which the model reads so many tokens."""
    tokens = torch.randint(VOCABULARY, (samples, read + 1), generator=torch.Generator().manual_seed(samples + read))
    return Batch(tokens, tokens, [f"s{row}" for row in range(samples)])


class Net(nn.Module):
    """An embedding, the body of the test, and a head; as a model of transformers."""

    def __init__(self, body, **parts: nn.Module) -> None:
        super().__init__()
        self.e, self.a = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b, self.h = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.body, self.parts = body, nn.ModuleDict(parts)

    def forward(self, ids, use_cache=False):
        return SimpleNamespace(logits=self.h(self.body(self, self.e(ids))))


def built(body, **parts: nn.Module) -> Net:
    torch.manual_seed(0)
    model = Net(body, **parts).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model


def unseen_of(model: nn.Module, batch: Batch) -> list[str]:
    """The parameters that hooks miss; the norms must be the loop's whichever they are."""
    exact = squares(loop.gradients(model, batch))
    torch.testing.assert_close(norms.norms(model, batch).square, exact, rtol=1e-9, atol=0)
    return hooks.backward(model, batch, lambda name, use, last: None).unseen


def added(model, x):
    y = model.a(x)
    y += x
    return model.b(y)


def sliced(model, x):
    y = model.a(x)
    y[..., :2].mul_(model.b(x)[..., 1:3])
    y[:, :1] = 3 * x[:, :1]
    return y


def chunked(model, x):
    y, z = model.a(x).chunk(2, -1)
    return torch.cat([y.clone().sin_(), z * 2], -1) + model.b(x)


def of_embedding(model, x):
    x *= 2
    x[..., 0].zero_()
    return model.b(torch.relu_(model.a(x)))


IN_PLACE = {
    "relu": lambda model, x: model.b(torch.relu_(model.a(x))),
    "a residual": added,
    "slices": sliced,
    "chunks": chunked,
    "an embedding": of_embedding,
    "a viewed output": lambda model, x: model.b(model.a(x).flatten(0, 1).sigmoid_().view_as(x)),
    "no bias": lambda model, x: model.b(linear(x, torch.eye(WIDTH).double()).tanh_()).add_(x),
    "a checkpoint": lambda model, x: checkpoint(lambda x: added(model, x), x, use_reentrant=False),
    "an unused output": lambda model, x: (model.a(x), model.b(x))[1],
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_layer_counts_though_its_output_is_changed_in_place(kind):
    assert unseen_of(built(IN_PLACE[kind]), batch_of(3, 4)) == []


class Norm(nn.Module):
    """An RMS norm in float32, whose input of another type may change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_a_layer_whose_input_changes_later_is_unseen():
    def body(model, x):
        y = model.a(x)
        z = model.parts["norm"](y)
        y.mul_(2.0)
        return model.b(y + z)

    assert unseen_of(built(body, norm=Norm()), batch_of(3, 4)) == ["parts.norm.weight"]


def test_a_hook_of_the_model_may_keep_an_output():
    kept = []

    def body(model, x):
        y = model.a(x)
        return model.b(y) + kept.pop()

    model = built(body)
    model.a.register_forward_hook(lambda module, args, output: kept.append(output))
    assert unseen_of(model, batch_of(3, 4)) == []


def test_a_layer_with_a_forward_of_its_instance_is_unknown():
    model = built(lambda model, x: model.parts["norm"](x), norm=Norm())
    norm = model.parts["norm"]
    norm.forward = lambda x: norm.weight**2 * x
    assert unseen_of(model, batch_of(3, 4)) == ["parts.norm.weight"]


class GatedNorm(nn.RMSNorm):
    """An RMS norm without a gate, and something else with one, as in Mamba 2."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * torch.sigmoid(gate))


def test_a_call_with_more_than_one_input_is_unseen():
    def body(model, x):
        return model.parts["gated"](model.parts["plain"](x), gate=model.a(x)) + model.b(x)

    assert unseen_of(built(body, gated=GatedNorm(WIDTH, 1e-6), plain=GatedNorm(WIDTH, 1e-6)), batch_of(3, 4)) == [
        "parts.gated.weight"
    ]


def test_a_use_without_a_gradient_ends_the_pass(monkeypatch):
    monkeypatch.setattr(hooks._Use, "__call__", lambda use, grad: None)
    with pytest.raises(RunFault, match=r"a use of .*h\.weight.* received no gradient"):
        norms.norms(built(IN_PLACE["relu"]), batch_of(3, 4))


def time_first(model, x):
    return model.b(torch.relu_(model.a(x.transpose(0, 1)))).cumsum(0).transpose(0, 1)


def heads(model, x):
    """Norms of [B, T, heads, features] and of [B, heads, T, features]."""
    each = model.parts["head"](x.unflatten(-1, (3, 2)))
    return x + (model.parts["last"](each.transpose(1, 2)).transpose(1, 2)).flatten(-2)


def positions(model, x):
    return model.b(x + model.parts["p"](torch.arange(x.shape[1])[None]))


def first_position(model, x):
    return model.b(x + model.parts["p"](torch.arange(x.shape[1])[None])[0])


def distances(model, x):
    """A bias of attention by relative position: ids [T, T]."""
    at = torch.arange(x.shape[1])
    bias = model.parts["p"]((at[:, None] - at).clamp(min=0)).mean(-1).tril()
    return model.b(bias @ x)


def reversed_rows(model, x):
    return model.a(x.flip(0)).flip(0)


def both_layouts(model, x):
    return model.a(x) + model.a(x.transpose(0, 1)).transpose(0, 1)


def flattened(model, x):
    return model.b(model.a(x.flatten(0, 1)).view_as(x))


def zero(model, x):
    return x + model.parts["zero"](model.a(x)) + model.b(x)


def position_table():
    return {"p": nn.Embedding(9, WIDTH)}


LAYOUTS = {  # a body, its parts, and those that hooks miss where there is more than one sample
    "time first": (time_first, dict, []),
    "heads": (heads, lambda: {"head": nn.LayerNorm(2), "last": nn.RMSNorm(2)}, []),
    "shared positions": (positions, position_table, []),
    "the first of repeated positions": (first_position, position_table, ["parts.p.weight"]),
    "distances": (distances, position_table, ["parts.p.weight"]),
    "reversed rows": (reversed_rows, dict, ["a.weight", "a.bias"]),
    "both layouts": (both_layouts, dict, ["a.weight", "a.bias"]),
    "flattened": (flattened, dict, ["a.weight", "a.bias"]),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_batch_dimension_is_found_whatever_the_sizes(kind):
    body, parts, missed = LAYOUTS[kind]
    model = built(body, **parts())
    for samples, read in ((4, 4), (3, 3), (5, 3), (2, 4), (2, 1), (1, 4), (1, 1)):
        unseen = unseen_of(model, batch_of(samples, read))
        assert unseen == ([] if samples == 1 else missed), (samples, read)


def test_layers_behind_zero_weights_have_a_batch_dimension():
    model = built(zero, zero=nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(model.parts["zero"].weight)
    assert unseen_of(model, batch_of(3, 3)) == []


def test_a_layer_that_mixes_samples_is_refused():
    model = built(lambda model, x: model.b(model.a(x) - 0.5 * model.a(x).mean(0, keepdim=True)))
    model.e.requires_grad_(False)
    model.a.requires_grad_(False)
    with pytest.raises(BadInput, match="the loss of a sample depends on other samples in e: a layer after it mixes"):
        norms.norms(model, batch_of(3, 4))


def test_a_model_is_probed_once_and_again_with_another_layer(monkeypatch):
    model, probed, probe = built(IN_PLACE["relu"]), [], hooks._probe
    monkeypatch.setattr(hooks, "_probe", lambda *args: probed.append(args[1].shape[0]) or probe(*args))
    for _ in range(3):
        norms.norms(model, batch_of(3, 4))
    assert probed == [2, 3]
    model.b = nn.Linear(WIDTH, WIDTH).double()
    norms.norms(model, batch_of(2, 5))
    assert probed == [2, 3, 2, 3]


def test_a_model_that_fails_in_the_probe_goes_by_another_method(capsys):
    def body(model, x):
        if x.shape[0] == 2:
            raise ValueError("two samples are too few")
        return model.b(x)

    model = built(body)
    assert unseen_of(model, batch_of(3, 4)) == ["e.weight", "b.weight", "b.bias", "h.weight", "h.bias"]
    assert "find no batch dimensions: the model fails in a probe: ValueError: two samples" in capsys.readouterr().err
