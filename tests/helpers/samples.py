"""Samples for the tests of every compressor: builds, shapes, inputs; and exact tests of what random codes draw."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import torch
from torch.nn.functional import pad

from gradwire.comm.compressors import available, method_class
from gradwire.comm.compressors.base import BlockQuantizer, Compressor, Quantizer, Shape
from gradwire.comm.compressors.rotation import Rotation
from gradwire.comm.compressors.segments import Segment, Segments
from gradwire.comm.compressors.sparse import Sparsifier

SHAPES: list[Shape] = [0, 1, 2, 255, 256, 257, 10_007, (1, 1), (7, 11), (3, 257), (0, 5), (5, 0)]
FLOAT32 = torch.finfo(torch.float32)
COPIES = 50  # of a tensor in one encoding, where it is drawn many times

VARIANTS: dict[str, list[dict]] = {
    "fp8": [{"format": "e5m2"}, {"block": 7}, {"format": "e5m2", "block": 64}],
    "int8": [
        {"block": 7},
        {"num_bits": 4},
        {"num_bits": 2, "block": 64},
        {"rounding": "stochastic"},
        {"rounding": "stochastic", "num_bits": 4, "block": 64},
    ],
    "onebit": [{"block": 7}, {"block": 2048}],
    "signsgd": [{"block": 7}, {"block": 2048}, {"scale": "none"}],
    "topk": [
        {"density": 0.3},
        {"density": 1.0},
        {"indices": "int32"},
        {"indices": "bitmap", "density": 0.05},
        {"indices": "rice", "density": 0.05},
    ],
    "threshold": [
        {"threshold": 0.01, "indices": "bitmap"},
        {"scale": "max", "threshold": 0.3},
        {"scale": "absolute", "threshold": 1.0},
    ],
    "chunktopk": [{"k": 3, "chunk": 16}, {"k": 5, "chunk": 100}, {"k": 9, "chunk": 4}],
    "dcttopk": [{"k": 3, "tile": 8}, {"k": 1, "tile": 1}, {"k": 40, "tile": 10}],
    "bins": [{"bits": 1}, {"bits": 8}, {"bits": 4}],
    "randomk": [{"density": 0.3}, {"density": 1.0}, {"scaled": False, "density": 0.05}],
    "gradiveq": [{"slice": 8, "components": 2, "window": 1, "refresh": 2}],
    "powersgd": [{"rank": 1}],
    "sketch": [{"rows": 1, "width": 0.3}, {"rows": 3, "density": 0.2}],
    "natural": [{"bits": 9}, {"block": 7}],
    "qsgd": [
        {"levels": 7, "norm": "max", "block": 64},
        {"levels": 1, "norm": "max"},
        {"levels": 1, "block": 7},
        {"levels": 20},
    ],
    "terngrad": [{"block": 7}],
}
"""Options, in addition to the defaults, with which the conformance suite builds a method; new methods add theirs."""


def of_kind(kind: type[Compressor]) -> list[str]:
    """Every registered method of that kind."""
    return [name for name in available() if issubclass(method_class(name), kind)]


METHODS = [(name, options) for name in available() for options in ({}, *VARIANTS.get(name, []))]
FIRST, SECOND = [*of_kind(Sparsifier), *of_kind(Rotation)], of_kind(Quantizer)
CHAINS = [(f"{first}+{second}", {}) for first, second in product(FIRST, SECOND)]
CHAINS += [("hadamard+int8", {"num_bits": 4, "block": 32}), ("hadamard+int8", {"rounding": "stochastic"})]
BUILDS = [*METHODS, *CHAINS]
DIAGONAL = {f"{FIRST[i % len(FIRST)]}+{SECOND[i % len(SECOND)]}" for i in range(max(len(FIRST), len(SECOND)))}
SWEPT = [(name, options) for name, options in CHAINS if not options and name not in DIAGONAL]
"""The chains that `make test` leaves to the sweep; each method is in another one."""


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(shape: Shape, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def draws(compressor: Compressor, x: torch.Tensor, count: int, seed: int = 9) -> torch.Tensor:
    """The values of ``count`` encodings of ``x`` from one generator: float64 [count, *x.shape].

    Where blocks do not depend on each other, one encoding holds many copies, each filled up with zeros to whole blocks.
    """
    drawn, g, copies, length = [], generator(seed), 1, x.numel()
    if isinstance(compressor, BlockQuantizer):
        copies, length = COPIES, compressor.blocks(length) * compressor.block
    given = x if copies == 1 else pad(x.view(-1), (0, length - x.numel())).repeat(copies)
    for _ in range(-(-count // copies)):
        drawn.append(compressor.decode(compressor.encode(given, generator=g), tuple(given.shape)))
    values = torch.cat([each.view(-1, length) for each in drawn])[:count, : x.numel()]
    return values.reshape(count, *x.shape).double()


def assert_frequencies(ups: torch.Tensor, trials: int, probability: torch.Tensor) -> None:
    """Independent coordinates went up ``ups`` times in ``trials``, each with its exact ``probability``.

    Each coordinate alone within 5 sigma (the exact binomial where fewer than 25 of an outcome are expected), and
    the sum of the squared deviations within the chi-square band that holds all but 1e-6 of its mass on either side.
    """
    from scipy import stats  # not above: benchmarks import this module, also where there is no scipy

    ups, p = ups.double().numpy().ravel(), probability.double().numpy().ravel()
    certain = (p == 0) | (p == 1)
    assert (ups[certain] == trials * p[certain]).all()
    ups, p = ups[~certain], p[~certain]
    rare = trials * np.minimum(p, 1 - p) < 25
    for count, chance in zip(ups[rare], p[rare], strict=True):
        assert stats.binomtest(int(count), trials, chance).pvalue > 5.7e-7 / max(1, rare.sum())
    often, chance = ups[~rare], p[~rare]
    z = (often - trials * chance) / np.sqrt(trials * chance * (1 - chance))
    assert (np.abs(z) <= 5).all()
    if z.size:
        low, high = stats.chi2(z.size).ppf([1e-6, 1 - 1e-6])
        assert low <= (z**2).sum() <= high


def assert_unbiased(drawn: torch.Tensor, x: torch.Tensor, variance: torch.Tensor) -> None:
    """The mean of ``drawn`` [N, ...] is within 5 sigma of ``x`` everywhere, by the exact ``variance`` (float64)."""
    sigma = (variance.double() / len(drawn)).sqrt()
    error = (drawn.mean(dim=0) - x.double()).abs()
    assert (error <= 5 * sigma + 4 * FLOAT32.eps * x.double().abs() + math.ldexp(1, -149)).all()


def scattered(compressor: Compressor, forms: list[tuple[int, ...]]) -> tuple[Segments, torch.Tensor]:
    """Tensors of these forms, apart from each other in a buffer that is NaN elsewhere, and their values.

    Their encodings lie in another order than they do, each at the byte after a gap.
    """
    numels = [math.prod(form) for form in forms]
    starts = [3 + 5 * i + sum(numels[:i]) for i in range(len(forms))]
    segments, at = [], 1
    for start, form in reversed(list(zip(starts, forms, strict=True))):
        size = compressor.wire_bytes(form)
        segments.append(Segment(start, form, at, size))
        at += (size or 0) + 1
    values = torch.full((starts[-1] + numels[-1] + 2,), math.nan)
    for i, segment in enumerate(segments):
        values[segment.elements] = normal(segment.numel, seed=40 + i)
    return Segments(reversed(segments)), values
