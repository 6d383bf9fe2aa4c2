"""The compiled loss is the loss, for every length of batch, with ignored targets and bfloat16."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

from gradwire.bench.training.objective import Plain
from gradwire.lm.data.batches import IGNORED, Batch
from gradwire.lm.models import causal


def batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, 320, (3, length), generator=generator)
    labels = tokens.clone()
    labels[0, :4] = labels[2, -3:] = IGNORED
    return Batch(tokens, labels, ["a", "b", "c"])


@pytest.mark.sweep  # half a minute of compiling
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_loss_has_the_value_and_the_gradients_of_the_plain_one(precision):
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # a pool's ranks may have no child processes
    found = {}
    for compiled in (False, True):
        model = causal.build("micro", 320, 24, seed=0)
        objective = Plain(precision, compiled=compiled)
        losses = []
        for length in (17, 24, 11):
            of = batch(length)
            loss, _ = objective.loss(model, of, torch.tensor(of.n_targets), last=True)
            loss.backward()
            losses.append(loss.item())
        found[compiled] = losses, [p.grad for p in model.parameters()]
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    for got, expected in zip(found[True][1], found[False][1], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2 if precision == "bf16" else 1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
