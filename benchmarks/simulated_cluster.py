"""A simulated cluster: discrete events over ranks, buckets and links, and over machines that are lost and return.

Ranks that are alike are one: a processor, and a link of each class, which do one thing at a time. Passes take the
processor bucket by bucket, encodings and decodings between them, and messages queue on the links, so what computation
hides is an outcome. Bytes, messages, codecs and the law of a collective's time are those of ``gradwire predict``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import simpy
import torch
from torch import nn

from gradwire.bench.config import Cell
from gradwire.bench.statistics.cost_model import Constants, Flow, legs, link_of
from gradwire.bench.statistics.description import SHARDING, Description, Traffic
from gradwire.comm.parallel.buckets import FEWEST, plan
from gradwire.comm.reduction import ENCODINGS

Events = Generator[Any, Any, None]

FORWARD = 1 / 3  # of a step's computation
MOST_PARTS = 48  # a model of more buckets or blocks is simulated in so many groups of them
NATIVE_BUCKETS = 2  # of DistributedDataParallel itself: the first is small
CODEC, PASS = 0, 1  # who has the processor first


class Part(NamedTuple):
    """Buckets or blocks that are simulated as one: their share of the model, and how many they are."""

    share: float
    count: int


class Collective(NamedTuple):
    """What each bucket does on one class of links: seconds for all bytes and calls, and of one bucket's latencies."""

    links: str
    sending: float
    waiting: float

    def seconds(self, part: Part) -> float:
        """Seconds of a part."""
        return self.sending * part.share + self.waiting * part.count


class Work(NamedTuple):
    """A rank's work.

    Attributes:
        parts: The model, in the order of its gradients.
        compute: Seconds of a step's passes.
        encode: Seconds of a reduction's encodings.
        decode: Seconds of its decodings.
        reduces: Its collectives; the two halves of an exchange are two.
        gathers: Those of sharded parameters, before the forward and before the backward pass of a part.
        scatters: Those of gradients inside islands.
        interval: Steps of a reduction.
        delay: Steps in which a reduction runs in the background; 0 if ranks wait for it.
    """

    parts: Sequence[Part]
    compute: float
    encode: float
    decode: float
    reduces: Sequence[Collective]
    gathers: Sequence[Sequence[Collective]] = ((), ())
    scatters: Sequence[Collective] = ()
    interval: float = 1
    delay: int = 0


class Rank:
    """Ranks that are alike, at work."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.env = simpy.Environment()
        self.processor = simpy.PriorityResource(self.env)
        self.links = {name: simpy.PriorityResource(self.env) for name in ("inside", "between")}

    def use(self, resource: simpy.PriorityResource, seconds: float, priority: int = CODEC) -> Events:
        """Wait for a resource, and use it."""
        with resource.request(priority) as turn:
            yield turn
            yield self.env.timeout(seconds)

    def send(self, collectives: Iterable[Collective], part: Part) -> Events:
        """Run the collectives of a part, one after another."""
        for collective in collectives:
            yield from self.use(self.links[collective.links], collective.seconds(part))

    def reduce(self, part: Part) -> Events:
        """Encode, send and decode a part."""
        work = self.work
        yield from self.use(self.processor, work.encode * part.share)
        for collective in work.reduces:
            yield from self.send([collective], part)
            yield from self.use(self.processor, work.decode * part.share / len(work.reduces))

    def settle(self, part: Part, averages: bool) -> Events:
        """Scatter a part's gradients inside an island, and average them."""
        yield from self.send(self.work.scatters, part)
        if averages:
            yield from self.reduce(part)

    def step(self, slow: float, averages: bool) -> Events:
        """Take a step: each part when its parameters are there, while those of the next one come."""
        work, settling = self.work, []
        for share, gathers in zip((FORWARD, 1 - FORWARD), work.gathers, strict=True):
            backward, arrival = share != FORWARD, None
            order = [*work.parts] if backward else [*reversed(work.parts)]
            for part, following in zip(order, [*order[1:], None], strict=True):
                yield arrival or self.env.process(self.send(gathers, part))
                if following:
                    arrival = self.env.process(self.send(gathers, following))
                yield from self.use(self.processor, slow * share * work.compute * part.share, PASS)
                if backward:
                    settling.append(self.env.process(self.settle(part, averages)))
                    yield self.env.timeout(0)  # it encodes first
        yield self.env.all_of(settling)

    def period(self, slow: float) -> Events:
        """Take the steps of a reduction; those of a round are alike."""
        work, averages = self.work, self.work.interval == 1
        began = self.env.now
        yield from self.step(slow, averages)
        if averages:
            return
        each = self.env.now - began
        message = self.env.process(self.reduce(Part(1.0, 1)))
        yield self.env.timeout(0)
        for part in work.parts:
            yield from self.use(self.processor, work.delay * each * part.share, PASS)
        yield message
        yield self.env.timeout((work.interval - 1 - work.delay) * each)


