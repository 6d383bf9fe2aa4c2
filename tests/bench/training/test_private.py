"""Private training against clipping by hand in float64, Opacus, and the statistics of its noise."""

from __future__ import annotations

import json
import math
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from data_samples import write_corpus
from diagonals import diagonals, swept
from scipy import optimize, stats
from small_model import make
from small_runs import SMALL, losses, parsed, run, words
from test_architectures import batch_of as four_of
from test_architectures import small
from test_methods import squares
from test_norms import SAMPLES, batch_of, built

from gradwire import cli
from gradwire.attribution.front import accounting
from gradwire.attribution.front.accounting import BYTES_PER_POINT, Guarantee, grid_points
from gradwire.attribution.front.private import PrivateGradients, derived
from gradwire.attribution.persample import loop as one_by_one
from gradwire.attribution.persample import norms
from gradwire.attribution.persample.batch import losses_of, trainable
from gradwire.attribution.persample.norms import coefficients
from gradwire.base.errors import BadInput
from gradwire.bench.config import Cell, Training, check_private
from gradwire.bench.training import settings as run_settings
from gradwire.bench.training.measure import Clock
from gradwire.bench.training.objective import Private, guarantee
from gradwire.bench.training.step import Feed, Preemption, Stepper, micro_batches
from gradwire.comm.collectives import Reducer
from gradwire.comm.collectives.world import World
from gradwire.comm.communication import LOCAL
from gradwire.comm.compressors import build
from gradwire.comm.parallel import named_parameters, wrap
from gradwire.lm.data import batches
from gradwire.lm.data.batches import poisson_steps
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenize import tokenize
from gradwire.lm.models import causal

ROWS = 2  # of a micro-batch
PRIVATE = ("--dp_max_grad_norm", "0.5", "--dp_noise_multiplier", "0.8")
ONEBIT_ADAM = (
    *["--strategy", "ddp", "--comm_compress", "onebit", "--comm_optimizer", "onebit_adam", "--comm_config_json"],
    '{"dense_steps": 2}',
)


class Caught(torch.optim.SGD):
    """An optimizer that keeps the gradients that it is given, whole."""

    def step(self, closure=None):
        found = {id(p): p.grad for group in self.param_groups for p in group["params"]}
        self.caught = {at: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for at, g in found.items()}


def private_gradient(rank, world, group, strategy, max_norm, noise, positions, steps=(0,), compressor=None, micro=1):
    """The gradient of each step on the first rank's view, by name, through the training loop's own step."""
    training = Training(
        batch_size=ROWS,
        grad_accum_steps=micro,
        clip_grad_norm=1e9,
        dp_max_grad_norm=max_norm,
        dp_noise_multiplier=noise,
        warmup_steps=1,
    )
    place = World(rank, rank, world, "gloo", torch.device("cpu"))
    model = built("tied")
    reducer = None if compressor is None else Reducer(build(compressor), group)
    objective = Private(model, training, 5, place)
    wrapped = wrap(model, strategy, reducer, device="cpu")
    optimizer = Caught(wrapped.parameters(), lr=0.1)
    own = list(positions)[rank::world]
    most = max(1, -(-len(positions) // world))
    batches = [batch_of(own[first : first + ROWS], ROWS) for first in range(0, most, ROWS)]
    feed = Feed(iter([batches] * (len(steps) + 1)), place.device)
    clock = Clock(place.device)
    stepper = Stepper(wrapped, optimizer, reducer, feed, objective, training, place, clock, Preemption())
    found = []
    for step in steps:
        row = stepper.take(step)
        found.append(({name: optimizer.caught[id(p)] for name, p in named_parameters(wrapped)}, row))
    return found


def clipped_by_hand(max_norm: float, count: int) -> tuple[dict[str, torch.Tensor], int]:
    """The sum of the samples' clipped gradients in float64, and how many were clipped."""
    found = one_by_one.gradients(built("tied").double(), batch_of(range(count)), "mean").gradient
    norm = sum(gradient.flatten(1).square().sum(1) for gradient in found.values()).sqrt()
    factor = torch.tensor([min(1.0, max_norm / float(n)) if n else 1.0 for n in norm], dtype=torch.float64)
    return {name: torch.einsum("b,b...->...", factor, g) for name, g in found.items()}, int((norm > max_norm).sum())


@pytest.mark.parametrize(
    ("strategy", "max_norm", "size"), diagonals(["naive", "bucket", "ddp", "fsdp2"], [6.5, 1e9], [1, 2, 3])
)
def test_the_gradient_is_the_sum_clipped_by_hand_whatever_the_ranks(world, strategy, max_norm, size):
    """Seven samples, one without a target; an infinite bound clips nothing and gives the plain mean over samples."""
    wanted, clipped = clipped_by_hand(max_norm, SAMPLES)
    assert clipped == (3 if max_norm == 6.5 else 0)
    for (found, row), *_ in world(size).run(private_gradient, strategy, max_norm, 0.0, range(SAMPLES)):
        expected = ROWS * size
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name].double() * expected, gradient, rtol=2e-4, atol=2e-6)
        assert (row["samples"], row["clipped_samples"]) == (SAMPLES, clipped)


