"""The frameworks' own options, passed on by `wrap`.

Of `parallel/wrap.py`.
"""

from __future__ import annotations

import pytest
import torch
from diagonals import diagonals, swept
from test_frameworks import batch_of, loss_of, model_of, whole_gradients
from test_overlap import Unused
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, wrap

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def exact(group) -> Reducer:
    return Reducer(build("none"), group, algorithm="exchange")


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def unused(rank, world, group):
    """Gradients of two steps, each rank leaving out another layer, by `wrap` and by DDP itself."""
    torch.manual_seed(5)
    layers = Unused()
    theirs = DistributedDataParallel(Unused(), find_unused_parameters=True)
    theirs.module.load_state_dict(layers.state_dict())
    reducer = exact(group)
    ours = wrap(layers, "ddp", reducer, find_unused_parameters=True)
    found = []
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model(data(rank, step), rank + step).backward()
        assert reducer.finish()
        found.append([{name: p.grad for name, p in model.module.named_parameters()} for model in (ours, theirs)])
    return found


def test_ddp_finds_unused_parameters(world):
    for steps in world(2).run(unused):
        for mine, expected in steps:
            torch.testing.assert_close(mine, expected)
            assert all(gradient.any() for gradient in mine.values())


class Branch(nn.Module):
    """A layer that every pass uses, and one that a pass may leave out; or a pass may drop what both compute."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 7), nn.Linear(7, 3)

    def forward(self, x, unused):
        y = self.a(x).tanh()
        y = y[:, :3].clone() if unused == "layer" else self.b(y)
        return x if unused == "both" else y.tanh()


class Branches(nn.Module):
    """Blocks of which one has an unused layer or two."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Branch() for _ in range(2))
        self.head = nn.Linear(3, 5)

    def forward(self, x, block, unused):
        for i, layer in enumerate(self.layers):
            x = layer(x, unused if i == block else "none")
        return self.head(x).square().mean()


def branched(rank, world, group, strategy, apart, passes):
    """Gradients of two steps that leave a layer unused, on each rank another one if ``apart``; and by fully_shard.

    Before each step a pass asks for the gradient of the data only: it leaves none in the parameters.
    """
    islands = build_islands(2) if strategy == "hsdp" else None
    reducer = exact(group) if islands is None else IslandReducer("none", islands, algorithm="exchange")
    found, models = [], []
    for way, own in ((strategy, reducer), ("fsdp2", None)):
        torch.manual_seed(5)
        models.append(wrap(Branches(), way, own))
    mine, theirs = models
    theirs.set_reduce_scatter_unused_params(apart)  # else it takes another gradient's bytes for the missing ones
    for step in range(2):
        for model in models:
            model.zero_grad()
        sent = reducer.traffic["sent"]
        x = data(rank, step).requires_grad_()
        assert torch.autograd.grad(mine(x, 0, "none"), x)[0].any()
        assert reducer.traffic["sent"] == sent, "a pass that leaves no gradient is not reduced"
        assert all(parameter.grad is None for parameter in mine.parameters())
        for micro, unused in enumerate(passes):
            for model in models:
                with accumulation(model, last=micro == len(passes) - 1):
                    model(data(rank, 10 * step + micro), (rank + step if apart else step) % 2, unused).backward()
        assert reducer.finish()
        found.append([whole_gradients(model) for model in models])
    return found


@pytest.mark.parametrize(
    ("size", "strategy", "apart", "passes"),
    [
        (3, "fsdp2", False, ["layer", "both"]),
        (4, "hsdp", True, ["layer"]),
        *swept((2, "fsdp2", True, ["layer", "layer"]), (4, "hsdp", False, ["layer"])),
    ],
)
def test_fsdp2_reduces_zeros_for_an_unused_layer(world, size, strategy, apart, passes):
    for steps in world(size).run(branched, strategy, apart, passes):
        for step, (mine, expected) in enumerate(steps):
            unused = {f"layers.{step}.b.weight", f"layers.{step}.b.bias"}
            assert (mine.keys() & unused) == (unused if apart else set())
            torch.testing.assert_close(mine, expected)


def without_zeros(rank, world, group, strategy):
    """The message about an unused layer by a version of torch that cannot reduce zeros."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
        islands = build_islands(2) if strategy == "hsdp" else None
        reducer = exact(group) if islands is None else IslandReducer("none", islands, algorithm="exchange")
        model = wrap(Branches(), strategy, reducer)
        with pytest.raises(RunFault) as error:
            model(data(rank, 0), 1, "layer").backward()
        return str(error.value)


@pytest.mark.parametrize(("size", "strategy"), [(2, "fsdp2"), (4, "hsdp")])
def test_an_unused_layer_is_named_where_torch_cannot_reduce_zeros(world, size, strategy):
    for found in world(size).run(without_zeros, strategy):
        assert "layers.1.b.bias" in found and "did a parameter get no gradient?" in found


def policy(rank, world, group, strategy_options):
    """Types of gathered weights, whether all stay gathered, and gradients by the framework and by a reducer."""
    seen = set()
    gradients = []
    for reducer in (None, exact(group)):
        model = wrap(model_of("odd"), "fsdp2", reducer, **strategy_options)
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_pre_hook(lambda part, _: seen.add(part.weight.dtype))
        loss = loss_of("odd", model, batch_of("odd", rank)).float()
        gathered = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        loss.backward()
        if reducer is not None:
            assert reducer.finish()
        gradients.append(whole_gradients(model))
    return seen, gathered, *gradients


@pytest.mark.parametrize(
    ("size", "options"), diagonals([2, 3], [{"mp_policy": BF16}, {"reshard_after_forward": False}, {}])
)
def test_fsdp2_takes_its_own_options(world, size, options):
    narrow = "mp_policy" in options
    for seen, gathered, theirs, mine in world(size).run(policy, options):
        assert seen == {torch.bfloat16 if narrow else torch.float32}
        assert gathered == ("reshard_after_forward" in options), "whether blocks stay gathered after the forward pass"
        torch.testing.assert_close(mine, theirs)


def refused(rank, world, group, strategy, options):
    with pytest.raises(BadInput) as error:
        wrap(model_of("odd"), strategy, None, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("fsdp2", {"mp_policy": BF16, "param_compress": "int8"}, "param_compress int8 gathers float32 parameters"),
        ("ddp", {"find_unused": True}, "Did you mean 'find_unused_parameters'"),
        ("hsdp", {"mp_polic": BF16}, "Did you mean 'mp_policy'"),
        ("fsdp1", {"mp_policy": BF16}, "option of strategy fsdp1 'mp_policy'"),
    ],
)
def test_other_options_are_refused(world, strategy, options, message):
    for found in world(2).run(refused, strategy, options):
        assert message in found
