"""The frameworks' own options, passed on by `wrap`."""

from __future__ import annotations

import pytest
import torch
from test_frameworks import batch_of, loss_of, model_of, whole_gradients
from test_overlap import Unused
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Reducer
from gradwire.compressors import build
from gradwire.errors import BadInput
from gradwire.parallel import wrap

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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{"mp_policy": BF16}, {"reshard_after_forward": False}, {}])
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