def test_a_compressor_sees_the_clipped_and_noisy_gradient(world):
    """Exact for the exchange without compression; int8 is within its own error of it."""
    (plain, _), *_ = world(2).run(private_gradient, "fsdp2", 6.5, 1.0, range(SAMPLES))[0]
    (exchanged, _), *_ = world(2).run(private_gradient, "fsdp2", 6.5, 1.0, range(SAMPLES), (0,), "none")[0]
    (coarse, _), *_ = world(2).run(private_gradient, "fsdp2", 6.5, 1.0, range(SAMPLES), (0,), "int8")[0]
    for name, gradient in plain.items():
        torch.testing.assert_close(exchanged[name], gradient, rtol=1e-5, atol=1e-6)
        error = (coarse[name] - gradient).norm() / gradient.norm()
        assert 0 < error < 0.02


MORE_RANKS = [(1, "fsdp2"), (2, "ddp"), (3, "fsdp2"), (4, "ddp")]


@pytest.mark.parametrize(
    ("size", "strategy"),
    [(1, "ddp"), (2, "fsdp2"), *swept(*MORE_RANKS)],
)
def test_the_noise_has_one_variance_whatever_the_ranks(world, size, strategy):
    """No sample at all, so the gradient is noise: its variance against a chi-square band of five standard errors."""
    max_norm, multiplier = 2.0, 1.5
    (first, _), (second, _) = world(size).run(private_gradient, strategy, max_norm, multiplier, (), (0, 1))[0]
    std = multiplier * max_norm / (ROWS * size)
    for name, noise in first.items():
        count = noise.numel()
        assert float(noise.double().square().mean()) / std**2 == pytest.approx(1, abs=5 * math.sqrt(2 / count)), name
        assert abs(float(noise.double().mean())) < 5 * std / math.sqrt(count), name
        other = second[name]  # the next step draws again
        assert abs(float((noise * other).double().mean())) < 5 * std**2 / math.sqrt(count), name
    whole = torch.cat([noise.flatten() for noise in first.values()]).double().numpy()
    assert stats.kstest(whole / std, "norm").pvalue > 1e-4
    same = [(a, b) for i, a in enumerate(first) for b in [*first][:i] if first[a].shape == first[b].shape]
    assert all(not torch.equal(first[a], first[b]) for a, b in same), "parameters draw on their own"


def test_noise_is_added_once_per_step_not_per_micro_batch(world):
    (once, _), *_ = world(2).run(private_gradient, "fsdp2", 6.5, 1.0, ())[0]
    (more, row), *_ = world(2).run(private_gradient, "fsdp2", 6.5, 1.0, range(SAMPLES))[0]
    assert row["passes"] == 2 * 2, "norms, then gradients, of two micro-batches"
    wanted, _ = clipped_by_hand(6.5, SAMPLES)
    for name, gradient in wanted.items():
        torch.testing.assert_close((more[name] - once[name]).double() * 2 * ROWS, gradient, rtol=1e-3, atol=1e-5)


