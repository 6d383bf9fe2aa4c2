"""`compress_gradients` on models that a user sharded over meshes of several dimensions, against the same program alone.

With ``none`` and torch's own collectives the trained parameters are equal; with a codec each gradient is within the
error that the codec has on one shard.
"""

from __future__ import annotations

import copy

import pytest
import torch
from diagonals import swept
from stacks import (
    STACKS,
    WIDTH,
    Net,
    experts,
    hsdp,
    inputs,
    loss_of,
    mesh_of,
    net,
    sharded,
    shared_meshes,
    tensor_ddp,
    tensor_fsdp,
    values,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.comm.closed_forms import parameters_unhooked
from gradwire.comm.collectives import METER
from gradwire.comm.parallel import block_sizes, wrap

STEPS = 3
CASES = {
    "none": {"compressor": "none"},
    "int8": {"compressor": "int8"},
    "topk": {"compressor": {"method": "topk", "density": 0.25}, "error_feedback": True},
    "int4 and int4-diff": {"compressor": {"method": "int8", "num_bits": 4}, "parameters": "int4-diff"},
    "qsgd": {"compressor": "qsgd", "error_feedback": True},
    "int8 inside": {"compressor": "onebit", "inside": "int8", "error_feedback": True},
}


def compressed(model: nn.Module, case: str | None, rate: float = 0.1):
    """An optimizer, and a compression unless ``case`` is None, which is without gradwire."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return optimizer, None if case is None else gradwire.compress_gradients(model, optimizer=optimizer, **CASES[case])


def train(model, optimizer, sample: int, steps: range) -> None:
    for step in steps:
        loss_of(model, sample, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(rank, world, group, stack, cases):
    """For each case, the parameters after some steps, and the traffic, or without gradwire the parameters before."""
    with shared_meshes():
        return [trained_by(case, *STACKS[stack](world)) for case in cases]


def trained_by(case, model, sample):
    sent = METER.sent("parameters")
    optimizer, compression = compressed(model, case)
    named = list(model.named_parameters())  # torch's TP × DDP takes those that are split from the model
    start = values(named) if compression is None else None
    train(model, optimizer, sample, range(STEPS))
    if compression is None:
        return values(named), start
    traffic = compression.traffic
    assert traffic.details["parameters"]["sent"] == METER.sent("parameters") - sent
    return values(named), traffic


BOUNDS = {"none": 1e-6, "int8": 0.006, "topk": 0.3, "int4 and int4-diff": 0.1, "int8 inside": 0.25}
GATHERING = ("hsdp", "hsdp, one island", "tp x fsdp", "columns", "together", "experts")
OF_TWO = ("hsdp, one island", "replicate")  # the others take two ranks in the sweep


def cases_of(stack):
    """The cases of a stack in `make test`, where two codecs take turns, and in the sweep."""
    taken, other = ("int8", "topk")[:: -1 if [*STACKS].index(stack) % 2 else 1]
    inside = ["int8 inside"] if stack == "hsdp" else []
    gathering = ["int4 and int4-diff"] if stack in GATHERING else []
    return [taken, *gathering, *inside, *(["none"] if taken == "topk" else [])], ["none", other]


@pytest.mark.parametrize(
    ("stack", "ranks", "cases"),
    [
        *((stack, 4, cases_of(stack)[0]) for stack in STACKS),
        *(pytest.param(stack, 4, cases_of(stack)[1], marks=pytest.mark.sweep) for stack in STACKS),
        *(pytest.param(stack, 2, ["none"], marks=[pytest.mark.sweep] * (stack not in OF_TWO)) for stack in STACKS),
    ],
)
def test_parameters_end_as_far_from_those_without_gradwire_as_the_codec_errs(world, stack, ranks, cases):
    """Relative to how far training moves them. Two ranks sum float32 exactly, four in another order."""
    for (expected, start), *others in world(ranks).run(trained, stack, [None, *cases]):
        moved = sum(float((start[name] - expected[name]).square().sum()) for name in expected)
        for case, (got, traffic) in zip(cases, others, strict=True):
            assert start.keys() == expected.keys() == got.keys()
            apart = sum(float((got[name] - expected[name]).square().sum()) for name in expected)
            relative = (apart / moved) ** 0.5
            if case == "none":
                assert relative <= (0 if ranks == 2 else BOUNDS[case])
            else:
                assert 1e-5 < relative < BOUNDS[case], case
                assert 0 < traffic["sent"] < traffic["raw"]
            assert (traffic.details["parameters"]["sent"] > 0) == ("parameters" in CASES[case])
            assert case != "int8 inside" or 0 < traffic.details["inside"]["sent"] < traffic.details["inside"]["raw"] / 2


@pytest.mark.parametrize("stack", ["tp x fsdp", *swept("tp x hsdp", "tp x ddp")])
def test_peers_of_tensor_parallelism_round_alike(world, stack):
    """Norms are not split: each peer has one, and a codec with random numbers must keep them equal."""
    ends = [end for [(end, _)] in world(4).run(trained, stack, ["qsgd"])]
    norms = [name for name in ends[0] if ".norm." in name]
    assert norms
    for end in ends[1:]:
        assert all(torch.equal(end[name], ends[0][name]) for name in norms)


def drawn_apart(rank, world, group):
    """Norms after a round of `DiLoCo` with random rounding, on DDP with tensor parallelism."""
    model, sample = tensor_ddp(world)
    optimizer = gradwire.DiLoCo(
        torch.optim.SGD(model.parameters(), lr=0.1), model, sync_every=2, compressor="qsgd", error_feedback=True
    )
    train(model, optimizer, sample, range(4))
    return {name: parameter for name, parameter in values(model.named_parameters()).items() if ".norm." in name}


def test_peers_of_tensor_parallelism_round_alike_in_local_updates(world):
    first, *others = world(4).run(drawn_apart)
    for norms in others:
        assert all(torch.equal(norms[name], parameter) for name, parameter in first.items())


def overflowed(rank, world, group):
    """The error of a step on each rank if the gradients of experts that two ranks average are not finite."""
    model, sample = experts(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradwire.compress_gradients(model, "int8", optimizer=optimizer, nonfinite="raise")
    model.experts.register_forward_pre_hook(lambda _, given: (given[0].detach(),))  # the rest has finite gradients
    dense, expert = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(sample)))
    (dense.square().mean() + expert.square().mean() * (float("inf") if rank == 1 else 1)).backward()
    with pytest.raises(NonFiniteGradient) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_value_that_is_not_finite_among_experts_is_raised_on_all_ranks(world):
    """Ranks 1 and 3 average its experts."""
    assert all("holds NaN, infinity" in message for message in world(4).run(overflowed))


def resumed(rank, world, group, stack, case):
    """Parameters of a run, and of one in new objects that goes on from its state after two steps."""
    saved, ends = None, []
    with shared_meshes():
        models = [STACKS[stack](world) for _ in range(2)]
    for model, sample in models:
        objects = (model, *compressed(model, case))
        for each, state in zip(objects, saved or (), strict=False):
            each.load_state_dict(state)
        if saved is None:
            train(*objects[:2], sample, range(2))
            saved = copy.deepcopy([each.state_dict() for each in objects])
        train(*objects[:2], sample, range(2, 3))
        ends.append(values(model.named_parameters()))
    return ends


@pytest.mark.parametrize(
    ("stack", "case"),
    [
        ("hsdp", "int8 inside"),
        ("tp x fsdp", "topk"),
        *(pytest.param(stack, "int4 and int4-diff", marks=pytest.mark.sweep) for stack in ("hsdp", "tp x fsdp")),
        *(
            pytest.param(stack, "topk", marks=pytest.mark.sweep)
            for stack in ("hsdp", "tp x hsdp", "replicate", "experts")
        ),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(world, stack, case):
    for unbroken, stopped in world(4).run(resumed, stack, case):
        assert all(torch.equal(unbroken[name], parameter) for name, parameter in stopped.items())


def state_of_another_mesh(rank, world, group):
    model, sample = hsdp(world, 2)
    optimizer, compression = compressed(model, "int8 inside")
    train(model, optimizer, sample, range(1))
    saved = copy.deepcopy(compression.state_dict())
    refusals = []
    _, without = compressed(hsdp(world, 2)[0], "topk")
    with pytest.raises(BadInput) as refusal:
        without.load_state_dict(saved)
    refusals.append(str(refusal.value))
    _, flat = compressed(hsdp(world, 1)[0], "int8")
    with pytest.warns(UserWarning, match="the reducer's state is of 2 x 2 ranks and this run has 4"):
        flat.load_state_dict(saved)
    return refusals


def test_a_state_of_other_levels_is_refused_and_of_another_mesh_dropped(world):
    for (refusal,) in world(4).run(state_of_another_mesh):
        assert "compressor" in refusal


def rounds(rank, world, group, stack, wrapped):
    """Parameters after rounds of local updates, on a user's model or on one from `wrap`."""
    if wrapped:
        model, sample = wrap(net(), "hsdp", islands=2, average=False, device="cpu"), rank
    else:
        model, sample = STACKS[stack](world)
    optimizer = gradwire.DiLoCo(
        torch.optim.AdamW(model.parameters(), lr=0.01),
        model,
        sync_every=2,
        compressor="onebit",
        error_feedback=True,
        outer={"lr": 0.7, "momentum": 0.9},
    )
    train(model, optimizer, sample, range(5))
    with optimizer.synchronized():
        return values(model.named_parameters()), optimizer.reducer.traffic["sent"]


def test_local_updates_between_the_islands_of_a_users_mesh(world):
    expected = world(4).run(rounds, None, True)
    for (got, sent), (parameters, bytes_sent) in zip(world(4).run(rounds, "hsdp", False), expected, strict=True):
        assert sent == bytes_sent > 0
        assert all(torch.equal(got[name], parameter) for name, parameter in parameters.items())


def parameter_bytes(rank, world, group, encoding):
    """Bytes of parameters at the start, which a replica sends once, and after `STEPS` steps of a flat model."""
    model, sample = hsdp(world, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = gradwire.compress_gradients(model, "none", optimizer=optimizer, parameters=encoding)
    started = compression.traffic.details["parameters"]
    train(model, optimizer, sample, range(STEPS))
    return started, compression.traffic.details["parameters"]


@pytest.mark.parametrize(("encoding", "share"), [("int8", 0.5), ("int4-diff", 0.1)])
def test_bytes_of_parameters_are_counted_next_to_those_of_float32(world, encoding, share):
    ranks = world(2).run(parameter_bytes, encoding)
    raw = STEPS * parameters_unhooked("reduce_scatter", block_sizes(net()), 2)
    assert all(started["raw"] == 0 for started, _ in ranks)
    assert sum(traffic["raw"] for _, traffic in ranks) == raw
    sent = sum(traffic["sent"] - started["sent"] for started, traffic in ranks)
    assert 0 < sent < share * raw


class Headless(Net):
    """Leaves the head to the loss."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def chunked(rank, world, group, chunks, early=False):
    """Parameters, and bytes of ``int4-diff``, after steps whose loss runs the head on one chunk after the other.

    With ``early`` the caller gathers the head before the first of two micro-batches, as a pipeline's schedule does.
    """
    mesh, model = mesh_of(world, names="dp"), net(Headless)
    fully_shard(model.head, mesh=mesh)
    sharded(model, mesh)
    optimizer, compression = compressed(model, "int4 and int4-diff")
    for step in range(STEPS):
        if early:
            model.head.unshard()
        for micro in range(2):
            hidden = model(inputs(rank, 10 * step + micro))
            sum(model.head(chunk).square().mean() for chunk in hidden.chunk(chunks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model.named_parameters()), compression.traffic.details["parameters"]["sent"]


@pytest.mark.parametrize(("chunks", "early"), [(2, False), (1, True)])
def test_differences_are_sent_once_in_a_step_whoever_gathers_the_head(world, chunks, early):
    expected = world(2).run(chunked, 1)
    for (got, sent), (parameters, once) in zip(world(2).run(chunked, chunks, early), expected, strict=True):
        assert sent == once > 0
        assert early is False or all(torch.equal(got[name], parameter) for name, parameter in parameters.items())


def accumulated(case, model, sample):
    """Parameters and traffic of steps of two micro-batches, of which only the last is averaged over the replicas."""
    optimizer, compression = compressed(model, case)
    start = values(model.named_parameters()) if compression is None else None
    for step in range(STEPS):
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            loss_of(model, sample, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model.named_parameters()), start if compression is None else compression.traffic


def micro_batches(rank, world, group, stack):
    """`accumulated` without gradwire and by two codecs, and the second one's traffic of as many steps of one pass."""
    with shared_meshes():
        results = [accumulated(case, *STACKS[stack](world)) for case in (None, "none", "int8")]
        return [*results, trained_by("int8", *STACKS[stack](world))]


@pytest.mark.parametrize("stack", ["hsdp", pytest.param("replicate", marks=pytest.mark.sweep)])
def test_micro_batches_without_an_all_reduce_count_in_the_next_one(world, stack):
    for (expected, start), (same, _), (close, traffic), (_, single) in world(4).run(micro_batches, stack):
        moved = sum(float((expected[name] - start[name]).norm()) for name in start)
        for got, bound in ((same, 1e-5), (close, 0.02)):
            assert sum(float((expected[name] - got[name]).norm()) for name in start) < bound * moved
        assert traffic["sent"] == single["sent"], "one all-reduce per step"


def unfinished(rank, world, group):
    """The message of a step that ends while the all-reduce is switched off."""
    model, sample = hsdp(world, 2)
    optimizer, _ = compressed(model, "int8")
    loss_of(model, sample, 0).backward()
    model.set_requires_all_reduce(False)
    loss_of(model, sample, 1).backward()
    with pytest.raises(RunFault) as refusal:
        optimizer.step()
    return str(refusal.value)


def test_a_step_without_its_all_reduce_is_refused(world):
    assert all("have gradients that were not reduced" in message for message in world(4).run(unfinished))


def refusals(rank, world, group):
    """The message of everything that is refused."""

    def hooked_before():
        model, _ = hsdp(world, 2)
        model.set_all_reduce_hook(lambda shard: None)
        compressed(model, "int8")

    def local_updates(stack):
        model, _ = STACKS[stack](world)
        gradwire.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_every=2)

    def narrow():
        model = sharded(net(), mesh_of(world, names="dp"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        gradwire.compress_gradients(model, "int8", parameters="int8")

    calls = {
        "rows of tensor parallelism": lambda: gradwire.compress_gradients(
            tensor_fsdp(world)[0], "int8", granularity="row"
        ),
        "narrow parameters": narrow,
        "inside without islands": lambda: compressed(hsdp(world, 1)[0], "int8 inside"),
        "inside of DDP": lambda: compressed(DistributedDataParallel(net()), "int8 inside"),
        "a user's all-reduce": hooked_before,
        "local updates, tp": lambda: local_updates("tp x fsdp"),
        "local updates, experts": lambda: local_updates("experts"),
        "local updates, one island": lambda: local_updates("hsdp, one island"),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises((BadInput, RunFault)) as refusal:
            call()
        messages[name] = str(refusal.value)
    return messages


def test_refusals_name_the_dimension(world):
    parts = {
        "inside without islands": "inside is the compressor inside islands of ranks, and the model has none: omit it",
        "inside of DDP": "inside is the compressor inside islands",
        "rows of tensor parallelism": "granularity row encodes all parameters of a rank together",
        "narrow parameters": "MixedPrecisionPolicy converts",
        "a user's all-reduce": "has an all-reduce hook already",
        "local updates, tp": "'tp'): DiLoCo takes",
        "local updates, experts": "no tensor or expert parallelism",
        "local updates, one island": "has sharded the model over 4 ranks without replicas",
    }
    for messages in world(4).run(refusals):
        for name, part in parts.items():
            assert part in messages[name], name
