"""torchrun --nproc_per_node 2 threads.py ddp|hook|diloco: two models train in a thread each, over a group each."""

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

dist.init_process_group("gloo")
way, rank = sys.argv[1], dist.get_rank()
groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in range(2)]


def prepared(number: int, compressed: bool) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and the function that trains it."""
    torch.manual_seed(number)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    model = DistributedDataParallel(net, process_group=groups[number])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if compressed and way == "diloco":
        optimizer = gw.DiLoCo(optimizer, model, sync_every=1, outer={"lr": 1.0, "momentum": 0.0})
    elif compressed and way == "hook":
        model.register_comm_hook(*gw.comm_hook(model, "none", group=groups[number]))
    elif compressed:
        gw.compress_gradients(model, "none", optimizer=optimizer)

    def train() -> None:
        time.sleep(0.2 * (rank != number))  # ranks begin with different models
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * number + rank))
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return net, train


def both(compressed: bool) -> list[torch.Tensor]:
    """The parameters of both models after their threads have ended."""
    nets, trains = zip(*(prepared(number, compressed) for number in range(2)), strict=True)
    threads = [threading.Thread(target=train, daemon=True) for train in trains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return [p.detach() for net in nets for p in net.parameters()]


torch.testing.assert_close(both(True), both(False))
print("right")
