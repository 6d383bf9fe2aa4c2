"""Private steps in a training loop, against Opacus, and the statistics of their noise.

Of `front/private.py` and `front/accounting.py`.
"""

from __future__ import annotations

import io
import math
import warnings
from copy import deepcopy

import pytest
import torch
from test_samples import SAMPLES, exact, labels, losses_of, made, wrapped
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import DiLoCo, Int8, compress_gradients, make_private
from gradwire.attribution.front import private as front
from gradwire.base.errors import BadInput

BOUND = {"mlp": 1.6, "text": 4.7, "images": 3.0}


def private_gradient(kind, strategy, rank=0, ranks=1, noise=0.0, micro=1):
    """The gradient of one private step, and the norms; each rank has its samples, in some micro-batches."""
    model, x = made(kind)
    x, y = torch.cat([x, x.flip(0)[:1]]), labels(SAMPLES + 1)
    model = wrapped(strategy, model) if strategy else model
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=noise,
        max_grad_norm=BOUND[kind],
        batch_size=SAMPLES + 1,
        seed=5,
    )
    x, y = x[rank::ranks], y[rank::ranks]
    for part in range(micro):
        last = part + 1 == micro
        if strategy and strategy != "ddp":
            model.set_requires_gradient_sync(last)
        private.backward(losses_of(model, x[part::micro], y[part::micro]), last=last)
    gradient = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()]
    private.detach()
    return torch.cat([of.flatten() for of in gradient]).double()


def by_hand(kind):
    """The clipped mean in float64."""
    model, x = made(kind)
    gradients = exact(model, torch.cat([x, x.flip(0)[:1]]), labels(SAMPLES + 1))
    norms = gradients.norm(dim=1, keepdim=True)
    assert 0 < int((norms > BOUND[kind]).sum()) < SAMPLES
    return (gradients * (BOUND[kind] / norms).clamp(max=1)).mean(0)


@pytest.mark.parametrize("kind", BOUND)
def test_a_step_has_the_mean_of_clipped_gradients(kind):
    torch.testing.assert_close(private_gradient(kind, None, micro=2), by_hand(kind), rtol=1e-4, atol=1e-6)


