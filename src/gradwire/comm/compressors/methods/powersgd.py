"""A matrix as the product of two thin ones, by one step of a power iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(NeurIPS 2019), algorithm 1: ``P = orthonormal(M Q)``, ``Q = M^T P``, and the matrix decodes to ``P Q^T``, the
projection of M onto the columns of P.

Wire, for an n x m matrix: P as float32 [n, rank], then Q as float32 [m, rank], both row-major. Vectors, and
matrices too small for savings (``rank (n + m) >= n m``), travel as float32. torch's PowerSGD hook leaves more matrices
uncompressed, all with ``2 rank (n + m) >= n m``: its ``min_compression_rate`` is 2, and this method's would be 1.

Rounds: the sum of the ranks' ``M Q``, made orthonormal on every rank, then the sum of their ``M^T P``. Both
products are linear in M, so the result is that of one worker with the mean. Every rank's contribution is the result
itself: error feedback keeps the error of the aggregate, as in the paper.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Compressor, Count, Shape, as_numbers, numel
from gradwire.comm.compressors.philox import draw_seed, uniforms
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State

DEPENDENT = 1e-6  # a column whose part outside the earlier ones is smaller than this is only rounding error of M Q


class PowerSGD(Compressor):
    """Sends the two factors of an approximation of low rank, wherever they are shorter than the matrix.

    ``||M - C||^2 = ||M||^2 - ||P^T M||^2``, up to rounding, and a matrix of at most this rank is exact.
    """

    name = "powersgd"
    use = "Large matrices on slow links, with error feedback; all ranks sum its factors natively."
    linear = True

    rank: Count = Field(default=4, description="columns of the two factors")

    def compresses(self, shape: Shape) -> bool:
        """Whether a tensor of this shape travels as two factors instead of float32."""
        return not isinstance(shape, int) and len(shape) == 2 and self.rank * sum(shape) < math.prod(shape)

    def wire_bytes(self, shape: Shape) -> int:
        """Four bytes per element of the factors, or of the tensor."""
        if not self.compresses(shape):
            return 4 * numel(shape)
        assert isinstance(shape, tuple)
        return 4 * self.rank * sum(shape)

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The wire, and whether it is not finite; a non-finite value of x makes its row of P non-finite."""
        wire = self.to_wire(x, generator)
        return wire, self.not_representable(as_numbers(wire, torch.float32))

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """One iteration from a random Q."""
        if not self.compresses(x.shape):
            return x.view(-1).view(torch.uint8)
        p = orthonormal(x @ self.drawn(x.shape, draw_seed(generator, x.device, self.name)))
        return torch.cat([p, (p.T @ x).T]).view(-1).view(torch.uint8)

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Multiply the factors."""
        numbers = as_numbers(wire, torch.float32)
        if not self.compresses(shape):
            return numbers
        p, q = numbers.view(-1, self.rank).split(shape)
        return p @ q.T

    def drawn(self, shape: Shape, seed: Tensor) -> Tensor:
        """A random Q for a matrix of ``shape``: uniform in (-1, 1) without 0, float32 [m, rank]."""
        assert isinstance(shape, tuple)
        return (uniforms(seed, shape[1] * self.rank) * 2 - (1 - 2.0**-24)).view(shape[1], self.rank)

    def new_state(self, shape: Shape, seed: int) -> State:
        """A random Q."""
        if not self.compresses(shape):
            return {}
        return {"q": self.drawn(shape, torch.tensor([seed], dtype=torch.int64, device="cpu"))}

    def elementwise(self, shape: Shape) -> bool:
        """Whether a tensor of this shape travels as float32."""
        return not self.compresses(shape)

    def stacks(self, shape: Shape) -> bool:
        """Whether a tensor of this shape travels as factors."""
        return self.compresses(shape)

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """Sum ``M Q``, then ``M^T P``; the next step starts with this one's Q.

        A column of Q that becomes 0 or non-finite (from the gradient, or because its rank is too small) would stay
        so; it keeps its previous direction.
        """
        if x.ndim == 1 or not self.compresses(x.shape[-2:]):
            return (yield ReduceRequest("sum", x, rows=True)) / context.world, x
        start = state["q"].to(x.device)
        product = (start.mT @ x.mT).mT.contiguous()  # on a CPU in a third of the time of x @ start
        p = orthonormal((yield ReduceRequest("sum", product, spare=True)))
        q = (yield ReduceRequest("sum", (p.mT @ x).mT.contiguous(), spare=True)) / context.world
        length = q.abs().amax(dim=-2, keepdim=True)  # P depends on directions only; scaling avoids over- and underflow
        state["q"] = torch.where((length > 0) & (length < math.inf), q / length, start)
        mean = p @ q.mT
        return mean, mean

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Four bytes per element of the factors, or of the tensor."""
        size = self.wire_bytes(shape)
        return RoundCost(summed=size) if self.compresses(shape) else RoundCost(rows=size)


def orthonormal(p: Tensor) -> Tensor:
    """The columns of ``p`` [..., n, r] made orthonormal in order, in float64, so that unlike machines agree.

    A column that depends on those before it becomes 0; one that is not finite stays so. On a CPU independent columns
    are made so by reflections, in a tenth of the time; their signs are those of Gram and Schmidt.
    """
    basis = p.to(torch.float64)
    if p.device.type == "cpu":
        reflected, upper = torch.linalg.qr(basis)
        lengths = upper.diagonal(dim1=-2, dim2=-1)
        if (lengths.abs() > DEPENDENT * basis.norm(dim=-2)).all():
            return (reflected * lengths.sign().unsqueeze(-2)).to(torch.float32)
    for j in range(basis.shape[-1]):
        column = basis[..., j : j + 1]
        before = column.norm(dim=-2, keepdim=True)
        if j:
            column -= basis[..., :j] @ (basis[..., :j].mT @ column)
        length = column.norm(dim=-2, keepdim=True)
        column *= torch.where(length > DEPENDENT * before, 1 / length, 0)
    return basis.to(torch.float32)
