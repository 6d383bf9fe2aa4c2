"""All methods that native collectives can reduce: linear ones by the mean alone; no gradient is lost or doubled."""

from __future__ import annotations

import io

import pytest
import torch
from lockstep import lockstep
from samples import METHODS, normal
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.comm.compressors import build
from gradwire.comm.compressors.rounds import Context, ReduceRequest

ROUNDS = [(name, options) for name, options in METHODS if build(name, **options).has_rounds]
LINEAR = [case for case in ROUNDS if case[0] in {"none", "randomk", "sketch", "powersgd", "gradiveq"}]
ADDS_IN = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Methods whose sum on the way is rounded: the relative error of one addition."""

MEANS = [case for case in ROUNDS if case[0] != "signsgd"]
"""Methods whose result is the mean of what the ranks sent; the majority of their signs is not."""

SHAPE, WORLD = (33, 40), 3


def gradients(steps: int, world: int = WORLD) -> list[list[torch.Tensor]]:
    """Unlike on the ranks, the steps' common part larger than what differs."""
    common = normal(SHAPE, 1)
    return [[common + normal(SHAPE, 100 * at + rank) * (rank + 1) for rank in range(world)] for at in range(steps)]


def fresh(compressor, world=WORLD):
    return [compressor.new_state(SHAPE, seed=5) for _ in range(world)]


def step(compressor, xs, states, at):
    return lockstep(compressor, xs, states, Context("layer.weight", SHAPE, at, len(xs), 11))


@pytest.mark.parametrize(("name", "options"), LINEAR, ids=str)
def test_the_linear_ones_see_the_mean_alone(name, options):
    """Ranks whose gradients have one mean get one result, however it is shared out among them."""
    compressor = build(name, **options)
    one, many = fresh(compressor, 1), fresh(compressor)
    for at, xs in enumerate(gradients(4)):
        mean = torch.stack(xs).double().mean(dim=0)
        alone = step(compressor, [mean.float()], one, at)[0][0]
        together = step(compressor, xs, many, at)[0][0]
        assert (alone.double() - together.double()).norm() <= 1e-4 * mean.norm()


@pytest.mark.parametrize(("name", "options"), MEANS, ids=str)
def test_with_error_feedback_nothing_is_lost(name, options):
    """The delivered means add up to the exact ones less the mean of what the ranks hold back."""
    compressor = build(name, **options)
    states = fresh(compressor)
    held = [torch.zeros(SHAPE) for _ in range(WORLD)]
    delivered, exact = torch.zeros(SHAPE, dtype=torch.float64), torch.zeros(SHAPE, dtype=torch.float64)
    for at, xs in enumerate(gradients(8)):
        exact += torch.stack(xs).double().mean(dim=0)
        asked = [x + residual for x, residual in zip(xs, held, strict=True)]
        means, sents, _ = step(compressor, asked, states, at)
        held = [x - sent for x, sent in zip(asked, sents, strict=True)]
        delivered += means[0]
    left = torch.stack(held).double().mean(dim=0)
    allowed = 2e-6 + WORLD * ADDS_IN.get(name, 0.0)
    assert (delivered - (exact - left)).norm() <= allowed * exact.norm()


@pytest.mark.parametrize(("name", "options"), ROUNDS, ids=str)
def test_a_state_can_be_saved_and_taken_up(name, options):
    compressor = build(name, **options)
    states, taken = fresh(compressor), None
    for at, xs in enumerate(gradients(6)):
        if at == 3:
            file = io.BytesIO()
            torch.save(states, file)
            file.seek(0)
            taken = torch.load(file, weights_only=True)
        unbroken = step(compressor, xs, states, at)
        if taken is not None:
            resumed = step(build(name, **options), xs, taken, at)
            for after, before in zip([*resumed[0], *resumed[1]], [*unbroken[0], *unbroken[1]], strict=True):
                assert torch.equal(after, before)


@pytest.mark.parametrize(("name", "options"), ROUNDS, ids=str)
def test_a_value_that_is_not_finite_shows_on_every_rank_or_nowhere(name, options):
    compressor = build(name, **options)
    xs = gradients(1)[0]
    xs[1][2, 3] = float("nan")
    means, _, _ = step(compressor, xs, fresh(compressor), 0)
    assert len({mean.isfinite().all().item() for mean in means}) == 1
    if name != "randomk":  # which may not have chosen it
        assert not means[0].isfinite().all()


def test_a_derived_seed_is_the_ranks_common_one():
    first = Context("a", (3,), 0, 2, 7)
    others = [first._replace(name="b"), first._replace(step=1), first._replace(seed=8)]
    assert len({context.derived_seed() for context in [first, *others]}) == 4
    assert first.derived_seed() == first._replace(world=3, shape=(5,)).derived_seed()
    assert 0 <= first.derived_seed() < 2**63


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def answered(ask: ReduceRequest, world: int) -> torch.Tensor:
    """The answer that `ask` receives where all ranks hand over the same."""
    if ask.op == "gather":
        return torch.stack([ask.tensor] * world)
    return ask.tensor * world if ask.op == "sum" else ask.tensor


def operations(name: str, options: dict, world: int) -> int:
    """How many one rank needs in a reduction over ``world`` ranks, the collectives left out."""
    compressor, x = build(name, **options), normal((40, 24))
    talk = compressor.rounds(x, compressor.new_state((40, 24), seed=1), Context("weight", (40, 24), 0, world, 1))
    total, answer = 0, None
    while True:
        with Operations() as counted:
            try:
                ask = talk.send(answer)
            except StopIteration:
                return total + counted.count
        total += counted.count
        answer = answered(ask, world)


@pytest.mark.parametrize(("name", "options"), ROUNDS, ids=str)
def test_nothing_is_decoded_rank_by_rank(name, options):
    assert operations(name, options, 2) == operations(name, options, 32)
