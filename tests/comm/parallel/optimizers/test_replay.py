"""Replayed embeddings against their protocol in one process: a shared embedding that takes steps by mean gradients."""

from __future__ import annotations

import pytest
import torch
from diagonals import diagonals
from protocols import Protocol, by_rows
from test_frameworks import batch_of, loss_of, model_of
from test_local_updates import (
    LONE,
    ONEBIT,
    STEPS,
    Simulated,
    gradients_of,
    held,
    in_step,
    set_rates,
    started,
    trainable,
    trained,
)
from test_optimizers import BETAS, CLIP, DECAY, RATES, REPLICAS, assert_same

from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell
from gradwire.comm.collectives import IslandReducer, Reducer, build_islands
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, full_state_dict, optimizers, wrap
from gradwire.comm.parallel.optimizers.replay import ReplayDiLoCo

ROWS = "rows.weight"  # the embedding, tied to a head
INT4 = {"method": "int8", "num_bits": 4, "block": 8}


class Replayed(Simulated):
    """Ranks whose embedding is, at the end of a round, one that a separate optimizer moved by mean gradients."""

    def __init__(self, world, method, cell, embeddings, **options):
        super().__init__(world, method, cell, **options)
        self.shared = torch.nn.Parameter(held().get_parameter(ROWS).detach().clone())
        kind = type(self.inner[0][0])
        betas = {"betas": BETAS} if kind is torch.optim.AdamW else {}
        self.its = kind([{"params": [self.shared], "weight_decay": DECAY}], **betas)
        options = dict(embeddings)
        shape = {ROWS: self.shapes[ROWS]}
        feedback, decay = cell.get("error_feedback", False), cell.get("ef_decay", 1.0)
        compressor = build(options.pop("method"), **options)
        self.its_protocol = Protocol(compressor, by_rows(shape, world), shape, world, 4, feedback, decay)
        self.steps, self.sums = [], [torch.zeros(self.shapes[ROWS]) for _ in range(world)]

    def close_step(self, step):
        self.steps.append(step)
        for rank in range(self.world):
            self.sums[rank] += self.parameters(rank)[ROWS].grad
        if not in_step(step, self.H):
            return
        gradients = [{ROWS: total / len(self.steps)} for total in self.sums]
        mean = self.its_protocol.reduce(self.algorithm, "all_reduce", gradients)[ROWS]
        others = [name for name in self.shapes if name != ROWS]
        self.receive(others, self.means(others), 0.0)
        self.rounds += 1
        self.shared.grad = mean.view(self.shared.shape)
        for earlier in self.steps:
            self.its.param_groups[0]["lr"] = RATES[earlier]
            self.its.step()
        for rank in range(self.world):
            p = self.parameters(rank)[ROWS]
            p.copy_(self.shared)
            self.inner[rank][0].state[p] = {key: value.clone() for key, value in self.its.state[self.shared].items()}
        self.steps, self.sums = [], [torch.zeros_like(total) for total in self.sums]


def replayed(size, method, cell, options, clip=CLIP):
    """The parameters on every rank and the norm, after each step, and the bytes of all ranks."""
    run, found = Replayed(size, method, cell, **options), []
    for step in range(STEPS):
        norm = run.step(step, clip)
        found.append(([{n: p.detach().clone() for n, p in run.parameters(r).items()} for r in range(size)], norm))
    return found, run.protocol.sent + run.its_protocol.sent


CASES = [
    ("none", {"algorithm": "exchange"}, {"H": 3, "outer_lr": 0.7, "outer_momentum": 0.6, "embeddings": INT4}),
    ("onebit", ONEBIT, {"H": 3, **LONE, "inner": "muon", "embeddings": INT4}),
    ("onebit", ONEBIT, {"H": 2, **LONE, "inner": "sgd", "embeddings": {"method": "onebit", "block": 4}}),
    ("onebit", ONEBIT, {"H": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "embeddings": INT4}),
    (
        "onebit",
        {**ONEBIT, "ef_decay": 0.9, "algorithm": "gather"},
        {"H": 4, **LONE, "embeddings": {"method": "topk", "density": 0.4}},
    ),
]


@pytest.mark.parametrize(("case", "strategy", "size"), diagonals(CASES, REPLICAS, [2, 3]), ids=str)
def test_replay_is_its_protocol_in_one_process(world, case, strategy, size):
    method, cell, options = case
    results = world(size).run(trained, "diloco", strategy, method, cell, options)
    expected, bytes_sent = replayed(size, method, cell, options)
    for rank, (found, _) in enumerate(results):
        for step, (parameters, norm, sent, difference, _) in enumerate(found):
            assert_same(trainable(parameters), expected[step][0][rank])
            assert norm == pytest.approx(expected[step][1], rel=1e-6)
            assert difference is None, "embeddings and their moments at the start of the round are equal on all ranks"
            assert (sent > (found[step - 1][2] if step else 0)) == in_step(step, options["H"])
    assert not torch.equal(results[0][0][0][0][ROWS], results[1][0][0][0][ROWS]), "in a round each has its own"
    sent = sum(traffic["sent"] for _, traffic in results)
    assert [traffic.details["closed_form"] for _, traffic in results] == [traffic["sent"] for _, traffic in results]
    assert sent == bytes_sent
    assert all(0 < traffic.details["embeddings"]["sent"] < traffic["sent"] for _, traffic in results)
    numel = sum(p.numel() for p in held().parameters() if p.requires_grad)
    assert {traffic.details["elements"] for _, traffic in results} == {STEPS * numel}, "raw counts every step"


