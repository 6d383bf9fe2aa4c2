"""Islands: sharded inside, reduced between. Against one process in float64, and bit for bit against a simulation.

Of `collectives/islands.py`, `comm/topology.py`, `strategies/hsdp.py`.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from diagonals import chosen
from protocols import Protocol, by_rows
from test_frameworks import STOCHASTIC, assert_near, batch_of, exact_gradients, loss_of, model_of, whole_gradients
from test_protocols import SHAPES, local_gradients
from test_protocols import loss_of as rough_loss_of
from test_protocols import model_of as rough_model_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Islands, Reducer, build_islands
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, clip_grad_norm, full_state_dict, hook, optimizers, wrap

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


@pytest.mark.parametrize(
    ("name", "method", "inside", "micros"),
    [
        ("odd", None, None, 1),
        ("odd", "none", None, 2),
        ("gpt2", "none", ("none", {}), 1),
        pytest.param("gpt2", None, None, 1, marks=pytest.mark.sweep),
        pytest.param("gpt2", "none", None, 2, marks=pytest.mark.sweep),
        pytest.param("odd", "none", ("none", {}), 1, marks=pytest.mark.sweep),
    ],
)
def test_gradients_equal_the_big_batch(world, name, method, inside, micros):
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
            parts = {name: next(p for p in self.cut[name] if p.row == position) for name in protocol.shapes}
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


def delivered(rank, world, group, number, cases):
    """For each case: every step's whole gradients, flattened, and the traffic of both levels."""
    found = []
    for between, inside, algorithm in cases:
        options = {"algorithm": "exchange", "error_feedback": True, "seed": SEED}
        islands = build_islands(number)
        within = None if inside is None else Reducer(build(inside[0], **inside[1]), islands.inside, **options)
        options["algorithm"] = algorithm
        reducer = IslandReducer(build(between[0], **between[1]), islands, inside=within, **options)
        model = wrap(rough_model_of(), "hsdp", reducer, device="cpu")
        steps = []
        for step in range(STEPS):
            model.zero_grad()
            rough_loss_of(model, rank, step).backward()
            assert reducer.finish()
            steps.append({name: gradient.flatten() for name, gradient in whole_gradients(model).items()})
        found.append((steps, reducer.traffic))
    return found


CASES = {
    "between": (("int8", STOCHASTIC), None, "exchange"),
    "both": (("topk", {"density": 0.2}), ("int8", STOCHASTIC), "exchange"),
    "one bit": (("onebit", {"block": 16}), ("none", {}), "gather"),
}


def compare(world, number, ranks, cases):
    results = world(number * ranks).run(delivered, number, [CASES[case] for case in cases])
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
    """The ranks' counts are those of the simulation, on each level, and the closed form."""
    within = [traffic.details["inside"] for traffic in traffics if inside is not None]
    of_islands = sum(protocol.sent for protocol in model.inside) if inside is not None else 0
    total = of_islands + sum(protocol.sent for protocol in model.between)
    assert sum(traffic["sent"] for traffic in within) == of_islands
    assert sum(traffic["sent"] for traffic in traffics) == total


def test_two_islands_of_two_ranks(world):
    compare(world, 2, 2, [*CASES])


@pytest.mark.sweep
@pytest.mark.parametrize(("number", "ranks"), [(2, 3), (3, 2)])
def test_six_ranks(world, number, ranks):
    """Three ranks add up in the order of the protocol in our own exchange only, not in gloo's reduce-scatter."""
    compare(world, number, ranks, ["both", "one bit"])


# --- optimizers between islands ---


ALONE = {
    "onebit_adam": ({"dense_steps": 2}, {}),
    "diloco": ({}, {"H": 3, "outer_lr": 0.8, "outer_momentum": 0.5, "steps": 6}),
    "sparseloco": ({}, {"H": 3, "steps": 6}),
    "streaming": ({}, {"H": 4, "outer_lr": 0.8, "streaming": {"fragments": 2, "delay": 1}, "steps": 6}),
    "demo": ({}, {}),
}


