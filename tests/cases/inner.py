"""torchrun --nproc_per_node 2 inner.py: each optimizer of torch in DiLoCo trains as without it, or is refused."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding

import gradwire as gw
from gradwire.base.errors import BadInput

dist.init_process_group("gloo")
rank = dist.get_rank()
lookup = torch.tensor([[0, 4, 4, 1, 2], [3, 0, 3, 3, 4]])


class Table(nn.Module):
    """Rows with sparse gradients; no module says so."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return embedding(x, self.rows, sparse=True)


def loss_of(model, rank, step):
    if isinstance(model, Table):
        return (model(lookup[rank, step : step + 2]) - 1).square().sum()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def trained_alone(start, kind, rank):
    """A rank's parameters after three local steps."""
    model = deepcopy(start)
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def local(start, kind):
    model = deepcopy(start)
    inner = kind(model.parameters(), lr=0.1)
    return model, gw.DiLoCo(inner, model, sync_every=3, outer={"lr": 1.0, "momentum": 0.0})


def check(name):
    """Train over a round, resumed in its middle, and compare with the mean of the ranks' own trainings."""
    kind = getattr(torch.optim, name)
    start = Table() if name == "SparseAdam" else nn.Linear(3, 1, bias=name != "Muon")
    model, optimizer = local(start, kind)
    for step in range(3):
        if step == 2:
            model_state, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
            model, optimizer = local(start, kind)
            model.load_state_dict(model_state)
            optimizer.load_state_dict(state)
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    ends = [trained_alone(start, kind, each) for each in range(2)]
    for p, first, second in zip(model.parameters(), *ends, strict=True):
        torch.testing.assert_close(p.detach(), (first + second) / 2, msg=lambda text: f"{name}: {text}")


torch.manual_seed(0)
refused = {}
names = [name for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer"]
assert len(names) > 12, names
for name in names:
    try:
        check(name)
    except BadInput as error:
        refused[name] = str(error)
assert refused.keys() == {"LBFGS", "SparseAdam"}, refused
assert "LBFGS needs one" in refused["LBFGS"] and "rows has a sparse one" in refused["SparseAdam"], refused
print("right")
