"""torchrun --nproc_per_node 2 skipped.py none|feedback|zero|fills|ddp|ddp_feedback|hook_feedback: unused layers.

A block, and an expert without tokens, keep their weights, optimizer state and residuals as without gradwire.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

dist.init_process_group("gloo")
way = sys.argv[1]
OF_DDP = way.startswith(("ddp", "hook"))
STEPS = ((None, None), (1, None), (None, 1), (1, 1), (0, 2), (None, "apart"), (None, None))  # the block and the expert


class Block(nn.Module):
    """Three experts, of which one may get no tokens."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x, idle):
        return x + sum(expert(x).tanh() for number, expert in enumerate(self.experts) if number != idle)


class Net(nn.Module):
    """Three blocks, of which one may be left out."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, skipped, idle):
        for number, block in enumerate(self.blocks):
            x = x if number == skipped else block(x, idle if number == 2 else None)
        return x.square().mean()


def copied(tensor):
    """Copy a rank's part of a tensor."""
    return tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(compressor, to_none, **options):
    """Return each parameter's gradient, values and optimizer state, and the residuals, after each step."""
    torch.manual_seed(3)
    model = Net()
    if OF_DDP:
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        model.set_reduce_scatter_unused_params(way == "fills")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    compression = None
    if compressor and way == "hook_feedback":
        model.register_comm_hook(*(pair := gw.comm_hook(model, compressor, **options)))
        compression = pair[0]
    elif compressor:
        compression = gw.compress_gradients(model, compressor, optimizer=optimizer, **options)
    seen = []
    for step, (skipped, idle) in enumerate(STEPS):
        if idle == "apart":
            idle = dist.get_rank()  # plain FSDP2 needs its setting
            if compression is None and not OF_DDP:
                model.set_reduce_scatter_unused_params(True)
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(9 * step + dist.get_rank()))
        model(x, skipped, idle).backward()
        optimizer.step()
        parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
        seen.append(
            {
                name: {
                    "gradient": None if p.grad is None else copied(p.grad),
                    "values": copied(p),
                    **{key: copied(kept) for key, kept in optimizer.state[p].items()},
                }
                for name, p in parameters.items()
            }
        )
        if compression is not None:
            residuals = compression.reducer.codec.state_dict()["residuals"] if options else {}
            for (name, *place), kept in residuals.items():
                seen[-1][name][str(place)] = copied(kept["residual.float32"])
        optimizer.zero_grad(set_to_none=to_none)
    return seen


feedback = way.endswith("feedback")
options = {"error_feedback": True} if feedback else {}
got, want = train("int8" if feedback else "none", way != "zero", **options), train(None, way != "zero")
zeros = train("int8", False, **options) if feedback and OF_DDP else None
for step, (ours, plain) in enumerate(zip(got, want, strict=True)):
    for name, expected in plain.items():
        left_out = expected["gradient"] is None
        assert left_out == (ours[name]["gradient"] is None), (step, name)
        if feedback:  # with gradients of int8, only what a step leaves out can be compared: with the step before
            expected = got[step - 1][name] if left_out else {}
        for key in expected.keys() - ({"gradient"} if left_out else set()):
            assert torch.equal(ours[name][key], expected[key]), (step, name, key)
        if left_out and zeros:  # a gradient of zeros is left out as well, and what is kept stays
            kept = [key for key in zeros[step][name] if key.startswith("[")]
            assert kept and all(torch.equal(zeros[step][name][key], zeros[step - 1][name][key]) for key in kept)
print("right")
