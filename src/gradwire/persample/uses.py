"""How one use of a parameter in a forward pass enters its per-sample gradient.

B samples, T tokens. A matrix that multiplies tokens has the gradient G[b] = Σ_t left[b, t] ⊗ right[b, t], so what is
wanted of it (its norm, its projection) can be had from the two factors, and G need not be formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outer:
    """A sum of outer products.

    Attributes:
        rows: Rows of the parameter.
        left: ``[B, T, rows]``, or ``[B, T]`` int64 where each is a unit vector: the ids that an embedding looked up.
        right: ``[B, T, columns]``.
    """

    rows: int
    left: Tensor
    right: Tensor

    @property
    def one_hot(self) -> bool:
        """Whether ``left`` holds ids."""
        return not self.left.is_floating_point()

    def gradient(self) -> Tensor:
        """G, ``[B, rows, columns]``."""
        if not self.one_hot:
            return self.left.transpose(1, 2) @ self.right
        samples, _, columns = self.right.shape
        found = self.right.new_zeros(samples * self.rows, columns)
        offsets = torch.arange(samples, device=self.left.device)[:, None] * self.rows
        found.index_add_(0, (self.left + offsets).flatten(), self.right.flatten(0, 1))
        return found.view(samples, self.rows, columns)


@dataclass(frozen=True)
class Direct:
    """A gradient that is formed.

    Attributes:
        value: ``[B, *shape]``.
    """

    value: Tensor

    def gradient(self) -> Tensor:
        """The value."""
        return self.value


Use: TypeAlias = Outer | Direct


def square_norm(uses: Sequence[Use]) -> Tensor:
    """``‖Σ G‖²`` over all uses of one parameter: float64 [B].

    A tied parameter's uses are added before the norm is taken: their inner products may have either sign.
    """
    if all(isinstance(use, Outer) for use in uses):
        outer = [use for use in uses if isinstance(use, Outer)]
        pairs = [
            (one, other, 1.0 if i == j else 2.0)
            for i, one in enumerate(outer)
            for j, other in enumerate(outer[: i + 1])
        ]
        return sum((factor * inner(one, other) for one, other, factor in pairs), torch.zeros(())).clamp(min=0)
    total = sum((use.gradient() for use in uses[1:]), uses[0].gradient())
    return _squares(total)


def inner(one: Outer, other: Outer) -> Tensor:
    """``⟨G, G'⟩`` of two uses with gradients of one shape: float64 [B].

    Σ_{t,t'} ⟨left_t, left'_t'⟩ ⟨right_t, right'_t'⟩ where that is cheaper than to form G.
    """
    tokens, columns = one.right.shape[1:]
    if one is other and not one.one_hot and 2 * tokens**2 > one.rows * columns:
        return _squares(one.gradient())
    products = _gram(one.left, other.left) * _gram(one.right, other.right)
    return products.sum((1, 2), dtype=torch.float64)


def _gram(one: Tensor, other: Tensor) -> Tensor:
    """Inner products of all pairs of tokens, ``[B, T, T']``; ids stand for unit vectors."""
    if one.is_floating_point() and other.is_floating_point():
        return one @ other.transpose(1, 2)
    if one.is_floating_point():
        return _gram(other, one).transpose(1, 2)
    if other.is_floating_point():
        wanted = one[:, None, :].expand(-1, other.shape[1], -1)
        return other.gather(2, wanted).transpose(1, 2)
    return (one[:, :, None] == other[:, None, :]).float()


def _squares(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).square().sum(1, dtype=torch.float64)
