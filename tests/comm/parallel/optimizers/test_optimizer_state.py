"""States of the optimizers that communicate: in memory, in files and in torch's distributed checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from diagonals import swept
from test_frameworks import batch_of, loss_of, model_of
from test_local_updates import ONEBIT, backward, gradients_of, held, set_rates
from test_optimizers import CLIP, groups_of
from test_state import descend, hooked
from torch.distributed.fsdp import FSDPModule

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.compressors import build
from gradwire.comm.parallel import named_parameters, optimizers, wrap
from gradwire.comm.parallel.model import local

SNAPSHOT, LAST = 4, 6
DENSE = {**ONEBIT, "dense_steps": 2}
SPARSE = {"method": {"chunktopk.k": 4, "chunk": 8}, "error_feedback": True, "ef_decay": 0.95, "algorithm": "gather"}
OPTIMIZERS = {  # the name, the method, the reducer's options, the optimizer's; what the snapshot is in the midst of
    "onebit_adam": ("onebit_adam", "onebit", DENSE, {}),
    "demo": ("demo", "dcttopk", {"error_feedback": True, "ef_decay": 0.9}, {}),
    "diloco": ("diloco", "onebit", ONEBIT, {"H": 3, "steps": LAST}),  # a round, with momentum
    "muloco": ("muloco", "bins", {"error_feedback": True}, {"H": 3, "steps": LAST}),
    "sparseloco": ("sparseloco", "chunktopk+bins", SPARSE, {"H": 3, "steps": LAST}),
    "replay": (  # a round, with gradients of the embedding
        "diloco",
        "onebit",
        ONEBIT,
        {"H": 3, "steps": LAST, "embeddings": {"method": "int8", "num_bits": 4, "block": 8}},
    ),
    "streaming": (  # a fragment in flight
        "diloco",
        "onebit",
        ONEBIT,
        {"H": 4, "streaming": {"fragments": 2, "delay": 1, "alpha": 0.5}, "steps": LAST},
    ),
}


def fresh(group, case, strategy="ddp"):
    """A reducer, a model and its optimizer."""
    name, method, cell, options = OPTIMIZERS[case]
    cell = {"seed": 4, **cell}
    compressor = build(method, **cell.pop("method", {}))
    if strategy == "hsdp":
        reducer = IslandReducer(compressor, build_islands(2), **cell)
    else:
        reducer = Reducer(compressor, group, **cell)
    model = wrap(model_of("odd") if strategy == "hsdp" else held(), strategy, reducer, device="cpu", average=False)
    return reducer, model, optimizers.build(name, model, groups_of(model), reducer, lr=1.0, **options)


def train(model, optimizer, rank, steps):
    for step in steps:
        set_rates(optimizer, step)
        if isinstance(model, FSDPModule):
            loss_of("odd", model, batch_of("odd", rank, step)).backward()
        else:
            backward(model, rank, step)
        if optimizer.communicate(CLIP)[1]:
            optimizer.step()
        optimizer.zero_grad()
    return torch.cat([local(p).flatten() for _, p in named_parameters(model)])


def snapshots(rank, world, group, case, strategy, folder):
    """The parameters after the last step of an unbroken run, and of runs that go on from states of its middle."""
    _, model, optimizer = fresh(group, case, strategy)
    train(model, optimizer, rank, range(SNAPSHOT))
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.save(state, folder / f"{rank}.pt")
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
    unbroken = train(model, optimizer, rank, range(SNAPSHOT, LAST))
    ended = {}
    for attempt in ("memory, once", "memory, twice"):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        ended[attempt] = train(model, optimizer, rank, range(SNAPSHOT, LAST))
    for file in (True, False):
        _, model, optimizer = fresh(group, case, strategy)
        if file:
            loaded = torch.load(folder / f"{rank}.pt", weights_only=True)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        else:
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
        ended["file" if file else "dcp"] = train(model, optimizer, rank, range(SNAPSHOT, LAST))
    return unbroken, ended


KIN = ("muloco", "sparseloco")  # DiLoCo with other settings


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        *((case, "ddp") for case in OPTIMIZERS if case not in KIN),
        *swept(*((case, "ddp") for case in KIN), *((case, "hsdp") for case in OPTIMIZERS if case != "replay")),
    ],  # the model of islands has no embedding
)
def test_a_run_that_goes_on_from_an_optimizers_state_equals_an_unbroken_one(world, case, strategy, tmp_path):
    for unbroken, ended in world(4 if strategy == "hsdp" else 2).run(snapshots, case, strategy, tmp_path):
        assert unbroken.isfinite().all()
        for way, parameters in ended.items():
            assert torch.equal(parameters, unbroken), way


def part_of(state):
    """The part of a state that is one rank's."""
    [part] = (value[0] for name, value in state.items() if name.startswith("rank"))
    return part


