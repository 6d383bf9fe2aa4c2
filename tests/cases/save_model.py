"""torchrun --nproc_per_node 2 save_model.py ddp|comm_hook|naive: a model is saved whole, or copied."""

import copy
import io
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import wrap

dist.init_process_group("gloo")
way, rank = sys.argv[1], dist.get_rank()
x = torch.randn(5, 33, generator=torch.Generator().manual_seed(rank))


def hooked(model: nn.Module) -> object:
    """Give a model a compressor; what knows its bytes."""
    if way == "comm_hook":
        model.register_comm_hook(*(state := gw.comm_hook(model, "int8")))
        return state[0]
    return gw.compress_gradients(model, "int8") if way == "ddp" else None


def loaded(model: nn.Module) -> nn.Module:
    """The model after a file; it warns once."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.load(file, weights_only=False)
    assert ["is loaded without" in str(each.message) for each in caught] == [True], caught
    return result


def gradient(model: nn.Module) -> torch.Tensor:
    """The gradient of a backward pass."""
    model.zero_grad()
    model(x).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))
if way == "naive":
    plain, model, knows = copy.deepcopy(net), wrap(net, "naive", reducer := Reducer("int8")), None
    mine = gradient(plain)
else:
    plain = DistributedDataParallel(copy.deepcopy(net))
    model = DistributedDataParallel(net)
    knows, mine = hooked(model), gradient(plain)
compressed = gradient(model)
assert (compressed - gradient(plain)).abs().max() > 0, "int8 changes a mean"
for copied in (loaded, copy.deepcopy):
    again = copied(model)
    assert all(map(torch.equal, again.parameters(), model.parameters()))
    assert torch.equal(gradient(again), mine)  # as of the model without a compressor
    assert torch.equal(gradient(model), compressed)
    if way == "naive":
        again = wrap(again, "naive", Reducer("int8"))
    else:
        assert hooked(again).traffic["sent"] == 0
    assert torch.equal(gradient(again), compressed)
print("right")
