"""torchrun --nproc_per_node 2 sparse.py: sparse gradients are averaged, or refused."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import GradwireError
from gradwire.comm.collectives import Reducer
from gradwire.comm.parallel import hook

dist.init_process_group("gloo")
torch.manual_seed(0)
table = nn.Embedding(20, 4, sparse=True)
model, reducer = DistributedDataParallel(table), Reducer("none")
try:
    hook(model, reducer)
    model(torch.tensor([1, 2 + dist.get_rank()])).square().sum().backward()
    assert reducer.finish()
except GradwireError as error:
    print("refused:", error)
else:
    exact = torch.zeros(20, 4)
    exact[1], exact[2:4] = 2 * table.weight[1], table.weight[2:4]
    torch.testing.assert_close(table.weight.grad.to_dense(), exact)
    print("right")
