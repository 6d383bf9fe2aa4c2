"""Every strategy with every compressor gives, bit for bit, what one process computes by the same protocol.

There are two families: under `naive`, `bucket` and `ddp` a mean is encoded again on its way back; under `fsdp1` and
`fsdp2` it stays with its owner. Error feedback is on, and every step has other gradients, so that residuals,
generators and states count. `make test` runs each case of the exchange and of native sums, and every second one that
gathers, under one of the ways, on two or three ranks; `make test-sweep` runs the full product.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import pytest
import torch
from protocols import Protocol, anywhere, by_rows
from test_frameworks import STOCHASTIC, small_first_bucket, whole_gradients
from torch import nn

from gradwire.comm.closed_forms import raw_bytes
from gradwire.comm.collectives import Reducer
from gradwire.comm.compressors import available, build
from gradwire.comm.parallel import strategy_class, wrap

STEPS, SEED = 3, 11
FALL_BACK = ("gradiveq", "powersgd", "sketch")  # send as float32 what they would not make shorter, such as a bias


class Rough(nn.Module):
    """Shapes that no number of ranks divides, fewer rows than ranks, and a layer whose every shard is some blocks long.

    Args:
        units: Whether the frameworks shall take each layer for a unit; the names are the same.
    """

    def __init__(self, units=True):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, 2, 2))
        layers = [nn.Linear(3, 1), nn.Linear(1, 47, bias=False), nn.Linear(47, 53)]
        self.layers = nn.ModuleList(layers) if units else nn.Sequential(*layers)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale.square().mean() + self.scale[0, 0, 0]).square()


SHAPES = {name: tuple(parameter.shape) for name, parameter in Rough().named_parameters()}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


class Way(NamedTuple):
    """A strategy, and how it puts parameters together."""

    strategy: str
    units: bool = True
    rebuilds: bool = False  # DDP has some buckets, and others after the first step
    options: tuple[tuple[str, float], ...] = ()

    @property
    def kind(self):
        return "reduce_scatter" if self.strategy.startswith("fsdp") else "all_reduce"

    @property
    def algorithms(self):
        return ALGORITHMS if self.kind == "all_reduce" else ("exchange", "native")

    def family(self, algorithm):
        """Settings that the result depends on, with the case and the number of ranks."""
        return (None, None) if algorithm == "native" else (self.kind, self.units if self.strategy == "fsdp1" else None)

    def cut(self, world):
        """The shards that it makes of the model."""
        if self.strategy != "fsdp1":
            return by_rows(SHAPES, world)
        layers = tuple(f"layers.{i}." for i in range(3)) if self.units else ()
        units = [{name: shape for name, shape in SHAPES.items() if name.startswith(layer)} for layer in layers]
        return anywhere([*units, {n: shape for n, shape in SHAPES.items() if not n.startswith(layers)}], world)


class Case(NamedTuple):
    """A compressor, and how it is used."""

    method: str
    options: dict
    algorithm: str
    feedback: bool = True


ALGORITHMS = ("exchange", "gather", "native")
STRATEGIES = {name: Way(name) for name in ("naive", "bucket", "ddp", "fsdp1", "fsdp2")}
OTHER_WAYS = {
    "bucket, one for each": Way("bucket", options=(("bucket_mb", 0),)),
    "ddp, rebuilt": Way("ddp", rebuilds=True),
    "fsdp1, one unit": Way("fsdp1", units=False),
    "fsdp2, one unit": Way("fsdp2", units=False),
}
WAYS = STRATEGIES | OTHER_WAYS
OPTIONS = {  # where the defaults would send next to nothing of such small tensors, or all of it
    "gradiveq": {"slice": 8, "components": 2, "window": 1, "refresh": 3},
    "powersgd": {"rank": 2},
    "randomk": {"density": 0.1},
    "sketch": {"width": 0.1, "density": 0.05},
    "topk": {"density": 0.1},
}
METHODS = [
    *((name, OPTIONS.get(name, {})) for name in available()),
    ("int8", STOCHASTIC),
    ("topk+int8", {"density": 0.05}),
    ("hadamard+int8", {"num_bits": 4, "block": 32}),
    ("randomk+qsgd", {"density": 0.2}),
    ("threshold+natural", {"threshold": 1.0}),
]
SUMMED = [("signsgd", {"scale": "none"}), *(method for method in METHODS if build(method[0], **method[1]).has_rounds)]
FORGETFUL = [("int8", STOCHASTIC), ("topk", {}), ("threshold", {})]
CASES = {
    f"{algorithm} {method} {options or ''}{'' if feedback else 'without feedback'}".strip(): Case(
        method, options, algorithm, feedback
    )
    for algorithm, methods, feedback in (
        ("exchange", METHODS, True),
        ("exchange", FORGETFUL, False),
        ("gather", METHODS, True),
        ("native", SUMMED, True),
    )
    for method, options in methods
}


def cases_of(way, algorithms=ALGORITHMS):
    """The names of all cases that a way can run."""
    return [
        name for name, case in CASES.items() if case.algorithm in WAYS[way].algorithms and case.algorithm in algorithms
    ]


def selection(size):
    """The tests of a number of ranks, as ``{way: [names]}``: the ways that can run a case take turns."""
    chosen = {way: [] for way in WAYS}
    for number, algorithm in enumerate(ALGORITHMS):
        able = [way for way in WAYS if algorithm in WAYS[way].algorithms]
        names = [name for name, case in CASES.items() if case.algorithm == algorithm]
        names = names[:: 2 if algorithm == "gather" else 1][(size + number) % 2 :: 2]
        for turn, name in enumerate(names, start=size):
            chosen[able[turn % len(able)]].append(name)
    return chosen


def model_of(units=True):
    torch.manual_seed(5)
    return Rough(units)


def loss_of(model, rank, step):
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))).mean()


@cache
def local_gradients(rank, step):
    """One rank's own, without any strategy."""
    model = model_of()
    loss_of(model, rank, step).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def delivered(rank, world, group, way, names):
    """For each case: every step's gradients as the wrapped model holds them, flattened, and the traffic."""
    found = []
    for case in map(CASES.get, names):
        options = {"algorithm": case.algorithm, "error_feedback": case.feedback, "seed": SEED}
        reducer = Reducer(build(case.method, **case.options), group, **options)
        with small_first_bucket() if way.rebuilds else nullcontext():
            model = wrap(model_of(way.units), way.strategy, reducer, device="cpu", **dict(way.options))
        steps = []
        for step in range(STEPS):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            assert reducer.finish()
            steps.append({name: gradient.flatten() for name, gradient in whole_gradients(model).items()})
        found.append((steps, reducer.traffic))
    return found