def test_norms_and_clipped_sums_are_opacus_own():
    """An independent oracle where it is right: untied weights, and positions that have a batch dimension."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    batch = batch_of([0, 1, 3, 4])
    model = built("untied").train()
    found = norms.norms(model, batch, "sum").square.sqrt()
    positions = torch.arange(batch.input_ids.shape[1]).expand(len(batch.labels), -1)
    max_norm = float(found.median())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = GradSampleModule(built("untied").train(), strict=False, loss_reduction="sum")
        logits = theirs(batch.input_ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        loss.backward()
    squares = sum(p.grad_sample.flatten(1).square().sum(1) for p in theirs.parameters())
    torch.testing.assert_close(found.float(), squares.sqrt(), rtol=1e-4, atol=0)
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        expected_batch_size=4,
        loss_reduction="sum",
    )
    optimizer.clip_and_accumulate()
    factors = coefficients(found, max_norm)
    of_each = one_by_one.gradients(built("untied"), batch, "sum").gradient
    for name, parameter in theirs._module.named_parameters():
        ours = torch.einsum("b,b...->...", factors.float(), of_each[name])
        torch.testing.assert_close(parameter.summed_grad, ours, rtol=1e-3, atol=1e-5)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The exact ε of a Gaussian mechanism of sensitivity μ and unit noise (Balle and Wang, ICML 2018, theorem 5)."""

    def excess(epsilon: float) -> float:
        there, back = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(there - math.exp(epsilon) * back - delta)

    return float(optimize.brentq(excess, 0, 200))


def test_epsilon_is_the_smaller_bound_of_the_accountants_whose_grid_fits(monkeypatch):
    from opacus.accountants import PRVAccountant
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV

    little = Guarantee(0.4, 1e-5, 0.005, 1)
    spent = little.spent(300)
    assert spent.prv == pytest.approx(11.53, abs=0.01) and spent.rdp == pytest.approx(13.98, abs=0.01)
    assert (spent.epsilon, spent.accountant) == (spent.prv, "prv")
    domain = PRVAccountant()._get_domain([PoissonSubsampledGaussianPRV(0.005, 0.4)], [300], 0.01, 1e-8)
    assert abs(grid_points(0.4, 0.005, 300, 1e-5) - domain.size) < 5
    monkeypatch.setattr(accounting, "LARGEST_GRID", BYTES_PER_POINT * (domain.size - 5))
    assert little.spent(300) == (None, spent.rdp) and little.spent(300).accountant == "rdp"


def test_a_grid_of_gigabytes_is_not_made():
    spent = Guarantee(0.1, 1e-5, 0.05, 10).spent(60)
    assert spent.prv is None and spent.epsilon == spent.rdp > 500
    assert Guarantee(0.0, 1e-5, 0.05, 10).spent(60) == (None, None)
    assert Guarantee(0.0, 1e-5, 0.05, 10).spent(60).epsilon is None


def test_epsilon_is_the_accountants():
    shuffled = Guarantee(1.2, 1e-5, None, steps_per_epoch=10)
    for steps, epochs in ((1, 1), (10, 1), (11, 2), (30, 3)):  # a part of an epoch counts as a whole one
        exact = gaussian_epsilon(math.sqrt(epochs) / 1.2, 1e-5)
        assert exact <= shuffled.spent(steps).epsilon <= exact + 0.03
    poisson = Guarantee(1.0, 1e-5, 0.02, steps_per_epoch=10)
    spent = [poisson.spent(steps).epsilon for steps in (1, 10, 100, 1000)]
    assert spent == sorted(spent) and spent[0] > 0
    assert spent[-1] < gaussian_epsilon(math.sqrt(20), 1e-5), "amplified: cheaper than twenty epochs without it"
    assert poisson.spent(0).epsilon == 0