def seconds_per_step(work: Work, machines: int = 1, sigma: float = 0.0, quantile: float = 0.5) -> float:
    """Simulate a reduction's steps, which take the slowest of machines a log-normal time: a quantile of it."""
    rank = Rank(work)
    rank.env.run(rank.env.process(rank.period(slowest(quantile, machines, work.interval, sigma))))
    return float(rank.env.now) / work.interval


def slowest(quantile: float, machines: int, steps: float, sigma: float) -> float:
    """A quantile of the slowest machine's mean step, over the median step.

    A sum of log-normals is taken for one with its mean and variance (Fenton, "The sum of log-normal probability
    distributions in scatter transmission systems", 1960): exact for one step.
    """
    variance = math.log1p(math.expm1(sigma**2) / steps)
    deviations = NormalDist().inv_cdf(quantile ** (1 / machines))
    return math.exp((sigma**2 - variance) / 2 + math.sqrt(variance) * deviations)


def work_of(description: Description, cell: Cell, constants: Constants, traffic: Traffic | None = None) -> Work:
    """A cell's work by a description's bytes, codecs and law."""
    place, between = description.place, description.islands > 1
    traffic = traffic or description.traffic(cell)
    ops, interval = [flow.op for flow in traffic.flows], traffic.gradients.interval
    encode, decode = description.coding(cell, traffic, constants)

    def route(flow: Flow, steps: float = 1) -> tuple[Collective, ...]:
        """A flow's collectives in a reduction of so many steps."""
        taken, collectives = legs(flow, place, between, constants.in_turn), []
        calls = constants.startup / ops.count(flow.op) / len(taken)
        for leg in taken:
            messages = leg.messages
            if flow.op == "all_reduce":  # NCCL takes a tree where a ring has more messages
                messages = min(messages, 2 * math.ceil(math.log2(place.world)))
            rate, latency = link_of(leg, place, place.bandwidth)
            seconds = calls + float(constants.sending(flow.op, leg.bytes, rate)) * steps
            links = "inside" if leg.links == "inside" else "between"
            collectives.append(Collective(links, seconds / flow.halves, latency * messages / flow.halves))
        return flow.halves * tuple(collectives)

    before: tuple[tuple[Collective, ...], ...] = ((), ())
    if traffic.parameters is not None:
        passes = 1 if cell.param_compress != "none" and ENCODINGS[cell.param_compress].differences else 2
        each = tuple(leg._replace(sending=leg.sending / passes) for leg in route(traffic.parameters))
        before = (each, each if passes == 2 else ())
    streaming = cell.communication.streaming
    return Work(
        parts_of((*description.shapes.items(),), description.strategy in SHARDING, cell.hooked, description.outside),
        constants.compute * description.computed(cell.label),
        encode * interval,
        decode * interval,
        route(traffic.gradients, interval),
        before,
        () if traffic.scattered is None else route(traffic.scattered),
        interval,
        streaming.delay if streaming else 0,
    )