def simulated(rank, world, group, way, names, size):
    """For each of this process's cases: every step's means and largest magnitudes; bytes as counted and as expected."""
    found = {}
    for name in names[rank::world]:
        case = CASES[name]
        ranks = Protocol(build(case.method, **case.options), way.cut(size), SHAPES, size, SEED, case.feedback)
        steps = []
        for step in range(STEPS):
            means = ranks.reduce(case.algorithm, way.kind, [local_gradients(r, step) for r in range(size)])
            steps.append((means, dict(ranks.largest)))
        found[name] = steps, ranks.sent, ranks.expected
    return found


SIMULATIONS = {}


def simulations(world, way, names, size):
    """`simulated`, once for all ways that agree on how the parameters are cut."""
    keys = {name: (name, size, *way.family(CASES[name].algorithm)) for name in names}
    missing = [name for name in names if keys[name] not in SIMULATIONS]
    for share in world(2).run(simulated, way, missing, size) if missing else ():
        SIMULATIONS.update({keys[name]: found for name, found in share.items()})
    return [SIMULATIONS[keys[name]] for name in names]


def batches(names):
    """A few at a time: a `run` of the pool has its time limit."""
    return [names[at : at + 6] for at in range(0, len(names), 6)]


def compare(world, way, names, size):
    """Run some cases on real ranks and in one process, and compare gradients and bytes."""
    results = [[] for _ in range(size)]
    for some in batches(names):
        for mine, found in zip(results, world(size).run(delivered, WAYS[way], some), strict=True):
            mine += found
    models = simulations(world, WAYS[way], names, size)
    for name, *ranks, (steps, sent, expected) in zip(names, *results, models, strict=True):
        for found, _ in ranks:
            for mine, first, (means, largest) in zip(found, ranks[0][0], steps, strict=True):
                assert mine.keys() == means.keys()
                for parameter, mean in means.items():
                    where = f"{name}: {parameter}"
                    assert torch.equal(mine[parameter], first[parameter]), f"{where} differs by rank"
                    assert_alike(CASES[name], size, mine[parameter], mean, largest.get(parameter), where)
        check_bytes(CASES[name], WAYS[way].strategy, [traffic for _, traffic in ranks], sent, expected)


