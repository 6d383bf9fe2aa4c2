"""Costs of collectives, flat and in two levels: the bytes and messages that a rank sends.

Ranks may form islands, with links inside and one cable to each. A ring passes every cable once, so its slowest link
counts; what all ranks of an island send at the same time shares the cable.

Bytes and messages are the closed forms in Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication
Operations in MPICH", IJHPCA 19, 2005); in two levels as in Mikami et al. ("Massively Distributed SGD:
ImageNet/ResNet-50 Training in a Flash", arXiv 1811.05233): within groups, then between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.comm.closed_forms import PASSES, total_bytes

NAMES = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "all-gather", "all_to_all": "all-to-all"}


class Sends(NamedTuple):
    """Bytes and number of sequential messages that one rank sends in a collective."""

    bytes: float
    messages: int


def collective(op: str, size: float, world: int) -> Sends:
    """Return what a rank sends in a ring, or in an all-to-all.

    Args:
        op: The collective.
        size: Bytes of a rank's input: of an all-gather its contribution.
        world: Number of ranks.
    """
    buffer = world * size if op == "all_gather" else size
    return Sends(total_bytes(op, buffer, world) / world, PASSES[op] * (world - 1))


def two_levels(world: int) -> tuple[int, int]:
    """Group size and number of groups: the divisors of W that are closest to each other."""
    group = max(size for size in range(1, math.isqrt(world) + 1) if world % size == 0)
    return group, world // group


def levels(op: str, size: float, group: int, groups: int) -> tuple[Sends, Sends]:
    """Bytes and messages that a rank sends within its group, and between groups.

    Together the bytes equal those of the flat collective, except for an all-to-all, which sends data leaving a group
    twice.
    """
    if op == "all_gather":  # contributions travel between groups first, then all of them within
        return collective(op, groups * size, group), collective(op, size, groups)
    return collective(op, size, group), collective(op, size if op == "all_to_all" else size / group, groups)


def hierarchical(op: str, size: float, world: int) -> Sends:
    """A collective within groups and one between groups of equal ranks, which needs fewer messages."""
    within, between = levels(op, size, *two_levels(world))
    return Sends(within.bytes + between.bytes, within.messages + between.messages)


class Leg(NamedTuple):
    """Bytes and messages of a rank on one class of links.

    Attributes:
        sends: Bytes and messages.
        links: ``between`` islands, or ranks without islands; ``inside`` them; or ``ring``, which passes both.
        sharing: Ranks that share a cable between islands.
    """

    sends: Sends
    links: str = "between"
    sharing: int = 1


class Algorithm(NamedTuple):
    """One algorithm to communicate gradients or parameters.

    Attributes:
        name: Name of the algorithm.
        op: The collective.
        legs: What a rank sends.
        decodings: Encodings of the whole buffer that a rank decodes.
    """

    name: str
    op: str
    legs: tuple[Leg, ...]
    decodings: int


def gradient_algorithms(measurement: Measurement, world: int, islands: int = 1) -> list[Algorithm]:
    """Algorithms to communicate gradients between ``world`` ranks: reductions of summable data, else encodings.

    A measurement with islands reduces shards between them, and the same on the islands asked for.
    """
    op, sent = measurement.gradients.op, measurement.gradients.bytes
    peers, size, sharing = measurement.world, sent, 1
    if measurement.islands > 1:
        sharing = world // islands
        peers, size = measurement.islands, sent * measurement.world / measurement.islands / sharing
        world, islands = islands, 1
    elif measurement.sharded:
        return _algorithms(op, sent / collective("all_to_all", 1, peers).bytes, world, islands)
    if op == "all_reduce":
        algorithms = _algorithms(op, size / collective("all_reduce", 1, peers).bytes, world, islands)
    else:
        size /= collective("all_gather" if op == "all_gather" else "all_reduce", 1, peers).bytes  # of an encoded buffer
        both = [
            *_algorithms("all_to_all", size, world, islands, halves=2),
            *_algorithms("all_gather", size, world, islands, decodings=world),
        ]
        algorithms = [algorithm for algorithm in both if algorithm.op == op or not measurement.fixed]
    return [
        algorithm._replace(legs=tuple(leg._replace(sharing=leg.sharing * sharing) for leg in algorithm.legs))
        for algorithm in algorithms
    ]


def parameter_algorithms(flow: Flow, measured: int, world: int, islands: int = 1) -> list[Algorithm]:
    """Algorithms to communicate a step's parameters between ``world`` ranks, each of which holds a shard."""
    size = flow.bytes / collective("all_to_all", 1, measured).bytes
    return _algorithms(flow.op, size / world if flow.op == "all_gather" else size, world, islands)


def inside(flow: Flow, measured: int, ranks: int) -> Algorithm:
    """How the ``ranks`` of an island communicate what those of a measured one did: parameters, or their gradients."""
    size = flow.bytes / collective("all_to_all", 1, measured).bytes
    sends = collective(flow.op, size / ranks if flow.op == "all_gather" else size, ranks)
    return Algorithm(NAMES[flow.op], flow.op, (Leg(sends, "inside"),), 0)


def _algorithms(op: str, size: float, world: int, islands: int, halves: int = 1, decodings: int = 2) -> list[Algorithm]:
    """A flat collective and, if the ranks form groups, a hierarchical one; each runs ``halves`` times."""
    name = NAMES[op]
    if islands == 1:
        by_name: dict[str, tuple[Leg, ...]] = {name: (Leg(collective(op, size, world)),)}
        if min(two_levels(world)) > 1:
            by_name[f"{name}, hierarchical"] = (Leg(hierarchical(op, size, world)),)
    else:
        within, between = levels(op, size, world // islands, islands)
        by_name = {
            name: _flat(op, size, world, world // islands),
            f"{name}, hierarchical": (Leg(within, "inside"), Leg(between, sharing=world // islands)),
        }
    return [
        Algorithm(name, op, tuple(_repeated(leg, halves) for leg in legs), decodings) for name, legs in by_name.items()
    ]


def _flat(op: str, size: float, world: int, ranks: int) -> tuple[Leg, ...]:
    """A flat collective of islands of ``ranks``: a ring, or a message from each rank to each other one."""
    if op != "all_to_all":
        return (Leg(collective(op, size, world), "ring"),)
    near, far = ranks - 1, world - ranks
    return Leg(Sends(near / world * size, near), "inside"), Leg(Sends(far / world * size, far), sharing=ranks)


def _repeated(leg: Leg, times: int) -> Leg:
    return leg._replace(sends=Sends(times * leg.sends.bytes, times * leg.sends.messages))


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
        seed: The run's seed.
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
    seed: int = 0

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
