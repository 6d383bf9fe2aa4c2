"""Predict step times on unmeasured links and world sizes, with a model fitted to measurements on a few links.

A collective takes T = α + B · √(h² + (8 f / R)²): a startup time α, and for each of the B bytes that a rank sends, h on
the host and f times its time on a link of R bit/s. h is the cost on an unlimited link; f is the backend's factor (how
often it sends a byte, how badly both directions overlap). Both costs overlap partially: the root of their squares lies
between full overlap (the maximum) and no overlap (the sum). α depends on strategy and collective, because it includes
the number of calls and the waiting for other ranks; h and f depend on the collective. The rest of a step (computation,
encoding, decoding, Python) is that of the compressor's measurements, those on fast links above all.

Local updates send their bytes once in H steps, so a step has 1/H of α. They are not fitted: the rest of their step is
what the model of the others leaves over.

After Hockney's model ("The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20,
1994). Bytes and messages of the collectives are those of `collective_costs`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.bench.statistics.collective_costs import (
    Algorithm,
    Flow,
    Measurement,
    gradient_algorithms,
    inside,
    parameter_algorithms,
)

Array = NDArray[np.float64]
Key = tuple[str, str]

WEIGHT_OF_PRIOR = 0.02  # keeps parameters that the measurements do not determine at their initial values
STATES = 16  # bytes per parameter: itself, its gradient, AdamW's two moments, all float32
GRID = np.logspace(4, 13, 577)  # bits per second at which crossovers are searched


# Why: docs/decisions.md, "The cost model's law".
@dataclass(frozen=True)
class Fit:
    """Fitted parameters of the model in the module's docstring.

    Args:
        alpha: Seconds per step, by strategy and collective.
        host: Seconds per byte, by collective.
        factor: The backend's factor f, by collective.
    """

    alpha: dict[Key, float]
    host: dict[str, float]
    factor: dict[str, float]

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Fit:
        """Fit the measurements' times by robust least squares of relative errors (soft L1 loss)."""
        from scipy.optimize import least_squares

        points = [(run, op, flows) for run in measurements for op, flows in run.by_op.items()]
        flows = [(point, run, flow) for point, (run, _, flows) in enumerate(points) for flow in flows]
        keys = sorted({(run.strategy, op) for run, op, _ in points})
        ops = sorted({op for _, op, _ in points})
        a = np.array([keys.index((run.strategy, op)) for run, op, _ in points])
        seconds = np.array([sum(flow.seconds for flow in flows) for _, _, flows in points])
        of = np.array([point for point, _, _ in flows])  # the point of each flow
        o = np.array([ops.index(flow.op) for _, _, flow in flows])
        size = np.array([flow.bytes for _, _, flow in flows])
        wire = 8 / np.array([run.rate_of(flow) for _, run, flow in flows])  # seconds per byte
        n, m = len(keys), len(ops)
        start = np.concatenate(
            [
                [np.log(seconds[a == i].min() / 2) for i in range(n)],
                [np.log((seconds[of] / np.maximum(size, 1))[o == i].min() / 2) for i in range(m)],
                np.zeros(m),
            ]
        )

        def errors(x: Array) -> Array:
            alpha, host, link = np.exp(x[a]), np.exp(x[n + o]), wire * np.exp(x[n + m + o])
            expected = alpha + np.bincount(of, size * np.hypot(host, link), len(points))
            return np.concatenate([expected / seconds - 1, WEIGHT_OF_PRIOR * (x - start)])

        fitted = np.exp(least_squares(errors, start, "3-point", loss="soft_l1", f_scale=0.1).x).tolist()
        alpha = dict(zip(keys, fitted[:n], strict=True))
        host, factor = (dict(zip(ops, values, strict=True)) for values in (fitted[n : n + m], fitted[n + m :]))
        return cls(alpha, host, factor)

    def per_byte(self, op: str, rate: Any) -> Any:
        """Seconds per byte of a collective at ``rate``, a number or an array in bits per second."""
        return np.hypot(self.host[op], 8 * self.factor[op] / rate)


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


class Prediction(NamedTuple):
    """A predicted step: the collective algorithm, seconds per step and seconds of communication."""

    algorithm: str
    step: float
    communication: float


