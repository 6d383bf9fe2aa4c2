"""Norms and rows in a training loop, against one backward pass per sample in float64."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire import GradientStore, per_sample
from gradwire.attribution import projections
from gradwire.attribution.persample import layer_factors
from gradwire.attribution.persample.batch import shapes
from gradwire.base.errors import BadInput, CheckFailed
from gradwire.lm.models import causal, lora

SAMPLES, CLASSES, EXACT = 5, 4, 2e-6


class Attention(nn.Module):
    """A block in the layout [T, B, C], with as many tokens as samples, between a batch-first input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.out = nn.Linear(7, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.head, self.checkpointed = nn.LayerNorm(8), nn.Linear(8, CLASSES), False

    def block(self, x):
        q, k, v = (part.unflatten(-1, (2, 4)).permute(1, 2, 0, 3) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
        return x + torch.relu_(self.out(mixed))

    def forward(self, x):
        x = self.first(x).transpose(0, 1)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x.mean(0))


def mlp():
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, CLASSES)), torch.randn(SAMPLES, 7)


def images():
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)),
        *(nn.Conv2d(6, 8, 2, groups=2, dilation=2), nn.Flatten(), nn.Linear(32, CLASSES)),
    ), torch.randn(SAMPLES, 3, 8, 8)


def sounds():
    layers = nn.Conv1d(3, 6, 3, padding=1, dilation=2, bias=False), nn.GELU(), nn.Flatten(), nn.Linear(36, CLASSES)
    return nn.Sequential(*layers), torch.randn(SAMPLES, 3, 8)


def attention():
    return Attention(), torch.randn(SAMPLES, SAMPLES, 7)


def checkpointed():
    model, x = attention()
    model.checkpointed = True
    return model, x


def text():
    return causal.build("micro", 64, 9, seed=0), torch.randint(64, (SAMPLES, 9))


def square_text():
    """As many tokens as samples, with positions that all samples share."""
    return causal.build("micro", 64, 9, seed=0), torch.randint(64, (SAMPLES, SAMPLES))


def adapted():
    pytest.importorskip("peft")
    model = lora.attach(text()[0], __import__("pathlib").Path("base"), rank=3, seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide A's gradient
            nn.init.normal_(parameter, std=0.1)
    return model, text()[1]


MODELS = {f.__name__: f for f in (mlp, images, sounds, attention, checkpointed, text, square_text, adapted)}


def made(kind):
    torch.manual_seed(0)
    model, x = MODELS[kind]()
    return model.train(), x


def losses_of(model, x, y):
    """A loss of each sample, [B]; one of them has the weight 0."""
    output = model(x)
    if x.is_floating_point():
        losses = cross_entropy(output, y, reduction="none")
    else:
        logits = output.logits[:, :-1]
        losses = cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").mean(1)
    return losses * (y != CLASSES - 1)


def labels(samples=SAMPLES):
    return torch.arange(samples) % CLASSES


def exact(model, x, y):
    """Norms and whole gradients by one backward pass per sample in float64."""
    model = deepcopy(model).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = []
    for row, label in zip(x.double() if x.is_floating_point() else x, y, strict=True):
        loss = losses_of(model, row[None], label[None]).sum()
        of_sample = torch.autograd.grad(loss, parameters, materialize_grads=True)
        gradients.append(torch.cat([gradient.flatten() for gradient in of_sample]))
    return torch.stack(gradients)


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", MODELS)
def test_norms_are_those_of_single_samples_and_gradients_stay(kind, reduction):
    model, x = made(kind)
    plain, before = deepcopy(model), dict(model.named_parameters())
    getattr(losses_of(plain, x, labels()), reduction)().backward()
    with per_sample(model).norms(reduction=reduction) as norms:
        getattr(losses_of(model, x, labels()), reduction)().backward()
    wanted = exact(model, x, labels()).norm(dim=1)
    assert norms.values.dtype == torch.float64 and norms.values[3] == 0
    torch.testing.assert_close(norms.values, wanted, rtol=EXACT, atol=0)
    for name, gradient in gradients_of(plain).items():
        torch.testing.assert_close(gradients_of(model)[name], gradient, rtol=1e-5, atol=1e-7)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["images", "text"])
@pytest.mark.parametrize("projection", [*projections.PROJECTORS])
def test_rows_are_the_projected_gradients(kind, projection):
    model, x = made(kind)
    gradients = exact(model, x, labels())
    dim = gradients.shape[1] if projection == "none" else 64
    with per_sample(model).rows(dim, projection, seed=3) as rows:
        losses_of(model, x, labels()).mean().backward()
    projector = projections.build(projection, shapes(model), 3)
    wanted = projector.project(gradients.float(), [dim])[dim]
    torch.testing.assert_close(rows.values, wanted, rtol=0, atol=2e-5 * float(wanted.norm(dim=1).max()))
    torch.testing.assert_close(rows.norms, gradients.norm(dim=1), rtol=EXACT, atol=0)


