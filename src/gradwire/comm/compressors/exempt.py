"""Which parameters travel as float32 although a compressor is on: norms and biases suffer most and weigh least."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict, Field

from gradwire.base.flags import NATURAL


class Exempt(BaseModel):
    """A parameter is exempt if any of the given conditions holds; by default none is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_numel: int | None = Field(None, ge=0, le=2**63 - 1, description="exempt parameters of at most so many elements")
    max_ndim: int | None = Field(None, **NATURAL.limits, description="exempt parameters of at most so many dimensions")
    names: tuple[str, ...] = Field(
        (), strict=False, description="exempt parameters whose name matches a pattern (* ? [])"
    )

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the parameter of that name and whole shape is exempt."""
        return (
            (self.max_numel is not None and math.prod(shape) <= self.max_numel)
            or (self.max_ndim is not None and len(shape) <= self.max_ndim)
            or any(fnmatchcase(name, pattern) for pattern in self.names)
        )
