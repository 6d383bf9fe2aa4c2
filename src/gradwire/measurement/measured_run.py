"""What the cost model needs of one measured run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Flow(NamedTuple):
    """Data that a rank sends per step in one collective.

    Attributes:
        op: The collective.
        bytes: Bytes per rank, as a bandwidth-optimal algorithm would send them.
        seconds: Duration.
    """

    op: str
    bytes: float
    seconds: float


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
        rate: The link's bits per second, infinite without a limit.
        step: Seconds per step.
        exposed: Seconds per step in which the rank communicates and does not compute.
        decode: Seconds per step spent on decoding.
        gradients: The flow of gradients.
        parameters: The flow of parameters, if they use a separate collective.
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

    @property
    def flows(self) -> tuple[Flow, ...]:
        """All flows of the measurement."""
        return (self.gradients,) if self.parameters is None else (self.gradients, self.parameters)

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