def apart(rank, world, group, number, name):
    """Weights and norms of six steps with an optimizer that communicates; ``number`` replicas or islands."""
    reduction, options = ALONE[name]
    reduction = {**reduction, "algorithm": "exchange"}
    sharded = number < world
    if sharded:
        reducer = IslandReducer(build("none"), build_islands(number), **reduction)
    else:
        reducer = Reducer(build("none"), group, **reduction)
    model = wrap(model_of("odd"), "hsdp" if sharded else "ddp", reducer, device="cpu", average=False)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    optimizer = optimizers.build("diloco" if name == "streaming" else name, model, groups, reducer, lr=1e-2, **options)
    norms = []
    for step in range(6):
        optimizer.zero_grad()
        mine = [2 * rank, 2 * rank + 1] if not sharded else [rank]
        for micro, source in enumerate(mine):
            with accumulation(model, last=micro + 1 == len(mine)):
                (loss_of("odd", model, batch_of("odd", source, step)) / len(mine)).backward()
        norm, taken = optimizer.communicate(max_norm=0.05)
        norms.append(norm)
        assert taken
        optimizer.step()
        with optimizer.synchronized(), torch.no_grad():
            loss_of("odd", model.eval(), batch_of("odd", 0))  # an evaluation keeps the root's weights gathered
            model.train()
    whole = full_state_dict(model)
    return {name.removeprefix("module."): value for name, value in whole.items()}, norms


@pytest.mark.parametrize("name", chosen(["onebit_adam", "diloco"], ALONE))
def test_an_island_of_two_ranks_is_a_replica_with_twice_the_batch(world, name):
    expected, its_norms = world(2).run(apart, 2, name)[0]
    found = world(4).run(apart, 2, name)
    for _, norms in found:
        assert norms == pytest.approx(its_norms, rel=1e-4)
    for key, value in expected.items():
        torch.testing.assert_close(found[0][0][key], value, rtol=1e-4, atol=1e-5)


COMPRESSED = {  # a method, the reducer's options, and the optimizer's
    "sparseloco": (
        "chunktopk+bins",
        {"chunktopk.k": 4, "chunk": 8},
        {"ef_decay": 0.95, "algorithm": "gather"},
        {"H": 2},
    ),
    "demo": ("dcttopk", {"k": 3, "tile": 4}, {"ef_decay": 0.999, "algorithm": "gather"}, {}),
    "streaming": ("onebit", {"block": 16}, {}, {"H": 4, "streaming": {"fragments": 2, "delay": 1}, "steps": 8}),
}


def reductions(rank, world, group, name):
    """The input and the result of each reduction between two islands, by parameter; weights at the end."""
    method, own, reduction, options = COMPRESSED[name]
    reduction = {"error_feedback": True, "algorithm": "exchange", "seed": SEED, **reduction}
    reducer = IslandReducer(build(method, **own), build_islands(2), **reduction)
    model = wrap(model_of("odd"), "hsdp", reducer, device="cpu", average=False)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    optimizer = optimizers.build("diloco" if name == "streaming" else name, model, groups, reducer, lr=1e-2, **options)
    with reducer.keeping() as kept:
        for step in range(8):
            optimizer.zero_grad()
            loss_of("odd", model, batch_of("odd", rank, step)).backward()
            assert optimizer.communicate(max_norm=0.5)[1]
            optimizer.step()
    return [(by_name(one.layout, one.flat), by_name(one.layout, one.mean)) for one in kept], full_state_dict(model)


def by_name(layout, flat):
    """The parameters in a buffer."""
    found = {name: torch.empty(sum(p.numel for p in layout.shards if p.name == name)) for name in layout.parameters}
    layout.unpack(flat, found)
    return found


