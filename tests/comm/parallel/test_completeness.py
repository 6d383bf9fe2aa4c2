"""`finish` ends a step whose gradients were all reduced, and refuses any other; forgotten, it warns once.

What users and other libraries do to a model that has a reducer: afterwards its gradients are the mean over the ranks,
or `finish` raises. The oracle is the same model without gradwire, in float64, with the batches of all ranks.

Of `parallel/strategy.py`.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
from diagonals import diagonals
from test_frameworks import whole_gradients
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.parallel import accumulation, hook, wrap


def warned(rank, world, group, strategy: str, way: str, foreach: bool = False) -> int:
    """The number of warnings about `finish` in three optimizer steps of two micro-batches each."""
    torch.manual_seed(3)
    reducer = Reducer("int8")
    model = wrap(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)), strategy, reducer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            for micro in range(2):
                with accumulation(model, last=micro == 1 or way == "reduce each"):
                    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + 3 * micro + rank))
                    model(x).square().sum().backward()
            if way != "forgotten":
                reducer.finish()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(x)  # an evaluation
    return sum("no step of the compressor ended" in str(each.message) for each in caught)


@pytest.mark.parametrize(
    ("strategy", "foreach"), diagonals(["naive", "bucket", "ddp", "fsdp1", "fsdp2"], [False, True])
)
def test_a_forgotten_finish_warns_once(world, strategy, foreach):
    assert world(2).run(warned, strategy, "forgotten", foreach) == [1, 1]
    assert world(2).run(warned, strategy, "finished", foreach) == [0, 0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_reducing_every_micro_batch_is_no_forgotten_finish(world, strategy):
    assert world(2).run(warned, strategy, "reduce each") == [0, 0]


# --- a model that was changed after its reducer was attached ---


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank, step):
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank + 1))


def loss(model, x):
    return model(x).square().mean()


def exact(world, step, frozen=(), dtype=torch.float64):
    """The mean gradients of a step by name, without gradwire."""
    model = net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model.to(dtype).double()
    for rank in range(world):
        (loss(model, batch(rank, step).to(dtype).double()) / world).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


def users_own(strategy, reducer, frozen):
    """A model that its user has wrapped, with a reducer by `hook`, or one by `wrap`."""
    model = unfrozen(net(), not frozen)
    if strategy == "hooked ddp":
        model = DistributedDataParallel(model)
        hook(model, reducer)
    elif strategy == "hooked fsdp2":
        for block in (model[0], model[2], model):
            fully_shard(block, mesh=init_device_mesh("cpu", (reducer.world,)))
        hook(model, reducer)
    else:
        model = wrap(model, strategy, reducer)
    return model


def replaced(model):
    model.load_state_dict({name: value.detach().clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def unfrozen(model, at):
    for name, parameter in model.named_parameters():
        if name.removeprefix("module.").removeprefix("_fsdp_wrapped_module.").startswith("0."):
            parameter.requires_grad_(at)
    return model


def changed(rank, world, group, strategy, change):
    """The largest error of a step's gradients after a change, relative to the exact ones; or what is raised."""
    reducer = (
        IslandReducer("none", build_islands(2), algorithm="exchange")
        if strategy == "hsdp"
        else Reducer("none", algorithm="exchange")
    )
    late = change == "replaced before" or change.startswith("unfrozen before")
    model = users_own(strategy, reducer, change.startswith("unfrozen"))
    if not late:
        loss(model, batch(rank, 0)).backward()
        assert reducer.finish()
        model.zero_grad()
    dtype = torch.float64
    try:
        if change.startswith("replaced"):
            model = replaced(model)
        elif change == "unfrozen on one rank":
            unfrozen(model, rank == 1)
        elif change.startswith("unfrozen"):
            unfrozen(model, True)
        elif change == "converted":
            model, dtype = model.to(torch.bfloat16), torch.bfloat16
        elif change == "frozen":
            unfrozen(model, False)
        elif change == "copied":
            model = copy.deepcopy(model)
        elif change == "held back":
            model[2].set_requires_gradient_sync(False)
        x = batch(rank, 1).to(torch.bfloat16) if dtype == torch.bfloat16 else batch(rank, 1)
        if change == "around":
            loss(model.module, x).backward()
        elif change == "no_sync":
            with accumulation(model, last=False):
                loss(model, x).backward()
        else:
            loss(model, x).backward()
        finished = reducer.finish() if change != "summed" else reducer.finish(torch.ones(2))
        if change == "twice":
            reducer.finish()
        assert finished
    except (BadInput, RunFault, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    frozen = ("0.weight", "0.bias") if change == "frozen" else ()
    right, reduced = exact(world, 1, frozen, dtype), whole_gradients(model)
    assert right.keys() <= reduced.keys()
    return max(float((reduced[name].double() - right[name]).norm() / right[name].norm()) for name in right)


NOTHING = "RunFault: no gradient was averaged in optimizer step 2"
UNREDUCED = "RunFault: optimizer step 2: 2 parameters have gradients that were not reduced on rank "
PART = UNREDUCED + "0 ({0}.weight, {0}.bias), nor were some on rank 1. "
CASES = {
    ("ddp", "around"): NOTHING,
    ("ddp", "no_sync"): NOTHING,
    ("fsdp1", "no_sync"): NOTHING,
    ("fsdp2", "no_sync"): NOTHING,
    ("naive", "no_sync"): NOTHING,
    ("bucket", "no_sync"): NOTHING,
    ("hooked ddp", "copied"): NOTHING,
    ("naive", "copied"): NOTHING,
    ("bucket", "copied"): NOTHING,
    ("hooked ddp", "twice"): NOTHING.replace("2", "3"),
    ("hooked fsdp2", "twice"): NOTHING.replace("2", "3"),
    ("hooked ddp", "converted"): NOTHING,
    ("hooked ddp", "replaced"): NOTHING,
    ("naive", "converted"): 2e-2,
    ("bucket", "converted"): 2e-2,
    ("naive", "replaced"): 1e-6,
    ("bucket", "replaced"): 1e-6,
    ("hooked fsdp2", "replaced before"): 1e-6,
    ("ddp", "unfrozen"): PART.format(0),
    ("hooked ddp", "unfrozen on one rank"): UNREDUCED + "1 (0.weight, 0.bias). ",
    ("naive", "unfrozen"): 1e-6,
    ("bucket", "unfrozen"): 1e-6,
    ("hooked fsdp2", "unfrozen"): 1e-6,
    ("hooked fsdp2", "unfrozen before"): 1e-6,
    ("naive", "frozen"): 1e-6,
    ("bucket", "frozen"): 1e-6,
    ("hooked fsdp2", "frozen"): 1e-6,
    ("fsdp1", "unfrozen"): 1e-6,
    ("fsdp1", "frozen"): 1e-6,
    ("fsdp1", "replaced"): 1e-6,
    ("hooked fsdp2", "held back"): PART.format(2),
    ("hsdp", "unfrozen"): 1e-6,
    ("hsdp", "frozen"): 1e-6,
    ("hooked ddp", "summed"): 1e-6,
}


@pytest.mark.parametrize(
    ("strategy", "change"), [pytest.param(*case, marks=[pytest.mark.sweep] * (case[0] == "naive")) for case in CASES]
)
def test_a_changed_model_is_averaged_or_refused(world, strategy, change):
    expected = CASES[strategy, change]
    for outcome in world(4 if strategy == "hsdp" else 2).run(changed, strategy, change):
        if isinstance(expected, str):
            assert isinstance(outcome, str) and outcome.startswith(expected), outcome
        else:
            assert not isinstance(outcome, str), outcome
            assert outcome < expected


# --- gradients that grow after their reduction, and parameters that need none ---


def added(rank, world, group, strategy, way):
    """The end of a step that adds to gradients after they were reduced."""
    reducer = Reducer("none", algorithm="exchange")
    model = users_own(strategy, reducer, False)
    synchronized = way == "thrown away"
    loss(model, batch(rank, 0)).backward()
    if way == "around":
        loss(model.module, batch(rank, 1)).backward()
    else:
        with model.no_sync() if strategy == "hooked ddp" else accumulation(model, last=False):
            loss(model, batch(rank, 1)).backward()
    if synchronized:
        model.zero_grad()
        loss(model, batch(rank, 1)).backward()
    try:
        assert reducer.finish()
    except RunFault as error:
        return str(error)
    right, reduced = exact(world, 1), whole_gradients(model)
    return max(float((reduced[name].double() - right[name]).norm() / right[name].norm()) for name in right)


@pytest.mark.parametrize(
    ("strategy", "way"),
    [("hooked ddp", "around"), ("hooked ddp", "no_sync"), ("naive", "no_sync"), ("bucket", "no_sync")],
)
def test_what_is_added_after_the_reduction_is_refused(world, strategy, way):
    for outcome in world(2).run(added, strategy, way):
        assert "6 parameters have gradients that were not reduced" in outcome


@pytest.mark.parametrize("strategy", ["hooked ddp", "naive", "bucket"])
def test_what_was_thrown_away_is_not_refused(world, strategy):
    for error in world(2).run(added, strategy, "thrown away"):
        assert error < 1e-6


def frozen_while_accumulating(rank, world, group, strategy):
    """The end of a step after whose first micro-batch a layer is frozen: its gradient is this rank's."""
    reducer = Reducer("none", algorithm="exchange")
    model = users_own(strategy, reducer, False)
    with accumulation(model, last=False):
        loss(model, batch(rank, 0)).backward()
    unfrozen(model, False)
    loss(model, batch(rank, 1)).backward()
    with pytest.raises(RunFault, match=r"2 parameters have gradients that were not reduced on rank 0 \(0.weight"):
        reducer.finish()


@pytest.mark.parametrize("strategy", ["naive", "bucket"])
def test_a_layer_that_is_frozen_while_gradients_accumulate(world, strategy):
    world(2).run(frozen_while_accumulating, strategy)


class Part(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def part_frozen(rank, world, group):
    """Steps of two parts with one reducer, one of which is frozen after the first; then one without a reduction."""
    torch.manual_seed(3)
    reducer = Reducer("none", algorithm="exchange")
    parts = [DistributedDataParallel(Part(first=nn.Linear(7, 5))), Part(second=nn.Linear(5, 3))]
    fully_shard(parts[1], mesh=init_device_mesh("cpu", (world,)))
    for part in parts:
        hook(part, reducer)
    for step in range(3):
        parts[1].zero_grad()
        parts[1](parts[0](batch(rank, step))).square().sum().backward()
        assert reducer.finish()
        parts[0].requires_grad_(False).zero_grad()
    with pytest.raises(RunFault, match="no gradient of 1 of the 2 models"):
        reducer.finish()


def test_a_part_without_trainable_parameters_needs_no_reduction(world):
    world(2).run(part_frozen)


def owners_own(rank, world, group, way):
    """Warnings in steps of FSDP2 with an optimizer in the backward pass, or a parameter that its owner averages."""
    model = net()
    mine = {model[2].weight} if way == "ignored" else None
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=init_device_mesh("cpu", (world,)), ignored_params=mine)
    reducer = Reducer("none", algorithm="exchange")
    hook(model, reducer)
    if way == "in backward":
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, each=optimizer: (each.step(), each.zero_grad()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss(model, batch(rank, step)).backward()
            assert reducer.finish()
    return [str(each.message) for each in caught if "no step of the compressor ended" in str(each.message)]


@pytest.mark.parametrize("way", ["ignored", "in backward"])
def test_what_the_models_owner_does_is_no_fault(world, way):
    assert world(2).run(owners_own, way) == [[], []]


def frozen_late(rank, world, group, strategy, way):
    """The error for a layer that is frozen where a forward pass of the model does not see it; the step after."""
    reducer = Reducer("none", algorithm="exchange")
    model = users_own(strategy, reducer, False)
    if way == "after the forward pass":
        output = loss(model, batch(rank, 0))
        unfrozen(model, False)
    else:
        unfrozen(model, False)
        output = model[4](model[3](model[2](model[1](model[0](batch(rank, 0)))))).square().mean()
    with pytest.raises(RunFault) as fault:
        output.backward()
    model.zero_grad()
    loss(model, batch(rank, 1)).backward()
    assert reducer.finish()
    return str(fault.value)


@pytest.mark.parametrize("strategy", ["naive", "bucket"])
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("after the forward pass", "was frozen between the forward and the backward pass"),
        ("around the forward pass", "0.weight, 0.bias were frozen after the model was last called"),
    ],
)
def test_a_layer_that_is_frozen_unseen_is_named(world, strategy, way, message):
    for fault in world(2).run(frozen_late, strategy, way):
        assert message in fault


def kept_alive(rank, world, group, strategy):
    """Whether a reducer keeps the parameters of a model that is gone."""
    reducer = Reducer("none", algorithm="exchange")
    model = users_own(strategy, reducer, False)
    loss(model, batch(rank, 0)).backward()
    assert reducer.finish()
    held = weakref.ref(next(iter(model.parameters())))
    del model
    gc.collect()
    return held() is not None


@pytest.mark.parametrize("strategy", ["hooked ddp", "hooked fsdp2", "naive"])
def test_a_reducer_does_not_keep_a_model(world, strategy):
    assert world(2).run(kept_alive, strategy) == [False, False]


def wrong_total(rank, world, group):
    reducer = Reducer("none")
    for total in (torch.tensor(1.0), [1.0]):
        with pytest.raises(BadInput, match="a tensor of one dimension"):
            reducer.finish(total)
    return reducer.step


def test_a_total_is_a_vector(world):
    assert world(2).run(wrong_total) == [0, 0]
