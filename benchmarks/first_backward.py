"""How long the first steps of a method take on a machine that has compiled no kernel::

    XDG_CACHE_HOME=$(mktemp -d) torchrun --nproc_per_node 2 benchmarks/first_backward.py int8

The model `tiny` under DDP, one thread for each rank; a second call with the same folder finds the kernels there.
"""

from __future__ import annotations

import sys
import time
from threading import enumerate as threads

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.lm.models import causal

BATCH, LENGTH, VOCAB = 8, 256, 256
FIRST, AFTER = 5, 5  # steps


def main(method: str) -> None:
    """Print seconds of the first steps and of steps after all compilation, with those of the rank's processor."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(causal.build("tiny", VOCAB, LENGTH, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gradwire.compress_gradients(model, method, optimizer=optimizer)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> str:
        began = time.perf_counter(), time.process_time()
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        passed = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return f"{passed - began[0]:.2f} + {ended - passed:.2f} ({time.process_time() - began[1]:.2f})"

    first = [step() for _ in range(FIRST)]
    for thread in threads():
        if thread.name == "gradwire-kernels":
            thread.join()
    dist.barrier()
    after = [step() for _ in range(AFTER)]
    print(
        f"rank {dist.get_rank()}, {method}: forward + backward (processor) in s\n"
        f"  the first steps         {', '.join(first)}\n"
        f"  when all is compiled    {', '.join(after)}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
