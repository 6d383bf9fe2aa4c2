"""torchrun --nproc_per_node 3 ranks_message.py: messages name ranks that there are, by their numbers in the program."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.base.errors import GradwireError

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([1, 2], timeout=timedelta(seconds=10))


def unreduced(late: list[int]) -> str:
    """The error of a step where some ranks unfroze two layers after the reducer was attached."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    net[:2].requires_grad_(False)
    model = DistributedDataParallel(net, process_group=pair)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gw.compress_gradients(model, "none", optimizer=optimizer)
    net[:2].requires_grad_(rank in late)
    try:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    except GradwireError as error:
        return str(error)
    return "accepted"


def differing() -> str:
    """The error where ranks give other options."""
    model = DistributedDataParallel(nn.Linear(4, 1), process_group=pair)
    try:
        gw.compress_gradients(model, "int8", error_feedback=rank == 2)
    except GradwireError as error:
        return str(error)
    return "accepted"


if rank:
    start = "optimizer step 1: 4 parameters have gradients that were not reduced on rank "
    both, last, options = unreduced([1, 2]), unreduced([2]), differing()
    assert both.startswith(f"{start}1 (0.weight, 0.bias, 1.weight and 1 more), nor were some on rank 2. "), both
    assert last.startswith(f"{start}2 (0.weight, 0.bias, 1.weight and 1 more). "), last
    assert "error_feedback is False on rank 1 and True on rank 2" in options, options
print("right")
