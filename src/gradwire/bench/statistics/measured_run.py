"""One measured run, as the cost model reads it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple


class Flow(NamedTuple):
    """Data that a rank sends per step in one collective.

    Attributes:
        op: The collective.
        bytes: Bytes per rank, as a bandwidth-optimal algorithm would send them.
        seconds: Duration; flows of one collective share its duration, and only their sum is measured.
        inside: Whether it stays inside islands.
    """

    op: str
    bytes: float
    seconds: float
    inside: bool = False


@dataclass(frozen=True)
class Measurement:
    """One measured run.

    Args:
        strategy: The data-parallel strategy.
        label: The compressor.
        sharded: Whether the strategy shards gradients, so that they are reduce-scattered instead of all-reduced.
        fixed: Whether the configuration fixes the algorithm, so that gradients use the measured collective only.
        world: World size, at least 2.
        link: The link's name.
        rate: A rank's share of the link in bits per second, infinite without a limit.
        step: Seconds per step.
        exposed: Seconds per step in which the rank communicates and does not compute.
        decode: Seconds per step spent on decoding.
        gradients: The flow of gradients.
        parameters: The flow of parameters, if it is not counted with the gradients.
        scattered: The flow of gradients inside islands.
        islands: Number of islands; 1 without.
        inside_rate: As ``rate``, inside islands.
        interval: Steps per message. Of more than 1 only steps and bytes are measured: a profile of a few steps need not
            hold whole rounds.
    """

    strategy: str
    label: str
    sharded: bool
    fixed: bool
    world: int
    link: str
    rate: float
    step: float
    exposed: float
    decode: float
    gradients: Flow
    parameters: Flow | None = None
    scattered: Flow | None = None
    islands: int = 1
    inside_rate: float = math.inf
    interval: float = 1.0

    @property
    def named_flows(self) -> dict[str, Flow]:
        """The flows by their attributes' names."""
        named = {"gradients": self.gradients, "parameters": self.parameters, "scattered": self.scattered}
        return {name: flow for name, flow in named.items() if flow is not None}

    @property
    def flows(self) -> tuple[Flow, ...]:
        """All flows of the measurement."""
        return tuple(self.named_flows.values())

    @property
    def by_op(self) -> dict[str, list[Flow]]:
        """The flows by collective."""
        return {op: [flow for flow in self.flows if flow.op == op] for op in dict.fromkeys(f.op for f in self.flows)}

    def rate_of(self, flow: Flow) -> float:
        """Bits per second of the links that a flow uses."""
        return self.inside_rate if flow.inside else self.rate

    @property
    def communication(self) -> float:
        """Seconds of all collectives per step."""
        return sum(flow.seconds for flow in self.flows)

    @property
    def rest(self) -> float:
        """Seconds of a step without exposed communication."""
        return self.step - self.exposed

    @property
    def hidden(self) -> float:
        """Seconds of communication hidden behind computation or other communication."""
        return max(self.communication - self.exposed, 0.0)
