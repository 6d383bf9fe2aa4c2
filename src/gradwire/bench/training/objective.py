"""Losses: of a split, and the one that a step differentiates, the plain mean or the clipped loss of private training.

Shape legend: B = samples of a micro-batch, W = world size, N = expected samples of a private step over all ranks.

Noise on gradients is the gradient of a term that is linear in the parameters. The backward pass therefore adds it to a
rank's local gradient before DDP's buckets, FSDP's reduce-scatter or a compressor see it.

The guarantee of private training is (ε, δ)-differential privacy per sample, under zero-out adjacency. Neighboring data
sets have the same size; in one of them, the gradient of one sample is zero. The size may therefore determine rates,
epochs and the assignment of samples to ranks. One sample changes the sum of clipped gradients by at most C, so noise of
standard deviation σC makes it a Gaussian mechanism with multiplier σ; post-processing of the noisy sum costs nothing.
Opacus's accountants compose steps: by Rényi divergences, and by distributions of the privacy loss on a grid (Gopi et
al., "Numerical Composition of Differential Privacy", NeurIPS 2021), which is tighter. Both are upper bounds on ε.

- Sampling. `poisson`: each sample joins each step independently at random, so the accountant applies amplification by
  subsampling. `shuffled`: a sample is in one step of each epoch. No amplification is claimed: an epoch costs as much as
  one step on all samples. Accounting for shuffled batches as if they were Poisson-sampled gives too small an ε
  (Chua et al., "How Private are DP-SGD Implementations?", ICML 2024).
- Compression. Each of W ranks draws noise of standard deviation σC/√W, which makes σC in their sum for any W. A sum of
  lossy encodings is not a function of that sum, so each rank's message must be private by itself, with a multiplier of
  only σ/√W, which is the one accounted. This requires that a sample is in one rank's message per step and that drawing
  it moves no other sample to another rank: `lm.data.batches.poisson_steps`.

Zero-out adjacency: Kairouz et al., "Practical and Private (Deep) Learning without Sampling or Shuffling" (ICML 2021).
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradwire.attribution.persample.batch import losses_of, trainable
from gradwire.attribution.persample.batch import n_targets as targets_of
from gradwire.attribution.persample.hooks import nodes_of, unviewed
from gradwire.attribution.persample.norms import check_repeatable, check_unmixed, coefficients, norms
from gradwire.base.errors import BadInput, listed
from gradwire.bench.config import Cell, Precision, Training
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch

Draw = Callable[[str, Tensor, torch.device], Tensor | None]
ADJACENCY = "zero-out"
EPSILON_ERROR = 0.01  # of the grid's bound
BYTES_PER_POINT = 192  # of the grid, at most: 182 measured with Opacus 1.6
LARGEST_GRID = 1 << 30  # bytes


class Quality(NamedTuple):
    """Mean negative log-likelihood per target in nats, its exponential, and the number of targets."""

    loss: float
    ppl: float
    n_targets: int


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the cross-entropy over the batch's targets in nats, a differentiable scalar.

    Samples are right-padded and attention is causal, so no target sees padding and no attention mask is needed.
    """
    return cross_entropy(model(batch.input_ids, use_cache=False).logits, batch.labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy in float32: of logits [B, T, vocabulary] and labels [B, T]."""
    predicted, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return F.cross_entropy(predicted, targets, ignore_index=-100, reduction="sum")


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Quality:
    """Loss and perplexity over all ranks' ``batches``; every rank must have the same number of them.

    Raises:
        BadInput: If no sample has a target.
    """
    training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        local = batch.to(device)
        totals += torch.stack([loss_sum(model, local).double(), torch.tensor(local.n_targets, device=device).double()])
    model.train(training)
    ops.all_reduce(totals, purpose="control")
    if not totals[1]:
        raise BadInput("no sample of the split has a target, so there is no loss: use other data or a larger length.")
    loss = float(totals[0] / totals[1])
    return Quality(loss, math.exp(loss) if loss < 700 else math.inf, int(totals[1]))


class Plain:
    """The mean over the targets of all ranks and micro-batches.

    Args:
        precision: ``fp32``; or ``bf16``: the forward pass runs under autocast, with float32 weights. The loss and the
            gradients of the weights are float32 in both.
        compiled: Compile the cross-entropy: its passes over the logits, the largest tensors of a step, become few.
    """

    passes = 1
    """Forward and backward passes over a micro-batch."""

    def __init__(self, precision: Precision = "fp32", *, compiled: bool = False) -> None:
        self.precision = precision
        self._cross_entropy = torch.compile(cross_entropy) if compiled else cross_entropy

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Prepare the step from its micro-batches, before the first forward pass."""

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Return a micro-batch's share of the loss to differentiate and of the step's mean loss per target.

        Args:
            model: The wrapped model.
            batch: The next of the micro-batches passed to `begin`.
            n_targets: Targets of all ranks and micro-batches in this step.
            last: Whether this is the step's last micro-batch.
        """
        # Without a cache: FSDP frees and refills the weights that it would be keyed by, and each is cast once anyway.
        mixed = torch.autocast(
            batch.input_ids.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False
        )
        with mixed:
            logits = model(batch.input_ids, use_cache=False).logits  # [B, T, vocabulary]
            # a step may have prompts alone
            loss = self._cross_entropy(logits, batch.labels) / n_targets.clamp(min=1)
        return loss, loss.detach()

    def totals(self) -> list[Tensor]:
        """This rank's statistics of the step, to be summed over ranks."""
        return []

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """The step's columns, from the sums of `totals` over ranks."""
        return {}


class Private(Plain):
    """DP-SGD: the sum of per-sample gradients clipped to C, plus noise, divided by N.

    A sample's loss is the mean over its own targets. N is a constant, so only the noisy sum depends on the samples.
    Each rank draws noise of standard deviation σC/√W, which makes σC in the sum over ranks.

    Args:
        model: The unwrapped model; it must not mix samples or use dropout.
        training: The settings, with C and σ.
        seed: Seed of the noise.
        world: The process group and this rank's position in it.

    Raises:
        BadInput: If the model mixes samples or its forward pass is not repeatable.
    """

    passes = 2

    def __init__(self, model: nn.Module, training: Training, seed: int, world: World) -> None:
        super().__init__()
        check_unmixed(model)
        check_repeatable(model)
        assert training.dp_max_grad_norm is not None
        self.max_norm, self.seed, self.rank = training.dp_max_grad_norm, seed, world.rank
        self.expected = training.batch_size * training.grad_accum_steps * world.world_size
        # The loop multiplies by W, because strategies average over ranks.
        self.std = math.sqrt(world.world_size) * training.dp_noise_multiplier * self.max_norm / self.expected
        self._coefficients = deque[Tensor]()
        self._totals = torch.zeros(3)

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch], step: int) -> None:
        """Compute every sample's norm and clipping coefficient, before any gradient accumulates."""
        self._step = step
        inner = getattr(model, "module", model)  # DDP's own forward would wait for gradients
        sample_norms = [norms(inner, batch).square.sqrt() for batch in micro_batches]
        self._coefficients = deque(coefficients(norm, self.max_norm) for norm in sample_norms)
        real = torch.tensor([id_ != "" for batch in micro_batches for id_ in batch.sample_id])
        of_samples = torch.cat(sample_norms)[real.to(sample_norms[0].device)]
        counts = (real.sum(), (of_samples > self.max_norm).sum(), of_samples.sum())
        self._totals = torch.stack([count.to(of_samples.device, torch.float32) for count in counts])

    def loss(self, model: nn.Module, batch: Batch, n_targets: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """The micro-batch's clipped loss; the backward pass of the last micro-batch adds the step's noise."""
        coefficient = self._coefficients.popleft()
        with noisy(model, self.std, self.seed, self._step, self.rank) if last and self.std else nullcontext() as check:
            losses = losses_of(model, batch)
        if check is not None:
            check(losses)
        loss = (coefficient.to(losses.dtype) * losses).sum() / self.expected
        total = (losses.detach() * targets_of(batch.labels)).sum()
        return loss, total / n_targets.clamp(min=1)  # Poisson sampling may draw no sample

    def totals(self) -> list[Tensor]:
        """Number of samples, number of clipped samples and sum of norms."""
        return list(self._totals)

    def columns(self, totals: Sequence[float]) -> dict[str, Any]:
        """``samples``, ``clipped_samples``, ``clipped_fraction`` and ``sample_norm_mean``."""
        samples, clipped, total = totals
        fields = {"samples": int(samples), "clipped_samples": int(clipped)}
        of_each = (clipped / samples, total / samples) if samples else (None, None)
        return fields | dict(zip(("clipped_fraction", "sample_norm_mean"), of_each, strict=True))


@contextmanager
def noisy(model: nn.Module, std: float, seed: int, step: int, rank: int) -> Iterator[Callable[[Tensor], None]]:
    """Add noise of standard deviation ``std`` to the gradients of forward passes in this context.

    A parameter's noise depends on the arguments and its name only, so a resumed run draws the same noise. Each gets it
    once, in the first of its layers' calls that the backward pass reaches.

    Args:
        model: A model whose layers return tensors, or tuples, lists or dicts of them; under FSDP2 every rank draws
            noise for the unsharded parameter.
        std: Standard deviation of each element.
        seed: The run's seed. Anyone who knows it can subtract the noise.
        step: The optimizer step.
        rank: This rank; ranks draw independently.

    Yields:
        A check that the backward pass of a loss adds noise to every parameter; it raises BadInput.

    Raises:
        BadInput: If a layer returns no tensor.
    """

    def draw(name: str, like: Tensor, device: torch.device) -> Tensor | None:
        if name in drawn:
            return None
        drawn.add(name)
        generator = torch.Generator(device).manual_seed(_derived(seed, step, rank, name))
        return std * torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        names = owned[module]
        if not places:
            raise BadInput(
                f"{', '.join(names.values())}: the layer that owns them returns a {type(output).__name__} without a "
                "tensor, so private training cannot add noise. Freeze them, or return a tensor, tuple, list or dict."
            )
        parameters = [getattr(module, local) for local in names]  # unsharded at this point under FSDP2
        added = _Added.apply(
            draw, tuple(names.values()), len(places), *(leaves[place] for place in places), *parameters
        )
        for place, values in zip(places, added, strict=True):
            leaves[place] = values
        return tree_unflatten(leaves, structure)

    def check(loss: Tensor) -> None:
        reached = {name for node in nodes_of([loss]) for name in getattr(node, "noisy_names", ())}
        left_out = [name for name in trainable(model) if name not in reached]
        if left_out:
            raise BadInput(
                f"{listed(left_out)}: the loss does not depend on the layer that owns them, so private training cannot "
                "add noise to their gradients. Freeze them, or call the layer itself."
            )

    owned, drawn = _owned(model), set[str]()
    handles = [module.register_forward_hook(after, prepend=True) for module in owned]
    try:
        yield check
    finally:
        for handle in handles:
            handle.remove()


class _Added(torch.autograd.Function):
    """The identity on a layer's outputs; its backward adds drawn noise to the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, draw: Draw, names: tuple[str, ...], outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.draw, ctx.noisy_names = draw, names
        ctx.like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in tensors[outputs:]]  # FSDP2 frees them
        ctx.device = tensors[0].device
        ctx.set_materialize_grads(False)
        return tuple(unviewed(values) for values in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        drawn = [ctx.draw(name, like, ctx.device) for name, like in zip(ctx.noisy_names, ctx.like, strict=True)]
        return None, None, None, *grads, *drawn


def _owned(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Names of the trainable parameters, by each layer that owns them and their local name in it."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    owned: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        local_names = {local: names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in names}
        if local_names:
            owned[module] = local_names
    return owned


def _derived(*words: object) -> int:
    """A seed below 2^63."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Guarantee:
    """The parameters that determine ε.

    Args:
        multiplier: The noise's standard deviation over C, as accounted.
        delta: δ.
        sample_rate: The probability that a sample is in a step with Poisson sampling; None if shuffled.
        steps_per_epoch: Optimizer steps per epoch; shuffling repeats no sample within one.
    """

    multiplier: float
    delta: float
    sample_rate: float | None
    steps_per_epoch: int

    def spent(self, steps: int) -> Spent:
        """Upper bounds on ε after ``steps`` optimizer steps; none without a guarantee, such as without noise."""
        if not self.multiplier:
            return Spent(None, None)
        if not steps:
            return Spent(0.0, 0.0)
        import numpy as np
        from opacus.accountants import PRVAccountant, RDPAccountant

        rate, times = (self.sample_rate, steps) if self.sample_rate else (1.0, math.ceil(steps / self.steps_per_epoch))

        def bound(accountant: Any, **options: float) -> float | None:
            accountant.history = [(self.multiplier, rate, times)]
            epsilon = float(accountant.get_epsilon(delta=self.delta, **options))
            return epsilon if math.isfinite(epsilon) else None

        # log(1 - rate) with a rate of 1; a bound of the smallest order, which holds and could be smaller
        with np.errstate(divide="ignore", over="ignore"), warnings.catch_warnings(action="ignore"):
            points = grid_points(self.multiplier, rate, times, self.delta)
            fits = points * BYTES_PER_POINT <= LARGEST_GRID
            prv = bound(PRVAccountant(), eps_error=EPSILON_ERROR) if fits else None
            return Spent(prv, bound(RDPAccountant()))


class Spent(NamedTuple):
    """Upper bounds on ε by accountant; both hold.

    Attributes:
        prv: By distributions of the privacy loss; None if their grid would need more memory than `LARGEST_GRID`.
        rdp: By Rényi divergences.
    """

    prv: float | None
    rdp: float | None

    @property
    def accountant(self) -> str | None:
        """The accountant with the smaller bound; None if there is none."""
        bounds = {name: bound for name, bound in self._asdict().items() if bound is not None}
        return min(bounds, key=bounds.__getitem__) if bounds else None

    @property
    def epsilon(self) -> float | None:
        """The smaller bound."""
        return getattr(self, self.accountant) if self.accountant else None


def grid_points(multiplier: float, rate: float, times: int, delta: float) -> float:
    """Return the number of points of the grid that Opacus's PRV accountant would compose ``times`` steps on."""
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size

    error = delta / 1000  # the accountant's own choice
    prvs = [PoissonSubsampledGaussianPRV(rate, multiplier)]
    options: dict[str, Any] = {"max_self_compositions": [times], "eps_error": EPSILON_ERROR, "delta_error": error}
    half = float(compute_safe_domain_size(prvs=prvs, **options))
    return 2 * half * math.sqrt(times * math.log(12 / error) / 2) / EPSILON_ERROR


# Why: docs/decisions.md, "ε for what really happens".
def guarantee(training: Training, cell: Cell, samples: int, world_size: int) -> Guarantee:
    """Return the privacy guarantee of a run.

    Args:
        training: Settings of private training, with the batch size.
        cell: The compressor setting.
        samples: Samples in the training split.
        world_size: Number of ranks.

    Raises:
        BadInput: If δ is too large, a step takes more samples than there are or could take one twice, or Opacus is not
            installed.
    """
    if training.dp_noise_multiplier and find_spec("opacus") is None:
        raise BadInput("private training needs Opacus: pip install 'gradwire[bench]'.")
    batch = training.batch_size * training.grad_accum_steps * world_size
    if batch > samples:
        raise BadInput(f"a private step takes {batch} samples, but the training split has {samples}; take fewer.")
    per_epoch, cut = divmod(samples // world_size // training.batch_size, training.grad_accum_steps)
    if cut and training.dp_sampling == "shuffled":
        raise BadInput(
            f"an epoch has {per_epoch * training.grad_accum_steps + cut} micro-batches, not a multiple of "
            f"--grad_accum_steps {training.grad_accum_steps}: a private step could hold a sample twice; use "
            "--dp_sampling poisson."
        )
    if training.dp_delta * samples >= 1:
        raise BadInput(
            f"--dp_delta {training.dp_delta:g} is not below 1 / {samples} (samples), so publishing one would be "
            f"allowed; use a value well below {1 / samples:.1g}."
        )
    exact = world_size == 1 or cell.method == "none"
    return Guarantee(
        multiplier=training.dp_noise_multiplier / (1 if exact else math.sqrt(world_size)),
        delta=training.dp_delta,
        sample_rate=batch / samples if training.dp_sampling == "poisson" else None,
        steps_per_epoch=per_epoch,
    )
