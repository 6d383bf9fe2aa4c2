"""torchrun --nproc_per_node 2 rank0.py: the state of rank 0 is refused on another rank, or right there too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")


def start() -> tuple[nn.Module, Reducer]:
    """A model and its reducer."""
    torch.manual_seed(0)
    model, reducer = DistributedDataParallel(nn.Linear(64, 8)), Reducer("topk", error_feedback=True)
    hook(model, reducer)
    return model, reducer


def step(model: nn.Module, reducer: Reducer, seed: int) -> torch.Tensor:
    """The gradient of a step."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    model.zero_grad()
    model(x).square().sum().backward()
    reducer.finish()
    return model.module.weight.grad.clone()


model, reducer = start()
step(model, reducer, 1)
of_rank_0 = [reducer.state_dict()]
dist.broadcast_object_list(of_rank_0)  # as a file that rank 0 alone has written
expected = step(model, reducer, 2)
model, reducer = start()
refusals: list[str | None] = [None, None]
try:
    reducer.load_state_dict(of_rank_0[0])
    refusal = None
except BadInput as error:
    refusal = str(error)
dist.all_gather_object(refusals, refusal)
if any(refusals):
    assert refusals[1], "the state of rank 0 belongs to rank 0"
    print("refused:", refusals)
else:
    torch.testing.assert_close(step(model, reducer, 2), expected, rtol=0, atol=0)
    print("right")