def on_ranks(rank, ranks, group, kind, strategy, noise):
    return private_gradient(kind, strategy, rank, ranks, noise, micro=1 if strategy == "ddp" else 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hsdp"])
def test_ranks_have_the_gradient_of_one_process(world, strategy):
    wanted = by_hand("text")
    for found in world(2).run(on_ranks, "text", strategy, 0.0):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def noise_of(world, size, strategy):
    """The noise of a step, in units of what its standard deviation must be."""
    found = world(size).run(on_ranks, "text", strategy, 1.5)[0] - by_hand("text")
    return found / (1.5 * BOUND["text"] / (SAMPLES + 1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_noise_is_added_once_over_all_ranks(world, strategy):
    noise = noise_of(world, 2, strategy)
    band = 5 * math.sqrt(2 / len(noise))
    assert float(noise.square().mean()) == pytest.approx(1, abs=band)
    assert float(noise.mean()) == pytest.approx(0, abs=5 / math.sqrt(len(noise)))
    assert abs(math.sqrt(2) - 1) > band, "noise of σC on each rank would be seen"


@pytest.mark.parametrize("kind", ["mlp", "text"])
def test_clipped_gradients_are_opacus_own(kind):
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    def of(model, x):
        if kind == "mlp":
            return losses_of(model, x, labels())
        positions = torch.arange(x.shape[1]).expand(len(x), -1)  # Opacus needs a batch dimension
        logits = model(x, position_ids=positions, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").mean(1)

    def untied():
        model, x = made(kind)
        if kind == "text":  # Opacus sums norms of tied uses
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model, x

    model, x = untied()
    given = {"noise_multiplier": 0.0, "max_grad_norm": BOUND[kind]}
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=1.0), batch_size=SAMPLES, **given)
    private.backward(of(model, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GradSampleModule(untied()[0], strict=False, loss_reduction="mean")
        of(theirs, x).mean().backward()
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1.0), expected_batch_size=SAMPLES, loss_reduction="mean", **given
    )
    optimizer.pre_step()
    for (name, parameter), own in zip(theirs._module.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_epsilon_is_opacus_own_and_counts_steps():
    from opacus.accountants import PRVAccountant

    model, x = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "batch_size": SAMPLES}
    private = make_private(model, optimizer, sample_rate=0.05, **given)
    for _ in range(3):
        private.backward(losses_of(model, x, labels()))
        optimizer.step()
        optimizer.zero_grad()
    accountant = PRVAccountant()
    accountant.history = [(1.1, 0.05, 3)]
    assert private.steps == 3
    assert private.epsilon(1e-5) == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-3)
    private.detach()
    assert not any(module._forward_hooks for module in model.modules())
    optimizer.step()


def compressed(rank, ranks, group):
    """ε with a compressor, of which each rank's message must be private by itself, and without."""
    model = DistributedDataParallel(made("mlp")[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": 2.0, "max_grad_norm": 1.0, "batch_size": 8, "sample_rate": 0.05}
    private = make_private(model, optimizer, **given)
    private.steps = 10
    before = private.epsilon(1e-5)
    compress_gradients(model, Int8())
    return before, private.epsilon(1e-5)


def test_a_compressor_leaves_each_message_its_share_of_the_noise(world):
    ((plain, lossy), *_) = world(2).run(compressed)
    assert plain < lossy == pytest.approx(front.Guarantee(math.sqrt(2), 1e-5, 0.05, 1).spent(10).epsilon)


def local_updates(rank, ranks, group):
    model = made("mlp")[0]
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_every=2, compressor="none")
    with pytest.raises(BadInput, match="DiLoCo sends no clipped gradients of samples"):
        make_private(model, optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=4)


def test_an_optimizer_that_communicates_by_rounds_is_refused(world):
    world(2).run(local_updates)


def test_misuse_is_refused():
    model, x = made("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 4}
    for wrong in ({"max_grad_norm": 0.0}, {"noise_multiplier": -1.0}, {"batch_size": 0}, {"sample_rate": 1.5}):
        with pytest.raises(BadInput, match=next(iter(wrong))):
            make_private(model, optimizer, **given | wrong)
    both = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(BadInput, match="parameters that are not of the model"):
        make_private(model, both, **given)
    private = make_private(model, optimizer, **given)
    with pytest.raises(BadInput, match="the model is watched already"):
        make_private(model, optimizer, **given)
    with pytest.raises(BadInput, match=r"no pass awaits: .* by private\.backward\(losses\)"):
        losses_of(model, x, labels()).mean().backward()
    with pytest.raises(BadInput, match="autocast rounds the norms"), torch.autocast("cpu", torch.bfloat16):
        model(x)
    with pytest.raises(BadInput, match="gradients without noise"):
        optimizer.step()
    with pytest.raises(BadInput, match=r"losses have the shape \(\): pass those of the last forward pass"):
        private.backward(losses_of(model, x, labels()).mean())
    private.backward(losses_of(model, x, labels()))
    with pytest.raises(BadInput, match="pass last=False for all others"):
        private.backward(losses_of(model, x, labels()))
    with pytest.raises(BadInput, match="pass sample_rate"):
        private.epsilon(1e-5)


def test_a_step_without_samples_is_noise():
    model = made("mlp")[0]
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 4, "seed": 0}
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    private.backward(losses_of(model, torch.zeros(0, 7), labels(0)))
    noise = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert float(noise.square().mean().sqrt()) == pytest.approx(0.25, rel=0.4) and noise.ne(0).all()


def test_a_step_without_samples_is_noise_alone():
    model, x = made("mlp")
    given = {"noise_multiplier": 1.5, "max_grad_norm": 2.0, "batch_size": 4, "seed": 3}
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    private.backward(losses_of(model, x[:0], labels()[:0]))
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert private.norms.shape == (0,)
    assert gradient.std() == pytest.approx(1.5 * 2.0 / 4, rel=0.2)


def test_a_copy_and_a_saved_model_are_not_private():
    model, x = made("mlp")
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": 4}
    plain = torch.autograd.grad(losses_of(model, x, labels()).mean(), [*model.parameters()])
    private = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with pytest.warns(UserWarning, match="is loaded without: call"):
        loaded = torch.load(file, weights_only=False)
    for copied in (loaded, deepcopy(model)):
        losses_of(copied, x, labels()).mean().backward()
        for parameter, gradient in zip(copied.parameters(), plain, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
        make_private(copied, torch.optim.SGD(copied.parameters(), lr=0.1), **given)
    private.backward(losses_of(model, x, labels()))
