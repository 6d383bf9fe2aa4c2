"""Blocks compiled before a strategy wraps the model: the same steps, parameters and bytes."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from test_frameworks import STRATEGIES

from gradwire import parallel
from gradwire.collectives import Reducer
from gradwire.compressors import build
from gradwire.models import causal

VOCABULARY, LENGTH = 320, 24


def trained(rank, world, group, strategy, compiled):
    """Losses of three steps, the parameters' names and the bytes; int8 reduces the gradients.

    ``compiled`` is "blocks" before `wrap`, "model" after it, or None.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._inductor.config.compile_threads = 1  # a pool's ranks may have no child processes
    model = causal.build("micro", VOCABULARY, LENGTH, seed=0).train()
    if compiled == "blocks":
        parallel.compile_blocks(model)
    reducer = Reducer(build("int8"), group)
    model = parallel.wrap(model, strategy, reducer, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = torch.compile(model) if compiled == "model" else model
    losses = []
    for step in range(3):
        x = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = forward(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return losses, [name for name, _ in parallel.named_parameters(model)], reducer.traffic["sent"], frames


@pytest.mark.sweep
@pytest.mark.parametrize("compiled", ["blocks", "model"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_compiled_trains_as_the_model_itself_does(world, strategy, compiled):
    for plain, other in zip(
        world(2).run(trained, strategy, None), world(2).run(trained, strategy, compiled), strict=True
    ):
        assert other[0] == pytest.approx(plain[0], rel=1e-4)
        assert other[1:3] == plain[1:3]
        assert other[3] > 0 == plain[3], "nothing was compiled"
