"""The calls of a compressor: checks, the choice of a kernel, and many tensors at once.

A caller with many tensors in one buffer makes a table of them once and calls the compressor once in a step::

    segments = Segments.of(compressor, [(run.start, form), ...])  # encodings follow each other in the message
    flags = torch.zeros(len(segments), dtype=torch.uint8)
    wire, segments = compressor.encode_many(
        flat, segments, message, generators=generators, flags=flags, residual=residual
    )
    ...  # exchange; received: uint8 [ranks, b], the ranks' messages in the order of the sum
    compressor.decode_add(received, segments, total, onto="zero")

``message``, ``residual`` and ``total`` are the caller's and may be used again in the next step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from torch import Tensor

from gradwire.base.errors import BadInput, NonFiniteGradient, unknown
from gradwire.base.strict import BOUND
from gradwire.comm.compressors import kernels
from gradwire.comm.compressors.segments import Buffers, Segments, Shape

Onto: TypeAlias = Literal["sum", "zero", "blank"]
ONTO: tuple[Onto, ...] = ("zero", "sum", "blank")
REHEARSED = 2**14  # elements of a tensor
HERE = torch.device("cpu")
COMPILED: set[Driver] = set()  # compressors that `compile_kernels` was given


class Driver(BaseModel):
    """The members of a compressor that its callers use, and its options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    if TYPE_CHECKING:  # `base.Compressor` declares them
        name: ClassVar[str]
        overflow: ClassVar[float]

        def wire_bytes(self, shape: Shape) -> int | None:
            """See `base.Compressor`."""

        def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
            """See `base.Compressor`."""

        def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
            """See `base.Compressor`."""

    def __init__(self, **options: Any) -> None:
        kind = type(self)
        name = kind.name if isinstance(kind.name, str) else kind.__name__  # that of a chain needs its members
        for option in options.keys() - kind.model_fields.keys():
            raise unknown(f"{name} option", option, kind.model_fields)
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise bad_option(name, kind.model_fields, error) from None

    def encode(self, x: Tensor, *, generator: torch.Generator | None = None, flag: Tensor | None = None) -> Tensor:
        """All bytes that travel for ``x``.

        Args:
            x: Float vector or matrix of any float type, on any device, contiguous or not.
            generator: Source of randomness on x's device; methods without randomness ignore it. The global random
                state is never touched.
            flag: uint8 [1] on x's device, set to 1 if ``x`` holds a value that is not finite or becomes so on the wire
                (fp16 beyond 65,519). Nothing synchronises for that, and the bytes decode to something not finite.

        Returns:
            uint8 [wire_bytes], contiguous, on x's device. It may share memory with ``x``.

        Raises:
            NonFiniteGradient: Without ``flag``, where the flag would be set.
            ValueError: If ``x`` is not a float vector or matrix.
        """
        if x.ndim not in (1, 2) or not x.is_floating_point():
            raise ValueError(f"{self.name} encodes float vectors and matrices, not {x.dtype} of shape {tuple(x.shape)}")
        wire, bad = self.coded(x.detach().to(torch.float32).contiguous(), generator)
        self._report(bad, flag)
        return wire

    def decode(self, wire: Tensor, shape: Shape) -> Tensor:
        """The tensor that ``wire`` represents.

        Args:
            wire: uint8 [b] as `encode` made it, on any device.
            shape: Shape of the encoded tensor.

        Returns:
            float32 of ``shape`` on the wire's device. It may share memory with ``wire``.

        Raises:
            ValueError: If these bytes cannot be an encoding of that shape.
        """
        expected = self.wire_bytes(shape)
        if wire.dtype != torch.uint8 or wire.ndim != 1 or expected not in (None, wire.numel()):
            raise ValueError(
                f"invalid payload: {wire.numel()} elements of {wire.dtype} cannot encode shape {shape} by {self.name}, "
                f"which takes {'a vector of' if expected is None else expected} bytes (uint8)"
            )
        return self.decoded(wire, (shape,) if isinstance(shape, int) else tuple(shape)).view(shape)

    def encode_many(
        self,
        values: Tensor,
        segments: Segments,
        wire: Tensor | None = None,
        *,
        generators: Sequence[torch.Generator | None] | None = None,
        flags: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Segments]:
        """`encode` for all tensors of a buffer, with the same bytes and the same draws.

        Where there is no kernel, this calls `encode` for one tensor after the other. With ``residual`` it is a step of
        error feedback: what is encoded is ``residual + values``, what was not sent becomes the residual, and a flagged
        tensor's becomes 0.

        Args:
            values: Float vector of at least ``segments.numel`` elements, on any device.
            segments: The positions of the tensors in it, and of their encodings in the wire.
            wire: uint8 vector of at least ``segments.nbytes``, contiguous, on the values' device; a new one by default.
                No other bytes of it change. Ignored if a size depends on the data.
            generators: A source of randomness for each tensor, as in `encode`.
            flags: uint8 [tensors], as in `encode`.
            residual: float32, contiguous, each tensor's residual at the position of the tensor in ``values``; changed
                in place.

        Returns:
            The wire and the segments; where a size depends on the data, a wire of all encodings one after the other,
            and the segments placed in it.

        Raises:
            NonFiniteGradient: Without ``flags``, where one would be set.
            ValueError: If a buffer is of a wrong type or too small.
        """
        check_buffer("values", values, segments.numel)
        values = values.detach().to(torch.float32).contiguous()
        if wire is None:
            wire = torch.empty(segments.nbytes or 0, dtype=torch.uint8, device=values.device)
        check_buffer("wire", wire, segments.nbytes or 0, torch.uint8)
        if residual is not None:
            check_buffer("residual", residual, segments.numel, torch.float32)
        given = generators or [None] * len(segments)
        if len(given) != len(segments):
            raise ValueError(f"{self.name}: {len(given)} generators for {len(segments)} segments")
        if flags is not None and flags.shape != (len(segments),):
            raise ValueError(f"{self.name}: the flags of {len(segments)} segments have shape {tuple(flags.shape)}")
        bad = torch.zeros(len(segments), dtype=torch.uint8, device=values.device)
        buffers = Buffers(values, segments, wire, given, bad, residual)
        encode_many = kernels.find(self, values.device).encode_many
        if encode_many and segments.fixed:
            encode_many(self, buffers)
        else:
            wire, segments = self.encode_each(buffers)
        self._report(bad, flags)
        return wire, segments

    def decode_add(self, wire: Tensor, segments: Segments, out: Tensor, *, onto: Onto = "sum") -> None:
        """`decode` all tensors of a message into a buffer, or add them to it, with no tensor between.

        Args:
            wire: uint8 [b], contiguous, as `encode_many` made it, on any device; or [messages, b], for several that
                are added one after the other, which reads and writes ``out`` once.
            segments: The positions of the encodings in a message, and of the tensors in ``out``.
            out: float32, contiguous, of at least ``segments.numel`` elements; others do not change.
            onto: Where the first message's tensors go: they are added to the ``sum`` that ``out`` holds, without a
                -0.0; added to ``zero``, so that a -0.0 becomes 0.0 as in any sum from 0; or copied into a ``blank``
                buffer. Only ``sum`` reads ``out``.

        Raises:
            ValueError: If the bytes cannot be encodings of those shapes, or a buffer is of a wrong type or too small.
        """
        if segments.nbytes is None:
            raise ValueError(f"{self.name}: the sizes depend on the data; take the segments that encode_many returned")
        wires = wire if wire.ndim == 2 and wire.is_contiguous() else wire.unsqueeze(0)
        check_buffer("wire", wires[0] if len(wires) else wire, segments.nbytes, torch.uint8)
        check_buffer("sum", out, segments.numel, torch.float32)
        decode_add = kernels.find(self, wire.device).decode_add
        if decode_add and segments.fixed:
            decode_add(self, wires, segments, out, onto)
        else:
            self.decode_each(wires, segments, out, onto)

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form for x's device, and whether x is not representable (bool or integer, [1])."""
        coded = kernels.find(self, x.device).encode(self, x, generator)
        return coded or (self.to_wire(x, generator), self.not_representable(x))

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form for the wire's device."""
        decoded = kernels.find(self, wire.device).decode(self, wire, shape)
        return self.from_wire(wire, shape) if decoded is None else decoded

    def encode_each(self, buffers: Buffers) -> tuple[Tensor, Segments]:
        """`encode_many` by `encode`."""
        values, segments, wire, generators, bad, residual = buffers
        wires = []
        for segment, generator, flag in zip(segments, generators, bad.split(1), strict=True):
            x = values[segment.elements] if residual is None else residual[segment.elements] + values[segment.elements]
            wires.append(self.encode(x.view(segment.form), generator=generator, flag=flag))
            if residual is not None:
                sent = self.decode(wires[-1], segment.form).view(-1)
                torch.sub(x, sent, out=residual[segment.elements]).masked_fill_(flag.to(torch.bool), 0)
        if not segments.fixed:
            return torch.cat([wire[:0], *wires]), segments.placed(encoding.numel() for encoding in wires)
        for segment, encoding in zip(segments, wires, strict=True):
            wire[segment.bytes] = encoding
        return wire, segments

    def decode_each(self, wires: Tensor, segments: Segments, out: Tensor, onto: Onto) -> None:
        """`decode_add` by `decode`."""
        for message in wires:
            for segment in segments:
                put(self.decode(message[segment.bytes], segment.form).view(-1), out[segment.elements], onto)
            onto = "sum"

    def _report(self, bad: Tensor, flags: Tensor | None) -> None:
        """Set the flags, or raise, for what is not representable."""
        if flags is not None:
            flags.logical_or_(bad)
        elif bad.any():
            raise NonFiniteGradient(
                f"{self.name}: the gradient holds NaN or a magnitude of {self.overflow:g} or more, "
                f"which its wire cannot carry"
            )

    def not_representable(self, x: Tensor) -> Tensor:
        """Whether ``x`` holds NaN or a magnitude of at least `overflow`: bool []."""
        if not x.numel():
            return torch.zeros((), dtype=torch.bool, device=x.device)
        return self._outside(*torch.aminmax(x))

    def rows_not_representable(self, x: Tensor) -> Tensor:
        """The same for each row of a matrix: bool [rows]."""
        if len(x) == 1 or not x.numel():
            return self.not_representable(x).expand(len(x))
        return self._outside(x.amin(1), x.amax(1))  # on a CPU ten times as fast as aminmax by rows

    def _outside(self, low: Tensor, high: Tensor) -> Tensor:
        """Whether extremes, which are NaN where any value is, fail the comparison."""
        return torch.logical_and(low > -self.overflow, high < self.overflow).logical_not_()