@cache
def parts_of(
    shapes: tuple[tuple[tuple[int, ...], int], ...], sharded: bool, hooked: bool, outside: int
) -> Sequence[Part]:
    """The library's buckets, or the blocks of a sharded model and what is outside of them, in groups."""
    if sharded:
        width = max(min(shape) for shape, _ in shapes if len(shape) > 1)
        numel = sum(count * math.prod(shape) for shape, count in shapes) - outside
        blocks = max(1, round(numel / (12 * width**2)))
        sizes = [numel / blocks] * blocks + [float(outside)] * bool(outside)
    else:
        tensors = [torch.empty(shape, device="meta") for shape, count in shapes for _ in range(count)]
        parameters = {str(number): nn.Parameter(tensor) for number, tensor in enumerate(tensors)}
        buckets = plan(parameters, fewest=FEWEST if hooked else NATIVE_BUCKETS)
        sizes = [sum(tensor.numel() for tensor in bucket.values()) for bucket in buckets]
    groups = np.array_split(sizes, min(len(sizes), MOST_PARTS))
    return [Part(float(group.sum() / sum(sizes)), len(group)) for group in groups]


@dataclass
class Machines:
    """Machines that train, are lost and return.

    Args:
        number: How many.
        lives: For a machine the seconds that it trains before each loss, if any.
        seconds: Seconds of a round with so many machines, or of training between checkpoints.
        away: Seconds until a machine that was lost is back.
        state: Seconds in which it receives the state of the run.
        detect: Seconds until the others notice a loss.
    """

    number: int
    lives: Callable[[int], Iterable[float] | None]
    seconds: Callable[[int], float]
    away: float
    state: float = 0.0
    detect: float = 0.0

    def __post_init__(self) -> None:
        self.env = simpy.Environment()
        self.alive, self.back = {*range(self.number)}, set[int]()
        self.means: list[int] = []  # machines of each round
        self.useful = 0.0
        for machine in self.alive:
            self.env.process(self.life(machine))

    def life(self, machine: int) -> Events:
        """Lose a machine at the end of each of its lives, and bring it back."""
        for seconds in self.lives(machine) or ():
            yield self.env.timeout(seconds)
            self.alive.discard(machine)
            self.back.discard(machine)
            self.training.interrupt()
            if math.isfinite(self.away):
                yield self.env.timeout(self.away)
                self.back.add(machine)

    def in_rounds(self, rounds: int) -> float:
        """Train in rounds that survive; return the seconds.

        What a lost machine computed in its round is lost; the others end theirs, when they have noticed. One that is
        back receives the state, and the round waits for it.
        """
        self.training = self.env.process(self._rounds(rounds))
        self.env.run(self.training)
        return float(self.env.now)

    def _rounds(self, rounds: int) -> Events:
        env = self.env
        while len(self.means) < rounds:
            late, until = self.state if self.back else 0.0, 0.0
            self.alive |= self.back
            self.back = set()
            left = 1.0 + late / self.seconds(max(1, len(self.alive)))
            while left or env.now < until:
                began, whole = env.now, self.seconds(max(1, len(self.alive)))
                try:
                    yield env.timeout(left * whole if left else until - env.now)
                    left = 0.0
                except simpy.Interrupt:
                    left = max(left - (env.now - began) / whole, 0.0)
                    until = max(until, env.now + self.detect)
            self.means.append(len(self.alive))

    def from_checkpoints(self, seconds: float, cost: float) -> float:
        """Train all together, from the last checkpoint after each loss; return the seconds that were not in vain."""
        self.training = self.env.process(self._checkpoints(cost))
        self.env.run(seconds)
        return self.useful

    def _checkpoints(self, cost: float) -> Events:
        env, ready = self.env, 0.0
        while True:
            try:
                yield env.timeout(max(ready - env.now, 0.0))
                yield env.timeout(self.seconds(self.number) + cost)
                self.useful += self.seconds(self.number)
            except simpy.Interrupt:
                ready = env.now + self.away + self.state
