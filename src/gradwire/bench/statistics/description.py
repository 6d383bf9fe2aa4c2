"""Predict steps from a description of a model, its ranks and their links: nothing is measured on a link.

A step takes the described computation, encoding and decoding at the device's speed, and the communication that
computation does not hide: the bytes of the closed forms under the law of `cost_model`, with constants of the backend.
There are three sets of them: a typical one, and a favourable and an unfavourable one, between which steps are expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradwire.base.errors import BadInput
from gradwire.bench.codecs.rates import Rates
from gradwire.bench.config import Cell
from gradwire.bench.statistics.cost_model import GRID, Constants, Flow, Place, crossover
from gradwire.comm.closed_forms import FLOAT32_BYTES, PASSES, parameters_unhooked, raw_bytes, unhooked_by_link
from gradwire.comm.communication import preset, steps_per_message
from gradwire.comm.reduction import ENCODINGS
from gradwire.comm.topology import SHARDING

if TYPE_CHECKING:
    from gradwire.comm.collectives.layout import Kind

Shapes = Mapping[tuple[int, ...], int]

WIDTH_PER_LAYER = 128  # of the transformer that stands for a number of parameters: as of 7 billion with width 4,096
BACKWARD = 2 / 3  # of a step's computation
CARRIERS = {"exchange": "all_to_all", "gather": "all_gather"}  # else the framework's own collective
LOCAL = {"comm_optimizer": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
ONE_BIT, FOUR_BITS = {"method": "onebit"}, {"method": "int8", "num_bits": 4, "block": 64}
CELLS: Mapping[str, Mapping[str, Any]] = {  # compared by default; labels and options are those of the records
    "none": {},
    "bf16-native": {"method": "bf16", "algorithm": "native"},
    "int8": {},
    "int4": FOUR_BITS,
    "powersgd": {"rank": 8, "error_feedback": True, "dense_steps": 90},
    "topk-ef": {"method": "topk+int8", "topk.density": 0.1, "error_feedback": True, "dense_steps": 90},
    "onebit_adam": {**ONE_BIT, "comm_optimizer": "onebit_adam", "dense_steps": 110},
    "int8-params8": {"method": "int8", "param_compress": "int8"},
    "int4-diff-int4-ef": {"method": "int8", "num_bits": 4, "error_feedback": True, "param_compress": "int4-diff"},
    **{f"diloco-{steps}-onebit": {**ONE_BIT, **LOCAL, "H": steps} for steps in (5, 30)},
    **{f"diloco-{steps}-int4": {**FOUR_BITS, **LOCAL, "H": steps} for steps in (30, 100, 500)},
    "streaming-15-onebit": {**ONE_BIT, **LOCAL, "H": 15, "streaming": {"fragments": 3, "delay": 2}},
}
RESIDUAL_BYTES = {None: 0, "float32": 4, "bf16": 2, "int8": 1}


def factors(all_reduce: float, all_gather: float, all_to_all: float, reduce_scatter: float) -> dict[str, float]:
    """Return the factors by collective."""
    return dict(zip(PASSES, (reduce_scatter, all_gather, all_to_all, all_reduce), strict=True))


# Typical, favourable, unfavourable, by kind of device. The typical ones of gloo suit benchmarks/overlap.csv; its
# reduce-scatter sends every byte twice. NCCL was never measured on a link: it reaches a link's rate, or two thirds.
BACKENDS = {
    "cpu": (
        Constants(5e-3, 4e-9, factors(1.1, 1.4, 1.4, 2.4), 0.35, 1.2),
        Constants(0.0, 8e-10, factors(1.0, 1.1, 1.1, 2.0), 0.7, 1.0, 0.95),
        Constants(15e-3, 2e-8, factors(1.3, 1.7, 1.7, 2.8), 0.0, 3.0, 1.2, True),
    ),
    "cuda": (
        Constants(1e-3, 1e-12, factors(1.1, 1.1, 1.1, 1.1), 0.7, 1.2),
        Constants(0.0, 1e-13, factors(1.0, 1.0, 1.0, 1.0), 1.0, 1.0, 0.95),
        Constants(5e-3, 1e-11, factors(1.5, 1.5, 1.5, 1.5), 0.0, 2.0, 1.1, True),
    ),
}


class Range(NamedTuple):
    """A number as expected, and between a favourable and an unfavourable case."""

    typical: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Range:
        """The range of a number in all cases, the typical one first."""
        typical, *others = values
        return cls(typical, min(typical, *others), max(typical, *others))


class Traffic(NamedTuple):
    """A cell's work on one rank in a step.

    Attributes:
        gradients: The collective of the gradients, or of what travels in their place, and its bytes.
        parameters: Those of sharded parameters, if any.
        scattered: Those of gradients inside islands, if any.
        encoded: Elements that it encodes.
        decoded: Elements that it decodes.
    """

    gradients: Flow
    parameters: Flow | None
    scattered: Flow | None
    encoded: float
    decoded: float

    @property
    def flows(self) -> list[Flow]:
        """All of its collectives."""
        return [flow for flow in (self.gradients, self.parameters, self.scattered) if flow is not None]

    @property
    def bytes(self) -> float:
        """Bytes that it sends."""
        return sum(flow.bytes for flow in self.flows)

    @property
    def between(self) -> float:
        """Bytes of them that leave an island which holds the model in shards; else all."""
        return self.bytes if self.scattered is None else self.gradients.bytes


class Expected(NamedTuple):
    """A cell's predicted step.

    Attributes:
        cell: The cell.
        bytes: Bytes that a rank sends per step.
        between: Bytes of them that leave an island which holds the model in shards; else all.
        step: Seconds of a step.
        exposed: Seconds of communication in it that computation does not hide.
        gains: How many times shorter it is than the step of each baseline.
        below: For each baseline the rate in bits per second below which its step is longer.
        memory: Bytes of residuals, replicas and anchors on a rank.
    """

    cell: Cell
    bytes: float
    between: float
    step: Range
    exposed: Range
    gains: Mapping[str, Range]
    below: Mapping[str, Range]
    memory: float


@dataclass(frozen=True)
class Description:
    """A model, its ranks, their links and their device.

    Args:
        shapes: Shapes of the parameters, and how many have each.
        outside: Elements outside the blocks, which FSDP gathers once in a step; the others twice.
        compute: Seconds of a float32 step whose communication costs nothing.
        strategy: The strategy.
        place: Ranks and links.
        rates: The speed of codecs.
        own: Seconds of computation of cells whose step computes something else, such as another optimizer's, by label.
    """

    shapes: Shapes
    outside: int
    compute: float
    strategy: str
    place: Place
    rates: Rates
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(count * math.prod(shape) for shape, count in self.shapes.items())

    @property
    def islands(self) -> int:
        """Islands that hold the model in shards."""
        return self.place.islands.number if self.strategy == "hsdp" else 1

    def computed(self, label: str) -> float:
        """Seconds of a cell's computation."""
        return self.own.get(label, self.compute)

    def expect(self, cells: Sequence[Cell], baselines: Sequence[Cell]) -> list[Expected]:
        """Predict cells, fastest first, and how they compare with baselines.

        Raises:
            BadInput: If the bytes of a cell depend on the data, or the device has no rate of its method.
        """
        listed, cases = {cell.label: cell for cell in (*baselines, *cells)}, BACKENDS[self.rates.kind]
        traffic = {label: self.traffic(cell) for label, cell in listed.items()}
        rests = {label: [self.rest(cell, traffic[label], case) for case in cases] for label, cell in listed.items()}

        def steps(rates: Any) -> dict[str, list[Any]]:
            """Seconds of a step at rates of the links, by cell and set of constants."""
            return {
                label: [
                    rest + self.exposed(cell, traffic[label], case, rates)
                    for rest, case in zip(rests[label], cases, strict=True)
                ]
                for label, cell in listed.items()
            }

        times, curves = steps(self.place.bandwidth), steps(GRID)
        expected = [
            Expected(
                cell,
                traffic[cell.label].bytes,
                traffic[cell.label].between,
                Range.of(map(float, times[cell.label])),
                Range.of(np.subtract(times[cell.label], rests[cell.label]).tolist()),
                {base.label: Range.of(np.divide(times[base.label], times[cell.label]).tolist()) for base in baselines},
                {base.label: Range.of(map(crossover, curves[cell.label], curves[base.label])) for base in baselines},
                self.memory(cell),
            )
            for cell in cells
        ]
        return sorted(expected, key=lambda row: row.step.typical)

    def rest(self, cell: Cell, traffic: Traffic, assumed: Constants) -> float:
        """Seconds of a step without exposed communication."""
        return assumed.compute * self.computed(cell.label) + sum(self.coding(cell, traffic, assumed))

    def coding(self, cell: Cell, traffic: Traffic, assumed: Constants) -> tuple[float, float]:
        """Seconds of a step's encodings and decodings.

        Raises:
            BadInput: If the device has no rate of the method.
        """
        if not cell.hooked:
            return 0.0, 0.0
        rate = self.rates.of(cell.method, cell.options)
        if rate is None:
            raise BadInput(f"{self.rates.device} has no rate of {cell.method}: measure it, or leave out {cell.label}.")
        tensors = rate.tensor * sum(self.shapes.values()) / steps_per_message(cell.flat())
        return assumed.codecs * (
            traffic.encoded * rate.encode + tensors
        ), assumed.codecs * traffic.decoded * rate.decode

    def exposed(self, cell: Cell, traffic: Traffic, assumed: Constants, rates: Any) -> Any:
        """Seconds of a step's communication that computation does not hide, at rates of the links."""
        between = self.islands > 1
        startup = assumed.startup * len({flow.op for flow in traffic.flows}) / traffic.gradients.interval
        sending = [assumed.seconds(flow, self.place, between, rates) for flow in traffic.flows]
        return startup + np.maximum(sum(sending) - self.hidden(cell, traffic, assumed), 0.0)

    def hidden(self, cell: Cell, traffic: Traffic, assumed: Constants) -> float:
        """Seconds of a step in which computation hides communication: a share of what runs meanwhile.

        That is the backward pass for gradients that are averaged and for sharded parameters, inside islands too, the
        steps of its delay for a fragment that streams, and nothing for what replicas send at the end of a round.
        """
        compute, steps = self.computed(cell.label), steps_per_message(cell.flat())
        backward = assumed.hidden * BACKWARD * compute
        if cell.communication.averages_gradients:
            return (cell.reduction.overlap or self.strategy in SHARDING) * backward
        inside = [
            assumed.sending(flow.op, flow.bytes, self.place.islands.rate) for flow in traffic.flows if flow.inside
        ]
        streaming = cell.communication.streaming
        return min(backward, sum(inside)) + (assumed.hidden * streaming.delay * compute / steps if streaming else 0.0)

    def traffic(self, cell: Cell) -> Traffic:
        """A cell's bytes by the closed forms, and the elements that its codec takes.

        Raises:
            BadInput: If its bytes depend on the data, or have no closed form.
        """
        from gradwire.comm.collectives.reducer import Payload, payload

        world, ranks = self.place.world, self.place.world // self.islands
        kind: Kind = "all_reduce"
        peers, shapes = world, self.shapes
        if self.islands > 1:
            peers, shapes = self.islands, {(-(-shape[0] // ranks), *shape[1:]): n for shape, n in shapes.items()}
        elif self.strategy in SHARDING:
            kind = "reduce_scatter"
        numel = sum(count * math.prod(shape) for shape, count in shapes.items())
        sent = Payload("native", raw_bytes(kind, numel, peers))
        if cell.hooked:
            reduction = cell.reduction.model_dump(exclude_unset=True)
            sent = payload({"method": cell.method, **cell.options}, shapes, kind, peers, **reduction)
        if sent.bytes is None or cell.inside is not None:
            reason = "depend on the data" if cell.inside is None else "inside islands have no closed form"
            raise BadInput(f"the bytes of {cell.label} {reason}, and cannot be predicted: leave it out.")
        interval = steps_per_message(cell.flat())
        once = interval * (cell.communication.streaming.fragments if cell.communication.streaming else 1)
        encoded, decoded = {"exchange": (1 + 1 / peers, 2), "gather": (1, peers), "native": (1, 1)}[sent.algorithm]
        if kind == "reduce_scatter":
            encoded, decoded = 1, 1
        decoded += cell.reduction.error_feedback  # to know what was lost
        halves = 2 if (sent.algorithm, kind) == ("exchange", "all_reduce") else 1
        flow = Flow(CARRIERS.get(sent.algorithm, kind), sent.bytes / peers / once, halves=halves, interval=interval)
        scattered = Flow("reduce_scatter", unhooked_by_link(self.numel, world, self.islands).inside / world, True)
        return Traffic(
            flow,
            self.gathered(cell, ranks),
            scattered if self.islands > 1 else None,
            encoded * numel / once,
            decoded * numel / once,
        )

    def gathered(self, cell: Cell, ranks: int) -> Flow | None:
        """The parameters that a rank of a shard sends per step; None for replicas."""
        from gradwire.comm.collectives.reducer import payload

        if self.strategy not in SHARDING:
            return None
        inside, sizes = self.islands > 1, (self.outside, self.numel - self.outside)
        if cell.param_compress == "none":
            total = parameters_unhooked("reduce_scatter", sizes, ranks)
            return Flow("all_gather", (total or 0) / ranks, inside)
        encoding = ENCODINGS[cell.param_compress]
        given = {"method": encoding.method, **encoding.options}
        once = payload(given, self.shapes, "reduce_scatter", ranks, algorithm="exchange", exempt=encoding.exempt).bytes
        passes = 1 if encoding.differences else (sizes[0] + 2 * sizes[1]) / self.numel
        return Flow("all_to_all", passes * (once or 0) / ranks, inside)

    def memory(self, cell: Cell) -> float:
        """Bytes of residuals, anchors, outer momenta and replicas on a rank; without the optimizer's own moments."""
        ranks, options = self.place.world // self.islands, cell.communication
        kept = self.numel / (ranks if self.islands > 1 else 1)
        states = RESIDUAL_BYTES[cell.reduction.feedback if cell.hooked else None]
        if cell.communication.comm_optimizer != "gradient" and "H" in preset(options.comm_optimizer).options:
            momentum = options.outer_momentum
            default = preset(options.comm_optimizer).options["outer_momentum"]
            states += FLOAT32_BYTES * (1 + bool(default if momentum is None else momentum))
        replica = cell.param_compress != "none" and ENCODINGS[cell.param_compress].differences
        return states * kept + FLOAT32_BYTES * self.numel * replica


def shapes_of_size(numel: int) -> Shapes:
    """Shapes of a transformer of so many parameters: square matrices as wide as such a model usually is, and a rest.

    A layer has 12 matrices of its width squared.
    """
    width = max(1, round((numel * WIDTH_PER_LAYER / 12) ** (1 / 3)))
    count, rest = divmod(numel, width * width)
    return {shape: n for shape, n in (((width, width), count), ((rest,), 1)) if n and math.prod(shape)}