def test_a_lossy_sum_is_accounted_by_what_one_rank_adds():
    training = Training(batch_size=4, dp_max_grad_norm=1.0, dp_noise_multiplier=1.0)

    def accounted(method: str, world_size: int) -> float:
        return guarantee(training, Cell.parse(method, {}), 1000, world_size).multiplier

    assert accounted("none", 1) == accounted("none", 4) == accounted("int8", 1) == 1.0
    assert accounted("int8", 4) == 0.5


def test_poisson_draws_every_sample_by_a_coin_of_its_own(tmp_path):
    shards = Shards(make(tmp_path).shards, "train")
    steps, expected, world = 400, 5, 3
    feeds = [poisson_steps(shards, 2, expected, rank, world, seed=3) for rank in range(world)]
    drawn: list[list[str]] = []
    for _ in range(steps):
        ranks = [next(feed) for feed in feeds]
        assert len({len(batches) for batches in ranks}) == 1, "FSDP needs as many passes on each rank"
        assert all(len(batch.labels) == 2 for batches in ranks for batch in batches)
        drawn.append([id_ for batches in ranks for batch in batches for id_ in batch.sample_id if id_])
        assert len(set(drawn[-1])) == len(drawn[-1])
    rate, sizes = expected / len(shards), [len(ids) for ids in drawn]
    assert np.mean(sizes) == pytest.approx(expected, abs=5 * math.sqrt(len(shards) * rate * (1 - rate) / steps))
    assert np.var(sizes) == pytest.approx(len(shards) * rate * (1 - rate), rel=0.4)  # a fixed size would have none
    counts = [sum(shards[at].sample_id in ids for ids in drawn) for at in range(len(shards))]
    band = 5 * math.sqrt(steps * rate * (1 - rate))
    assert all(abs(count - steps * rate) < band for count in counts)
    again = next(poisson_steps(shards, 2, expected, 0, 1, seed=3, start=7))
    assert sorted(id_ for batch in again for id_ in batch.sample_id if id_) == sorted(drawn[7])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Token shards of a small corpus."""
    return make(tmp_path_factory.mktemp("private")).shards


class ZeroedOut(Shards):
    """The training split without the targets of one sample, so that its gradient is zero: a neighbour of the split."""

    def __init__(self, folder, index):
        super().__init__(folder, "train")
        self.index = index

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return sample._replace(input_ids=sample.input_ids[:1]) if index == self.index else sample


def messages(rank, world, flags, split, cell, steps) -> list[torch.Tensor]:
    """The sums that this rank hands to its reducer in each step, in units of C, with weights that stay as they are."""
    settings = run_settings.settings_of(parsed(flags))
    training, place = settings.training, World(rank, rank, world, "gloo", torch.device("cpu"))
    model = causal.build("micro", split.meta["vocab_size"], split.meta["max_length"], seed=0)
    method, options = cell
    reducer = Reducer(build(method), **options)
    objective = Private(model, training, 5, place)
    wrapped = wrap(model, settings.strategy, reducer, device="cpu")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    feed, clock = Feed(micro_batches(settings, split, place, 0), place.device), Clock(place.device)
    stepper = Stepper(wrapped, optimizer, reducer, feed, objective, training, place, clock, Preemption())
    found = []
    for step in range(steps):
        with reducer.keeping() as kept:
            stepper.take(step)
            # The strategies divide the sum over ranks by W, and the objective by the expected number of samples.
            sums = torch.cat([reduced.flat.flatten().double() for reduced in kept])
        found.append(sums * objective.expected / world / objective.max_norm)
    return found


def changes(rank, world, group, flags, shards, cell, steps, indices) -> dict[str, list[list[float]]]:
    """By how much this rank's messages of each step change with a sample: if it is zeroed out, if it is not drawn."""
    split = Shards(shards, "train")
    whole = messages(rank, world, flags, split, cell, steps)
    found = {"zeroed out": [messages(rank, world, flags, ZeroedOut(shards, index), cell, steps) for index in indices]}
    found["not drawn"] = []
    for index in indices if "poisson" in flags else ():
        with mock.patch.object(batches, "drawn", without(index)):
            found["not drawn"].append(messages(rank, world, flags, split, cell, steps))
    return {
        how: [[float((a - b).norm()) for a, b in zip(whole, one, strict=True)] for one in of_each]
        for how, of_each in found.items()
    }


