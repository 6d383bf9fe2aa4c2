"""A rank that differs, or does not come, is found and named."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
import torch.distributed as dist
from diagonals import swept
from test_frameworks import batch_of, loss_of, model_of
from torch import nn

from gradwire.base.errors import RunFault
from gradwire.comm.parallel import verify, wrap

REPLICAS = ("naive", "bucket", "ddp")


def outcome(check, *args):
    try:
        check(*args)
    except RunFault as error:
        return str(error)
    return None


def trained(rank, world, group, strategy, fault, every):
    """The result of the check after each of four steps; ``fault`` happens on the last rank in the second."""
    model = model_of("odd")
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    model.narrow.weight.data = model.narrow.weight.data.double().float()
    model = wrap(model, strategy, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = verify.SyncCheck(model, optimizer, every)
    differences = []
    for step in range(4):
        check.before(step)
        optimizer.zero_grad()
        loss_of("odd", model, batch_of("odd", rank, step)).backward()
        faulty = step == 1 and rank == world - 1
        if not (faulty and fault == "step"):
            optimizer.step()
        if faulty and fault == "rate":
            optimizer.param_groups[0]["lr"] *= 2
        if faulty and fault == "buffer":
            next(buffer for name, buffer in model.named_buffers() if name.endswith("seen"))[1] = 7
        if faulty and fault == "parameter":
            inner = getattr(model, "module", model)
            for name in ("norm.bias", "layers.2.weight"):  # one bit of one element
                inner.get_parameter(name).data.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
        differences.append(outcome(check.after, step))
    return differences


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        *product(("ddp", "fsdp2"), ("none", "step", "buffer")),
        *swept(*product(("naive", "bucket", "fsdp1"), ("none", "step", "buffer"))),
    ],
)
def test_every_strategy_is_checked(world, strategy, fault):
    results = world(2).run(trained, strategy, fault, 1)
    assert results[0] == results[1]
    if fault == "none":
        assert results[0] == [None] * 4
        return
    assert results[0][0] is None
    if fault == "buffer":
        differences = [f"after optimizer step {step} seen on rank 1 differs from rank 0's." for step in (1, 2, 3)]
        assert results[0][1:] == ([differences[0], None, None] if strategy == "ddp" else differences), (
            "DDP broadcasts its buffers"
        )
    elif fault == "step" and strategy in REPLICAS:
        assert "after optimizer step 1 scale on rank 1 differs" in results[0][1]
    elif fault == "step":
        assert results[0][1] == (
            "after optimizer step 1 the optimizer's number of steps on rank 1 differs from rank 0's."
        )


def test_a_rank_alone_agrees_with_itself(world):
    assert world(1).run(trained, "fsdp2", "none", 1) == [[None] * 4]


@pytest.mark.parametrize("strategy", ["ddp", *swept("naive", "bucket")])
def test_the_first_tensor_that_differs_is_named(world, strategy):
    results = world(3).run(trained, strategy, "parameter", 2)
    assert results[1:] == results[:1] * 2
    numel = len(model_of("odd").state_dict()) + 3
    start = "after optimizer step 1 norm.bias on rank 2 differs from rank 0's"
    assert results[0][::2] == [None, None], "every second step is checked"
    assert results[0][1] == f"{start} (2 of {numel} tensors differ)."


def test_a_learning_rate_of_its_own_is_found(world):
    differences = world(2).run(trained, "ddp", "rate", 1)[0][1]
    assert (
        differences == "after optimizer step 1 the learning rate of parameter group 0 on rank 1 differs from rank 0's."
    )


def another_model(rank, world, group):
    model = wrap(nn.Linear(2, 2), "naive", device="cpu")
    if rank == 1:
        model.register_buffer("another", torch.zeros(1))
    return verify.first_difference(model)


def test_models_of_different_length_are_distinguished(world):
    assert world(2).run(another_model) == ["the number of its tensors on rank 1 differs from rank 0's"] * 2


def late(rank, world, group, absent):
    """The message and the waiting time of each rank at a barrier that one of them does not reach in time."""
    own = verify.meeting_group(group, 1.0)
    start = time.monotonic()
    differences = None if rank == absent else outcome(verify.barrier, "optimizer step 7", own, 1.0)
    waited = time.monotonic() - start
    dist.barrier()
    return differences, waited


@pytest.mark.parametrize("absent", [0, 2])
def test_the_barrier_names_who_is_missing(world, absent):
    results = world(3).run(late, absent)
    assert results[absent][0] is None
    differences = [message for message, _ in results if message]
    assert all(message.startswith("not all ranks reached optimizer step 7 within 1 s: ") for message in differences)
    assert len(differences) == 2 and max(waited for _, waited in results) < 10
    if absent == 2:
        assert "Ranks 2 failed to pass monitoredBarrier" in differences[0]
    else:
        assert all("rank 0" in message.lower() for message in differences)


def test_an_off_switch(world):
    assert world(2).run(trained, "naive", "parameter", 0) == [[None] * 4] * 2