@dataclass(frozen=True)
class Model:
    """The fit, and the measured remainder of a step for each compressor.

    Args:
        measurements: The measured measurements, all of one world size.
    """

    measurements: tuple[Measurement, ...]

    @cached_property
    def fit(self) -> Fit:
        """The fitted model of collectives."""
        return Fit.of(self.fitted)

    @property
    def fitted(self) -> tuple[Measurement, ...]:
        """The measurements whose communication is known: one message per step."""
        return tuple(measurement for measurement in self.measurements if measurement.interval == 1)

    @cached_property
    def by_label(self) -> dict[Key, list[Measurement]]:
        """The measurements by strategy and label."""
        measured: defaultdict[Key, list[Measurement]] = defaultdict(list)
        for measurement in self.measurements:
            measured[measurement.strategy, measurement.label].append(measurement)
        return dict(measured)

    def communication(self, measurement: Measurement) -> float:
        """Seconds of communication that the fit predicts for a measurement."""
        return sum(self._expected(measurement, op) for op in measurement.by_op)

    def _expected(self, measurement: Measurement, op: str) -> float:
        """Seconds that the fit predicts for one collective of a measurement."""
        flows = measurement.by_op[op]
        sending = sum(flow.bytes * float(self.fit.per_byte(op, measurement.rate_of(flow))) for flow in flows)
        return self.fit.alpha[measurement.strategy, op] / measurement.interval + sending

    def _rest(self, measurement: Measurement) -> float:
        """Seconds of a step without exposed communication."""
        return measurement.rest if measurement.interval == 1 else measurement.step - self.communication(measurement)

    def step(self, measurement: Measurement, communication: Any) -> Any:
        """Seconds of a step with the measurement's compressor and ``communication`` seconds of communication.

        Computation hides as much communication as on the link where it hid the most.
        """
        runs = self.by_label[measurement.strategy, measurement.label]
        hidden = max(run.hidden for run in runs)
        rest = sum(share * self._rest(run) for share, run in zip(shares(runs), runs, strict=True))
        return rest + np.maximum(communication - hidden, 0)

    def steps(
        self, key: Key, world: int, rates: Array, latency: float, islands: Islands = NO_ISLANDS
    ) -> tuple[list[str], Array, Array]:
        """Names of the algorithms, and their step and communication seconds ``[algorithms, rates]``.

        Args:
            key: Strategy and label.
            world: The world size.
            rates: Bits per second, of each island's cable or, without islands, each rank's.
            latency: Additional seconds per message there.
            islands: The islands.
        """
        measurement = self.by_label[key][0]
        decode = fmean(run.decode for run in self.by_label[key])
        peers = measurement.islands if measurement.islands > 1 else measurement.world
        decodings = peers if measurement.gradients.op == "all_gather" else 2
        names, steps, times = [], [], []
        for algorithm in self.algorithms(measurement, world, islands.number):
            if (measurement.strategy, algorithm.op) not in self.fit.alpha:
                continue
            sending = [self._sending(flow, rates, latency, islands) for flow in _inside(measurement, world, islands)]
            if measurement.parameters is not None and not measurement.parameters.inside:
                gathers = self.gathers(measurement.parameters, measurement.world, world, islands.number)
                sending.append(np.min([self._sending(gather, rates, latency, islands) for gather in gathers], axis=0))
            ops = {algorithm.op, *(flow.op for name, flow in measurement.named_flows.items() if name != "gradients")}
            startup = sum(self.fit.alpha[measurement.strategy, op] for op in ops) / measurement.interval
            communication = (
                startup + self._sending(algorithm, rates, latency, islands, measurement.interval) + sum(sending)
            )
            names.append(algorithm.name)
            times.append(communication)
            steps.append(self.step(measurement, communication) + decode * (algorithm.decodings / decodings - 1))
        return names, np.array(steps), np.array(times)

    def algorithms(self, measurement: Measurement, world: int, islands: int) -> list[Algorithm]:
        """The ways in which a measurement's gradients can travel between ``world`` ranks."""
        return gradient_algorithms(measurement, world, islands)

    def gathers(self, parameters: Flow, measured: int, world: int, islands: int) -> list[Algorithm]:
        """The ways in which a step's parameters can travel between ``world`` ranks."""
        return parameter_algorithms(parameters, measured, world, islands)

    def _sending(
        self, algorithm: Algorithm, rates: Array, latency: float, islands: Islands, interval: float = 1.0
    ) -> Any:
        """Seconds per step of an algorithm without its startup time, with messages in every ``interval``-th step."""
        total: Any = np.zeros(len(rates))
        for (sent, messages), links, sharing in algorithm.legs:
            rate, wait = {
                "between": (rates / sharing, latency),
                "inside": (islands.rate, islands.latency),
                "ring": (np.minimum(rates, islands.rate), max(latency, islands.latency)),
            }[links]
            total = total + sent * self.fit.per_byte(algorithm.op, rate) + wait * messages / interval
        return total

    def predict(self, key: Key, world: int, rate: float, latency: float, islands: Islands = NO_ISLANDS) -> Prediction:
        """Predict the step of a strategy and label with the fastest algorithm."""
        names, steps, times = self.steps(key, world, np.array([rate]), latency, islands)
        best = int(steps[:, 0].argmin())
        return Prediction(names[best], float(steps[best, 0]), float(times[best, 0]))

    def fastest(self, key: Key, world: int, latency: float, islands: Islands = NO_ISLANDS) -> Array:
        """Seconds of a step with the fastest algorithm, at every rate of `GRID`."""
        return self.steps(key, world, GRID, latency, islands)[1].min(0)

    def resampled(self, times: int, seed: int = 0) -> Iterator[Model]:
        """Yield models of resampled measurements: a bootstrap of the residuals.

        Each collective's time is the fitted time multiplied by a relative residual drawn from all measurements; the
        rest of each step is drawn from the measurements of its strategy and label, by their `shares`. Local updates
        keep their steps.
        """
        draw = np.random.default_rng(seed)
        residuals = np.array(
            [
                sum(flow.seconds for flow in flows) / self._expected(measurement, op)
                for measurement in self.fitted
                for op, flows in measurement.by_op.items()
            ]
        )
        others = tuple(measurement for measurement in self.measurements if measurement.interval != 1)
        for _ in range(times):
            yield Model((*(self._drawn(measurement, residuals, draw) for measurement in self.fitted), *others))

    def _drawn(self, measurement: Measurement, residuals: Array, draw: np.random.Generator) -> Measurement:
        runs = self.by_label[measurement.strategy, measurement.label]
        rest = runs[draw.choice(len(runs), p=shares(runs))].rest
        scales = {
            op: self._expected(measurement, op)
            * float(residuals[draw.integers(len(residuals))])
            / sum(flow.seconds for flow in flows)
            for op, flows in measurement.by_op.items()
        }
        flows: dict[str, Any] = {
            name: flow._replace(seconds=flow.seconds * scales[flow.op])
            for name, flow in measurement.named_flows.items()
        }
        drawn = replace(measurement, **flows)
        exposed = max(drawn.communication - measurement.hidden, 0.0)
        return replace(drawn, exposed=exposed, step=rest + exposed)


