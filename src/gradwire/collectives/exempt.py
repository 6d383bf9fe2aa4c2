"""Which parameters are sent as float32 although a compressor is on: norms and biases suffer most and weigh least."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict, Field

from gradwire.collectives.layout import Piece


class Exempt(BaseModel):
    """A parameter is exempt if any of the given conditions holds; by default none is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_numel: int | None = Field(None, ge=0, description="exempt parameters of at most so many elements")
    max_ndim: int | None = Field(None, ge=0, description="exempt parameters of at most so many dimensions")
    names: tuple[str, ...] = Field((), strict=False, description="exempt parameters whose name matches a pattern")

    def covers(self, piece: Piece) -> bool:
        """Whether the parameter that ``piece`` belongs to is exempt."""
        return (
            (self.max_numel is not None and piece.parameter_numel <= self.max_numel)
            or (self.max_ndim is not None and len(piece.shape) <= self.max_ndim)
            or any(fnmatchcase(piece.name, pattern) for pattern in self.names)
        )
