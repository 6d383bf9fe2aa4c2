"""Chains: a sparsifier's values through a quantizer, nothing else changed."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from samples import CHAINS, assert_unbiased, draws, generator, normal

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build

NAMES = [
    "topk+int8",
    "topk+natural",
    "topk+qsgd",
    "topk+fp16",
    "topk+signsgd",
    "randomk+qsgd",
    "randomk+int8",
    "randomk+terngrad",
    "randomk+bf16",
    "randomk+natural",
    "threshold+onebit",
    "threshold+fp8",
    "threshold+int8",
    "threshold+natural",
    "thresholdv+1bit",
    "topk+nc",
]
UNBIASED = {"randomk+qsgd", "randomk+terngrad", "randomk+natural"}


@pytest.mark.parametrize("name", NAMES)
def test_what_arrives_is_the_quantized_choice_at_its_places(name):
    n, x = 3001, normal(3001)
    chain = build(name)
    wire = chain.encode(x, generator=generator(7))
    g = generator(7)  # both draw from one generator, the sparsifier first
    head, values = chain.sparsifier.pick(x, g)
    coded = chain.quantizer.encode(values, generator=g)
    assert torch.equal(wire, torch.cat([head, coded]))
    assert chain.index_bytes(wire, n) == head.numel()
    assert wire.numel() == head.numel() + chain.quantizer.wire_bytes(values.numel())
    places, _ = chain.sparsifier.places(head, n)
    expected = torch.zeros(n)
    expected[places] = chain.quantizer.decode(coded, values.numel()) * chain.sparsifier.gain(n)
    assert torch.equal(chain.decode(wire, n), expected)
    assert places.numel() in (30, int((x.abs() >= 2.5 * x.square().mean().sqrt()).sum()))


def test_a_chain_is_unbiased_if_both_members_are():
    assert {name for name in NAMES if build(name).unbiased} == UNBIASED | {
        name for name in ("randomk+bf16", "randomk+int8") if build(name.split("+")[1]).unbiased
    }
    assert build("randomk+int8", rounding="stochastic").unbiased
    assert not build("randomk+qsgd", scaled=False).unbiased
    assert set(UNBIASED) <= {name for name, _ in CHAINS}


def composed_variance(x: torch.Tensor, k: int, noise) -> torch.Tensor:
    """The exact variance of unbiased rounding of a random k of n, over all subsets; ``noise`` is that of rounding."""
    n, squares = x.numel(), np.zeros(x.numel())
    subsets = list(combinations(range(n), k))
    for subset in subsets:
        chosen = x.double().numpy()[list(subset)]
        squares[list(subset)] += (chosen**2 + noise(chosen)) * (n / k) ** 2
    return torch.from_numpy(squares / len(subsets)) - x.double() ** 2


def of_rounding(level: np.ndarray) -> np.ndarray:
    """The variance of rounding up with the probability of the fractional part."""
    part = level - np.floor(level)
    return part * (1 - part)


def of_int8(chosen: np.ndarray, top: int) -> np.ndarray:
    scale = np.abs(chosen).max() / top
    noise = of_rounding(chosen / scale) * scale**2
    noise[np.abs(chosen) == np.abs(chosen).max()] = 0
    return noise


def of_qsgd(chosen: np.ndarray, levels: int) -> np.ndarray:
    norm = math.sqrt((chosen**2).sum())
    return of_rounding(np.abs(chosen) / norm * levels) * (norm / levels) ** 2


@pytest.mark.parametrize(
    ("name", "options", "noise"),
    [
        ("randomk+int8", {"rounding": "stochastic", "num_bits": 4}, lambda chosen: of_int8(chosen, 7)),
        ("randomk+int8", {"rounding": "stochastic", "num_bits": 2}, lambda chosen: of_int8(chosen, 1)),
        ("randomk+qsgd", {"levels": 2}, lambda chosen: of_qsgd(chosen, 2)),
        ("randomk+qsgd", {"levels": 7}, lambda chosen: of_qsgd(chosen, 7)),
        (
            "randomk+terngrad",
            {},
            lambda chosen: np.abs(chosen).max() * np.abs(chosen) - chosen**2,
        ),
    ],
    ids=["int8 of 4 bits", "int8 of 2 bits", "qsgd of 2 levels", "qsgd of 7 levels", "terngrad"],
)
def test_the_composition_is_unbiased_with_its_exact_variance(name, options, noise):
    x, count = normal(7, seed=11), 500
    drawn = draws(build(name, density=3 / 7, **options), x, count)
    variance = composed_variance(x, 3, noise)
    assert_unbiased(drawn, x, variance)
    deviations = (drawn - x.double()).square()
    spread = (deviations.var(dim=0) / count).sqrt()
    assert ((deviations.mean(dim=0) - variance).abs() <= 5 * spread + 1e-6).all()


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5])
def test_top_k_in_8_bits_contracts(density):
    """Elements that are left out and rounding errors are at different places, so their energies add."""
    n, x = 3000, normal(3000, seed=8)
    chain = build("topk+int8", density=density)
    k = chain.sparsifier.kept(n)
    decoded = chain.decode(chain.encode(x), n).double()
    left_out = x.double().abs().sort().values[: n - k].square().sum()
    error = (decoded - x.double()).square().sum()
    rounding = error - left_out
    assert 0 <= rounding <= k * (x.double().abs().max() / 254) ** 2
    assert error <= (1 - k / n) * x.double().square().sum() + rounding
    assert error < (1 - k / n * (1 - 1e-3)) * x.double().square().sum()


def test_options_go_by_member_or_bare():
    one = build("topk+int8", **{"topk.density": 0.25, "int8.num_bits": 4, "block": 64})
    other = build("topk+int8", density=0.25, num_bits=4, **{"int8.block": 64})
    assert one == other and one.sparsifier.density == 0.25 and one.quantizer.block == 64
    assert one.wire_bytes(1000) == other.wire_bytes(1000)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "topk+randomk",
            {},
            "a chain is sparsifier+quantizer or rotation+quantizer; topk is a sparsifier, randomk is a sparsifier",
        ),
        ("topk+threshold", {}, "topk is a sparsifier, threshold is a sparsifier"),
        ("int8+topk", {}, "int8 is a quantizer, topk is a sparsifier"),
        ("int8+fp16", {}, "int8 is a quantizer, fp16 is a quantizer"),
        (
            "topk+int8+fp16",
            {},
            "compressor 'topk+int8+fp16': a chain has two members, a sparsifier or a rotation, then a quantizer",
        ),
        ("topk+int9", {}, "unknown compressor 'int9'. Did you mean 'int8'"),
        ("topk+int8", {"densty": 0.1}, "unknown topk+int8 option 'densty'. Did you mean 'density'"),
        ("topk+int8", {"topk.block": 5}, "unknown topk+int8 option 'topk.block'. Did you mean"),
        ("topk+int8", {"density": 0.1, "topk.density": 0.2}, "topk+int8 option 'density' is given twice"),
        ("topk+int8", {"topk.density": 1.5}, "topk option 'density' is 1.5: it must be less than or equal to 1"),
        ("randomk+qsgd", {"density": 0.0}, "randomk option 'density' is 0.0: it must be greater than 0"),
        ("topk", {"density": math.nan}, "topk option 'density' is nan: it must be a finite number"),
        ("topk", {"density": "1%"}, "topk option 'density' is '1%': it must be a valid number"),
        ("topk", {"indices": "golomb"}, "it must be 'auto', 'int32', 'bitmap' or 'rice'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(name, options, message):
    with pytest.raises(BadInput) as raised:
        build(name, **options)
    assert message in str(raised.value)


def test_what_the_quantizer_cannot_carry_is_flagged_only_if_it_is_sent():
    x = torch.ones(1000)
    x[5] = 1e5
    flag = torch.zeros(1, dtype=torch.uint8)
    build("topk+fp16").encode(x, flag=flag)
    assert flag.item() == 1
    flag.zero_()
    build("randomk+fp16").encode(x, generator=generator(3), flag=flag)
    places, _ = build("randomk").places(build("randomk").encode(x, generator=generator(3)), 1000)
    assert 5 not in places.tolist() and flag.item() == 0
