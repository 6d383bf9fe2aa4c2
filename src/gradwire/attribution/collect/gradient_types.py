"""Gradient types: transformations of per-sample gradients before projection.

``sgd`` is the gradient, ``sign`` its signs, and ``adam`` the next Adam update for this sample alone, without the
learning rate, from the saved moments of training (``lm.models.optimizer``); ``ekfac`` is in `ekfac`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.attribution.collect import ekfac
from gradwire.attribution.options import AdamVariant
from gradwire.attribution.store.provenance import Provenance
from gradwire.base.errors import BadInput
from gradwire.lm.models import optimizer
from gradwire.lm.models.optimizer import Moments

LESS_BETAS, LESS_EPS = (0.9, 0.999), 1e-8  # constants of LESS's code, independent of the training's
NOISE = 2e-6  # ten times the float32 rounding error of a zero sum, relative to its row's RMS
CHUNK = 1 << 22  # entries processed at once


class GradientType(Protocol):
    """Transforms rows in place."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Transform gradients [samples, n] in place and return them."""


def sgd(rows: Tensor) -> Tensor:
    """Return the gradient unchanged."""
    return rows


@dataclass(frozen=True)
class Sign:
    """The signs of the gradient's entries, 0 for those of at most `NOISE` times the RMS of their row.

    Some gradients are zero up to rounding, such as that of the key bias in attention, to which softmax is invariant.
    Their signs would depend on the batch and the number of threads. A row runs along a parameter's last dimension: the
    rows of an embedding differ in scale by orders of magnitude with the probabilities of their tokens, and small rows
    are as exact as large ones.

    Attributes:
        shapes: The shape of each parameter, in the order of the columns.
    """

    shapes: Sequence[tuple[int, ...]]

    def __call__(self, rows: Tensor) -> Tensor:
        """Replace gradients [samples, n] by their signs, in place."""
        for columns, shape in zip(rows.split([math.prod(shape) for shape in self.shapes], 1), self.shapes, strict=True):
            part = columns.unflatten(1, (-1, *shape[-1:])) if shape else columns
            rms = part.square().mean(-1, keepdim=True).sqrt()
            part.masked_fill_(part.abs() <= NOISE * rms, 0.0).sign_()
        return rows


@dataclass(frozen=True)
class Adam:
    """Adam's update direction (Kingma & Ba, 2015, algorithm 1): with m' = β₁m + (1 - β₁)g and v' = β₂v + (1 - β₂)g²,

    - ``torch``: m' / (1 - β₁ᵗ) / (√(v' / (1 - β₂ᵗ)) + ε), t counting this step: as `torch.optim.Adam`;
    - ``less``: m' / √(v' + 1e-8), without bias correction, ε in the root, β₁ = 0.9 and β₂ = 0.999 always
      (Xia et al., 2024, "LESS", as published in code).

    Attributes:
        exp_avg: m, [n], in the order of the rows' columns.
        exp_avg_sq: v, [n].
        step: Steps made, [n]; may differ between parameters.
        beta1: β₁.
        beta2: β₂.
        eps: ε.
        variant: ``torch`` or ``less``.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    beta1: float
    beta2: float
    eps: float
    variant: AdamVariant = "torch"

    @classmethod
    def of(cls, moments: Moments, shapes: Mapping[str, Any], variant: AdamVariant, device: torch.device) -> Adam:
        """Build from the saved moments of training.

        Args:
            moments: The moments of at least the parameters of ``shapes``.
            shapes: The trainable parameters, in the order of the columns.
            variant: ``torch`` or ``less``.
            device: Device of the rows.

        Raises:
            BadInput: If a parameter has no moments, or moments of a different shape.
        """
        for name, shape in shapes.items():
            if name not in moments.step:
                raise BadInput(f"{moments.path} has no moments of {name}: a different model, or not trained.")
            if (of := tuple(moments.exp_avg[name].shape)) != tuple(shape):
                raise BadInput(f"{moments.path} has moments of {name} of shape {of}, the model's is {tuple(shape)}.")

        def flat(values: Iterable[Tensor]) -> Tensor:
            return torch.cat([value.flatten() for value in values]).to(device)

        first, second = (flat(of[name] for name in shapes) for of in (moments.exp_avg, moments.exp_avg_sq))
        steps = flat(torch.full(tuple(shape), float(moments.step[name])) for name, shape in shapes.items())
        betas = LESS_BETAS if variant == "less" else moments.betas
        return cls(first, second, steps, *betas, moments.eps, variant)

    def __call__(self, rows: Tensor) -> Tensor:
        """Replace gradients [samples, n] by update directions, in place."""
        for start in range(0, rows.shape[1], CHUNK):
            columns = rows[:, start : start + CHUNK]
            m, v, step = (of[start : start + CHUNK] for of in (self.exp_avg, self.exp_avg_sq, self.step))
            second = (columns.square() * (1 - self.beta2)).add_(self.beta2 * v)
            columns.mul_(1 - self.beta1).add_(self.beta1 * m)
            if self.variant == "less":
                columns.div_(second.add_(LESS_EPS).sqrt_())
            else:
                second.div_(1 - self.beta2 ** (step + 1)).sqrt_().add_(self.eps)
                columns.div_(1 - self.beta1 ** (step + 1)).div_(second)
        return rows


def build(
    provenance: Provenance, model: nn.Module, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> Callable[[Mapping[str, tuple[int, ...]]], GradientType]:
    """Build the gradient type of a provenance, with Adam's moments or EK-FAC's factors if needed.

    Args:
        provenance: The provenance.
        model: The model, of whose trainable parameters the moments are.
        shapes: Those parameters that the gradient is of, in the order of the rows' columns.
        device: Device of the rows.

    Returns:
        The gradient type of rows of all these parameters or, but for ``ekfac``, of some of them.

    Raises:
        BadInput: If these are missing, have changed, or do not fit the model.
    """
    if provenance.grad_type == "sgd":
        return lambda of: sgd
    if provenance.grad_type == "sign":
        return lambda of: Sign([*of.values()])
    place = provenance.step_dir
    if provenance.grad_type == "ekfac":
        if ekfac.digest(place) != provenance.optimizer_digest:
            raise BadInput(f"the factors in {place} are not those that were collected with.")
        factors = ekfac.load(place, provenance.model_digest, provenance.loss, shapes, device, provenance.lora)
        return lambda of: factors
    moments = optimizer.load(place, model)
    if optimizer.digest(moments.path.parent) != provenance.optimizer_digest:
        raise BadInput(f"the moments in {moments.path} are not those that were collected with.")
    return lambda of: Adam.of(moments, of, provenance.adam_variant, device)