def shares(runs: Sequence[Measurement]) -> Array:
    """The weight of each run in the rest of a step: errors are relative to the step, so slow links say little."""
    weights = np.array([run.step for run in runs]) ** -2.0
    return weights / weights.sum()


def _inside(measurement: Measurement, world: int, islands: Islands) -> list[Algorithm]:
    """How a measurement's flows inside islands are communicated inside these."""
    measured, ranks = measurement.world // measurement.islands, world // islands.number
    return [inside(flow, measured, ranks) for flow in measurement.flows if flow.inside]


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


class LeftOut(NamedTuple):
    """A measurement and its step and communication seconds, predicted from measurements on other links."""

    measurement: Measurement
    step: float
    communication: float

    @property
    def errors(self) -> tuple[float, float]:
        """Relative errors of step and communication time; NaN if communication was not measured."""
        measured = self.measurement.communication
        return self.step / self.measurement.step - 1, self.communication / measured - 1 if measured else math.nan


def leave_one_link_out(measurements: Iterable[Measurement]) -> list[LeftOut]:
    """Predict each measurement on a rate-limited link from the measurements on all other links."""
    measurements = list(measurements)
    predictions = []
    for link in dict.fromkeys(measurement.link for measurement in measurements if math.isfinite(measurement.rate)):
        model = Model(tuple(measurement for measurement in measurements if measurement.link != link))
        for measurement in measurements:
            known = {(measurement.strategy, flow.op) for flow in measurement.flows} <= model.fit.alpha.keys()
            if measurement.link == link and known and (measurement.strategy, measurement.label) in model.by_label:
                communication = model.communication(measurement)
                predictions.append(LeftOut(measurement, float(model.step(measurement, communication)), communication))
    return predictions


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
