"""Costs of collectives: the bytes and messages that a rank sends, and how long they take on a link.

A collective takes T = α + B · √(h² + (8 f / R)²): a startup time α, and for each of the B bytes that a rank sends, h on
the host and f times its time on a link of R bit/s. h is the cost on an unlimited link; f is the backend's factor (how
often it sends a byte, how badly both directions overlap). Both costs overlap partially: the root of their squares lies
between full overlap (the maximum) and no overlap (the sum). α includes the number of calls and the waiting for other
ranks.

Ranks may form islands, with links inside and one cable to each. A ring passes every cable once, so its slowest link
counts; what all ranks of an island send at the same time shares the cable.

After Hockney's model ("The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20,
1994). Messages are the closed forms in Thakur, Rabenseifner and Gropp ("Optimization of Collective Communication
Operations in MPICH", IJHPCA 19, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.comm.closed_forms import PASSES

Array = NDArray[np.float64]

STATES = 16  # bytes per parameter: itself, its gradient, AdamW's two moments, all float32
GRID = np.logspace(4, 13, 577)  # bits per second at which crossovers are searched


class Islands(NamedTuple):
    """The islands to predict for, and the links inside them.

    Attributes:
        number: Number of islands; 1 without.
        rate: Bits per second of each rank's link inside its island.
        latency: Additional seconds per message there.
    """

    number: int = 1
    rate: float = math.inf
    latency: float = 0.0


NO_ISLANDS = Islands()


class Place(NamedTuple):
    """A place to predict steps for: ranks and links.

    Attributes:
        world: The number of ranks.
        bandwidth: Bits per second of each rank's link, or each island's cable.
        latency: Seconds per message there.
        islands: The islands.
    """

    world: int
    bandwidth: float
    latency: float
    islands: Islands

    @property
    def ranks(self) -> int:
        """Ranks of an island."""
        return self.world // self.islands.number


class Flow(NamedTuple):
    """Data that a rank sends per step in one collective.

    Attributes:
        op: The collective.
        bytes: Bytes per rank, as a bandwidth-optimal algorithm would send them.
        inside: Whether it stays inside islands.
        halves: Collectives that carry it: an exchange has two.
        interval: Steps per message.
    """

    op: str
    bytes: float
    inside: bool = False
    halves: int = 1
    interval: float = 1.0


class Leg(NamedTuple):
    """Bytes and sequential messages of a rank on one class of links.

    Attributes:
        bytes: The bytes.
        messages: The messages.
        links: ``between`` islands, or ranks without islands; ``inside`` them; or ``ring``, which passes both.
        sharing: Ranks that share a cable between islands.
    """

    bytes: float
    messages: int
    links: str = "between"
    sharing: int = 1


def legs(flow: Flow, place: Place, between: bool, in_turn: bool) -> list[Leg]:
    """What a rank sends of a flow: in a ring, or in an all-to-all a message to each other rank.

    Args:
        flow: The flow.
        place: The ranks and their islands.
        between: Whether a flow that does not stay inside islands is between the ranks that hold the same shard.
        in_turn: Whether the messages of an all-to-all wait for each other, or all are sent at once.
    """
    islands, ranks = place.islands.number, place.ranks
    world = ranks if flow.inside else islands if between else place.world

    def sent(peers: int) -> tuple[float, int]:
        messages = flow.halves * PASSES[flow.op] * peers
        if flow.op == "all_to_all" and not in_turn:
            messages = -(-messages // (world - 1))
        return flow.bytes * peers / (world - 1), messages

    if flow.inside:
        return [Leg(*sent(world - 1), "inside")]
    if between or islands == 1:
        return [Leg(*sent(world - 1), sharing=ranks if between else 1)]
    if flow.op != "all_to_all":
        return [Leg(*sent(world - 1), "ring")]
    return [Leg(*sent(ranks - 1), "inside"), Leg(*sent(world - ranks), sharing=ranks)]


# Why: docs/decisions.md, "The cost model's law".
class Constants(NamedTuple):
    """A set of assumptions about a backend and its machines: parameters of the law, and what a step makes of it.

    Attributes:
        startup: Seconds of a step's collectives of one kind: calls, and waiting for other ranks; nothing hides them.
        host: Seconds per byte that a rank sends, whatever the link.
        factor: How often a byte takes its time on a link, by collective.
        hidden: Share of the backward pass that hides communication.
        codecs: A codec's time in a step over its time alone.
        compute: A step's computation over the described one.
        in_turn: Whether the messages of an all-to-all wait for each other, each a latency.
    """

    startup: float
    host: float
    factor: Mapping[str, float]
    hidden: float
    codecs: float
    compute: float = 1.0
    in_turn: bool = False

    def sending(self, op: str, nbytes: float, rate: Any) -> Any:
        """Seconds in which bytes of a collective travel at a rate in bits per second."""
        return nbytes * np.hypot(self.host, 8 * self.factor[op] / rate)

    def seconds(self, flow: Flow, place: Place, between: bool, rates: Any) -> Any:
        """Seconds per step of a flow without its startup, at ``rates`` (one or an array) in place of the place's."""
        total: Any = 0.0
        for leg in legs(flow, place, between, self.in_turn):
            rate, wait = link_of(leg, place, rates)
            total = total + self.sending(flow.op, leg.bytes, rate) + wait * leg.messages / flow.interval
        return total


def link_of(leg: Leg, place: Place, rates: Any) -> tuple[Any, float]:
    """Bits per second and latency of a leg's links, at ``rates`` in place of the place's."""
    rate, wait = {
        "between": (rates / leg.sharing, place.latency),
        "inside": (place.islands.rate, place.islands.latency),
        "ring": (np.minimum(rates, place.islands.rate), max(place.latency, place.islands.latency)),
    }[leg.links]
    return rate, wait


def crossover(steps: Array, baseline: Array) -> float:
    """The rate below which a step is shorter than the baseline's; both arrays are over `GRID`.

    Returns:
        Bits per second; 0 if never shorter, infinite if always shorter (between 10 kbit/s and 10 Tbit/s).
    """
    slower = steps >= baseline
    if not slower.any():
        return math.inf
    first = int(slower.argmax())
    if first == 0:
        return 0.0
    before, after = (steps - baseline)[first - 1 : first + 1]
    low, high = np.log(GRID[first - 1 : first + 1])
    return float(np.exp(low + (high - low) * before / (before - after)))


def peak_memory(measured: float, sharded: int, world: int, other: int, outer: float = 0.0) -> float:
    """Peak memory of a rank at another world size, in bytes.

    A rank's share of parameters, gradients, moments and anchors changes with the number of ranks. Activations, buckets
    and what FSDP gathers of a block stay as they are.

    Args:
        measured: The peak at ``world`` ranks.
        sharded: Number of parameters that are divided among the ranks, 0 where each rank has all of them.
        world: The world size of the measurement, at least 2.
        other: The world size of the prediction, at least 2.
        outer: Bytes of anchors and outer momenta in ``measured``; they are divided as parameters are.
    """
    divided = STATES * sharded + (world * outer if sharded else 0.0)
    return measured + divided * (1 / other - 1 / world)