def local_moments(optimizer, rank, step):
    """The replay continues from the rank's own moments."""
    if step == 5:
        state = optimizer.inner.state[optimizer.replayed[ROWS]]
        optimizer.began[ROWS] = {key: value.clone() for key, value in state.items()}


@pytest.mark.sweep
def test_embeddings_that_go_apart_are_found(world):
    options = {"H": 3, **LONE, "embeddings": INT4}
    for found, _ in world(2).run(trained, "diloco", "ddp", "onebit", ONEBIT, options, CLIP, local_moments):
        assert found[2][3] is None and found[5][3] is not None


@pytest.mark.parametrize("step", [3, 5])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(world, step):
    """Step 3 is local: nobody takes it, nor replays it. Step 5 ends a round: embeddings return to its start too."""
    cell, options = {**ONEBIT, "nonfinite": "skip"}, {"H": 3, **LONE, "embeddings": INT4}
    for found, traffic in world(2).run(trained, "diloco", "ddp", "onebit", cell, options, CLIP, (1, step)):
        assert [taken for *_, taken in found] == [at != step for at in range(STEPS)]
        assert_same(found[step][0], found[2][0])
        assert traffic.details["nonfinite_steps"] == 1
        assert [difference for _, _, _, difference, _ in found] == [None] * STEPS
        assert not torch.equal(found[-1][0][ROWS], found[step][0][ROWS])


