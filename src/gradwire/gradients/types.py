"""Gradient types: what a row is made of, given the gradients of its samples.

``sgd`` is the gradient, ``sign`` its signs, ``adam`` the step that Adam would take next for this sample alone, without
the learning rate: by the moments that training left (``models.optimizer``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.config import AdamVariant
from gradwire.errors import BadInput
from gradwire.models.optimizer import Moments

LESS_BETAS, LESS_EPS = (0.9, 0.999), 1e-8  # constants of LESS's code, whatever the training took
NOISE = 2e-6  # ten times what float32 leaves of a sum that is zero, of the RMS of its row
CHUNK = 1 << 22  # entries that are worked on at once


class GradientType(Protocol):
    """Changes rows in place."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Turn gradients [samples, n] into what the type says, in place; returns them."""


# How far two computations of a row may lie apart, relative to its norm: float32 sums in another order, times a wide
# margin. Adam divides by what may be rounding noise itself, and a sign is another for entries that are nearly noise.
TOLERANCE = {"sgd": 1e-4, "adam": 5e-3, "sign": 1e-2}


def sgd(rows: Tensor) -> Tensor:
    """The gradient itself."""
    return rows


@dataclass(frozen=True)
class Sign:
    """The signs of the gradient's entries, 0 for those that are no larger than `NOISE` times the RMS of their row.

    Some gradients are zero but for rounding, such as that of a key's bias in attention, which softmax takes away again.
    The signs of those would be another draw in every batch, at any number of threads. A row is what lies along a
    parameter's last dimension: the rows of an embedding differ by the probabilities of their tokens, by any power of
    ten, and the small ones are as exact as the large ones.

    Attributes:
        shapes: The shape of each parameter, in the order of the columns.
    """

    shapes: Sequence[tuple[int, ...]]

    def __call__(self, rows: Tensor) -> Tensor:
        """Turn gradients [samples, n] into signs, in place."""
        for columns, shape in zip(rows.split([math.prod(shape) for shape in self.shapes], 1), self.shapes, strict=True):
            part = columns.unflatten(1, (-1, *shape[-1:])) if shape else columns
            rms = part.square().mean(-1, keepdim=True).sqrt()
            part.masked_fill_(part.abs() <= NOISE * rms, 0.0).sign_()
        return rows


@dataclass(frozen=True)
class Adam:
    """Adam's direction (Kingma & Ba, 2015, algorithm 1): with m' = β₁m + (1 - β₁)g and v' = β₂v + (1 - β₂)g²,

    - ``torch``: m' / (1 - β₁ᵗ) / (√(v' / (1 - β₂ᵗ)) + ε), t the steps made and this one: as `torch.optim.Adam`;
    - ``less``: m' / √(v' + 1e-8), uncorrected, ε in the root, β₁ = 0.9 and β₂ = 0.999 whatever the training took
      (Xia et al., 2024, "LESS", as published in code).

    Attributes:
        exp_avg: m, [n], in the order of the rows' columns.
        exp_avg_sq: v, [n].
        step: Steps made, [n]: a parameter may have made fewer than another.
        beta1: β₁.
        beta2: β₂.
        eps: ε.
        variant: Which of the two.
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
        """From what training left, by parameter name.

        Args:
            moments: The moments of every parameter of ``shapes``, at least.
            shapes: The trainable parameters, in the order of the columns.
            variant: ``torch`` or ``less``.
            device: Where rows are.

        Raises:
            BadInput: If a parameter has no moments, or some of another shape.
        """
        for name, shape in shapes.items():
            if name not in moments.exp_avg:
                raise BadInput(f"{moments.path} has no moments of {name}: it is of another model, or was not trained.")
            if tuple(moments.exp_avg[name].shape) != tuple(shape):
                raise BadInput(
                    f"{moments.path} has moments of {name} of shape {tuple(moments.exp_avg[name].shape)}, "
                    f"the model's is {tuple(shape)}."
                )

        def flat(values: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([values[name].flatten() for name in shapes]).to(device)

        steps = {name: torch.full(tuple(shape), float(moments.step[name])) for name, shape in shapes.items()}
        betas = LESS_BETAS if variant == "less" else moments.betas
        return cls(flat(moments.exp_avg), flat(moments.exp_avg_sq), flat(steps), *betas, moments.eps, variant)

    def __call__(self, rows: Tensor) -> Tensor:
        """Turn gradients [samples, n] into directions, in place."""
        for start in range(0, rows.shape[1], CHUNK):
            part = rows[:, start : start + CHUNK]
            m, v, step = (of[start : start + CHUNK] for of in (self.exp_avg, self.exp_avg_sq, self.step))
            second = (part.square() * (1 - self.beta2)).add_(self.beta2 * v)
            part.mul_(1 - self.beta1).add_(self.beta1 * m)
            if self.variant == "less":
                part.div_(second.add_(LESS_EPS).sqrt_())
            else:
                second.div_(1 - self.beta2 ** (step + 1)).sqrt_().add_(self.eps)
                part.div_(1 - self.beta1 ** (step + 1)).div_(second)
        return rows
