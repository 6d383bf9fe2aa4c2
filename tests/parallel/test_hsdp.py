"""Islands: sharded inside, reduced between. Against one process in float64, and bit for bit against a simulation."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from protocols import Protocol, by_rows
from test_frameworks import STOCHASTIC, assert_near, batch_of, exact_gradients, loss_of, model_of, whole_gradients
from test_protocols import SHAPES, local_gradients
from test_protocols import loss_of as rough_loss_of
from test_protocols import model_of as rough_model_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.collectives import IslandReducer, Islands, Reducer, build_islands
from gradwire.compressors import build
from gradwire.errors import BadInput
from gradwire.parallel import accumulation, clip_grad_norm, full_state_dict, wrap
from gradwire.parallel.fsdp2 import FSDP2

SEED, STEPS = 11, 3


def reducer_of(islands, method, inside=None, **options):
    """A reducer between islands; ``inside`` is a method and its options, or None."""
    method, own = method
    within = None if inside is None else Reducer(build(inside[0], **inside[1]), islands.inside, **options)
    return IslandReducer(build(method, **own), islands, inside=within, **options)


def gradients(rank, world, group, name, number, method, inside, micros):
    """Each rank's whole mean gradients, their norm, and the bytes that the reducer counted."""
    islands = build_islands(number)
    reducer = None if method is None else reducer_of(islands, (method, {}), inside, algorithm="exchange")
    options = {"islands": islands} if reducer is None else {}
    model = wrap(model_of(name), "hsdp", reducer, device="cpu", **options)
    for micro in range(micros):
        with accumulation(model, last=micro == micros - 1):
            (loss_of(name, model, batch_of(name, rank, micro)) / micros).backward()
    found = whole_gradients(model)
    assert reducer is None or reducer.finish()
    return found, clip_grad_norm(model, 1e9), None if reducer is None else reducer.traffic


@pytest.mark.parametrize("name", ["odd", "gpt2"])
def test_gradients_equal_the_big_batch(world, name):
    for method, inside, micros in ((None, None, 1), ("none", None, 2), ("none", ("none", {}), 1)):
        exact = exact_gradients(name, range(4), tuple(range(micros)))
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in exact.values()))
        for found, its_norm, _ in world(4).run(gradients, name, 2, method, inside, micros):
            assert_near(found, exact)
            assert its_norm == pytest.approx(norm, rel=1e-5)


# --- bit for bit ---


