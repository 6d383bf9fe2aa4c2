"""Local updates against their protocol in one process, bit for bit, and against plain optimizers where they meet.

Of `diloco.py`, `streaming.py`.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from diagonals import diagonals, swept
from protocols import Protocol, by_rows
from test_optimizers import BETAS, CLIP, DECAY, RATES, REPLICAS, Held, assert_same, groups_of, whole

from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.bench.config import Cell
from gradwire.comm.collectives import Reducer
from gradwire.comm.communication import preset
from gradwire.comm.compressors import build
from gradwire.comm.parallel import accumulation, named_parameters, optimizers, wrap
from gradwire.comm.parallel.optimizers.diloco import DiLoCo, Rounds
from gradwire.comm.parallel.optimizers.quorum import ATTEMPTS, Quorum
from gradwire.comm.parallel.verify import SyncCheck, first_difference

STEPS = 8
LONE = {"outer_lr": 1.0, "outer_momentum": 0.0}  # the outer step moves to the mean


class Blocks(Held):
    """The same with blocks, whose matrices Muon would update: a tall one, a wide one."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 7), torch.nn.Linear(7, 3)])


def held():
    torch.manual_seed(3)
    return Blocks()


def gradients_of(rank, step):
    """Each rank's own, of very different sizes."""
    generator = torch.Generator().manual_seed(1000 * rank + step + 1)
    named = enumerate(held().named_parameters())
    return {name: (torch.randn(p.shape, generator=generator) + 0.3) * 0.2 ** (i % 3) for i, (name, p) in named}


def backward(model, rank, step):
    with accumulation(model, last=True):
        model(gradients_of(rank, step)).backward()


def set_rates(optimizer, step):
    """Vectors have a rate of their own."""
    for group in optimizer.param_groups:
        group["lr"] = RATES[step] * (1 if group["weight_decay"] else 2)


def started(group, name, strategy, method, cell, options):
    cell = dict(cell)
    reducer = Reducer(build(method, **cell.pop("method", {})), group, seed=4, **cell)
    model = wrap(held(), strategy, reducer, device="cpu", average=False)
    settings = {"lr": 1.0, "betas": BETAS, "steps": STEPS, **options}
    return reducer, model, optimizers.build(name, model, groups_of(model), reducer, **settings)


def trained(rank, world, group, name, strategy, method, cell, options, clip=CLIP, fault=None):
    """After each step: parameters, norm, bytes sent, what differs between the ranks, and whether the step was taken."""
    reducer, model, optimizer = started(group, name, strategy, method, cell, options)
    found = []
    for step in range(STEPS):
        set_rates(optimizer, step)
        backward(model, rank, step)
        if fault == (rank, step):
            next(p for n, p in named_parameters(model) if n == "bias").grad[2] = float("nan")
        elif callable(fault):
            fault(optimizer, rank, step)
        norm, taken = optimizer.communicate(clip)
        if taken:
            optimizer.step()
        optimizer.zero_grad()
        found.append(
            (
                whole(model),
                norm,
                reducer.traffic["sent"],
                first_difference(model, optimizer, drifting=not optimizer.in_step),
                taken,
            )
        )
    return found, reducer.traffic


