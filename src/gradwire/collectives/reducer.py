"""The mean of a gradient over the ranks, through a compressor.

A reduce-scatter sends each rank the encodings of its row and leaves it their mean; an all-reduce then sends every
owner's mean to all ranks. A codec sees one piece of one parameter at a time, so the result depends on the model and on
the number of ranks, not on how a framework groups its parameters.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from gradwire.collectives import ops
from gradwire.collectives.bytes import FLOAT32
from gradwire.collectives.exchange import exchange
from gradwire.collectives.layout import Layout, Piece
from gradwire.collectives.meter import METER, Meter
from gradwire.compressors import build
from gradwire.compressors.base import Compressor
from gradwire.compressors.exempt import Exempt
from gradwire.compressors.schedule import Schedule
from gradwire.errors import BadInput, NonFiniteGradient, unknown

Kind = Literal["reduce_scatter", "all_reduce"]
Phase = Literal["scatter", "gather"]  # every rank's gradients to the owners; the owners' means to every rank

CHOICES = {
    "algorithm": ("auto", "exchange"),
    "second": ("encoded", "float32"),
    "nonfinite": ("raise", "skip", "propagate"),
}
NOTHING = Exempt()


class Reducer:
    """Reduces flat gradient buffers; one per run and rank, and every rank makes the same calls in the same order.

    At a world size of 1 it is the identity: nothing is encoded, kept or counted.

    Args:
        compressor: What encodes a piece.
        group: The ranks; None is the default group.
        algorithm: ``exchange`` (the encodings travel and are decoded before they are summed) or ``auto``, which is
            resolved here, once; `algorithm` then tells what runs.
        second: How an all-reduce's means travel: ``encoded`` again, or as ``float32``.
        exempt: Parameters that travel as float32.
        schedule: Which compressor each optimizer step uses, where it is not always ``compressor``.
        dense_steps: In the first so many optimizer steps everything travels as float32.
        nonfinite: What `finish` does if any rank met a value that is not finite: ``raise`` on all ranks, ``skip``
            (return False), or ``propagate`` (return True).
        seed: Of the codecs' generators. Each parameter, phase and rank draws from a generator of its own.

    Raises:
        BadInput: If an option has a value that it does not take.
    """

    def __init__(
        self,
        compressor: Compressor,
        group: ops.Group = None,
        *,
        algorithm: str = "auto",
        second: str = "encoded",
        exempt: Exempt = NOTHING,
        schedule: Schedule | None = None,
        dense_steps: int = 0,
        nonfinite: str = "raise",
        seed: int = 0,
    ) -> None:
        for option, value in (("algorithm", algorithm), ("second", second), ("nonfinite", nonfinite)):
            if value not in CHOICES[option]:
                raise unknown(f"value of the reducer's option {option!r},", str(value), CHOICES[option])
        if dense_steps < 0:
            raise BadInput(f"dense_steps is {dense_steps}: it counts optimizer steps and cannot be negative.")
        self.compressor = compressor
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.algorithm = "exchange" if algorithm == "auto" else algorithm
        self.second = second
        self.exempt = exempt
        self.schedule = schedule
        self.dense_steps = dense_steps
        self.nonfinite = nonfinite
        self.seed = seed
        self.step = 0  # optimizer steps finished
        self.meter = Meter(METER)
        self._float32 = build("none")
        self._counts: Counter[str] = Counter()
        self._expected: int | None = 0  # bytes over all ranks; None once a size depended on the data
        self._flag: Tensor | None = None  # uint8 [1]: this rank met a value that is not finite
        self._generators: dict[tuple[str, Phase], torch.Generator] = {}
        self._restored: dict[tuple[str, Phase], Tensor] = {}  # states of generators that were not used since

    def reduce_scatter(self, flat: Tensor, layout: Layout | str) -> Tensor:
        """This rank's row of the mean over the ranks.

        Args:
            flat: Vector of any float type, `layout.numel` elements.
            layout: What lies where in ``flat``; a name stands for one vector that is cut anywhere.

        Returns:
            float32 [row_numel]; padding is 0.

        Raises:
            RunFault: If ``flat`` is no buffer of that layout.
        """
        flat, layout = self._buffer(flat, layout)
        if self.world == 1:
            return flat.to(torch.float32)
        self._count(layout, "reduce_scatter")
        return self._scatter(flat, layout)

    def all_reduce(self, flat: Tensor, layout: Layout | str) -> Tensor:
        """The mean over the ranks, bit-equal on all of them: float32 of ``flat``'s shape; else as `reduce_scatter`."""
        numel = flat.numel()
        flat, layout = self._buffer(flat, layout)
        if self.world == 1:
            return flat.to(torch.float32)
        self._count(layout, "all_reduce")
        return self._gather(self._scatter(flat, layout), layout)[:numel]

    def finish(self) -> bool:
        """End the optimizer step: advance `step` and agree over the ranks whether every value was finite.

        Call it once per optimizer step, after backward, on every rank.

        Returns:
            Whether the caller shall take the optimizer step. With one rank nothing was looked at, and it always is.

        Raises:
            NonFiniteGradient: On all ranks alike, under ``raise``.
        """
        finished, self.step = self.step, self.step + 1
        if self.world == 1 or self._agreed_finite():
            return True
        self._counts["nonfinite_steps"] += 1
        if self.nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradient of optimizer step {self.step} holds NaN, infinity or a value too large for "
                f"{self.compressor.name} on at least one rank",
                step=finished,
            )
        return self.nonfinite == "propagate"

    @property
    def traffic(self) -> dict[str, Any]:
        """This rank's totals since the start.

        ``raw`` and ``sent``: payload in bytes, as float32 and as it was; ``closed_form``: the sum of `closed_form` over
        all calls, so over all ranks, None if one of them was; ``agreement``: bytes of the flag; ``elements``
        of all reduced buffers, ``exempt_elements`` of them; ``encode_seconds`` and ``decode_seconds`` of the host;
        ``by_op``: the payload's bytes, seconds and calls per collective.
        """
        return {
            "raw": self._counts["raw"],
            "sent": self.meter.sent("payload"),
            "closed_form": self._expected,
            "agreement": self.meter.sent("agreement"),
            "elements": self._counts["elements"],
            "exempt_elements": self._counts["exempt_elements"],
            "fallbacks": 0,  # whatever travels as float32 here was asked for: `exempt`, `dense_steps`, `second`
            "nonfinite_steps": self._counts["nonfinite_steps"],
            "encode_seconds": self.meter.totals["encode", "codec"].seconds,
            "decode_seconds": self.meter.totals["decode", "codec"].seconds,
            "by_op": {op: vars(cost).copy() for op, cost in self.meter.by_op("payload").items()},
        }

    def closed_form(self, layout: Layout, kind: Kind) -> int | None:
        """Payload in bytes, summed over the ranks, of one call at the present step; None if it depends on the data.

        Every encoding travels to all ranks but its sender: in a reduce-scatter one rank sends each row to its owner,
        and there are ``world - 1`` others; in an all-reduce an owner sends its row to ``world - 1``.
        """
        phases: tuple[Phase, ...] = ("scatter", "gather") if kind == "all_reduce" else ("scatter",)
        sizes = [size for phase in phases for row in self._sizes(layout, phase) for size in row]
        known = [size for size in sizes if size is not None]
        return (self.world - 1) * sum(known) if len(known) == len(sizes) else None

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: with it a resumed run equals an unbroken one."""
        current = {key: generator.get_state() for key, generator in self._generators.items()}
        return {"world": self.world, "step": self.step, "generators": {**self._restored, **current}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state that the same rank of an earlier run left; of another world size only the step counts."""
        self.step = state["step"]
        self._generators = {}
        self._restored = dict(state["generators"])
        if state["world"] != self.world:
            warnings.warn(
                f"the reducer's state is of {state['world']} ranks and this run has {self.world}: "
                f"the codecs' generators start anew",
                stacklevel=2,
            )
            self._restored = {}

    def _buffer(self, flat: Tensor, layout: Layout | str) -> tuple[Tensor, Layout]:
        """The buffer and its layout; one that goes by a name alone is padded to whole rows."""
        if isinstance(layout, str):
            layout = Layout.cut([(layout, (flat.numel(),))], self.world)
            flat = pad(flat, (0, layout.numel - flat.numel()))
        layout.check(flat)
        return flat, layout

    def _scatter(self, flat: Tensor, layout: Layout) -> Tensor:
        """Send every row to its owner; the mean of what this rank, as an owner, received: float32 [row_numel]."""
        self._flag = flat.new_zeros(1, dtype=torch.uint8) if self._flag is None else self._flag
        sizes = self._sizes(layout, "scatter")
        with self.meter.span("encode", "codec"):
            outgoing = [[self._encode(flat[piece.run], piece, "scatter") for piece in row] for row in layout.rows]
        incoming = exchange(outgoing, sizes, [sizes[self.rank]] * self.world, flat.device, self.group, self.meter)
        with self.meter.span("decode", "codec"):
            mean = torch.zeros(layout.row_numel, dtype=torch.float32, device=flat.device)
            for wires in incoming:  # summed in rank order
                for piece, wire in zip(layout.rows[self.rank], wires, strict=True):
                    mean[layout.run_in_row(piece)] += self._decode(wire, piece, "scatter")
            return mean.div_(self.world)

    def _gather(self, mean: Tensor, layout: Layout) -> Tensor:
        """Send this rank's row of means to all; all rows as decoded, the own one too: float32 [numel]."""
        sizes = self._sizes(layout, "gather")
        with self.meter.span("encode", "codec"):
            own = [self._encode(mean[layout.run_in_row(p)], p, "gather") for p in layout.rows[self.rank]]
        incoming = exchange(
            [own] * self.world, [sizes[self.rank]] * self.world, sizes, mean.device, self.group, self.meter
        )
        with self.meter.span("decode", "codec"):
            full = torch.zeros(layout.numel, dtype=torch.float32, device=mean.device)
            for row, wires in zip(layout.rows, incoming, strict=True):
                for piece, wire in zip(row, wires, strict=True):
                    full[piece.run] = self._decode(wire, piece, "gather")
            return full

    def _encode(self, values: Tensor, piece: Piece, phase: Phase) -> Tensor:
        """A piece's bytes; a value that is not finite sets the flag."""
        generator = self._generator(piece.name, phase, values.device)
        return self._codec(piece, phase).encode(values.view(piece.form), generator=generator, flag=self._flag)

    def _decode(self, wire: Tensor, piece: Piece, phase: Phase) -> Tensor:
        """A piece's values as a vector."""
        return self._codec(piece, phase).decode(wire, piece.form).view(-1)

    def _codec(self, piece: Piece, phase: Phase) -> Compressor:
        """What encodes a piece at the present step."""
        dense = self.step < self.dense_steps or (phase == "gather" and self.second == "float32")
        if dense or self.exempt.covers(piece.name, piece.shape):
            return self._float32
        return self.compressor if self.schedule is None else self.schedule.at(self.step)

    def _sizes(self, layout: Layout, phase: Phase) -> list[list[int | None]]:
        """Bytes of every piece's encoding, row by row; None where they depend on the data."""
        return [[self._codec(piece, phase).wire_bytes(piece.form) for piece in row] for row in layout.rows]

    def _generator(self, name: str, phase: Phase, device: torch.device) -> torch.Generator:
        """The generator of one parameter and phase on this rank."""
        key = (name, phase)
        if key not in self._generators:
            generator = torch.Generator(device)
            if key in self._restored:
                generator.set_state(self._restored.pop(key))
            else:
                words = f"{self.seed}/{self.rank}/{phase}/{name}".encode()
                generator.manual_seed(int.from_bytes(hashlib.sha256(words).digest()[:8], "little"))
            self._generators[key] = generator
        return self._generators[key]

    def _agreed_finite(self) -> bool:
        """Whether no rank met a value that is not finite since the last call; the same answer on all ranks."""
        if self._flag is None:  # no gradient was reduced yet
            device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
            self._flag = torch.zeros(1, dtype=torch.uint8, device=device)
        met = bool(ops.all_reduce(self._flag, "max", self.group, "agreement", self.meter).item())
        self._flag.zero_()
        return not met

    def _count(self, layout: Layout, kind: Kind) -> None:
        """Count a call's elements, and the bytes that this rank would send of them as float32."""
        expected = self.closed_form(layout, kind)
        self._expected = None if expected is None or self._expected is None else self._expected + expected
        numel = sum(piece.numel for piece in layout.pieces)
        own = sum(piece.numel for piece in layout.rows[self.rank])
        sent = numel - own + ((self.world - 1) * own if kind == "all_reduce" else 0)
        self._counts["raw"] += FLOAT32 * sent
        self._counts["elements"] += numel
        self._counts["exempt_elements"] += sum(p.numel for p in layout.pieces if self.exempt.covers(p.name, p.shape))