def without(index, draw=batches.drawn):
    """Every draw as it is, but for one sample."""
    return lambda *args: (all_ := draw(*args))[all_ != index]


CELLS = {
    "int8": ("int8", {}),
    "native": ("powersgd", {"algorithm": "native", "dense_steps": 1}),
    "gather": ("onebit", {"algorithm": "gather", "error_feedback": True}),
    "exchange": ("topk", {"algorithm": "exchange", "error_feedback": True, "second": "float32"}),
}
QUICK = [
    (3, "fsdp2", "exchange", "poisson", 2),
    (2, "bucket", "native", "shuffled", 1),
]


def layouts(*values):
    return pytest.mark.parametrize(("size", "strategy", "cell", "sampling", "micro"), *values)


@layouts(QUICK)
def test_a_sample_changes_the_messages_of_one_rank_by_c(
    world, shards, size, strategy, cell, sampling, micro, indices=(3, 8)
):
    """The premise of ε with a lossy compressor. C is below every norm, so that a message changes by all of C."""
    per_epoch = len(Shards(shards, "train")) // size // SMALL["batch_size"]
    micro = math.gcd(micro, per_epoch) if sampling == "shuffled" else micro
    steps = per_epoch // micro if sampling == "shuffled" else 2
    flags = words(
        *(shards, "nowhere", "--dp_max_grad_norm", "0.01", "--dp_sampling", sampling, "--grad_accum_steps", str(micro)),
        strategy=strategy,
    )
    ranks = world(size).run(changes, flags, shards, CELLS[cell], steps, indices)
    seen = 0
    for how in ("zeroed out", "not drawn") if sampling == "poisson" else ("zeroed out",):
        for at, index in enumerate(indices):
            of_ranks = [of_rank[how][at] for of_rank in ranks]
            moved = [(step, rank) for step in range(steps) for rank in range(size) if of_ranks[rank][step] > 1e-6]
            assert [of_ranks[rank][step] for step, rank in moved] == pytest.approx([1] * len(moved), abs=1e-3)
            one_rank, one_step = len({rank for _, rank in moved}) <= 1, len(moved) <= 1
            assert one_rank if sampling == "poisson" else one_step, f"sample {index} {how}: steps and ranks {moved}"
            seen += len(moved)
    assert seen


@pytest.mark.sweep
@layouts(
    [
        (size, strategy, [*CELLS][(at + size) % len(CELLS)], sampling, 2)
        for size in (2, 3, 4)
        for at, strategy in enumerate(("naive", "bucket", "ddp", "fsdp2"))
        for sampling in ("poisson", "shuffled")
    ]
)
def test_more_samples_change_the_messages_of_one_rank_by_c(world, shards, size, strategy, cell, sampling, micro):
    test_a_sample_changes_the_messages_of_one_rank_by_c(
        world, shards, size, strategy, cell, sampling, micro, indices=range(0, len(Shards(shards, "train")), 4)
    )


def test_each_message_carries_its_share_of_the_noise(world, shards):
    """No sample at all: S/√W on every rank, by a chi-square band of five standard errors, and each draws its own."""
    flags = words(shards, "nowhere", "--dp_max_grad_norm", "2.0", "--dp_noise_multiplier", "1.5", strategy="ddp")
    noises = world(3).run(only_noise, flags, shards)
    for rank, noise in enumerate(noises):
        count = noise.numel()
        assert float(noise.square().mean()) / (1.5**2 / 3) == pytest.approx(1, abs=5 * math.sqrt(2 / count))
        assert all(abs(float((noise * other).mean())) < 5 * 0.75 / math.sqrt(count) for other in noises[:rank])