def put(value: Tensor, part: Tensor, onto: Onto) -> None:
    """Add a decoded tensor to its part of the buffer, or set the part to it."""
    if onto == "sum":
        part += value
    elif onto == "zero":
        torch.add(value, 0.0, out=part)
    else:
        part.copy_(value)


def check_buffer(what: str, buffer: Tensor, least: int, dtype: torch.dtype | None = None) -> None:
    """Refuse a buffer of segments that is not a vector, or of another type, too small, or not contiguous if written."""
    fits = buffer.is_floating_point() if dtype is None else buffer.dtype == dtype and buffer.is_contiguous()
    if buffer.ndim != 1 or buffer.numel() < least or not fits:
        raise ValueError(
            f"the {what} of segments take a vector of at least {least} elements of {dtype or 'a float type'}, "
            f"not {buffer.dtype} of shape {tuple(buffer.shape)}"
        )


def bad_option(name: str, fields: Mapping[str, FieldInfo], error: ValidationError) -> BadInput:
    """The first complaint of pydantic as one message: the option, what was given, what is allowed."""
    complaint = error.errors()[0]
    option = ".".join(map(str, complaint["loc"]))
    message = complaint["msg"].removeprefix("Value error, ").replace(BOUND, "it must be ")
    if not option:
        return BadInput(f"{name}: {message}.")
    allowed = bounds(option, fields[option]) if option in fields else ""
    return BadInput(f"{name} option {option!r} is {complaint['input']!r}: {message}{allowed}.")