def test_accumulated_passes_and_a_scaled_loss_are_told():
    model, x = made("mlp")
    wanted = exact(model, x, labels()).norm(dim=1)
    with per_sample(model).norms(scale=1024 / 2, passes=2) as norms:
        for rows in (slice(0, 2), slice(2, None)):
            (1024 * losses_of(model, x[rows], labels()[rows]).mean() / 2).backward()
    torch.testing.assert_close(norms.values, wanted, rtol=EXACT, atol=0)
    untold = "2 forward passes of the model computed gradients, but passes is 1"
    with pytest.raises(BadInput, match=untold), per_sample(model).norms():
        for _ in range(2):
            losses_of(model, x, labels()).mean().backward()


def test_autocast_stays_within_the_error_of_bfloat16():
    model, x = made("text")
    wanted = exact(model, x, labels()).norm(dim=1)
    with per_sample(model).norms() as norms:
        with torch.autocast("cpu", torch.bfloat16):
            loss = losses_of(model, x, labels()).mean()
        loss.backward()
    kept = wanted > 0
    assert 0 < float((norms.values - wanted)[kept].div(wanted[kept]).abs().max()) < 2e-2


def test_the_probe_leaves_random_numbers_buffers_and_modes_alone():
    model = nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.5), nn.Linear(9, CLASSES)).train()
    model[2].eval()
    x = torch.randn(SAMPLES, 7)
    torch.manual_seed(1)
    plain = losses_of(model, x, labels())
    torch.manual_seed(1)
    with per_sample(model).norms():
        watched = losses_of(model, x, labels())
        watched.mean().backward()
    assert torch.equal(plain, watched) and [module.training for module in model] == [True, True, False]


class Twice(nn.Module):
    """A layer's weight used once more, past the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x) + x @ self.layer.weight)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x) - self.layer(x).mean(0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(7, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, -1])


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        return checkpoint(self.head, self.first(x), use_reentrant=True)


REFUSED = {
    "a weight used elsewhere": (Twice, "every use of layer.weight"),
    "samples mixed": (Mixed, "every use of layer.bias, layer.weight"),
    "a layer without a rule": (Recurrent, "the layer of lstm.weight_ih_l0"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4)), "1 is a BatchNorm1d, which mixes"),
    "a reentrant checkpoint": (Reentrant, "use_reentrant=False"),
    "compiled": (lambda: torch.compile(nn.Linear(7, CLASSES)), "the model is compiled"),
    "a scalar": (lambda: Scalar(), "returns no tensor whose dimension 0 has the size of its first"),
}


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.layer(x).square().mean()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_right_is_refused(kind):
    build, message = REFUSED[kind]
    model = build()
    with pytest.raises(BadInput, match=message), per_sample(model).norms():
        model(torch.randn(SAMPLES, 7)).sum().backward()
    assert not any(module._forward_hooks for module in model.modules())


class Bare(nn.Module):
    """Leaves its head to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(7, 7), nn.Linear(7, CLASSES, bias=False)

    def forward(self, x):
        return self.layer(x)


def test_misuse_is_refused():
    model, x = made("mlp")
    samples = per_sample(model)
    with pytest.raises(BadInput, match="the model is watched already"), samples.norms(), samples.norms():
        pass
    nothing = r"no gradient has reached 0\.bias, 0\.weight, 2\.bias and 1 more"
    with pytest.raises(BadInput, match=nothing), samples.norms() as norms:
        losses = losses_of(model, x, labels())
        with pytest.raises(BadInput, match=nothing):
            norms.values.tolist()
    with pytest.raises(BadInput, match="no gradient has reached any layer"), samples.norms():
        pass
    with pytest.raises(BadInput, match="second backward pass over one forward pass"), samples.norms():
        losses = losses_of(model, x, labels())
        losses.mean().backward(retain_graph=True)
        losses.mean().backward()
    with pytest.raises(BadInput, match=r"2\.weight, 2\.bias: the layer runs outside"), samples.norms():
        model[2](torch.randn(SAMPLES, 9))
    body = Bare()
    with pytest.raises(BadInput, match=r"head.weight is used outside the model's"), per_sample(body).norms():
        (body(x) @ body.head.weight.T).sum().backward()
    with pytest.raises(BadInput, match="a forward pass depends on an earlier one"), samples.norms(passes=2):
        model(model(x)[:, :1].expand(-1, 7))
    fresh, _ = made("mlp")
    with pytest.raises(BadInput, match="the model's first outputs have NaN"), per_sample(fresh).norms():
        fresh(torch.full_like(x, torch.nan))
    with pytest.raises(BadInput, match="reduction is 'average'"):
        samples.norms(reduction="average")


