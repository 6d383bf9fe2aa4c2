"""Threshold: every element whose magnitude reaches a threshold; their number depends on the data.

The hard threshold of Sahu et al., "Rethinking Gradient Sparsification as Total Error Minimization" (NeurIPS 2021),
absolute as there, or adapted to the tensor.

Wire: their number k as uint64, their places in ascending order (`gradwire.comm.compressors.indices`), then the values.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from gradwire.comm.compressors import indices
from gradwire.comm.compressors.base import Shape, as_numbers, numel
from gradwire.comm.compressors.indices import CodeName
from gradwire.comm.compressors.sparse import Sparsifier, magnitudes

COUNT = 8  # bytes
INFINITY = 0x7F800000  # the bits of float32's


class Threshold(Sparsifier):
    """Sends every non-zero element of magnitude ``v`` or more, if any.

    The error of an element is less than v, so the squared error of the tensor is at most ``min(||x||^2, n v^2)``.
    """

    name = "threshold"
    use = "When few gradients are large and their number may vary from step to step."

    threshold: float = Field(default=2.5, gt=0, description="the least magnitude sent, in units of scale")
    scale: Literal["rms", "max", "absolute"] = Field(
        default="rms", description="unit of the threshold: the tensor's root mean square, its largest magnitude, or 1"
    )
    indices: CodeName = Field(
        default="auto", description="how the places are written; auto: the shortest code of known size"
    )

    @model_validator(mode="after")
    def _reachable(self) -> Threshold:
        if self.scale == "max" and self.threshold > 1:
            raise ValueError(f"threshold {self.threshold:g} would never send anything: with scale max it is at most 1")
        return self

    def kept(self, shape: Shape) -> None:
        """None: it depends on the data."""

    def head_bytes(self, shape: Shape) -> None:
        """None: it depends on the data."""

    def least(self, x: Tensor) -> Tensor:
        """The bits of the least magnitude sent: int32 [], at least 1 and at most infinity's.

        Zeros are never sent, non-finite values always. The unit is computed in float64, and the threshold
        rounded once to float32.
        """
        if self.scale == "absolute" or not x.numel():
            unit = torch.ones((), dtype=torch.float64, device=x.device)
        elif self.scale == "max":
            unit = x.abs().amax().to(torch.float64)
        else:
            unit = x.to(torch.float64).square_().mean().sqrt_()
        return self.least_for(unit)

    def least_for(self, unit: Tensor) -> Tensor:
        """`least` by its unit, float64 []."""
        return magnitudes((self.threshold * unit).to(torch.float32)).view(()).clamp_(1, INFINITY)

    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Compare with the threshold."""
        places = (magnitudes(x) >= self.least(x)).nonzero().view(-1)
        return self.head(indices.encode(places, x.numel(), self.indices), places.numel()), x.view(-1)[places]

    def head(self, coded: Tensor, count: int) -> Tensor:
        """The number of places before their code."""
        return torch.cat([torch.tensor([count], dtype=torch.int64, device=coded.device).view(torch.uint8), coded])

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """Read the number and the code of the places."""
        places, used = indices.decode(wire[COUNT:], numel(shape), self.count(wire, shape), self.indices)
        return places, COUNT + used

    def count(self, wire: Tensor, shape: Shape) -> int:
        """Read how many places there are.

        Raises:
            ValueError: If the number is missing or too large.
        """
        if wire.numel() < COUNT:
            raise ValueError(f"invalid payload: {wire.numel()} bytes cannot encode a number of places")
        count = int(as_numbers(wire[:COUNT], torch.int64))
        if not 0 <= count <= numel(shape):
            raise ValueError(f"invalid payload: {wire.numel()} bytes cannot encode {count} places of shape {shape}")
        return count