def bounds(option: str, field: FieldInfo) -> str:
    """The range of an option that has two bounds, such as `` (0 < density <= 1)``; nothing for others."""
    signs = {"gt": "<", "ge": "<=", "lt": "<", "le": "<="}
    limits = [(kind, getattr(limit, kind)) for limit in field.metadata for kind in signs if hasattr(limit, kind)]
    low = [f"{value} {signs[kind]}" for kind, value in limits if kind[0] == "g"]
    high = [f"{signs[kind]} {value}" for kind, value in limits if kind[0] == "l"]
    return f" ({low[0]} {option} {high[0]})" if low and high else ""


def compile_kernels(compressors: Iterable[Driver]) -> None:
    """Compile kernels for a CPU in a thread, once in a process; until it ends, other threads take the reference.

    Both have the same bytes. A process that ends earlier waits for the function that is being compiled. If one does not
    compile, a warning says so, and the reference serves to the end.
    """
    wanted = {compressor for compressor in compressors if has_kernel(compressor)} - COMPILED
    if not wanted:
        return
    COMPILED.update(wanted)

    def compile_wanted() -> None:
        try:
            encode_and_decode(wanted, [(5, 7), (11,)], HERE, True)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            kernels.FAILED.append(reason)
            warnings.warn(
                f"kernels for this processor do not compile ({reason}): compression takes the reference "
                f"implementations, which have the same results and are slower",
                RuntimeWarning,
                stacklevel=1,
            )
        finally:
            kernels.COMPILING.discard(thread)

    thread = Thread(target=compile_wanted, name="gradwire-kernels")
    kernels.COMPILING.add(thread)
    thread.start()