def given(rank, world, group, folder):
    """The answers of reducer and optimizer to states that are not theirs, and whether they stayed as they were."""
    model, reducer, optimizer = hooked()
    descend(model, reducer, optimizer, rank, range(1))
    _, wrapped, diloco = fresh(group, "diloco")
    train(wrapped, diloco, rank, range(4))
    answers = {}
    for name, target in (("reducer", reducer), ("diloco", diloco)):
        state = copy.deepcopy(target.state_dict())
        if rank == 0:
            torch.save(state, folder / name)
        torch.distributed.barrier()
        part = part_of(state)
        mine = f"rank{rank}"
        wrong = {
            "empty": {},
            "none": None,
            "negative": {**state, "step": -5},
            "no rank": {key: value for key, value in state.items() if key != mine},
            "rank 0": torch.load(folder / name, weights_only=True),
            "algorithm": {**state, mine: ({**part, "algorithm": "magic"},)},
            "options": {**state, mine: ({key: value for key, value in part.items() if key != "options"},)},
            "anchors": {**state, mine: ({**part, "anchors": {"cube": torch.zeros(2)}},)},
            "residuals": {**state, mine: ({**part, "residuals": {"cube": 1}},)},
        }
        for what, value in wrong.items():
            try:
                target.load_state_dict(value)
            except BadInput as error:
                answers[name, what] = str(error)
        assert same(part_of(target.state_dict()), part)
    return answers


def same(one, two):
    """Whether two nested states are equal bit by bit."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def test_a_state_that_is_not_this_ranks_is_refused(world, tmp_path):
    answers = world(2).run(given, tmp_path)
    for rank, messages in enumerate(answers):
        for name in ("reducer", "diloco"):
            refused = {what for of, what in messages if of == name}
            expected = {"empty", "none", "negative", "no rank", *(["rank 0"] if rank else [])}
            assert refused == expected | ({"algorithm", "options", "residuals"} if name == "reducer" else {"anchors"})
        assert messages["reducer", "empty"] == "the state of a reducer is what its state_dict() returned, not {}."
        assert "not {'step': -5, 'rank" in messages["reducer", "negative"]
        if rank:
            for name in ("reducer", "diloco"):
                assert "the state is of rank 0 of 2, and this is rank 1" in messages[name, "rank 0"]


def adopted(rank, world, group):
    """1-bit Adam that goes on from AdamW's state, and that AdamW; then its counts after the variance is frozen."""
    _, model, optimizer = fresh(group, "onebit_adam")
    twin = held()
    adamw = torch.optim.AdamW(groups_of(twin), lr=0.01)
    for step in range(3):
        twin(gradients_of(0, step)).backward()
        adamw.step()
        adamw.zero_grad()
    model.module.load_state_dict(twin.state_dict())
    state = copy.deepcopy(adamw.state_dict())
    optimizer.load_state_dict(state)
    same_as_adamw = []
    for step in range(3, 9):
        if step < 5:  # both warm-up steps, with rank 0's gradients on all ranks
            for each, do in ((model, optimizer), (twin, adamw)):
                each(gradients_of(0, step)).backward()
                assert not isinstance(do, optimizers.Communicating) or do.communicate(1e9)[1]
                do.step()
                do.zero_grad()
            theirs = dict(twin.named_parameters())
            same_as_adamw += [torch.equal(p, theirs[name]) for name, p in named_parameters(model)]
        else:
            train(model, optimizer, rank, [step])
    counts = {(int(kept["step"]), int(kept["variance_steps"])) for kept in optimizer.state.values()}
    unchanged = same(adamw.state_dict()["param_groups"], state["param_groups"])
    refused = []
    sgd = torch.optim.SGD(groups_of(twin), lr=0.1, momentum=0.9)
    twin(gradients_of(0, 0)).backward()
    sgd.step()
    amsgrad = copy.deepcopy(state)
    amsgrad["param_groups"][0]["amsgrad"] = True
    shapes = copy.deepcopy(state)
    shapes["state"][0]["exp_avg"] = torch.zeros(2)
    for wrong in (sgd.state_dict(), amsgrad, shapes, {}):
        with pytest.raises(BadInput) as error:
            optimizer.load_state_dict(wrong)
        refused.append(str(error.value))
    return same_as_adamw, counts, unchanged, refused