def inners(name, model):
    """Torch's own optimizers; each has the matrices in its first group and the rest in its second."""
    groups = groups_of(model)
    if name == "sgd":
        return [torch.optim.SGD(groups)]
    hidden = {p for p in model.blocks.parameters() if p.ndim == 2} if name == "muon" else set()
    matrices = [p for p in groups[0]["params"] if p in hidden]
    groups[0]["params"] = [p for p in groups[0]["params"] if p not in hidden]
    adamw = torch.optim.AdamW(groups, betas=BETAS)
    if name == "adamw":
        return [adamw]
    return [adamw, torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")]


class Simulated:
    """All ranks of a run in one process: torch's own AdamW or SGD on every rank, torch's SGD outside."""

    def __init__(self, world, method, cell, H, outer_lr, outer_momentum, inner="adamw", nesterov=True):
        self.world, self.H = world, H
        self.models = [held() for _ in range(world)]
        self.shapes = {n: tuple(p.shape) for n, p in self.models[0].named_parameters() if p.requires_grad}
        self.inner = [inners(inner, model) for model in self.models]
        self.anchors = {n: torch.nn.Parameter(p.detach().clone()) for n, p in self.parameters(0).items()}
        momentum = {"momentum": outer_momentum, "nesterov": nesterov} if outer_momentum else {}
        self.outer = torch.optim.SGD(self.anchors.values(), lr=outer_lr, **momentum)
        self.algorithm = cell.get("algorithm", "exchange")
        feedback = cell.get("error_feedback", False)
        compressor = build(method, **cell.get("method", {}))
        decay = cell.get("ef_decay", 1.0)
        self.protocol = Protocol(compressor, by_rows(self.shapes, world), self.shapes, world, 4, feedback, decay)
        self.rounds = 0

    def parameters(self, rank):
        return {n: p for n, p in self.models[rank].named_parameters() if p.requires_grad}

    def step(self, step, clip):
        """Take a step; the norm."""
        norms = []
        for rank in range(self.world):
            gradients = {n: gradients_of(rank, step)[n] for n in self.shapes}
            squares = (
                torch.stack([torch.zeros(()), *map(torch.linalg.vector_norm, gradients.values())]).double().square()
            )
            norms.append(float(squares.sum().sqrt()))
            for name, p in self.parameters(rank).items():
                p.grad = gradients[name] * (clip / norms[-1]) if norms[-1] > clip else gradients[name]
            for optimizer in self.inner[rank]:
                set_rates(optimizer, step)
                optimizer.step()
        with torch.no_grad():
            self.close_step(step)
        return math.sqrt(sum(norm**2 for norm in norms) / self.world)

    def close_step(self, step):
        if (step + 1) % self.H == 0 or step + 1 == STEPS:
            self.receive(list(self.shapes), self.means(list(self.shapes)), 0.0)
            self.rounds += 1

    def means(self, names):
        """The mean of some parameters' pseudo-gradients, as all ranks decode it."""
        ranks = range(self.world)
        deltas = [{n: p.detach() for n, p in self.parameters(rank).items() if n in names} for rank in ranks]
        deltas = [{n: self.anchors[n] - p for n, p in mine.items()} for mine in deltas]
        self.protocol.shapes = {n: self.shapes[n] for n in names}
        return self.protocol.reduce(self.algorithm, "all_reduce", deltas)

    def receive(self, names, means, alpha):
        """Take the outer step with some parameters, and mix them with the ranks' own."""
        for name, anchor in self.anchors.items():
            anchor.grad = means[name].view(anchor.shape) if name in names else None
        self.outer.step()
        for rank in range(self.world):
            for name, p in self.parameters(rank).items():
                if name in names:
                    p.copy_(torch.lerp(p, self.anchors[name], 1 - alpha) if alpha else self.anchors[name])


def simulated(size, method, cell, options, clip=CLIP):
    """The parameters on every rank and the norm, after each step, and the bytes of all ranks."""
    run, found = (Streamed if "streaming" in options else Simulated)(size, method, cell, **options), []
    for step in range(STEPS):
        norm = run.step(step, clip)
        found.append(([{n: p.detach().clone() for n, p in run.parameters(r).items()} for r in range(size)], norm))
    return found, run.protocol.sent


ONEBIT = {"method": {"block": 16}, "error_feedback": True, "algorithm": "exchange"}
CASES = [
    ("none", {"algorithm": "exchange"}, {"H": 3, "outer_lr": 0.7, "outer_momentum": 0.6}),
    ("onebit", ONEBIT, {"H": 2, "outer_lr": 0.7, "outer_momentum": 0.9}),
    ("onebit", {**ONEBIT, "ef_decay": 0.9, "algorithm": "gather"}, {"H": 3, **LONE}),
    ("onebit", ONEBIT, {"H": 2, **LONE, "inner": "muon"}),
    ("int8", {**ONEBIT, "method": {"num_bits": 4, "block": 64}, "algorithm": "gather"}, {"H": 5, **LONE}),
    ("topk", {"method": {"density": 0.3}, "error_feedback": True, "algorithm": "gather"}, {"H": 1, **LONE}),
    ("onebit", {**ONEBIT, "error_feedback": False}, {"H": 4, **LONE, "inner": "sgd"}),
]
PRESETS = {  # what the papers' defaults are
    "sparseloco": {"H": 30, **LONE},
    "muloco": {"H": 30, "outer_lr": 0.7, "outer_momentum": 0.6, "inner": "muon"},
    "diloco": {"H": 500, "outer_lr": 0.7, "outer_momentum": 0.9},
}


class Streamed(Simulated):
    """The same with fragments: what is sent is received some steps later, and mixed."""

    def __init__(self, world, method, cell, H, streaming, **more):
        super().__init__(world, method, cell, H, **more)
        self.delay, self.alpha = streaming["delay"], streaming["alpha"]
        first = ["cube", "rows.weight", "blocks.0.weight", "blocks.0.bias"]
        self.fragments = {
            1: [list(self.shapes)],
            2: [first, [name for name in self.shapes if name not in first]],
        }[streaming["fragments"]]
        self.arriving = {}  # by step: the fragment and its means

    def close_step(self, step):
        last = step + 1 == STEPS
        for number, names in enumerate(self.fragments):
            if (step + 1 - (number + 1) * self.H // len(self.fragments)) % self.H == 0 and not last:
                self.arriving[step + self.delay] = names, self.means(names)
        for due in sorted(self.arriving):
            if due == step or last:
                self.receive(*self.arriving.pop(due), self.alpha)
        if last:
            self.receive(list(self.shapes), self.means(list(self.shapes)), 0.0)


def trainable(parameters):
    return {name: value for name, value in parameters.items() if name != "still"}


def in_step(step, H):
    return (step + 1) % H == 0 or step + 1 == STEPS


@pytest.mark.parametrize(("case", "strategy", "size"), diagonals(CASES, REPLICAS, [2, 3]), ids=str)
def test_diloco_is_its_protocol_in_one_process(world, case, strategy, size):
    method, cell, options = case
    results = world(size).run(trained, "diloco", strategy, method, cell, options)
    expected, bytes_sent = simulated(size, method, cell, options)
    for rank, (found, _) in enumerate(results):
        for step, (parameters, norm, sent, difference, _) in enumerate(found):
            assert_same(trainable(parameters), expected[step][0][rank])
            assert norm == pytest.approx(expected[step][1], rel=1e-6)
            assert difference is None, "anchors are equal on all ranks, and parameters at the end of a round"
            assert (sent > (found[step - 1][2] if step else 0)) == in_step(step, options["H"])
    assert not torch.equal(results[0][0][0][0]["bias"], results[1][0][0][0]["bias"]) or options["H"] == 1
    sent = sum(traffic["sent"] for _, traffic in results)
    assert [traffic.details["closed_form"] for _, traffic in results] == [traffic["sent"] for _, traffic in results]
    assert sent == bytes_sent
    numel = sum(p.numel() for p in held().parameters() if p.requires_grad)
    assert {traffic.details["elements"] for _, traffic in results} == {STEPS * numel}, "raw counts every step"


STREAMS = [
    ({"fragments": 2, "delay": 1, "alpha": 0.5}, {"H": 4, **LONE}, ONEBIT),
    ({"fragments": 2, "delay": 2, "alpha": 0.25}, {"H": 6, "outer_lr": 0.7, "outer_momentum": 0.5}, ONEBIT),
    ({"fragments": 2, "delay": 0, "alpha": 0.0}, {"H": 3, **LONE}, {**ONEBIT, "algorithm": "gather"}),
    ({"fragments": 1, "delay": 2, "alpha": 0.5}, {"H": 3, **LONE}, {**ONEBIT, "overlap": False}),
]


@pytest.mark.parametrize(("case", "strategy", "size"), diagonals(STREAMS, REPLICAS, [2, 3]), ids=str)
def test_streaming_is_its_protocol_in_one_process(world, case, strategy, size):
    streaming, options, cell = case
    options = {**options, "streaming": streaming}
    results = world(size).run(trained, "diloco", strategy, "onebit", cell, options)
    expected, bytes_sent = simulated(size, "onebit", cell, options)
    for rank, (found, _) in enumerate(results):
        for step, (parameters, _, _, difference, _) in enumerate(found):
            assert_same(trainable(parameters), expected[step][0][rank])
            assert difference is None, "anchors are equal on all ranks"
        assert_same(found[-1][0], results[0][0][-1][0])
    sent = sum(traffic["sent"] for _, traffic in results)
    assert [traffic.details["closed_form"] for _, traffic in results] == [traffic["sent"] for _, traffic in results]
    assert sent == bytes_sent
    numel = sum(p.numel() for p in held().parameters() if p.requires_grad)
    assert {traffic.details["elements"] for _, traffic in results} == {STEPS * numel}, "raw counts every step"


@pytest.mark.parametrize("step", [4, 5])
def test_streaming_skips_a_step_that_is_not_finite(world, step):
    """Step 4 receives the first fragment, which is dropped; step 5 sends the second."""
    cell, options = {**ONEBIT, "nonfinite": "skip"}, {"H": 6, **LONE, "streaming": STREAMS[1][0]}
    for found, traffic in world(2).run(trained, "diloco", "ddp", "onebit", cell, options, CLIP, (1, step)):
        assert [taken for *_, taken in found] == [at != step for at in range(STEPS)]
        assert [difference for _, _, _, difference, _ in found] == [None] * STEPS
        assert traffic.details["nonfinite_steps"] == 1
        assert all(value.isfinite().all() for value in found[-1][0].values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_papers_defaults(name):
    assert preset(name).options == PRESETS[name]


@pytest.mark.parametrize(
    ("name", "size"),
    [("sparseloco", 2), *swept(("sparseloco", 3), *product(("muloco", "diloco"), (2, 3)))],
)
def test_a_preset_is_its_protocol_in_one_process(world, name, size):
    """With what a cell of it sends, and a round short enough to see two of them."""
    parsed = Cell.parse(name, {"comm_optimizer": name, **({"method": "onebit"} if name == "diloco" else {})})
    method = {"chunktopk.k": 2, "chunk": 8} if name == "sparseloco" else {}
    cell = {"method": method, **{key: getattr(parsed.reduction, key) for key in parsed.reduction.model_fields_set}}
    results = world(size).run(trained, name, "ddp", parsed.method, {**cell, "algorithm": "gather"}, {"H": 3})
    options = PRESETS[name] | {"H": 3}
    expected, bytes_sent = simulated(size, parsed.method, {**cell, "algorithm": "gather"}, options)
    for rank, (found, _) in enumerate(results):
        for step, (parameters, *_) in enumerate(found):
            assert_same(trainable(parameters), expected[step][0][rank])
    assert sum(traffic["sent"] for _, traffic in results) == bytes_sent


SPARSE = {"method": {"chunktopk.k": 4, "chunk": 8}, "error_feedback": True, "ef_decay": 0.95, "algorithm": "gather"}


def rounds_by_name(rank, world, group, name, method, cell):
    """Of a run with rounds of 3 steps: pseudo-gradients by round, residuals at its end, first and last anchors."""
    reducer, model, optimizer = started(group, name, "ddp", method, cell, {"H": 3})
    first = {name: anchor.clone() for name, anchor in optimizer.anchors.items()}
    with reducer.keeping() as kept:
        for step in range(STEPS):
            set_rates(optimizer, step)
            backward(model, rank, step)
            optimizer.communicate(CLIP)
            optimizer.step()
            optimizer.zero_grad()
    deltas = [{name: torch.empty_like(anchor) for name, anchor in first.items()} for _ in kept]
    for one, delta in zip(kept, deltas, strict=True):
        optimizer.layout.unpack(one.flat, delta)
    residuals = reducer.codec.state_dict()["residuals"]
    return deltas, {key: state["residual.float32"] for key, state in residuals.items()}, first, optimizer.anchors


def binned(x):
    """Bins of a quarter of six standard deviations around the mean; each element becomes the mean of its bin."""
    if (x == x[0]).all():
        return x
    codes = ((x - x.mean()) / (6 * x.std() / 4) + 2).round().clamp(0, 3)
    return sum(torch.where(codes == code, x[codes == code].mean(), 0.0) for code in codes.unique())


def largest_binned(x):
    """The four largest of each eight elements, binned; of a shorter rest a half."""
    chosen = torch.zeros(len(x), dtype=torch.bool)
    for start in range(0, len(x), 8):
        part = x[start : start + 8]
        chosen[start + part.abs().topk(max(1, round(len(part) / 2))).indices] = True
    decoded = torch.zeros_like(x)
    decoded[chosen] = binned(x[chosen])
    return decoded


class Kept:
    """Residuals by key, in float64: e <- decay e + x is sent, and e loses what arrives."""

    def __init__(self, decay, lossy):
        self.decay, self.lossy, self.e = decay, lossy, {}

    def send(self, key, x):
        sent = self.decay * self.e.get(key, 0.0) + x
        arrived = self.lossy(sent)
        self.e[key] = sent - arrived
        return arrived


HAND_MADE = {  # by preset: its method, what that does to a shard, decay of e, outer rate and momentum, algorithm
    "sparseloco": ("chunktopk+bins", largest_binned, 0.95, 1.0, 0.0, "gather"),
    "muloco": ("bins", binned, 0.9, 0.7, 0.6, "exchange"),
}


@pytest.mark.parametrize("name", HAND_MADE)
def test_rounds_of_a_preset_are_the_papers_arithmetic(world, name):
    """In float64, without any encoder: sparsifier, quantizer, error feedback and outer step from their formulas."""
    method, lossy, decay, rate, momentum, algorithm = HAND_MADE[name]
    options = SPARSE["method"] if name == "sparseloco" else {}
    cell = {"method": options, "error_feedback": True, "ef_decay": decay, "algorithm": algorithm}
    results = world(2).run(rounds_by_name, name, method, cell)
    first, last = results[0][2:]
    kept = [Kept(decay, lossy) for _ in results]
    anchors = {key: value.double() for key, value in first.items()}
    outer = {key: torch.zeros_like(value) for key, value in anchors.items()}
    cuts = by_rows({key: tuple(value.shape) for key, value in first.items()}, 2)
    for number in range(3):
        for key, anchor in anchors.items():
            means = []
            for shard in cuts[key]:
                place = slice(shard.at, shard.at + shard.numel)
                given = [deltas[number][key].double().reshape(-1)[place] for deltas, *_ in results]
                arrived = [own.send((key, "scatter", shard.at), x) for own, x in zip(kept, given, strict=True)]
                mean = sum(arrived) / 2
                owner = kept[shard.row]
                means.append(owner.send((key, "gather", shard.at), mean) if algorithm == "exchange" else mean)
            mean = torch.cat(means).view(anchor.shape)
            outer[key] = momentum * outer[key] + mean
            anchor -= rate * (mean + momentum * outer[key])
    for (_, residuals, *_), own in zip(results, kept, strict=True):
        assert residuals.keys() == own.e.keys()
        for key, residual in residuals.items():
            torch.testing.assert_close(residual.double().view(-1), own.e[key], rtol=1e-5, atol=1e-6)
    for key, anchor in anchors.items():
        torch.testing.assert_close(last[key].double(), anchor, rtol=1e-5, atol=1e-6)
    assert all(any(e.norm() > 0.1 * anchors[key[0]].norm() for key, e in own.e.items()) for own in kept), "e matters"


def sgd(rank, world, group, clip):
    """Every-step SGD under torch's own DDP."""
    model = wrap(held(), "ddp", device="cpu")
    optimizer = torch.optim.SGD(groups_of(model))
    found = []
    for step in range(STEPS):
        set_rates(optimizer, step)
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(whole(model))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_one_local_step_of_sgd_is_every_step_sgd(world, size):
    options = {"H": 1, **LONE, "inner": "sgd"}
    results = world(size).run(trained, "diloco", "ddp", "none", {"algorithm": "exchange"}, options, math.inf)
    for (found, _), expected in zip(results, world(size).run(sgd, math.inf), strict=True):
        for step in range(STEPS):
            for name, value in expected[step].items():
                # a rounding of the parameter and one of the mean, in each step
                torch.testing.assert_close(found[step][0][name], value, rtol=2e-7 * (step + 1), atol=2e-7 * (step + 1))


@pytest.mark.parametrize("H", [1, 3, 5, {0: 1, 3: 4}], ids=str)
def test_a_single_rank_is_plain_adamw(world, H):
    [(found, traffic)] = world(1).run(trained, "diloco", "naive", "onebit", {"error_feedback": True}, {"H": H, **LONE})
    model = held()
    optimizer = torch.optim.AdamW(groups_of(model), betas=BETAS)
    for step in range(STEPS):
        set_rates(optimizer, step)
        model(gradients_of(0, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in whole(model).items():
            torch.testing.assert_close(found[step][0][name], value, rtol=1e-6, atol=1e-6)
    assert traffic["raw"] == traffic["sent"] == 0


@pytest.mark.parametrize("step", [3, 5])
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(world, step):
    """Step 3 is local: nobody takes it. Step 5 ends a round: the ranks return to the anchors."""
    cell = {**ONEBIT, "nonfinite": "skip"}
    results = world(2).run(trained, "diloco", "ddp", "onebit", cell, {"H": 3, **LONE}, CLIP, (1, step))
    for found, traffic in results:
        assert [taken for *_, taken in found] == [at != step for at in range(STEPS)]
        assert_same(found[step][0], found[2][0])
        assert traffic.details["nonfinite_steps"] == 1
        assert [difference for _, _, _, difference, _ in found] == [None] * STEPS
        assert all(value.isfinite().all() for value in found[-1][0].values())
        assert not torch.equal(found[-1][0]["bias"], found[step][0]["bias"])


def diverging(rank, world, group, policy, step):
    cell = {**ONEBIT, "nonfinite": policy}
    try:
        found, _ = trained(rank, world, group, "diloco", "naive", "onebit", cell, {"H": 3, **LONE}, CLIP, (0, step))
    except NonFiniteGradient as error:
        return error.step
    return math.isnan(found[step][1]), bool(found[-1][0]["bias"].isfinite().all())


def test_other_policies_raise_on_all_ranks_or_propagate(world):
    assert world(2).run(diverging, "raise", 4) == [4, 4]
    assert world(2).run(diverging, "raise", 5) == [5, 5]
    assert world(2).run(diverging, "propagate", 4) == [(True, False)] * 2


def checked(rank, world, group, fault):
    """The steps after which ``verify_sync`` complained, when it looks every other step."""
    _, model, optimizer = started(group, "diloco", "ddp", "onebit", ONEBIT, {"H": 4, "outer_lr": 0.5})
    check, found = SyncCheck(model, optimizer, 2), []
    for step in range(STEPS):
        set_rates(optimizer, step)
        backward(model, rank, step)
        optimizer.communicate(CLIP)
        optimizer.step()
        if step == 4 and rank == 1:
            fault_of = {"anchor": optimizer.anchors, "momentum": optimizer.momenta, "none": whole(model)}
            fault_of[fault]["cube"].view(-1)[4] += 1e-6
        try:
            check.after(step)
        except Exception as error:
            found.append((step, str(error)))
    return found


@pytest.mark.parametrize(
    ("fault", "what"), [("none", None), ("anchor", "the anchor"), ("momentum", "the outer momentum")]
)
def test_verify_sync_checks_what_is_shared_between_rounds(world, fault, what):
    for found in world(2).run(checked, fault):
        assert [step for step, _ in found] == ([] if what is None else [5, 7])
        if what is not None:
            assert found[0][1].startswith(f"after optimizer step 5 {what} of cube on rank 1 differs from rank 0's")
            assert found[1][1].startswith("after optimizer step 7 cube on rank 1"), "parameters at the end of a round"


def outer_bytes(rank, world, group, options):
    return started(group, "diloco", "ddp", "onebit", ONEBIT, {"H": 4, **options})[2].outer_bytes


@pytest.mark.parametrize(("options", "copies"), [(LONE, 1), ({"outer_momentum": 0.5}, 2)], ids=str)
@pytest.mark.parametrize("streaming", [{}, {"streaming": STREAMS[0][0]}], ids=str)
def test_the_memory_of_rounds_is_a_copy_or_two_of_the_parameters(world, options, copies, streaming):
    numel = sum(p.numel() for p in held().parameters() if p.requires_grad)
    assert world(2).run(outer_bytes, {**options, **streaming}) == [4 * copies * numel] * 2


def swapped(rank, world, group):
    _, model, optimizer = started(group, "diloco", "ddp", "onebit", ONEBIT, {"H": 4, **LONE})
    first = whole(model)
    for step in range(2):
        set_rates(optimizer, step)
        backward(model, rank, step)
        optimizer.communicate(CLIP)
        optimizer.step()
    own = whole(model)
    with optimizer.synchronized():
        inside = whole(model)
    return first, own, inside, whole(model)


def test_an_evaluation_sees_the_anchors(world):
    for first, own, inside, after in world(2).run(swapped):
        assert_same(inside, first)
        assert_same(after, own)
        assert not torch.equal(own["bias"], first["bias"])


@pytest.mark.parametrize(
    ("interval", "steps", "ends"),
    [
        (1, 4, [0, 1, 2, 3]),
        (3, 8, [2, 5, 7]),
        ({0: 1, 2: 3, 9: 2}, 12, [0, 1, 4, 7, 8, 10, 11]),
    ],
)
def test_rounds(interval, steps, ends):
    rounds = Rounds(interval, steps)
    assert [step for step in range(steps) if rounds.ends(step)] == ends


def refused(rank, world, group, cell, options):
    try:
        started(group, "diloco", "ddp", "onebit", cell, options)
    except BadInput as error:
        return str(error)


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        ({"dense_steps": 3}, {}, "local updates send the outcome of rounds, and have no dense_steps"),
        ({}, {"H": 0}, "DiLoCo: sync_every: give a number of steps from 1 on, or a schedule from step 0 on"),
        ({}, {"H": {3: 1}}, "sync_every: give a number of steps from 1 on"),
        ({}, {"outer_lr": 0.0}, "outer: lr must be greater than 0, got 0.0"),
        ({}, {"outer_momentum": 1.0}, "outer: momentum must be less than 1, got 1.0"),
        ({}, {"inner": "adam"}, "Did you mean 'adamw'"),
        ({}, {"streaming": {"fragments": 2, "delay": 3}, "H": 7}, "a delay of 3, it must be a number from 8 on"),
        ({}, {"streaming": {"fragments": 2}, "H": {0: 9}}, "sync_every is {0: 9}; for 2 fragments"),
        ({}, {"streaming": {"fragments": 2, "alpha": 1}}, "streaming: alpha must be less than 1, got 1"),
        ({}, {"streaming": {"fragments": 12}}, "11 parameters cannot be distributed over 12 fragments"),
    ],
)
def test_bad_input_is_one_message(world, cell, options, message):
    [found] = world(1).run(refused, cell, options)
    assert message in found


def test_muon_without_a_block_is_refused():
    with pytest.raises(BadInput, match=r"first nn\.ModuleList"):
        optimizers.build_inner("muon", Held(), groups_of(Held()), lr=1.0)


class Container(torch.optim.Optimizer):
    """An optimizer that steps another one, as torchtitan's does."""

    def __init__(self, optimizer):
        self.optimizers = [optimizer]
        super().__init__(optimizer.param_groups, optimizer.defaults)


def test_an_optimizer_whose_moments_would_not_be_saved_is_refused():
    model = torch.nn.Linear(3, 5)
    container = Container(torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(BadInput, match="Container keeps moments in optimizers that it holds"):
        DiLoCo(container, model, sync_every=2)


def test_a_group_that_joins_a_round_which_nobody_ends_stops_with_a_message(monkeypatch):
    """The groups that trained are gone; tests/faults/test_quorum.py has real ones."""
    group, quorums = Quorum.__new__(Quorum), []
    group.number, group._received = 1, {"averages": True, "source": 3}
    monkeypatch.setattr(group, "_call_roll", lambda: None)
    monkeypatch.setattr(group, "_ask", lambda: quorums.append(len(quorums)))
    with pytest.raises(RunFault, match="group 1 has the state of group 3 in the middle of a round"):
        group._settled()
    assert len(quorums) == ATTEMPTS + 1