def has_kernel(compressor: Driver) -> bool:
    """Whether the compressor, or a member of a chain, has a kernel for a CPU."""
    return any(kernels.load(HERE.type, name) is not kernels.REFERENCE for name in compressor.name.split("+"))


def rehearse(
    compressors: Iterable[Driver], shapes: Iterable[tuple[int, ...]], device: torch.device, *, feedback: bool
) -> None:
    """Compile the kernels of compressors before anything is timed: encode and decode random tensors, as reductions do.

    Nothing is kept, and the global random state is not touched.

    Args:
        compressors: The compressors.
        shapes: Shapes of parameters; of each one, the first rows are enough.
        device: The device.
        feedback: Whether an encoding is also made with a residual.
    """
    for thread in tuple(kernels.COMPILING):
        thread.join()
    encode_and_decode(compressors, shapes, device, feedback)


def encode_and_decode(
    compressors: Iterable[Driver], shapes: Iterable[tuple[int, ...]], device: torch.device, feedback: bool
) -> None:
    """Call compressors as reductions do; arguments as of `rehearse`."""
    forms = [*dict.fromkeys(map(first_rows, shapes))]
    starts = accumulate(map(math.prod, forms), initial=0)
    tensors = [*zip(starts, forms, strict=False)]
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(sum(map(math.prod, forms)), generator=generator, dtype=torch.float32, device=device)
    for compressor in dict.fromkeys(compressors):
        for start, form in tensors:
            x = values[start : start + math.prod(form)].view(form)
            compressor.decode(compressor.encode(x, generator=generator), form)
        segments = Segments.of(compressor, tensors)
        for residual in [None, torch.zeros_like(values)][: 1 + feedback]:
            wire, placed = compressor.encode_many(
                values,
                segments,
                generators=[generator] * len(tensors),
                flags=torch.zeros(len(tensors), dtype=torch.uint8, device=device),
                residual=residual,
            )
            for onto in ONTO:
                compressor.decode_add(wire.expand(2, -1).contiguous(), placed, values.clone(), onto=onto)


def first_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The form that a compressor sees of a parameter, with as many rows as `REHEARSED` elements have, at least one."""
    form = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape),)
    return min(form[0], max(1, REHEARSED // max(1, math.prod(form[1:])))), *form[1:]