def test_onebit_adam_goes_on_from_adamws_state(world):
    for same_as_adamw, counts, unchanged, refused in world(2).run(adopted):
        assert all(same_as_adamw) and len(same_as_adamw) > 10
        assert counts == {(9, 5)}, "the variance is of AdamW's three steps and two of the warm-up"
        assert unchanged
        assert "OneBitAdam continues from the step and moments (exp_avg, exp_avg_sq) of AdamW" in refused[0]
        assert refused[1] == "OneBitAdam has no amsgrad."
        assert "for a parameter of shape [3, 2, 5]" in refused[2]
        assert refused[3] == "the state of OneBitAdam lacks param_groups, state."


def rounds_saved(rank, world, group, folder):
    _, model, optimizer = fresh(group, "diloco")
    train(model, optimizer, rank, range(SNAPSHOT))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def rounds_moved(rank, world, group, folder):
    """The rest of a checkpoint of three ranks, and whether a round begins at its parameters, and goes on."""
    reducer, model, optimizer = fresh(group, "diloco")
    with pytest.warns(UserWarning, match="the optimizer's state is of 3 ranks and this run has 2: a round begins"):
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    parameters = {name: p.detach().clone() for name, p in optimizer.parameters.items()}
    begins = all(torch.equal(anchor, parameters[name]) for name, anchor in optimizer.anchors.items())
    step, residuals = reducer.step, len(reducer.codec.state_dict()["residuals"])
    ended = train(model, optimizer, rank, range(SNAPSHOT, LAST))
    return begins, step, residuals, parameters, ended


def test_a_checkpoint_of_other_ranks_begins_a_round_at_its_parameters(world, tmp_path):
    world(3).run(rounds_saved, tmp_path)
    first, second = world(2).run(rounds_moved, tmp_path)
    for begins, step, residuals, parameters, ended in (first, second):
        assert begins and (step, residuals) == (SNAPSHOT, 0)
        assert same(parameters, first[3]) and torch.equal(ended, first[4]), "ranks agree at the end of a round"


def without_rounds(rank, world, group):
    """The messages of local updates after torch's part of their state alone, and after `restart`."""
    _, model, optimizer = fresh(group, "diloco")
    train(model, optimizer, rank, range(2))
    optimizer.load_state_dict({key: optimizer.state_dict()[key] for key in ("state", "param_groups")})
    backward(model, rank, 2)
    with pytest.raises(BadInput) as error:
        optimizer.communicate(CLIP)
    optimizer.restart()
    assert optimizer.communicate(CLIP)[1]
    return str(error.value)


def test_local_updates_need_their_rounds(world):
    for message in world(2).run(without_rounds):
        assert message.startswith("DiLoCo has loaded a state without this rank's rounds: load the whole state_dict()")