def only_noise(rank, world, group, flags, shards) -> torch.Tensor:
    """The sums that this rank hands to its reducer in a step without samples, in units of C, without padding."""
    with mock.patch.object(batches, "drawn", lambda *args: np.arange(0)):
        noise = messages(rank, world, flags, Shards(shards, "train"), CELLS["int8"], 1)[0]
    return noise[noise != 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_drawn_sample_leaves_every_other_on_its_rank(shards, monkeypatch, world_size):
    split = Shards(shards, "train")

    def shares() -> list[set[str]]:
        feeds = [next(poisson_steps(split, 2, len(split), rank, world_size, seed=0)) for rank in range(world_size)]
        return [{id_ for batch in feed for id_ in batch.sample_id if id_} for feed in feeds]

    whole = shares()
    for index in range(len(split)):
        monkeypatch.setattr(batches, "drawn", without(index))
        assert [one - other for one, other in zip(whole, shares(), strict=True)].count(set()) == world_size - 1
        assert set.union(*whole) - set.union(*shares()) == {split[index].sample_id}


def trained(world, size, shards, folder, *more, **changes):
    rows, record = world(size).run(run, words(shards, folder, *more, **changes))[0]
    return rows, record


def test_without_noise_and_clipping_private_training_is_plain_training(world, tmp_path):
    """Every sample has as many targets, so that the mean over samples is the mean over targets."""
    texts = ["".join(chr(97 + (i * j + j * j) % 26) for j in range(13)) for i in range(60)]
    documents = [{"id": f"d{i}", "title": "t", "text": text} for i, text in enumerate(texts)]
    corpus = write_corpus(tmp_path / "corpus.json", documents)
    sizes = {"vocab_size": 258, "max_length": 16, "shard_size": 50, "val_fraction": 0.1}
    tokenize(corpus, tmp_path, tokenizer="bpe", dataset="equal", **sizes)
    split = Shards(tmp_path / "shards", "train")
    assert len({len(split[at].input_ids) for at in range(len(split))}) == 1
    shuffled = ("--dp_max_grad_norm", "1e9", "--dp_sampling", "shuffled")
    given = {"strategy": "fsdp2", "eval_every": 0}
    plain, _ = trained(world, 2, tmp_path / "shards", tmp_path / "plain", **given)
    private, record = trained(world, 2, tmp_path / "shards", tmp_path / "private", *shuffled, **given)
    assert losses(private) == pytest.approx(losses(plain), rel=1e-5)
    assert [row["grad_norm"] for row in private] == pytest.approx([row["grad_norm"] for row in plain], rel=1e-4)
    assert (record["clipped_fraction"], record["epsilon"], record["noise_multiplier"]) == (0.0, None, 0.0)


def test_a_private_run_ends_with_its_budget(world, shards, tmp_path):
    rows, record = trained(world, 2, shards, tmp_path / "run", *PRIVATE, strategy="fsdp2")
    held = Shards(shards, "train")
    wanted = Guarantee(0.8, 1e-5, 4 / len(held), 1).spent(SMALL["steps"]).epsilon
    assert record["epsilon"] == pytest.approx(wanted) and record["delta"] == 1e-5
    assert (record["noise_multiplier"], record["noise_multiplier_accounted"]) == (0.8, 0.8)
    assert (record["sampling"], record["adjacency"], record["accountant"]) == ("poisson", "zero-out", "prv")
    assert 0 < record["clipped_fraction"] <= 1
    assert rows[2]["epsilon"] < rows[5]["epsilon"] == record["epsilon"]
    assert len({row["samples"] for row in rows}) > 1, "the samples of a step vary"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "logs" / "tensorboard")).Reload()
    assert {"train/epsilon", "train/clipped_fraction", "train/sample_norm_mean"} <= set(events.Tags()["scalars"])


