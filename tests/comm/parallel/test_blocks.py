"""Which parts of a model `wrap` shards one by one, and what it says of a model that it cannot shard."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from gradwire import comm_hook
from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import accumulation, hook, named_parameters, wrap

STRATEGIES = ("naive", "bucket", "ddp", "fsdp1", "fsdp2")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x):
        return x + self.outer(self.inner(x).tanh())


class Net(nn.Module):
    """Three blocks, in the container that is asked for."""

    def __init__(self, container):
        super().__init__()
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        self.layers = {
            "list": nn.ModuleList,
            "dict": lambda blocks: nn.ModuleDict(zip("012", blocks, strict=True)),
            "sequence": lambda blocks: nn.Sequential(*blocks),
        }[container](blocks)
        self.head = nn.Linear(7, 5)

    def forward(self, x):
        for block in self.layers.children():
            x = block(x)
        return self.head(x).square().sum()


def gradients(rank, world, group, container):
    """The sharded units and the gradients of a model, and those of the same model on one rank with all inputs."""
    xs = [torch.randn(4, 7, generator=torch.Generator().manual_seed(each)) for each in range(world)]
    model = Net(container)
    reducer = Reducer("none")
    wrapped = wrap(model, "fsdp2", reducer, device="cpu")
    units = sum(isinstance(module, FSDPModule) for module in wrapped.modules())
    with accumulation(wrapped, last=True):
        wrapped(xs[rank]).backward()
    reducer.finish()
    alone = Net(container)
    (sum(map(alone, xs)) / world).backward()
    exact = {name: parameter.grad for name, parameter in alone.named_parameters()}
    return units, {name: p.grad.full_tensor() for name, p in named_parameters(wrapped)}, exact


@pytest.mark.parametrize("container", ["dict", "sequence"])
def test_blocks_in_any_container_are_units(world, container):
    for units, delivered, exact in world(2).run(gradients, container):
        assert units == 4, "three blocks, and the rest"
        torch.testing.assert_close(delivered, exact, rtol=1e-6, atol=1e-6)


def large(width):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def warned(rank, world, group, strategy, width):
    """The warnings of wrapping a model without blocks."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        wrap(large(width), strategy, Reducer("none"), device="cpu")
    return [str(one.message) for one in noted if "blocks" in str(one.message)]


@pytest.mark.parametrize(
    ("strategy", "width", "count"), [("fsdp2", 2700, 1), ("fsdp1", 2700, 1), ("fsdp2", 64, 0), ("ddp", 2700, 0)]
)
def test_a_large_model_without_blocks_is_one_unit_with_a_warning(world, strategy, width, count):
    for messages in world(2).run(warned, strategy, width):
        assert len(messages) == count
        assert all("28 MiB" in message and "gradwire.compress_gradients" in message for message in messages)


def refused(rank, world, group):
    """The message of each way about a model on the meta device."""
    with torch.device("meta"):
        model, buffered = Net("list"), nn.Module()
    buffered.weight = nn.Parameter(torch.ones(3))
    buffered.register_buffer("scale", torch.ones(3, device="meta"))
    calls = [lambda way=way: wrap(model, way, Reducer("int8"), device="cpu") for way in STRATEGIES]
    calls += [lambda: wrap(model, "ddp"), lambda: wrap(buffered, "naive", Reducer("int8"), device="cpu")]
    return [message_of(call) for call in (*calls, lambda: comm_hook(model, "int8"))]


def message_of(call):
    try:
        call()
    except BadInput as error:
        return str(error)


def test_a_model_without_values_is_refused(world):
    for messages in world(2).run(refused):
        assert all("on the meta device" in message and "to_empty" in message for message in messages)


def hooked_on_meta(rank, world, group):
    """Gradients of a model that is sharded and hooked before it has values, and without gradwire."""
    delivered = []
    for compressed in (True, False):
        with torch.device("meta"):
            model = Net("list")
        for block in model.layers:
            fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        reducer = Reducer("none")
        if compressed:
            hook(model, reducer)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.to_local().data.uniform_(-0.3, 0.3)
        if not compressed:
            model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        model(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).backward()
        if compressed:
            reducer.finish()
        delivered.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return delivered


def test_a_sharded_model_may_get_its_values_after_hook(world):
    for delivered, exact in world(2).run(hooked_on_meta):
        torch.testing.assert_close(delivered, exact, rtol=1e-6, atol=1e-6)