@pytest.mark.parametrize("name", chosen(["sparseloco"], COMPRESSED))
def test_what_optimizers_send_between_islands_is_its_protocol_in_one_process(world, name):
    """Shards of momenta or pseudo-gradients, each with its residual, decayed, in every fragment."""
    method, own, reduction, _ = COMPRESSED[name]
    results = world(4).run(reductions, name)
    cut = by_rows({name: tuple(p.shape) for name, p in model_of("odd").named_parameters()}, 2)
    whole = {name: tuple(p.shape) for name, p in model_of("odd").named_parameters()}
    for position in range(2):
        first, second = results[position][0], results[2 + position][0]
        assert len(first) == len(second) > 3
        shapes = {
            name: (part.numel // math.prod(whole[name][1:]), *whole[name][1:])
            for name, parts in cut.items()
            for part in parts
            if part.row == position
        }
        protocol = Numbered(build(method, **own), by_rows(shapes, 2), shapes, 2, True)
        protocol.decay, protocol.ranks_of = reduction.get("ef_decay", 1.0), [position, 2 + position]
        for (given, delivered), (others, its) in zip(first, second, strict=True):
            protocol.shapes = {name: shapes[name] for name in given}
            means = protocol.reduce(reduction.get("algorithm", "exchange"), "all_reduce", [given, others])
            for key, mean in means.items():
                assert torch.equal(delivered[key], mean) and torch.equal(its[key], mean), key
    assert any(p.abs().sum() > 0 for p in results[0][1].values())


OPTIONS = {"dense_steps": 1, "exempt": {"names": ("*.bias", "scale")}, "algorithm": "exchange"}


def optioned(rank, world, group):
    """Whole gradients of four steps, with dense steps, exemptions and a schedule; and what was exempt or encoded."""
    reducer = IslandReducer(
        build("onebit", block=16),
        build_islands(2),
        schedule={"block": {0: 16, 3: 8}},
        error_feedback=True,
        **OPTIONS,
    )
    model = wrap(rough_model_of(), "hsdp", reducer, device="cpu")
    steps = []
    for step in range(4):
        model.zero_grad()
        rough_loss_of(model, rank, step).backward()
        assert reducer.finish()
        steps.append({name: gradient.flatten() for name, gradient in whole_gradients(model).items()})
    return steps, {key: reducer.traffic.details[f"{key}_elements"] for key in ("exempt", "encoded")}


def test_schedules_dense_steps_and_exemptions_hold_between_islands(world):
    """Step 0 is dense, and from step 3 on blocks have 8 elements; residuals stay."""
    plain, coded = (TwoLevels(2, 2, method, None) for method in (("none", {}), ("onebit", {"block": 16})))
    results = world(4).run(optioned)
    for step in range(4):
        gradients = [local_gradients(rank, step) for rank in range(4)]
        exact = plain.step("exchange", gradients)
        if step == 3:
            for protocol in coded.between:
                protocol.compressor = build("onebit", block=8)
        means = coded.step("exchange", gradients) if step else exact
        for steps, _ in results:
            for name, found in steps[step].items():
                is_exempt = name.endswith(".bias") or name == "scale"
                assert torch.equal(found, exact[name] if is_exempt else means[name]), (step, name)
    for _, counted in results:
        assert counted["exempt"] > 0 and counted["encoded"] > 0


# --- what is refused, and what is not summed twice ---


def refusals(rank, world, group):
    """The message of everything that is refused."""
    islands = build_islands(2)
    reducer = IslandReducer(build("int8"), islands)
    plain = Reducer(build("int8"), group)
    sharded = model_of("even")
    fully_shard(sharded, mesh=islands.mesh["inside"])
    other = DeviceMesh.from_group(
        [islands.between, islands.inside], "cpu", mesh=islands.mesh.mesh, mesh_dim_names=("replicate", "shard")
    )
    calls = {
        "a plain reducer": lambda: wrap(model_of("even"), "hsdp", plain, device="cpu"),
        "another strategy": lambda: wrap(model_of("even"), "ddp", reducer, device="cpu"),
        "no islands": lambda: wrap(model_of("even"), "hsdp", device="cpu"),
        "one island": lambda: build_islands(1),
        "three islands": lambda: build_islands(3),
        "other names": lambda: Islands(other),
        "other islands": lambda: wrap(model_of("even"), "hsdp", reducer, device="cpu", islands=3),
        "another group inside": lambda: IslandReducer(build("int8"), islands, inside=plain),
        "an island alone": lambda: hook(sharded, plain),
        "flat shards": lambda: wrap(model_of("even"), "fsdp2", plain, device="cpu", average=False),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(BadInput) as refusal:
            call()
        found[name] = str(refusal.value)
    return found


def test_bad_input_is_one_message(world):
    expected = {
        "a plain reducer": "needs an IslandReducer",
        "another strategy": "use strategy hsdp",
        "no islands": "islands is 0: strategy hsdp, or a link between islands, needs at least 2",
        "one island": "for a single island use fsdp2",
        "three islands": "3 islands do not divide 4 ranks evenly: take a world size that is a multiple of 3",
        "other names": "('between', 'inside'), not ('replicate', 'shard')",
        "other islands": "the reducer has 2 islands, but islands is 3",
        "another group inside": "needs the group Islands.inside",
        "an island alone": "over ranks [0, 1], and the reducer over [0, 1, 2, 3]: use gradwire.compress_gradients",
        "flat shards": "use one with replicas, or hsdp",
    }
    first = world(4).run(refusals)[0]
    assert first.keys() == expected.keys()
    for name, part in expected.items():
        assert part in first[name], name


def single_ranks(rank, world, group):
    """Gradients with islands of one rank, the wrapper, and the warnings."""
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        reducer = IslandReducer(build("int8"), build_islands(2), algorithm="exchange")
        model = wrap(model_of("odd"), "hsdp", reducer, device="cpu", param_compress="int8", reshard_after_forward=False)
        with pytest.raises(BadInput, match="param_compress"):
            wrap(model_of("odd"), "hsdp", reducer, device="cpu", param_compres="int8")
    loss_of("odd", model, batch_of("odd", rank)).backward()
    assert reducer.finish()
    mine, flat = whole_gradients(model), Reducer(build("int8"), group, algorithm="exchange")
    plain = wrap(model_of("odd"), "ddp", flat, device="cpu")
    loss_of("odd", plain, batch_of("odd", rank)).backward()
    same = all(torch.equal(mine[name], gradient) for name, gradient in whole_gradients(plain).items())
    return same, type(model).__name__, [str(note.message) for note in noted]


def test_one_rank_per_island_is_ddp(world):
    for same, kind, notes in world(2).run(single_ranks):
        assert same
        assert kind == "DistributedDataParallel"
        dropped = "param_compress, reshard_after_forward"
        assert f"2 islands of one rank each have nothing to shard: using strategy ddp without {dropped}" in notes


def spoiled(rank, world, group):
    """Whether each of three steps is taken, where one rank's gradient is not finite in the second."""
    islands = build_islands(2)
    inside = Reducer(build("int8"), islands.inside, nonfinite="skip")
    reducer = IslandReducer(build("int8"), islands, inside=inside, nonfinite="skip", error_feedback=True)
    model = wrap(model_of("odd"), "hsdp", reducer, device="cpu")
    taken = []
    for step in range(3):
        model.zero_grad()
        loss = loss_of("odd", model, batch_of("odd", rank, step))
        (loss * (float("nan") if (step, rank) == (1, 3) else 1.0)).backward()
        total = torch.full((1,), 1.0 + rank)
        taken.append((reducer.finish(total), float(total)))
    return taken, inside.step, reducer.codec.residual_norm


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_islands(world):
    for taken, steps, norm in world(4).run(spoiled):
        assert taken == [(True, 10.0), (False, 10.0), (True, 10.0)]
        assert steps == 3
        assert math.isfinite(norm)


def moved(rank, world, group):
    """Steps, residuals and warnings after states went to other topologies."""
    islands = build_islands(2)

    def new(flat=False):
        made = {"error_feedback": True, "algorithm": "exchange"}
        if flat:
            return Reducer(build("int8"), group, **made)
        return IslandReducer(build("int8"), islands, inside=Reducer(build("int8"), islands.inside, **made), **made)

    first = new()
    model = wrap(model_of("odd"), "hsdp", first, device="cpu")
    loss_of("odd", model, batch_of("odd", rank)).backward()
    assert first.finish()
    state, found = first.state_dict(), []
    alike, flat, back = new(), new(flat=True), new()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        alike.load_state_dict(state)
        flat.load_state_dict(state)
        back.load_state_dict(flat.state_dict())
    for reducer in (alike, flat, back):
        found.append((reducer.step, len(reducer.codec.state_dict()["residuals"])))
    return found, [str(note.message) for note in noted], back.inside.step


def test_a_state_of_another_topology_leaves_the_step_only(world):
    for (alike, flat, back), notes, inside in world(4).run(moved):
        assert alike[0] == flat[0] == back[0] == inside == 1
        assert alike[1] > 0 == flat[1] == back[1]
        assert len(notes) == 2
        assert "of 2 x 2 ranks and this run has 4: residuals" in notes[0]
        assert "of 4 ranks and this run has 2 x 2: residuals" in notes[1]