EXACT = ("int8", "signsgd")  # whole numbers are added up, or nothing is
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8}
AMPLIFIED = {"powersgd": 100, "gradiveq": 100}  # a decomposition follows on the sum; measured, not derived


def assert_alike(case, size, found, mean, largest, where):
    """The same bits; of native sums of three and more, up to what the order of summation leaves open.

    Two orders of adding W numbers of a magnitude up to m differ by at most ``2 (W - 1) u W m``, u the unit roundoff of
    the type that is added in; the means by a W-th of that and the two divisions' ``2 u m``.
    """
    if case.algorithm != "native" or size == 2 or case.method in EXACT:
        assert torch.equal(found, mean), where
    else:
        allowed = 2 * size * ROUNDOFF.get(case.method, 2.0**-24) * AMPLIFIED.get(case.method, 1) * largest
        assert (found - mean).abs().max() <= allowed, where


def check_bytes(case, strategy, traffics, sent, expected):
    """The ranks' counts are the simulation's, and both are the closed form."""
    total, raw = (sum(traffic[key] for traffic in traffics) for key in ("sent", "raw"))
    forms = [traffic.details["closed_form"] for traffic in traffics]
    assert None in forms or sum(forms) == total, case
    if case.algorithm != "native":  # of native sums `Protocol` does not know how they travel
        assert total == sent and forms == ([None] * len(forms) if expected is None else [t["sent"] for t in traffics])
        assert None in forms or sum(forms) == expected, case
    for traffic in traffics:
        assert (traffic.details["fallbacks"] > 0) == (case.method in FALL_BACK), case
        assert traffic.details["exempt_elements"] == 0, case
        if case.algorithm != "native":
            assert (traffic.details["index"] > 0) == case.method.startswith(
                ("topk", "chunktopk", "dcttopk", "threshold", "randomk")
            ), case
    if case.method == "none" and case.algorithm == "exchange":
        assert total == raw == STEPS * raw_bytes(strategy_class(strategy).kind, NUMEL, len(traffics))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_selection(world, way, size):
    compare(world, way, selection(size)[way], size)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("way", "algorithm"), [(way, algorithm) for way in WAYS for algorithm in WAYS[way].algorithms])
def test_every_case_under_every_way(world, way, size, algorithm):
    compare(world, way, cases_of(way, [algorithm]), size)


def many_steps(rank, world, group, strategy, names, steps):
    """For each case, a hash of the parameters after training."""
    found = []
    for case in map(CASES.get, names):
        options = {"algorithm": case.algorithm, "error_feedback": case.feedback}
        reducer = Reducer(build(case.method, **case.options), group, **options)
        torch.manual_seed(rank)  # `wrap` gives all ranks the same
        model = wrap(nn.Sequential(nn.Linear(3, 41, bias=False), nn.Softplus()), strategy, reducer, device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert reducer.finish()
            optimizer.step()
        numbers = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        assert numbers.isfinite().all()
        found.append(hashlib.sha256(numbers.numpy().tobytes()).hexdigest())
    return found


def replicas_stay_equal(world, size, strategy, names, steps=50):
    for some in batches(names):
        for name, *hashes in zip(some, *world(size).run(many_steps, strategy, some, steps), strict=True):
            assert len(set(hashes)) == 1, name


REPLICAS = ("naive", "bucket", "ddp")


def test_replicas_are_bit_equal_after_many_steps(world):
    """A third of the compressors by one of their algorithms; on three ranks some of them."""
    by_method = {}
    for name, case in CASES.items():
        by_method.setdefault((case.method, str(case.options)), []).append(name)
    chosen = [names[turn % len(names)] for turn, names in enumerate(by_method.values())][2::3]
    replicas_stay_equal(world, 2, "ddp", chosen, 15)
    replicas_stay_equal(world, 3, "ddp", chosen[::4], 15)


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", REPLICAS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replicas_are_bit_equal_after_fifty_steps_everywhere(world, strategy, size, algorithm):
    replicas_stay_equal(world, size, strategy, cases_of(strategy, [algorithm]))