def by_name(rank, world, group):
    """The weights by the class's own arguments, and by a cell's; whether gradients and rates were left as they were."""
    ended = []
    for of_cell in (True, False):
        if of_cell:
            options = {"H": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "embeddings": INT4}
            _, model, optimizer = started(group, "diloco", "ddp", "onebit", ONEBIT, options)
        else:
            model = held()
            inner = torch.optim.AdamW(
                [
                    {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
                    {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
                ],
                betas=BETAS,
            )
            settings = {"compressor": build("onebit", block=16), "embeddings": build("int8", num_bits=4, block=8)}
            optimizer = ReplayDiLoCo(inner, model, sync_every=2, steps=STEPS, seed=4, algorithm="exchange", **settings)
            optimizer.max_norm = CLIP
        for step in range(STEPS):
            set_rates(optimizer, step)
            model(gradients_of(rank, step)).backward()
            optimizer.communicate(CLIP)
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                assert (p.grad is None) == (gradient is None)
                assert gradient is None or torch.equal(p.grad, gradient)
            assert [group["lr"] for group in optimizer.param_groups] == [RATES[step], 2 * RATES[step]]
            optimizer.zero_grad()
        ended.append([p.detach().clone() for p in model.parameters()])
    return ended


def test_the_class_is_the_cell(world):
    for of_cell, of_class in world(2).run(by_name):
        assert all(torch.equal(a, b) for a, b in zip(of_cell, of_class, strict=True))


def islands(rank, world, group, number):
    """The weights of a GPT-2 after five steps; ``number`` replicas or islands."""
    sharded = number < world
    reducer = IslandReducer("none", build_islands(number)) if sharded else Reducer("none", group)
    model = wrap(model_of("gpt2"), "hsdp" if sharded else "ddp", reducer, device="cpu", average=False)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    options = {"H": 2, "steps": 5, "embeddings": "none", **LONE}
    optimizer = optimizers.build("diloco", model, groups, reducer, lr=1e-3, **options)
    for step in range(5):
        optimizer.zero_grad()
        mine = [rank] if sharded else [2 * rank, 2 * rank + 1]
        for micro, source in enumerate(mine):
            with accumulation(model, last=micro + 1 == len(mine)):
                (loss_of("gpt2", model, batch_of("gpt2", source, step)) / len(mine)).backward()
        assert optimizer.communicate(max_norm=0.5)[1]
        optimizer.step()
    return {name.removeprefix("module."): value for name, value in full_state_dict(model).items()}


def test_an_island_of_two_ranks_is_a_replica_with_twice_the_batch(world):
    expected, found = world(2).run(islands, 2)[0], world(4).run(islands, 2)[0]
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


def residuals(rank, world, group):
    """After a round: the norm and bytes of residuals, and those of the tensors that a checkpoint would have."""
    reducer, model, optimizer = started(group, "diloco", "ddp", "onebit", ONEBIT, {"H": 2, **LONE, "embeddings": INT4})
    for step in range(2):
        set_rates(optimizer, step)
        model(gradients_of(rank, step)).backward()
        optimizer.communicate(CLIP)
        optimizer.step()
        optimizer.zero_grad()
    kept = [part.codec.state_dict()["residuals"] for part in (reducer, *reducer.parts.values())]
    tensors = [[t for residual in of_part.values() for t in residual.values()] for of_part in kept]
    return reducer.residual_norm, reducer.residual_bytes, tensors


def test_the_residuals_of_embeddings_count(world):
    for norm, size, tensors in world(2).run(residuals):
        assert all(any(residual.any() for residual in of_part) for of_part in tensors)
        together = torch.cat([residual.flatten().double() for of_part in tensors for residual in of_part])
        assert norm == pytest.approx(float(together.norm()), rel=1e-6)
        assert size == 4 * together.numel()


class Plain(torch.nn.Module):
    """No embedding."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 2)


def without_embedding(rank, world, group):
    model = Plain()
    try:
        ReplayDiLoCo(torch.optim.AdamW(model.parameters()), model, sync_every=2, embeddings="int8")
    except BadInput as error:
        return str(error)


def test_a_model_without_embedding_is_refused(world):
    [message] = world(1).run(without_embedding)
    assert message == (
        "embeddings: the model has 0 trainable weights of embeddings and their head, of 2 parameters; use DiLoCo "
        "without it."
    )


class Untied(torch.nn.Module):
    """A head that comes first, embeddings of tokens and of more positions, and a block in the head's shape."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 11)
        self.tokens, self.positions = torch.nn.Embedding(11, 5), torch.nn.Embedding(13, 5)
        self.blocks, self.last = torch.nn.ModuleList([torch.nn.Linear(5, 11)]), torch.nn.Linear(11, 5)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(len(ids)))
        return torch.nn.functional.cross_entropy(self.head(x + self.last(self.blocks[0](x))), ids.roll(1))


def untied(rank, world, group):
    """A round of two steps: what is replayed, gradients of it in each step, and weights before and after."""
    torch.manual_seed(3)
    model = Untied()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = ReplayDiLoCo(
        inner, model, sync_every=2, embeddings="none", outer={"lr": 1.0, "momentum": 0.0}, algorithm="exchange"
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = []
    for step in range(2):
        model(torch.arange(6) * (rank + 2) % 11 + step * rank % 3).backward()
        gradients.append({name: model.get_parameter(name).grad.clone() for name in optimizer.replayed})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, before, {name: p.detach() for name, p in model.named_parameters()}


def test_a_head_that_is_not_tied_is_replayed_too(world):
    results = world(2).run(untied)
    gradients, before, after = results[0]
    assert set(gradients[0]) == {"tokens.weight", "positions.weight", "head.weight"}
    for name in gradients[0]:
        p = torch.nn.Parameter(before[name].clone())
        p.grad = torch.stack([of_step[name] for of_rank, _, _ in results for of_step in of_rank]).mean(0)
        optimizer = torch.optim.AdamW([p], lr=0.1)
        for _ in range(2):
            optimizer.step()
        torch.testing.assert_close(after[name], p.detach(), rtol=1e-5, atol=1e-6)


def other_codec(rank, world, group):
    try:
        started(group, "diloco", "ddp", "onebit", ONEBIT, {"H": 2, "embeddings": {**INT4, "num_bits": 4 + 4 * rank}})
    except BadInput as error:
        return str(error)


def test_ranks_with_other_codecs_are_refused(world):
    for message in world(2).run(other_codec):
        assert "ranks reduce gradients differently: embeddings.compressor is" in message


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"embeddings": "int9"}, "unknown compressor 'int9'"),
        ({"embeddings": {"method": "int8", "bits": 4}}, "unknown int8 option 'bits'"),
        ({"embeddings": {"num_bits": 4}}, "a mapping with its method and options"),
        ({"embeddings": "int8", "streaming": {"fragments": 2}}, "streaming lacks: omit one of them"),
        ({"embeddings": "int8", "comm_optimizer": "demo"}, "an option of comm_optimizer diloco, sparseloco, muloco"),
    ],
)
def test_bad_cells_are_one_message(cell, message):
    with pytest.raises(BadInput) as refused:
        Cell.parse("cell", {"method": "onebit", "comm_optimizer": "diloco", "H": 4, **cell})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cell_gives_back_its_embeddings():
    mapping = {"method": "onebit", "comm_optimizer": "diloco", "H": 4, "embeddings": INT4}
    cell = Cell.parse("cell", mapping)
    assert Cell.parse("cell", cell.flat()) == cell
    assert cell.methods == ["onebit", "int8"]
    assert cell.communication.module.endswith(".replay")
