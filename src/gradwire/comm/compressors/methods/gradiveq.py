"""Slices of the gradient in the basis of their principal components.

Yu et al., "GradiVeQ: Vector Quantization for Bandwidth-Efficient Gradient Aggregation in Distributed CNN Training"
(NeurIPS 2018): the gradient is cut into slices g of K consecutive elements, and ``y = U^T (g - mu)`` travels, where mu
is the slices' mean and U [K, k] their first k principal components.

Wire, for S whole slices: mu as float32 [K], U^T as float32 [k, K], the coefficients as float32 [S, k], and the elements
after the last whole slice as float32. If that is not shorter than the tensor, it travels as float32.

Rounds: for ``window`` steps the gradient is summed uncompressed, and every rank keeps the second moment of the mean's
slices. Then the first rank's basis is gathered (the result of an eigendecomposition differs between machines, and for
nearly equal eigenvalues even its vectors do), and only coefficients are summed. These are linear in the gradient, so
the result is that of one worker with the mean. After ``refresh`` steps the next window begins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire.comm.compressors.base import Compressor, Count, Shape, as_numbers, numel
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State

TILE = 4096  # slices whose moment is computed at a time


class Sums(NamedTuple):
    """Sums over slices that a basis is computed from, in float64.

    Attributes:
        count: Number of slices: [].
        total: Their sum: [K].
        moment: The sum of ``g g^T``: [K, K].
    """

    count: Tensor
    total: Tensor
    moment: Tensor


class GradiVeQ(Compressor):
    """Sends k coefficients per slice, and the basis.

    The squared error of a slice is ``||g - mu||^2 - ||y||^2``, its energy outside the basis: zero if the slices are in
    k dimensions around their mean.
    """

    name = "gradiveq"
    use = "Convolutions, whose neighbouring gradients correlate; natively summed between the basis steps."
    linear = True

    slice: int = Field(default=64, ge=2, le=2**13, description="consecutive elements in a slice (K)")
    components: Count = Field(default=8, description="coefficients per slice (k), fewer than its elements")
    window: Count = Field(default=10, description="uncompressed steps, in rounds, that a basis is computed from")
    refresh: Count = Field(default=100, description="steps from one window to the next, more than the window has")

    @model_validator(mode="after")
    def _fewer(self) -> GradiVeQ:
        if self.components >= self.slice:
            raise ValueError(f"components {self.components} must be fewer than the slice's {self.slice} elements")
        if self.window >= self.refresh:
            raise ValueError(f"window {self.window} must be shorter than refresh {self.refresh}")
        return self

    def slices(self, shape: Shape) -> int:
        """Whole slices in a tensor."""
        return numel(shape) // self.slice

    def sent(self, shape: Shape) -> int:
        """Coefficients, and the elements after the last whole slice."""
        return self.slices(shape) * self.components + numel(shape) % self.slice

    @property
    def basis_numel(self) -> int:
        """Elements of mu and U."""
        return (1 + self.components) * self.slice

    def compresses(self, shape: Shape) -> bool:
        """Whether a tensor of this shape travels as coefficients instead of float32."""
        return self.basis_numel + self.sent(shape) < numel(shape)

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per element of mu, U and what is sent, or of the tensor."""
        return 4 * (self.basis_numel + self.sent(shape) if self.compresses(shape) else numel(shape))

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The wire, and whether it is not finite; a non-finite value of a slice makes mu non-finite."""
        wire = self.to_wire(x, generator)
        return wire, self.not_representable(as_numbers(wire, torch.float32))

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Compute the basis of x's own slices and the coefficients of x."""
        if not self.compresses(x.shape):
            return x.view(-1).view(torch.uint8)
        slices, _ = self.cut(x.view(-1))
        basis = self.basis(sums(slices))
        return torch.cat([basis.view(-1), self.project(x.view(-1), basis)]).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Expand the coefficients."""
        numbers = as_numbers(wire, torch.float32)
        if not self.compresses(shape):
            return numbers
        basis, sent = numbers.split([self.basis_numel, self.sent(shape)])
        return self.expand(sent, basis.view(-1, self.slice), shape)

    def cut(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A vector's whole slices, [S, K], and the elements after them."""
        end = x.numel() - x.numel() % self.slice
        return x[:end].view(-1, self.slice), x[end:]

    def basis(self, sums: Sums) -> Tensor:
        """mu, then the components by falling variance, as rows: float32 [1 + k, K].

        NaN where the sums are not finite.
        """
        mean = sums.total / sums.count
        covariance = sums.moment / sums.count - torch.outer(mean, mean)
        finite = covariance.isfinite().all()
        vectors = torch.linalg.eigh(torch.where(finite, covariance, 0))[1]  # by rising eigenvalue; NaN would raise
        rows = torch.cat([mean.unsqueeze(0), vectors.T.flip(0)[: self.components]])
        return torch.where(finite, rows, math.nan).to(torch.float32)

    def project(self, x: Tensor, basis: Tensor) -> Tensor:
        """The coefficients of a vector, and the elements after its last whole slice: float32 [sent]."""
        slices, rest = self.cut(x)
        sent = x.new_empty(self.sent(x.numel()))
        coefficients, end = sent.split([len(slices) * self.components, len(rest)])
        offset = -(basis[1:] @ basis[0])
        torch.addmm(offset, slices, basis[1:].T, out=coefficients.view(-1, self.components))
        end.copy_(rest)
        return sent

    def expand(self, sent: Tensor, basis: Tensor, shape: Shape) -> Tensor:
        """Invert `project`, except for the part outside the basis."""
        x = sent.new_empty(numel(shape))
        slices, rest = self.cut(x)
        coefficients, end = sent.split([len(slices) * self.components, len(rest)])
        torch.addmm(basis[0], coefficients.view(-1, self.components), basis[1:], out=slices)
        rest.copy_(end)
        return x

    def new_state(self, shape: Shape, seed: int) -> State:
        """Return the state before the first step."""
        if not self.compresses(shape):
            return {}
        return {
            "steps": torch.zeros((), dtype=torch.int64, device="cpu"),
            "count": torch.zeros((), dtype=torch.float64, device="cpu"),
            "total": torch.zeros(self.slice, dtype=torch.float64, device="cpu"),
            "moment": torch.zeros(self.slice, self.slice, dtype=torch.float64, device="cpu"),
            "basis": torch.zeros(1 + self.components, self.slice, dtype=torch.float32, device="cpu"),
        }

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """Sum x in the window, and coefficients after it; the state counts its own steps."""
        if not self.compresses(x.shape):
            return (yield ReduceRequest("sum", x, rows=True)) / context.world, x
        step = int(state["steps"]) % self.refresh  # always on the CPU
        state["steps"] = state["steps"] + 1
        if step >= self.window:
            basis = state["basis"].to(x.device)
            sent = self.project(x.view(-1), basis)
            total = yield ReduceRequest("sum", sent)
            mean = self.expand(total / context.world, basis, x.shape)
            return mean.view(x.shape), self.expand(sent, basis, x.shape).view(x.shape)
        mean = (yield ReduceRequest("sum", x)) / context.world
        new = sums(self.cut(mean.view(-1))[0])
        for key, value in new._asdict().items():
            before = state[key].to(x.device) if step else 0
            state[key] = before + torch.where(new.moment.isfinite().all(), value, 0)
        if step == self.window - 1:
            basis = self.basis(Sums(state["count"].clamp_min(1), state["total"], state["moment"]))
            state["basis"] = (yield ReduceRequest("gather", basis))[0]
        return mean, x

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """The tensor in the window, with the basis at its end; else what is sent. Steps count from `new_state`."""
        if not self.compresses(shape):
            return RoundCost(rows=4 * numel(shape))
        if step is None or step % self.refresh >= self.window:
            return RoundCost(summed=4 * self.sent(shape))
        last = step % self.refresh == self.window - 1
        return RoundCost(summed=4 * numel(shape), gathered=4 * self.basis_numel if last else 0)


def sums(slices: Tensor) -> Sums:
    """Sum float32 ``slices`` [S, K] for a basis."""
    total = slices.new_zeros(slices.shape[1], dtype=torch.float64)
    moment = slices.new_zeros(slices.shape[1], slices.shape[1], dtype=torch.float64)
    for tile in slices.split(TILE):
        exact = tile.to(torch.float64)
        total += exact.sum(dim=0)
        moment += exact.T @ exact
    return Sums(total.new_tensor(len(slices)), total, moment)