class TwoLevels:
    """All ranks of one run: the protocol inside of every island, then that of every shard between the islands."""

    def __init__(self, number, ranks, between, inside, feedback=True):
        self.number, self.ranks, self.exact_inside = number, ranks, inside is None
        within = inside or ("none", {})
        cut = by_rows(SHAPES, ranks)
        self.inside = [Numbered(build(within[0], **within[1]), cut, SHAPES, ranks, feedback) for _ in range(number)]
        self.between, self.cut = [], cut
        for position in range(ranks):
            own = {name: [part for part in parts if part.row == position] for name, parts in cut.items()}
            shapes = {
                name: (parts[0].numel // math.prod(SHAPES[name][1:]), *SHAPES[name][1:])
                for name, parts in own.items()
                if parts
            }
            made = Numbered(build(between[0], **between[1]), by_rows(shapes, number), shapes, number, feedback)
            self.between.append(made)
        for island in range(number):
            self.inside[island].ranks_of = [island * ranks + position for position in range(ranks)]
        for position in range(ranks):
            self.between[position].ranks_of = [island * ranks + position for island in range(number)]

    def step(self, algorithm, gradients):
        """The mean of all ranks' gradients, flattened, by name."""
        of_islands = [
            protocol.reduce("exchange", "reduce_scatter", gradients[island * self.ranks :][: self.ranks])
            for island, protocol in enumerate(self.inside)
        ]
        means = {name: torch.zeros(math.prod(shape)) for name, shape in SHAPES.items()}
        for position, protocol in enumerate(self.between):
            parts = {name: [p for p in self.cut[name] if p.row == position][0] for name in protocol.shapes}
            shards = [{name: mean[name][p.at :][: p.numel] for name, p in parts.items()} for mean in of_islands]
            for name, mean in protocol.reduce(algorithm, "all_reduce", shards).items():
                means[name][parts[name].at :][: parts[name].numel] = mean
        return means


class Numbered(Protocol):
    """A protocol over some of the ranks, whose generators go by their numbers among all."""

    def __init__(self, compressor, cut, shapes, world, feedback):
        super().__init__(compressor, cut, shapes, world, SEED, feedback)
        self.ranks_of = []

    def generator(self, rank, phase, name):
        return super().generator(self.ranks_of[rank], phase, name)


def delivered(rank, world, group, number, cases, fault):
    """For each case: every step's whole gradients, flattened, and the traffic of both levels."""
    found = []
    for between, inside, algorithm in cases:
        options = {"algorithm": "exchange", "error_feedback": True, "seed": SEED}
        islands = broken(build_islands(number), fault)
        within = None if inside is None else Reducer(build(inside[0], **inside[1]), islands.inside, **options)
        options["algorithm"] = algorithm
        reducer = IslandReducer(build(between[0], **between[1]), islands, inside=within, **options)
        model = wrap(rough_model_of(), "hsdp", reducer, device="cpu")
        if fault == "divisor":
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(0.5)
        steps = []
        for step in range(STEPS):
            model.zero_grad()
            rough_loss_of(model, rank, step).backward()
            assert reducer.finish()
            steps.append({name: gradient.flatten() for name, gradient in whole_gradients(model).items()})
        found.append((steps, reducer.traffic))
    return found


def broken(islands, fault):
    """The islands with a fault of the caller."""
    if fault == "exchanged":
        rows = islands.mesh.mesh.T.contiguous()
        mesh = DeviceMesh.from_group(
            [islands.inside, islands.between], "cpu", mesh=rows, mesh_dim_names=("between", "inside")
        )
        islands.mesh, islands.number, islands.ranks = mesh, *rows.shape
        islands.inside, islands.between = islands.between, islands.inside
    if fault == "order":
        ranks = dist.get_process_group_ranks(islands.between)
        islands.between = dist.new_group(ranks[::-1], use_local_synchronization=True, sort_ranks=False)
    return islands


CASES = {
    "between": (("int8", STOCHASTIC), None, "exchange"),
    "both": (("topk", {"density": 0.2}), ("int8", STOCHASTIC), "exchange"),
    "one bit": (("onebit", {"block": 16}), ("none", {}), "gather"),
}


def compare(world, number, ranks, cases, fault=None):
    results = world(number * ranks).run(delivered, number, [CASES[case] for case in cases], fault)
    for case, *found in zip(cases, *results, strict=True):
        between, inside, algorithm = CASES[case]
        model = TwoLevels(number, ranks, between, inside)
        expected = [
            model.step(algorithm, [local_gradients(rank, step) for rank in range(number * ranks)])
            for step in range(STEPS)
        ]
        for steps, _ in found:
            for mine, means in zip(steps, expected, strict=True):
                assert mine.keys() == means.keys()
                for name, mean in means.items():
                    assert torch.equal(mine[name], mean), f"{case}: {name}"
        check_bytes(model, [traffic for _, traffic in found], inside)


def check_bytes(model, traffics, inside):
    """What ranks counted is what the simulation sent, on each level, and the closed form."""
    within = [traffic["inside"] for traffic in traffics if inside is not None]
    of_islands = sum(protocol.sent for protocol in model.inside) if inside is not None else 0
    total = of_islands + sum(protocol.sent for protocol in model.between)
    assert sum(traffic["sent"] for traffic in within) == of_islands
    assert sum(traffic["sent"] for traffic in traffics) == total


def test_two_islands_of_two_ranks(world):
    compare(world, 2, 2, [*CASES])
