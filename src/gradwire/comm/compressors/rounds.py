"""The second form of a compressor: a dialogue with collectives that can reduce its messages natively.

``compressor.rounds(x, state, context)`` is a generator. It yields a `ReduceRequest`, receives the reduced tensor, and
returns the approximation of the mean and this rank's own contribution to it. The reducer drives it with collectives,
fused over parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from gradwire.comm.compressors.segments import Shape

State = dict[str, Tensor]


class ReduceRequest(NamedTuple):
    """A tensor to be reduced over the ranks.

    Attributes:
        op: ``sum`` and ``max`` element by element; ``gather`` puts the ranks' tensors one after another, [W, ...].
        tensor: This rank's part; equal in shape and type on all ranks.
        rows: Whether the tensor has one element per element of x, so that a reduce-scatter may answer with the part
            that belongs to this rank's rows only. The caller slices dependent tensors the same way.
        spare: Whether the driver may overwrite the tensor.
    """

    op: Literal["sum", "max", "gather"]
    tensor: Tensor
    rows: bool = False
    spare: bool = False


class Context(NamedTuple):
    """Values that are equal on all ranks: the parameter and the step.

    Attributes:
        name: The parameter's name.
        shape: Shape of ``x``.
        step: Optimizer steps finished before this one.
        world: Number of ranks.
        seed: The run's.
        feedback: Whether the contribution that the rounds return is used.
    """

    name: str
    shape: tuple[int, ...]
    step: int
    world: int
    seed: int
    feedback: bool = True

    def derived_seed(self) -> int:
        """A seed for this parameter and step, the same on all ranks: below 2^63."""
        words = f"{self.seed} {self.step} {self.name}".encode()
        return int.from_bytes(hashlib.sha256(words).digest()[:8], "little") >> 1


class RoundCost(NamedTuple):
    """Bytes of the tensors that one rank hands over in `rounds`, by how they travel.

    Attributes:
        summed: In sums and maxima of whole tensors.
        rows: In those that may be answered row by row.
        gathered: In gathers.
    """

    summed: int = 0
    rows: int = 0
    gathered: int = 0


Rounds = Generator[ReduceRequest, Tensor, tuple[Tensor, Tensor]]


class Reducible:
    """The members of a compressor whose messages a native collective can reduce; without `rounds` there is no such."""

    name: ClassVar[str]

    @property
    def has_rounds(self) -> bool:
        """Whether a native collective can reduce it, through `rounds`."""
        return type(self).rounds is not Reducible.rounds

    def new_state(self, shape: Shape, seed: int) -> State:
        """The state of `rounds` for one parameter between steps; the caller owns it, and checkpoints it."""
        return {}

    def elementwise(self, shape: Shape) -> bool:
        """Whether `rounds` treats each element of such a tensor by itself, without a state: it may be given several
        tensors as one vector.
        """
        return False

    def stacks(self, shape: Shape) -> bool:
        """Whether `rounds` takes several matrices of ``shape`` as [b, n, m], with their states stacked."""
        return False

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """Reduce ``x`` over the ranks by native collectives (see `gradwire.comm.compressors.rounds`).

        Args:
            x: float32 of ``context.shape``, contiguous; not to be changed, as it may be the gradient itself.
            state: As `new_state` made it; changed in place.
            context: The same on all ranks.

        Returns:
            The approximation of the mean over the ranks, and this rank's own contribution to it (what error feedback
            subtracts), both float32 of ``context.shape``.
        """
        raise NotImplementedError(f"{self.name} has no form that a native collective can reduce")

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Bytes of the tensors that one rank hands over in `rounds`, by how they travel.

        Args:
            shape: Shape of the parameter.
            step: Steps that this compressor has made, for methods whose first ones differ; None is any later one.
        """
        raise NotImplementedError(f"{self.name} has no form that a native collective can reduce")

    def round_bytes(self, shape: Shape, step: int | None = None) -> int:
        """All of `round_cost`."""
        return sum(self.round_cost(shape, step))
