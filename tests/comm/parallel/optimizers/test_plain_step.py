"""Optimizers that communicate, as users call them: a model, a compressor and a plain ``step``.

Of `optimizers/base.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from diagonals import diagonals, swept
from test_local_updates import ONEBIT, STEPS, gradients_of, held, set_rates, simulated, trainable
from test_optimizer_state import same
from test_optimizers import BETAS, CLIP, RATES, WARM, assert_near, assert_same, groups_of, whole
from test_optimizers import gradients_of as odd_gradients_of
from test_optimizers import held as odd
from test_optimizers import simulated as simulated_adam
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.parallel import wrap
from gradwire.comm.parallel.model import local


def model_of(kind, net):
    return DistributedDataParallel(net) if kind != "plain" else net


def perturbed(net, rank):
    """The model with other weights on every rank but the first, which are to be replaced by the first one's."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(rank)
    return net


def step_of(loop, optimizer, model, gradients):
    """Take a step of a training loop of some kind."""

    def closure():
        optimizer.zero_grad()
        loss = model(gradients)
        loss.backward()
        return loss

    if loop == "closure":
        before = model(gradients).item()
        assert optimizer.step(closure).item() == before, "the loss before the step"
        return
    for _ in range(4 if loop == "accumulated" else 1):  # quarters of a gradient add up exactly
        (model(gradients) / (4 if loop == "accumulated" else 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def diloco(rank, world, group, loop, options):
    """The parameters after each step, and the bytes sent."""
    model = model_of(loop, perturbed(held(), rank))
    inner = torch.optim.AdamW(groups_of(model), lr=1.0, betas=BETAS)
    for group in inner.param_groups:
        group["lr"] = 1.0 if group["weight_decay"] else 2.0
    compressor = {"method": "onebit", "block": 16}
    options = {**options, "algorithm": "exchange", "seed": 4}
    optimizer = gw.DiLoCo(inner, model, sync_every=3, compressor=compressor, steps=STEPS, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[step])
    history = []
    for step in range(STEPS):
        if loop != "scheduler":
            set_rates(optimizer, step)
        step_of(loop, optimizer, model, gradients_of(rank, step))
        if loop == "scheduler":
            scheduler.step()
        history.append(whole(model))
    return history, optimizer.traffic


@pytest.mark.parametrize("loop", ["ddp", "closure", "scheduler", *swept("plain", "accumulated", "classical")])
def test_a_plain_loop_with_diloco_is_its_protocol_in_one_process(world, loop):
    outer = {"lr": 0.7, "momentum": 0.5, "nesterov": loop != "classical"}
    results = world(2).run(diloco, loop, {"outer": outer})
    options = {"H": 3, "outer_lr": 0.7, "outer_momentum": 0.5, "nesterov": loop != "classical"}
    expected, bytes_sent = simulated(2, "onebit", ONEBIT, options, math.inf)
    for rank, (history, _) in enumerate(results):
        for step, parameters in enumerate(history):
            assert_same(trainable(parameters), expected[step][0][rank])
    assert sum(traffic["sent"] for _, traffic in results) == bytes_sent


def adam(rank, world, group, kind, dense_steps, steps):
    """The parameters after each step of 1-bit Adam without compression, which clips the mean."""
    model = model_of(kind, perturbed(odd(), rank))
    options = {"compressor": "none", "algorithm": "exchange", "dense_steps": dense_steps, "max_norm": CLIP}
    optimizer = gw.OneBitAdam(groups_of(model), model, lr=1.0, betas=BETAS, **options)
    history = []
    for step in range(steps):
        for i, group_ in enumerate(optimizer.param_groups):
            group_["lr"] = RATES[step] * (1 + i)
        step_of(kind, optimizer, model, odd_gradients_of(rank, step))
        history.append(whole(model))
    return history


def adamw(rank, world, group, steps):
    """The same under torch's own DDP and AdamW."""
    model = DistributedDataParallel(odd())
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0, betas=BETAS)
    history = []
    for step in range(steps):
        for i, group_ in enumerate(optimizer.param_groups):
            group_["lr"] = RATES[step] * (1 + i)
        model(odd_gradients_of(rank, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        history.append(whole(model))
    return history


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_onebit_adam_warms_up_as_torchs_ddp_and_adamw_and_then_keeps_its_protocol(world, kind):
    expected = simulated_adam(2, 8, "none", {}, {})
    for history, theirs in zip(world(2).run(adam, kind, WARM, 8), world(2).run(adamw, WARM), strict=True):
        for step, parameters in enumerate(theirs):
            assert_near(history[step], {name: value.double() for name, value in parameters.items()}, 1e-6)
        for step, parameters in enumerate(expected):
            assert_near(history[step], parameters)


def kin(rank, world, group, name, kind):
    """The bytes sent, whether parameters moved, and they themselves at the end of a short run."""
    model = model_of(kind, perturbed(held(), rank))
    start = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    if name == "OneBitAdam":
        optimizer = gw.OneBitAdam(groups_of(model), model, dense_steps=1, lr=0.01)
    elif name == "DeMo":
        optimizer = gw.DeMo(groups_of(model), model, lr=0.01)
    else:
        inner = gw.Muon(groups_of(model), model, lr=0.01) if name == "DiLoCo" else torch.optim.AdamW(groups_of(model))
        fragments = {"fragments": 2} if name == "StreamingDiLoCo" else {}
        optimizer = getattr(gw, name)(inner, model, sync_every=4, compressor="onebit", steps=STEPS, **fragments)
    for step in range(STEPS):
        step_of(kind, optimizer, model, gradients_of(rank, step))
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    return optimizer.traffic, bool((end != start).any()), end


@pytest.mark.parametrize(
    ("name", "kind"), diagonals(["DiLoCo", "StreamingDiLoCo", "OneBitAdam", "DeMo"], ["plain", "ddp"])
)
def test_every_kind_of_it_trains_by_step_alone(world, name, kind):
    (traffic, moved, end), (_, _, other) = world(2).run(kin, name, kind)
    assert moved and torch.equal(end, other) and end.isfinite().all()
    assert 0 < traffic["sent"] < traffic["raw"]


def islands(rank, world, group, own):
    """The shards after a run on two islands, sharded by the user or by `wrap`."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    if own:
        model = fully_shard(net, mesh=build_islands(2).mesh)
        options = {"compressor": "onebit"}
    else:
        reducer = IslandReducer("onebit", build_islands(2), error_feedback=True)
        model = wrap(net, "hsdp", reducer, device="cpu", average=False)
        options = {"reducer": reducer}
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = gw.DiLoCo(inner, model, sync_every=2, **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * rank + step)
        model(torch.randn(6, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([local(p).flatten() for p in model.parameters()]), optimizer.traffic["sent"]


def test_a_model_sharded_inside_islands_trains_between_them(world):
    found, expected = world(4).run(islands, True), world(4).run(islands, False)
    for (mine, sent), (theirs, reference) in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs) and sent == reference > 0
    assert torch.equal(found[0][0], found[2][0]) and not torch.equal(found[0][0], found[1][0])


def stages(rank, world, group):
    """How far a pipeline's stage is from training by DDP after rounds of one step; what DiLoCo answers to sharded ones.

    The stages have parameters of equal names and shapes.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ends = []
    for rounds in (True, False):
        torch.manual_seed(mesh["pp"].get_local_rank())
        model = DistributedDataParallel(torch.nn.Linear(5, 7), process_group=mesh.get_group("dp"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rounds:
            optimizer = gw.DiLoCo(optimizer, model, sync_every=1, outer={"lr": 1.0, "momentum": 0.0})
        for step in range(3):
            model(
                torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * rank + step))
            ).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    islands = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicas", "shards"))["replicas", "shards"]
    answers = [message_of(fully_shard(net(), mesh=mesh["dp"])), message_of(fully_shard(net(), mesh=islands))]
    return float((ends[0] - ends[1]).abs().max()), answers


def test_a_pipelines_stages_are_not_averaged_with_each_other(world):
    for apart, (flat, islands) in world(4).run(stages):
        assert apart < 1e-5
        assert "sharded the model over 2 ranks without replicas: shard it over a mesh of islands" in flat
        assert "takes one of all 4 ranks" in islands and "For a pipeline's stage use Distrib" in islands


def message_of(model, **options):
    """The message with which DiLoCo refuses a model."""
    with pytest.raises(BadInput) as refused:
        gw.DiLoCo(torch.optim.AdamW(model.parameters()), model, sync_every=2, **options)
    return str(refused.value)


def net():
    return torch.nn.Linear(5, 7)


def refused(rank, world, group):
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, lambda state, bucket: None)
    scaled = gw.DiLoCo(torch.optim.AdamW((model := net()).parameters()), model, sync_every=2)
    scaled.found_inf = torch.zeros(())
    answers = {
        "sharded": message_of(fully_shard(net())),
        "fsdp1": message_of(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)),
        "hooked": message_of(hooked),
        "averaged": message_of(wrap(net(), "ddp", Reducer("int8"), device="cpu")),
        "option": message_of(net(), compressor="int8", dens=3),
        "both": message_of(net(), reducer=Reducer("int8"), algorithm="gather"),
        "ranks": message_of(net(), compressor="int8", seed=0, steps=rank + 1),
    }
    for name, call in {
        "order": lambda: gw.DiLoCo(net(), torch.optim.AdamW(net().parameters()), sync_every=2),
        "twice": lambda: gw.DiLoCo(scaled, model, sync_every=2),
        "warm-up": lambda: gw.OneBitAdam(net().parameters(), net()),
        "scaler": scaled.step,
    }.items():
        with pytest.raises(BadInput) as error:
            call()
        answers[name] = str(error.value)
    return answers


def test_what_cannot_train_apart_is_refused_at_the_call(world):
    expected = {
        "sharded": "fully_shard has sharded the model over 4 ranks without replicas",
        "fsdp1": "FullyShardedDataParallel shards it",
        "hooked": "the model has a communication hook, which DiLoCo would never call",
        "averaged": "gradients of this model are averaged already",
        "option": "unknown option of Reducer 'dens'",
        "both": "DiLoCo has a reducer and options of one (algorithm)",
        "ranks": "steps is 1 on rank 0 and 2 on rank 1",
        "order": "DiLoCo takes an optimizer of torch, such as AdamW, then the model, not Linear",
        "twice": "then the model, not DiLoCo",
        "warm-up": "dense_steps must be at least 1",
        "scaler": "DiLoCo does not support GradScaler",
    }
    for answers in world(4).run(refused):
        for case, message in expected.items():
            assert message in answers[case], case


def allocated(rank, world, group):
    """The entries that torch's distributed checkpoints read of an optimizer without a step, and its count of steps."""
    model = held()
    inner = torch.optim.AdamW(groups_of(model))
    optimizer = gw.DiLoCo(inner, model, sync_every=1, compressor="onebit")
    start = whole(model)
    if rank == 0:  # it is no step, so it sends nothing
        state = get_optimizer_state_dict(model, optimizer)["state"]
        assert {"exp_avg", "exp_avg_sq", "step"} <= state["cube"].keys()
    return optimizer.reducer.step, optimizer.traffic["raw"], same(start, whole(model))


def test_a_step_that_allocates_the_state_is_none(world):
    assert world(2).run(allocated) == [(0, 0, True)] * 2


def warmed_up(rank, world, group):
    """Two steps whose first has a learning rate of 0, as in a linear warm-up."""
    model = held()
    optimizer = gw.DiLoCo(torch.optim.AdamW(groups_of(model), lr=0.0), model, sync_every=1)
    for step in range(2):
        model(gradients_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.reducer.step, {int(kept["step"]) for kept in optimizer.state.values()}


def test_a_step_with_a_learning_rate_of_0_is_one(world):
    assert world(2).run(warmed_up) == [(2, {2})] * 2


def at_rate_0(rank, world, group, kind):
    """Steps that the reducer counted, of a first one at rate 0 in which one rank has no, or only zero, gradients."""
    model = held()
    if kind == "onebit_adam":
        optimizer = gw.OneBitAdam(model.parameters(), model, lr=0.0, compressor="none", dense_steps=1)
    else:
        optimizer = gw.DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.0), model, sync_every=1, compressor="none")
    if rank == 0 or kind == "onebit_adam":  # which needs a gradient of every parameter
        (model(gradients_of(rank, 0)) * (1 - rank)).backward()
    optimizer.step()
    return optimizer.reducer.step


@pytest.mark.parametrize("kind", ["onebit_adam", "diloco"])
def test_a_step_at_rate_0_communicates_on_a_rank_without_gradients_too(world, kind):
    """The first step of a linear warm-up."""
    assert world(2).run(at_rate_0, kind) == [1, 1]