def wrapped(strategy, model):
    if strategy == "ddp":
        return DistributedDataParallel(model)
    shape, names = ((2, 1), ("copies", "parts")) if strategy == "hsdp" else ((dist.get_world_size(),), ("data",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for block in getattr(model, "transformer", nn.Module()).h if hasattr(model, "transformer") else [model[0]]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def on_ranks(rank, ranks, group, strategy, kind):
    """Norms of all samples, dealt out in turns, and of the same samples on each rank; and the mean gradient."""
    model, x = made(kind)
    x, y = torch.cat([x, x.flip(0)[:1]]), labels(SAMPLES + 1)  # a multiple of the ranks
    model = wrapped(strategy, model)
    samples = per_sample(model)
    with samples.norms() as norms:
        losses_of(model, x[rank::ranks], y[rank::ranks]).mean().backward()
    gradient = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
    with samples.norms() as same:
        losses_of(model, x, y).mean().backward()
    with pytest.raises(CheckFailed, match="two squared norms of sample"):
        norms.gathered("replicated")
    return norms.gathered(), same.gathered("replicated"), gradient


@pytest.mark.parametrize("kind", ["mlp", "text"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
def test_ranks_have_the_norms_of_one_process(world, strategy, kind):
    model, x = made(kind)
    x, y = torch.cat([x, x.flip(0)[:1]]), labels(SAMPLES + 1)
    wanted = exact(model, x, y)
    for dealt, same, gradient in world(2).run(on_ranks, strategy, kind):
        order = [*range(0, SAMPLES + 1, 2), *range(1, SAMPLES + 1, 2)]
        torch.testing.assert_close(dealt, wanted.norm(dim=1)[order], rtol=EXACT, atol=0)
        torch.testing.assert_close(same, wanted.norm(dim=1), rtol=EXACT, atol=0)
        mean = torch.cat([of.flatten() for of in gradient]).double()
        torch.testing.assert_close(mean, wanted.mean(0), rtol=1e-4, atol=1e-6)


def uneven(rank, ranks, group):
    """Norms under FSDP2 where the first pass has one sample on rank 0, and the others on rank 1."""
    model, x = made("mlp")
    model, part = wrapped("fsdp2", model), slice(1) if rank == 0 else slice(1, None)
    with per_sample(model).norms() as norms:
        losses_of(model, x[part], labels()[part]).mean().backward()
    part = slice(0) if rank == 0 else slice(None)
    with per_sample(model).norms() as later:
        losses_of(model, x[part], labels()[part]).sum().backward()
    return norms.gathered(), later.values


def test_a_rank_with_one_sample_takes_part_in_the_probe_of_a_sharded_model(world):
    wanted = exact(*made("mlp"), labels()).norm(dim=1)
    for rank, (norms, later) in enumerate(world(2).run(uneven)):
        torch.testing.assert_close(norms, wanted, rtol=EXACT, atol=0)
        torch.testing.assert_close(later, SAMPLES * wanted if rank else wanted[:0], rtol=EXACT, atol=0)


class Heads(nn.Module):
    """A body and two heads, which return a tensor each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(7, 9), nn.Linear(9, CLASSES), nn.Linear(9, CLASSES)

    def forward(self, x):
        x = self.body(x).tanh()
        return {"first": self.first(x), "second": self.second(x)}


def test_all_outputs_of_a_model_are_probed():
    torch.manual_seed(5)
    model, x = Heads(), torch.randn(SAMPLES, 7)

    def losses(model, x, y):
        output = model(x)
        return cross_entropy(output["first"], y, reduction="none") + output["second"].square().sum(1)

    with per_sample(model).norms(reduction="sum") as norms:
        losses(model, x, labels()).sum().backward()
    double = deepcopy(model).double()
    for norm, row, label in zip(norms.values, x.double(), labels(), strict=True):
        gradients = torch.autograd.grad(losses(double, row[None], label[None]).sum(), [*double.parameters()])
        wanted = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        torch.testing.assert_close(norm, wanted, rtol=EXACT, atol=0)


def test_rows_are_written_with_their_ids_and_norms(tmp_path):
    (model, x), ids = made("mlp"), [f"sample {number}" for number in range(SAMPLES)]
    with per_sample(model).rows(7) as rows:
        losses_of(model, x, labels()).mean().backward()
    with GradientStore.create(tmp_path / "store", projection="sjlt") as writer:
        with pytest.raises(BadInput, match=f"{SAMPLES} rows have {SAMPLES - 1} ids"):
            rows.write(writer, ids[1:])
        rows.write(writer, ids)
    store = GradientStore(tmp_path / "store")
    assert store.ids == ids
    torch.testing.assert_close(torch.from_numpy(store[:]), rows.values, rtol=0, atol=0)
    assert store.meta["norm"].to_pylist() == pytest.approx(rows.norms.tolist(), rel=1e-7)


@pytest.mark.parametrize("fault", ["a layer left out", "a sample counted twice"])
def test_a_planted_fault_is_seen(monkeypatch, fault):
    def rule(module, x, grad):
        if fault == "a layer left out" and module.in_features == 7:
            grad = torch.zeros_like(grad)
        if fault == "a sample counted twice":
            grad = torch.cat([2 * grad[:1], grad[1:]])
        return layer_factors.linear(module, x, grad)

    monkeypatch.setitem(layer_factors.OF_TORCH, nn.Linear.forward, rule)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        test_norms_are_those_of_single_samples_and_gradients_stay("mlp", "mean")
