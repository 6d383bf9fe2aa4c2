"""A lossless code of the bytes that another compressor sends, the last stage of any chain: ``int8+entropy``.

Each kind of bytes is coded with its own frequencies (`gradwire.comm.compressors.lossless`,
`gradwire.comm.compressors.rans`), as DietGPU and ZipNN do for bfloat16 (Hershcovitch et al., "ZipNN: Lossless
Compression for AI Models", arXiv:2411.05239, 2024): exponents, codes of small integers, scales and gaps of indices are
far from uniform, mantissas are not.

Wire, where the shape gives the other compressor's bytes: those, if they are fewer than 1,024 or no code is shorter;
else the code, which is known by its length. Where it does not: those, if they are fewer than 128; else a byte, 0 or 1,
and those or the code. So no encoding is longer than 1.01 times the one without this stage.

It is written and read on the host, whatever the device of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comm.compressors import lossless
from gradwire.comm.compressors.base import Compressor, Shape
from gradwire.comm.compressors.methods.none import Uncompressed
from gradwire.comm.compressors.segments import Segments

SHORT = 1024  # bytes; a shorter encoding would gain less than its length, which has to travel, and a code's head take
SHORTEST = 128  # bytes, where the length has to travel in any case
FLOAT32 = Uncompressed()


# Why: docs/decisions.md, "The lossless stage sends its tables".
class Entropy(Compressor):
    """Sends float32, or in a chain another compressor's bytes, in a lossless code of fewer bytes."""

    name = "entropy"
    use = "Last in a chain, over a slow link: `bf16+entropy` sends bfloat16's very numbers in two thirds of its bytes."

    @property
    def inner(self) -> Compressor:
        """The compressor that makes the bytes."""
        return FLOAT32

    def after(self, first: Compressor) -> Compressor:
        """The code of what ``first`` sends."""
        return EntropyOf(first=first)

    @property
    def unbiased(self) -> bool:
        """As without this stage."""
        return self.inner.unbiased

    def not_representable(self, x: Tensor) -> Tensor:
        """As without this stage."""
        return self.inner.not_representable(x)

    def compresses(self, shape: Shape) -> bool:
        """As without this stage."""
        return self.inner.compresses(shape)

    def wire_bytes(self, shape: Shape) -> int | None:
        """The bytes without this stage where they are few; None where they are coded."""
        size = self.inner.wire_bytes(shape)
        return size if size is not None and size < SHORT else None

    def index_bytes(self, wire: Tensor, shape: Shape) -> int:
        """The code's bytes of indices."""
        coded, body = self._body(wire, shape)
        return lossless.index_bytes(body.cpu().numpy()) if coded else self.inner.index_bytes(body, shape)

    def sent_elements(self, shape: Shape, wire: Tensor | None = None) -> int | None:
        """As without this stage."""
        known = self.inner.sent_elements(shape)
        if known is not None or wire is None:
            return known
        return self.inner.sent_elements(shape, self._unpacked(wire, shape))

    def to_wire(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode and code."""
        return self._packed(self.inner.to_wire(x, generator), tuple(x.shape))

    def from_wire(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undo both."""
        return self.inner.from_wire(self._unpacked(wire, shape), shape)

    def coded(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """`to_wire` in its fastest form, and whether x is not representable."""
        raw, bad = self.inner.coded(x, generator)
        return self._packed(raw, tuple(x.shape)), bad

    def decoded(self, wire: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`from_wire` in its fastest form."""
        return self.inner.decode(self._unpacked(wire, shape), shape).view(-1)

    def _encode_each(
        self,
        values: Tensor,
        segments: Segments,
        wire: Tensor,
        generators: Sequence[torch.Generator | None],
        bad: Tensor,
        residual: Tensor | None,
    ) -> tuple[Tensor, Segments]:
        """The other compressor's `encode_many`, then code each tensor's bytes."""
        plain = segments.derive(self, lambda: Segments.of(self.inner, ((s.start, s.form) for s in segments)))
        raw, placed = self.inner.encode_many(values, plain, generators=generators, flags=bad, residual=residual)
        wires = [self._packed(raw[segment.bytes], segment.form) for segment in placed]
        if not segments.fixed:
            return torch.cat([wire[:0], *wires]), segments.placed(encoding.numel() for encoding in wires)
        for segment, encoding in zip(segments, wires, strict=True):
            wire[segment.bytes] = encoding
        return wire, segments

    def _packed(self, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The wire of an encoding."""
        known = self.inner.wire_bytes(shape) is not None
        if raw.numel() < (SHORT if known else SHORTEST):
            return raw
        code = lossless.encode(raw.cpu().numpy(), self.inner.sections(raw, shape), least=0 if known else SHORTEST)
        shorter = code.size < raw.numel()
        body = torch.from_numpy(code).to(raw.device) if shorter else raw
        return body if known else torch.cat([body.new_full((1,), shorter), body])

    def _unpacked(self, wire: Tensor, shape: Shape) -> Tensor:
        """The encoding of a wire."""
        coded, body = self._body(wire, shape)
        if not coded:
            return body
        raw = lossless.decode(body.cpu().contiguous().numpy(), self.inner.wire_bytes(shape))
        return torch.from_numpy(raw).to(wire.device)

    def _body(self, wire: Tensor, shape: Shape) -> tuple[bool, Tensor]:
        """Whether a wire holds a code, and the wire without the byte that tells.

        Raises:
            ValueError: If it cannot be either.
        """
        size = self.inner.wire_bytes(shape)
        if size is None and wire.numel() >= SHORTEST:
            if wire[0] > 1:
                raise ValueError(
                    f"invalid payload: the first byte for {self.name} is {int(wire[0])}; it must be 0 or 1"
                )
            return bool(wire[0]), wire[1:]
        if size is not None and wire.numel() > size:
            raise ValueError(
                f"invalid payload: {wire.numel()} bytes for {self.name}, at most {size} encode shape {shape}"
            )
        return size is not None and wire.numel() < size, wire


class EntropyOf(Entropy):
    """Another compressor's bytes in a lossless code."""

    first: Compressor

    @property
    def name(self) -> str:  # type: ignore[override]
        """All names, as in ``topk+int8+entropy``."""
        return f"{self.first.name}+{Entropy.name}"

    @property
    def overflow(self) -> float:  # type: ignore[override]
        """As without this stage."""
        return self.first.overflow

    @property
    def inner(self) -> Compressor:
        """The compressor that makes the bytes."""
        return self.first
