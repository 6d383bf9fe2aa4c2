"""Segments: positions of the tensors of one call in a buffer of values, and of their encodings in a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Shape: TypeAlias = int | tuple[int, ...]


def numel(shape: Shape) -> int:
    """Number of elements of a tensor of ``shape``."""
    return shape if isinstance(shape, int) else math.prod(shape)


class Segment(NamedTuple):
    """One tensor.

    Attributes:
        start: Its first element in the values.
        form: Its shape, a vector's or a matrix's.
        at: Its first byte in the wire; has no meaning where a size is None.
        size: Bytes of its encoding; None if it depends on the data.
    """

    start: int
    form: tuple[int, ...]
    at: int
    size: int | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.form)

    @property
    def elements(self) -> slice:
        """Its position in the values."""
        return slice(self.start, self.start + self.numel)

    @property
    def bytes(self) -> slice:
        """The encoding's position in the wire."""
        assert self.size is not None
        return slice(self.at, self.at + self.size)


class Segments:
    """The tensors of one call, in any order; they overlap neither in the values nor in the wire.

    Keep the object from step to step: what the kernels derive from it is computed once.
    """

    def __init__(self, segments: Iterable[Segment], *, fixed: bool | None = None) -> None:
        self._segments = tuple(segments)
        self._derived: dict[object, object] = {}
        ends = [segment.at + segment.size for segment in self._segments if segment.size is not None]
        self.nbytes = max(ends, default=0) if len(ends) == len(self._segments) else None
        """Bytes of the wire up to the last encoding's end; None if a size depends on the data."""
        self.fixed = self.nbytes is not None if fixed is None else fixed
        """Whether the forms alone give all sizes."""
        self.numel = max((segment.start + segment.numel for segment in self._segments), default=0)
        """Elements of the values up to the last tensor's end."""

    @classmethod
    def of(cls, compressor: Any, tensors: Iterable[tuple[int, tuple[int, ...]]], at: int = 0) -> Segments:
        """Tensors given by start and form, whose encodings follow each other from byte ``at`` on."""
        segments = []
        for start, form in tensors:
            segments.append(Segment(start, form, at, compressor.wire_bytes(form)))
            at += segments[-1].size or 0
        return cls(segments)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._segments)

    def __getitem__(self, index: int) -> Segment:
        """Return one tensor."""
        return self._segments[index]

    def __iter__(self) -> Iterator[Segment]:
        """Iterate over the tensors."""
        return iter(self._segments)

    def placed(self, sizes: Iterable[int]) -> Segments:
        """The same tensors, whose encodings have these sizes and follow each other from byte 0 on."""
        segments, at = [], 0
        for segment, size in zip(self._segments, sizes, strict=True):
            segments.append(segment._replace(at=at, size=size))
            at += size
        return Segments(segments, fixed=self.fixed)

    def derive(self, key: object, make: Callable[[], T]) -> T:
        """The result of ``make``, computed once for each key."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]  # type: ignore[return-value]

    def table(self, device: torch.device) -> Tensor:
        """`rows` on a device, copied there once."""
        return self.derive(device, lambda: torch.tensor(self.rows, dtype=torch.int64, device=device).view(-1, 4))

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The rows of the kernels' table: of each tensor start, elements, first byte and bytes."""
        return [(segment.start, segment.numel, segment.at, segment.size or 0) for segment in self]


class Buffers(NamedTuple):
    """The arguments of one call that encodes, after their checks.

    Attributes:
        values: float32 vector, contiguous.
        segments: The positions of the tensors in it, and of their encodings in the wire.
        wire: uint8 vector, contiguous; only the encodings' bytes are written.
        generators: A source of randomness for each tensor.
        bad: uint8 [tensors], zeros, set where a tensor is not representable.
        residual: float32, laid out as the values and added to them; then what was not sent, and 0 where a tensor is
            bad. None: there is no error feedback.
    """

    values: Tensor
    segments: Segments
    wire: Tensor
    generators: Sequence[torch.Generator | None]
    bad: Tensor
    residual: Tensor | None
