"""Private steps (DP-SGD) in anyone's training loop: gradients of samples clipped to C, and Gaussian noise on their sum.

Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016). A forward pass has two backward passes: one through
the layers' outputs for the norms, and one of the losses weighted by the clipping factors, so that wrappers and
reducers see an ordinary pass (ghost clipping; Li et al., "Large Language Models Can Be Strong Differentially Private
Learners", ICLR 2022). Noise is added where a layer's parameter gets its gradient, before DDP's buckets, FSDP's
reduce-scatter or a compressor see it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.attribution.front.accounting import Guarantee, check_accountant
from gradwire.attribution.front.samples import Front, check_model, check_seen
from gradwire.attribution.persample.batch import trainable
from gradwire.attribution.persample.hooks import Pass, Take
from gradwire.attribution.persample.layer_factors import SquareNorms
from gradwire.attribution.persample.norms import coefficients
from gradwire.base.errors import BadInput, listed
from gradwire.comm.parallel.model import inside
from gradwire.comm.parallel.optimizers import Communicating
from gradwire.comm.parallel.strategy import HOOKED
from gradwire.comm.torch_internals import has_comm_hook, unreduced


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    noise_multiplier: float,
    max_grad_norm: float,
    batch_size: int,
    sample_rate: float | None = None,
    batch_dim: int = 0,
    seed: int | None = None,
) -> Private:
    """Make a model's optimizer steps private: call ``private.backward(losses)`` for ``losses.mean().backward()``.

    The gradient of a step is the sum of its samples' gradients, each clipped to the norm C, plus noise of standard
    deviation σC, divided by ``batch_size``. The noise is that of the sum over all ranks. Hooks stay until
    `Private.detach`; forward passes without gradients do not notice them.

    Args:
        model: A model as for `per_sample`; in DDP, each rank with different samples, or sharded by ``fully_shard``.
        optimizer: Its optimizer, whose ``step`` ends the step.
        noise_multiplier: σ.
        max_grad_norm: C.
        batch_size: Expected samples of a step, over all ranks and accumulated passes.
        sample_rate: The probability with which each sample is in a step, drawn independently (Poisson sampling), for
            `Private.epsilon`.
        batch_dim: As of `per_sample`.
        seed: Seed of the noise; whoever knows it can subtract the noise. None: from the operating system.

    Raises:
        BadInput: If a number is invalid, the model is not one for `per_sample`, or the optimizer communicates by
            itself or has parameters of another model.
    """
    if isinstance(optimizer, Communicating):
        raise BadInput(
            f"{type(optimizer).__name__} sends no clipped gradients of samples, so that no guarantee holds: use an "
            "optimizer of torch."
        )
    if not (noise_multiplier >= 0 and max_grad_norm > 0 and batch_size >= 1):
        raise BadInput(
            f"noise_multiplier is {noise_multiplier}, max_grad_norm is {max_grad_norm} and batch_size is {batch_size}: "
            "the first must not be negative, the others must be positive."
        )
    if sample_rate is not None and not 0 < sample_rate <= 1:
        raise BadInput(f"sample_rate is {sample_rate}: it is a probability above 0.")
    check_model(model)
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise BadInput(
            "the optimizer has parameters that are not of the model, whose gradients would be neither clipped nor "
            "noisy: pass a model that holds them all."
        )
    rank, ranks = ranks_of(model)
    gradients = PrivateGradients(
        inside(model),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        batch_dim=batch_dim,
        seed=int.from_bytes(os.urandom(8), "little") if seed is None else seed,
        rank=rank,
        ranks=ranks,
    )
    return Private(model, optimizer, gradients, sample_rate)


class Private:
    """Private steps of an optimizer; see `make_private`.

    Attributes:
        steps: Optimizer steps so far; set it when a run resumes.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, gradients: PrivateGradients, sample_rate: float | None
    ) -> None:
        self._model, self._gradients, self._sample_rate = model, gradients, sample_rate
        self._stack, self._noised = ExitStack(), False
        self._stack.enter_context(gradients.watched())
        for handle in (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ):
            self._stack.callback(handle.remove)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._gradients.step

    @steps.setter
    def steps(self, steps: int) -> None:
        self._gradients.step = steps

    @property
    def norms(self) -> Tensor:
        """The norms of the last backward pass's samples before clipping, float64 [B]. They are not private."""
        return self._gradients.norms

    def backward(self, losses: Tensor, *, last: bool = True) -> None:
        """Add the clipped gradients of samples to the parameters' gradients.

        Args:
            losses: The loss of each sample, [B], from the model's last forward pass.
            last: Whether this is the step's last backward pass, which adds the noise; False for the others with
                accumulation.

        Raises:
            BadInput: If the losses are not of that pass, hooks miss a use of a parameter, a parameter would get no
                noise, or the step had its last pass already.
        """
        if self._noised:
            raise BadInput("the step had its last backward pass: with accumulation, pass last=False for all others.")
        self._gradients.clipped(losses, last).backward()
        self._noised = last

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on ε after the steps so far, under zero-out adjacency of data sets.

        With a compressor of gradients each rank's message must be private by itself, with its share of the noise.

        Raises:
            BadInput: If there is no sample rate, or Opacus is not installed.
        """
        if self._sample_rate is None:
            raise BadInput("ε needs the probability with which a sample is in a step: pass sample_rate.")
        check_accountant()
        wrapped = isinstance(self._model, DistributedDataParallel) and has_comm_hook(self._model)
        share = math.sqrt(self._gradients.ranks) if wrapped or self._model in HOOKED else 1.0
        guarantee = Guarantee(self._gradients.noise_multiplier / share, delta, self._sample_rate, 1)
        epsilon = guarantee.spent(self.steps).epsilon
        return math.inf if epsilon is None else epsilon

    def detach(self) -> None:
        """Remove all hooks."""
        self._stack.close()

    def _before_step(self, *_: Any) -> None:
        if not self._noised:
            raise BadInput(
                "the optimizer's step has gradients without noise: call private.backward(losses) for each pass, with "
                "last=True for the last one of the step."
            )

    def _after_step(self, *_: Any) -> None:
        self._noised, self.steps = False, self.steps + 1


class PrivateGradients:
    """Clipped gradients of a model's samples, and their noise.

    Args:
        model: The model, without DDP.
        noise_multiplier: σ.
        max_grad_norm: C.
        batch_size: N, expected samples of a step.
        seed: Seed of the noise.
        rank: This rank, and
        ranks: W, the number of ranks whose gradients are averaged. Each draws noise by itself, of standard deviation
            σC/√W in a sum, which makes σC in the sum over ranks.
        batch_dim: As of `per_sample`.

    Attributes:
        step: The optimizer step, which the noise depends on.
        norms: Norms of the last backward pass's samples, float64 [B].
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        batch_size: int,
        seed: int,
        rank: int,
        ranks: int,
        batch_dim: int = 0,
    ) -> None:
        self.noise_multiplier, self.max_norm, self.ranks, self.step = noise_multiplier, max_grad_norm, ranks, 0
        self.norms = torch.zeros(0, dtype=torch.float64)
        self._scale = ranks / batch_size  # the average over ranks divides by their number
        self._std = noise_multiplier * max_grad_norm / math.sqrt(ranks) * self._scale
        self._seed, self._rank, self._model = seed, rank, model
        self._front = Front(model, batch_dim, self._start, self._ended)
        self._run: Pass | None = None
        self._drawn, self._leaves = set[str](), set[str]()

    def watched(self) -> ExitStack:
        """Watch the forward passes in a context."""
        return self._front.watched()

    def clipped(self, losses: Tensor, last: bool, missed: Callable[[list[str]], Tensor] | None = None) -> Tensor:
        """Return the loss whose gradient is the clipped one, W/N times the sum.

        Args:
            losses: Of each sample, [B], from the last forward pass.
            last: Whether its backward pass adds the step's noise.
            missed: Computes the squared norms [B] over parameters that hooks miss; None: they are refused.
        """
        run, self._run = self._run, None
        if run is None or losses.shape != (run.samples,):
            raise BadInput(
                f"losses have the shape {tuple(losses.shape)}: pass those of the last forward pass, [B], once."
            )
        self._front.watch.search(run, [losses])
        if missed is None:
            check_seen(run)
        left_out = [name for name in trainable(self._model) if not run.due[name] and name not in run.unseen]
        if left_out:
            raise BadInput(
                f"{listed(left_out)}: the loss does not depend on the layer that owns them, so private training cannot "
                "add noise to their gradients. Freeze them, or call the layer itself."
            )
        with unreduced(self._model):
            torch.autograd.grad(losses.sum(), self._front.watch.root, retain_graph=True, allow_unused=True)
        square, run.take = self._growing.total(), None
        if run.due.total():
            raise BadInput(f"a use of {listed([*+run.due])} received no gradient.")
        if run.unseen and missed is not None:
            names = [name for name in trainable(self._model) if name in run.unseen]
            square = square + missed(names)
            self._add_noise_at(names)
        self.norms, self._drawn = square.sqrt(), set()
        self._noise = self._noised if last and self._std else None
        run.noise = self._noise
        return (coefficients(self.norms, self.max_norm).to(losses.dtype) * losses).sum() * self._scale

    def _start(self, samples: int, device: torch.device) -> Take:
        if torch.is_autocast_enabled(device.type):
            raise BadInput(
                "autocast rounds the norms that samples are clipped by, so that a gradient may exceed max_grad_norm: "
                "take private steps in float32."
            )
        self._growing = SquareNorms(samples, device)
        return self._growing.take

    def _ended(self, run: Pass, outputs: list[Tensor]) -> None:
        self._run = run

    def _add_noise_at(self, names: list[str]) -> None:
        """Add noise where the gradients of parameters that hooks miss arrive."""
        for name in set(names) - self._leaves:
            self._leaves.add(name)
            hook = partial(self._at_leaf, name)
            trainable(self._model)[name].register_hook(hook)

    def _at_leaf(self, name: str, grad: Tensor) -> Tensor:
        return grad if self._noise is None else self._noise(name, grad)

    def _noised(self, name: str, grad: Tensor) -> Tensor:
        """Return a gradient with the parameter's noise of the step, which it gets once."""
        if name in self._drawn:
            return grad
        self._drawn.add(name)
        generator = torch.Generator(grad.device).manual_seed(derived(self._seed, self.step, self._rank, name))
        return grad + self._std * torch.randn(grad.shape, generator=generator, dtype=grad.dtype, device=grad.device)


def ranks_of(model: nn.Module) -> tuple[int, int]:
    """Return this rank, and the number of ranks that average a model's gradients."""
    if isinstance(model, DistributedDataParallel):
        return dist.get_rank(), dist.get_world_size(model.process_group)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return dist.get_rank(), parameter.device_mesh.size()
    return 0, 1


def derived(*words: object) -> int:
    """A seed below 2^63."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1