@pytest.mark.sweep
def test_a_lossy_private_run_has_a_rank_s_budget(world, shards, tmp_path):
    exact = Guarantee(0.8, 1e-5, 4 / len(Shards(shards, "train")), 1).spent(SMALL["steps"]).epsilon
    cell = ("--comm_compress", "int8", "--comm_config_json", json.dumps({"error_feedback": True}))
    _, coarse = trained(world, 2, shards, tmp_path / "int8", *PRIVATE, *cell, strategy="ddp", eval_every=0)
    assert coarse["noise_multiplier_accounted"] == pytest.approx(0.8 / math.sqrt(2))
    assert coarse["epsilon"] > exact and coarse["compression_ratio"] > 3


def test_the_step_that_diverged_is_accounted(world, shards, tmp_path):
    rows, record = trained(world, 2, shards, tmp_path, *PRIVATE, strategy="ddp", lr=1e38)
    assert record["status"] == "diverged" and 0 < len(rows) < SMALL["steps"]
    assert record["epsilon"] == Guarantee(0.8, 1e-5, 4 / len(Shards(shards, "train")), 1).spent(len(rows) + 1).epsilon


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("shuffled", marks=pytest.mark.sweep)])
def test_a_resumed_private_run_equals_an_unbroken_one(world, shards, tmp_path, sampling):
    flags = (*PRIVATE, "--dp_sampling", sampling)
    options = {"checkpoint_every": 4, "eval_every": 0}
    whole, record = trained(world, 2, shards, tmp_path / "whole", *flags, **options)
    folder = tmp_path / "whole"
    (folder / "record.json").unlink()
    resumed, again = trained(world, 2, shards, folder, *flags, "--resume", **options)
    assert losses(resumed) == losses(whole)
    assert again["epsilon"] == record["epsilon"] and again["val_loss"] == record["val_loss"]


