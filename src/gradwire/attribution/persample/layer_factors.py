"""Contribution of one use of a parameter in a forward pass to its per-sample gradient.

For B samples of T tokens, the gradient of a matrix that multiplies tokens is G[b] = Σ_t left[b, t] ⊗ right[b, t]. Its
norm and its projection follow from the two factors, without forming G.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.attribution.persample.batch import squares


@dataclass(frozen=True)
class OuterProduct:
    """A gradient given as a sum of outer products.

    Attributes:
        rows: Rows of the parameter.
        left: ``[B, T, rows]``, or int64 ids ``[B, T]`` of an embedding, which represent unit vectors.
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
        """Form G, ``[B, rows, columns]``."""
        samples, _, columns = self.right.shape
        formed = self.right.new_empty(samples, self.rows, columns)
        self.write(formed)
        return formed

    def write(self, out: Tensor, add: bool = False) -> None:
        """Write G into ``out``, or add it there."""
        if not self.one_hot:
            torch.baddbmm(out, self.left.transpose(1, 2), self.right, beta=int(add), out=out)
            return
        if not add:
            out.zero_()
        for of, ids, right in zip(out, self.left, self.right, strict=True):
            of.index_add_(0, ids, right)


@dataclass(frozen=True)
class Direct:
    """A gradient that is already formed.

    Attributes:
        value: ``[B, *shape]``.
    """

    value: Tensor

    def gradient(self) -> Tensor:
        """Return the value."""
        return self.value

    def write(self, out: Tensor, add: bool = False) -> None:
        """Write the value into ``out``, or add it there."""
        if add:
            out += self.value
        else:
            out.copy_(self.value)


LayerFactor: TypeAlias = OuterProduct | Direct


def square_norm(uses: Sequence[LayerFactor]) -> Tensor:
    """Compute ``‖Σ G‖²`` over all uses of one parameter: float64 [B].

    The inner products between the uses of a tied parameter are included; they may have either sign.
    """
    if all(isinstance(use, OuterProduct) for use in uses):
        outer = [use for use in uses if isinstance(use, OuterProduct)]
        pairs = [
            (left, right, 1.0 if i == j else 2.0)
            for i, left in enumerate(outer)
            for j, right in enumerate(outer[: i + 1])
        ]
        return sum((factor * inner(left, right) for left, right, factor in pairs), torch.zeros(())).clamp(min=0)
    total = sum((use.gradient() for use in uses[1:]), uses[0].gradient())
    return squares(total.flatten(1))


def inner(use: OuterProduct, second: OuterProduct) -> Tensor:
    """Compute ``⟨G, G'⟩`` of two uses with gradients of equal shape: float64 [B].

    Uses Σ_{t,t'} ⟨left_t, left'_t'⟩ ⟨right_t, right'_t'⟩ where that is cheaper than forming G.
    """
    tokens, columns = use.right.shape[1:]
    if use is second and not use.one_hot and 2 * tokens**2 > use.rows * columns:
        return squares(use.gradient().flatten(1))
    products = _gram(use.left, second.left) * _gram(use.right, second.right)
    return products.sum((1, 2), dtype=torch.float64)


def _gram(first: Tensor, second: Tensor) -> Tensor:
    """Compute the inner products of all pairs of tokens, ``[B, T, T']``; ids represent unit vectors."""
    if first.is_floating_point() and second.is_floating_point():
        return first @ second.transpose(1, 2)
    if first.is_floating_point():
        return _gram(second, first).transpose(1, 2)
    if second.is_floating_point():
        wanted = first[:, None, :].expand(-1, second.shape[1], -1)
        return second.gather(2, wanted).transpose(1, 2)
    return (first[:, :, None] == second[:, None, :]).float()


class SquareNorms:
    """Sums squared norms over parameters. The uses of a tied parameter are added before its norm is taken.

    Args:
        samples: B.
        device: Device of the pass.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        self._met = defaultdict[str, list[LayerFactor]](list)
        self._squares = torch.zeros(samples, dtype=torch.float64, device=device)

    def take(self, name: str, use: LayerFactor, last: bool) -> None:
        """Add a use; the last use of a parameter adds its squared norm to the sum."""
        self._met[name].append(use)
        if last:
            self._squares.add_(square_norm(self._met.pop(name)))

    def total(self) -> Tensor:
        """Return the sums, float64 [B], after the pass."""
        return self._squares