def test_parameter_gathers_of_private_steps_are_counted(world, shards, tmp_path):
    flags = ("--dp_max_grad_norm", "1.0", "--dp_sampling", "shuffled")
    _, private = trained(world, 2, shards, tmp_path / "private", *flags, eval_every=0)
    _, plain = trained(world, 2, shards, tmp_path / "plain", eval_every=0)
    assert 1.4 < private["bytes_parameters_raw_total"] / plain["bytes_parameters_raw_total"] < 1.7, "one pass more"
    assert private["bytes_raw_total"] == plain["bytes_raw_total"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dp_noise_multiplier", "1.0"), "dp_noise_multiplier is 1 without dp_max_grad_norm"),
        (("--compile", "--dp_max_grad_norm", "1.0"), "compile is set with dp_max_grad_norm"),
        (("--precision", "bf16", "--dp_max_grad_norm", "1"), "precision is bf16 with dp_max_grad_norm"),
        ((*PRIVATE, "--strategy", "fsdp1"), "strategy fsdp1 flattens parameters"),
        ((*PRIVATE, "--param_compress", "bf16"), "trains with other weights than the norms use"),
        ((*PRIVATE, *ONEBIT_ADAM), "comm_optimizer onebit_adam sends no gradients"),
        ((*PRIVATE, "--dp_delta", "0.5"), "is not below 1 /"),
        ((*PRIVATE, "--grad_accum_steps", "100"), "a private step takes"),
        ((*PRIVATE, "--dp_sampling", "shuffled", "--grad_accum_steps", "3"), "could hold a sample twice"),
        (("--dp_max_grad_norm", "-1"), "dp_max_grad_norm"),
    ],
)
def test_bad_input_is_one_message(flags, message, shards, tmp_path, capsys):
    assert cli.main(["train", *words(shards, tmp_path / "run"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").rglob("*")] == ["train.failed.json"]


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
@pytest.mark.parametrize("name", [*LOCAL, "demo"])
def test_local_updates_are_refused(name, strategy):
    """They send no clipped gradient of a sample, so that no guarantee would hold."""
    cell = Cell.parse("x", {"comm_optimizer": name, **({} if name in ("sparseloco", "demo") else {"method": "onebit"})})
    check_private(Training(), cell, strategy)
    with pytest.raises(
        BadInput, match=rf"private training\), compressor cell 'x': comm_optimizer {name} sends no gradients"
    ):
        check_private(Training(dp_max_grad_norm=1.0), cell, strategy)


def gradients_of(model, **given):
    """Private gradients with nothing clipped."""
    usual = {"noise_multiplier": 0.0, "max_grad_norm": 1e9, "batch_size": 1, "seed": 1, "rank": 3, "ranks": 1}
    return PrivateGradients(model, **usual | given)


class PastTheLayer(torch.nn.Module):
    """Leaves a layer out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return self.first(x)


def test_a_parameter_that_would_get_no_noise_is_refused():
    model = PastTheLayer()
    gradients = gradients_of(model)
    with gradients.watched():
        losses = model(torch.ones(2, 3)).sum(1)
    with pytest.raises(BadInput, match=r"^second\.weight: the loss does not depend on the layer that owns them"):
        gradients.clipped(losses, last=True)


class Scaled(torch.nn.Module):
    """A layer without a rule."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return {"unused": x, "used": self.weight * x}


class Changed(torch.nn.Module):
    """Uses layers twice, shares a weight, and changes outputs in place."""

    def __init__(self):
        super().__init__()
        self.scaled, self.a, self.b = Scaled(), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        x = self.scaled(x)["used"]
        x.relu_()
        for layer in (self.a, self.b, self.a):
            y = layer(x)
            y += x
            x = torch.tanh_(y)
        return x


def test_each_parameter_gets_its_noise_once_whatever_its_layers_return():
    model, x, found = Changed(), torch.linspace(-1, 1, 12).view(4, 3), []
    for multiplier in (0.0, 3e-9):
        model.zero_grad()
        gradients = gradients_of(model, noise_multiplier=multiplier)
        gradients.step = 2
        with gradients.watched():
            losses = model(x).sum(1)
        gradients.clipped(losses, last=True, missed=lambda names: torch.zeros(4)).backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for (name, without), noised, exact in zip(found[0].items(), found[1].values(), plain, strict=True):
        torch.testing.assert_close(without, exact)
        drawn = torch.Generator().manual_seed(derived(1, 2, 3, name))
        torch.testing.assert_close(
            noised - without, 3 * torch.randn(exact.shape, generator=drawn), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("architecture", ["roc_bert", "xlnet", "prophetnet", "blenderbot"])
def test_no_clipped_gradient_exceeds_the_bound(architecture):
    """Outputs changed in place, as many tokens as samples in [T, B, C], layers that return tuples."""
    model, batch = small(architecture), four_of(4, 4)
    unused = torch.autograd.grad(losses_of(model, batch).sum(), list(trainable(model).values()), allow_unused=True)
    for parameter, gradient in zip(list(trainable(model).values()), unused, strict=True):
        parameter.requires_grad_(gradient is not None)  # private training refuses what the loss does not depend on
    by_hand = one_by_one.gradients(model, batch)
    exact = squares(by_hand).sqrt()
    bound = float(exact.sort().values[1])
    gradients = gradients_of(model, max_grad_norm=bound)
    with gradients.watched():
        losses = losses_of(model, batch)
    gradients.clipped(losses, True, lambda names: norms.norms(model, batch, names=names).square).backward()
    factors = coefficients(gradients.norms, bound)
    torch.testing.assert_close(factors * exact, exact.clamp(max=bound), rtol=1e-5, atol=0)
    for name, parameter in trainable(model).items():
        wanted = torch.einsum("b,b...->...", factors.float(), by_hand.gradient[name])
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_that_mixes_is_refused():
    place = World(0, 0, 1, "gloo", torch.device("cpu"))
    training = Training(dp_max_grad_norm=1.0)
    model = causal.build("micro", 64, 9, seed=0)
    model.transformer.ln_f = torch.nn.BatchNorm1d(8)
    with pytest.raises(BadInput, match="mixes the samples of a batch"):
        Private(model, training, 0, place)
