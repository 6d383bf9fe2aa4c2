"""Every registered compressor keeps the contract; int8's errors are exactly what its definition says."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compressors import available, build, method_class, option_schema, registry
from gradwire.compressors.base import Compressor, Shape, numel
from gradwire.errors import BadInput, NonFiniteGradient

BUILDS = [
    *((name, {}) for name in available()),
    ("int8", {"block": 7}),
    ("int8", {"rounding": "stochastic"}),
    ("int8", {"rounding": "stochastic", "block": 64}),
]
SHAPES: list[Shape] = [0, 1, 2, 255, 256, 257, 10_007, (1, 1), (7, 11), (3, 257), (0, 5)]
FLOAT32 = torch.finfo(torch.float32)

every_build = pytest.mark.parametrize(("name", "options"), BUILDS, ids=str)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(shape: Shape, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


@every_build
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip_keeps_shape_and_states_its_bytes(name, options, shape):
    compressor = build(name, **options)
    wire = compressor.encode(normal(shape), generator=generator())
    assert (wire.dtype, wire.ndim, wire.is_contiguous()) == (torch.uint8, 1, True)
    assert compressor.wire_bytes(shape) in (None, wire.numel())
    decoded = compressor.decode(wire, shape)
    assert decoded.dtype == torch.float32
    assert tuple(decoded.shape) == (shape if isinstance(shape, tuple) else (shape,))
    assert decoded.isfinite().all()


@every_build
def test_same_generator_same_bytes_and_the_global_state_is_untouched(name, options):
    compressor = build(name, **options)
    x = normal((7, 11))
    before = torch.get_rng_state()
    first, second = (compressor.encode(x, generator=generator(5)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


@every_build
def test_any_float_type_and_memory_order(name, options):
    compressor = build(name, **options)
    x = normal((11, 7)).to(torch.bfloat16).T  # not contiguous
    plain = compressor.encode(x.to(torch.float32).contiguous(), generator=generator())
    assert torch.equal(compressor.encode(x, generator=generator()), plain)


@every_build
def test_an_encoding_is_self_contained_and_may_lie_anywhere_in_a_message(name, options):
    wire = build(name, **options).encode(normal(257), generator=generator())
    message = torch.cat([wire.new_zeros(3), wire])
    fresh = build(name, **options)  # another object, another place in memory
    assert torch.equal(fresh.decode(message[3:], 257), fresh.decode(wire, 257))


@every_build
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_flagged_or_raised_and_stays_visible(name, options, value):
    compressor = build(name, **options)
    x = normal(257)
    x[100] = value
    with pytest.raises(NonFiniteGradient):
        compressor.encode(x, generator=generator())
    flag = torch.zeros(1, dtype=torch.uint8)
    wire = compressor.encode(x, generator=generator(), flag=flag)
    assert flag.item() == 1
    assert not compressor.decode(wire, 257).isfinite().all()
    compressor.encode(normal(257), generator=generator(), flag=flag)
    assert flag.item() == 1, "a later finite tensor must not clear the flag"


@every_build
def test_extreme_finite_values(name, options):
    compressor = build(name, **options)
    for x in (
        torch.zeros(300),
        torch.full((300,), -1e-3),
        torch.full((300,), FLOAT32.tiny / 3),
        torch.eye(1, 300)[0],
        torch.full((300,), 6e4),
    ):
        assert compressor.decode(compressor.encode(x, generator=generator()), 300).isfinite().all()
    zeros = compressor.encode(torch.zeros(300), generator=generator())
    assert torch.equal(compressor.decode(zeros, 300), torch.zeros(300))


@every_build
def test_a_truncated_wire_is_refused(name, options):
    compressor = build(name, **options)
    wire = compressor.encode(normal(257), generator=generator())
    with pytest.raises(ValueError, match=name):
        compressor.decode(wire[:-1], 257)


@every_build
def test_what_is_no_float_vector_or_matrix_is_refused(name, options):
    for x in (torch.zeros(2, 2, 2), torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=name):
            build(name, **options).encode(x)


@pytest.mark.parametrize(
    "compressor", [c for name, options in BUILDS if (c := build(name, **options)).unbiased], ids=str
)
def test_declared_unbiased_is_unbiased(compressor):
    x, draws, g = normal(257), 2000, generator(9)
    decoded = torch.stack([compressor.decode(compressor.encode(x, generator=g), 257) for _ in range(draws)]).double()
    sigma = decoded.std(dim=0) / math.sqrt(draws)
    # 257 coordinates: 5 sigma; and float32's rounding where the codec draws nothing
    assert ((decoded.mean(dim=0) - x.double()).abs() <= 5 * sigma + 1e-6 * x.abs()).all()


def test_lossless_and_casts_are_exact():
    x = normal(10_007)
    for name, dtype in (("none", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        compressor = build(name)
        assert torch.equal(compressor.decode(compressor.encode(x), x.shape), x.to(dtype).to(torch.float32))


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_cast_counts_as_not_finite_from_where_it_overflows(name, dtype):
    overflow = torch.tensor([build(name).overflow], dtype=torch.float32)
    below = torch.nextafter(overflow, torch.zeros(1))
    assert overflow.to(dtype).isinf().all() and below.to(dtype).isfinite().all()
    build(name).encode(-below)
    with pytest.raises(NonFiniteGradient, match=name):
        build(name).encode(-overflow)


def int8_scales(x: torch.Tensor, block: int) -> torch.Tensor:
    """Each element's scale, in float64, straight from the definition."""
    scales = [chunk.abs().max() / 127 for chunk in x.double().split(block)]
    return torch.cat([scale.expand(chunk.numel()) for scale, chunk in zip(scales, x.split(block), strict=True)])


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 40),
    block=st.integers(1, 12),
    exponent=st.integers(-44, 37),
    seed=st.integers(0, 2**31),
)
def test_int8_nearest_errs_by_half_a_scale_at_most(size, block, exponent, seed):
    x = (torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2 - 1) * 10.0**exponent
    x = x.to(torch.float32)
    compressor = build("int8", block=block)
    error = (compressor.decode(compressor.encode(x), size).double() - x.double()).abs()
    half = int8_scales(x, block).clamp_min(FLOAT32.tiny) / 2
    assert (error <= half + 2 * FLOAT32.eps * x.double().abs()).all()


def test_int8_nearest_reaches_its_bound_and_its_ends():
    x = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.5, 126.5])
    decoded = build("int8").decode(build("int8").encode(x), 6)
    assert decoded.tolist() == [127.0, -127.0, 0.0, 2.0, -2.0, 126.0]  # ties to even


def test_int8_wire_is_scales_then_codes():
    x = torch.tensor([254.0, -127.0, 4.0, 0.0, -3.0])
    wire = build("int8", block=2).encode(x)
    assert wire[:12].view(torch.float32).tolist() == pytest.approx([2.0, 4.0 / 127, 3.0 / 127])
    assert wire[12:].view(torch.int8).tolist() == [127, -64, 127, 0, -127]


def test_int8_stochastic_has_the_exact_variance():
    x, draws, g = normal(300, seed=3), 4000, generator(4)
    compressor = build("int8", rounding="stochastic", block=100)
    decoded = torch.stack([compressor.decode(compressor.encode(x, generator=g), 300) for _ in range(draws)]).double()
    scale = int8_scales(x, 100)
    part = (x.double() / scale).frac().abs()
    variance = scale**2 * part * (1 - part)
    sigma = (variance / draws).sqrt()
    assert ((decoded.mean(dim=0) - x.double()).abs() <= 5 * sigma + 1e-6 * x.abs()).all()
    assert ((decoded - x.double()).abs() < scale * (1 + 1e-5)).all()
    expected = variance.sum()
    # the sum of 300 independent sample variances, each with a relative spread of at most a few percent
    assert (decoded.var(dim=0).sum() / expected - 1).abs() < 0.02


def test_int8_stochastic_refuses_the_global_generator():
    with pytest.raises(ValueError, match="generator"):
        build("int8", rounding="stochastic").encode(normal(5))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int9", {}, "unknown compressor 'int9'. Did you mean 'int8'"),
        ("int8", {"blok": 64}, "unknown int8 option 'blok'. Did you mean 'block'"),
        ("int8", {"block": "64"}, "int8 option 'block' is '64': Input should be a valid integer"),
        ("int8", {"block": 0}, "int8 option 'block' is 0: Input should be greater than or equal to 1"),
        ("int8", {"rounding": "up"}, "int8 option 'rounding' is 'up': Input should be 'nearest' or 'stochastic'"),
        ("none", {"level": 3}, "unknown none option 'level'. Available: none."),
    ],
)
def test_bad_names_and_options_are_told(name, options, message):
    with pytest.raises(BadInput) as raised:
        build(name, **options)
    assert message in str(raised.value)


def test_names_are_known_without_torch():
    program = (
        "import sys; from gradwire.compressors import available; print(available()); assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "int8" in printed


def test_registry_describes_what_it_lists():
    for name in available():
        assert method_class(name).name == name
        assert method_class(name).__doc__
    assert option_schema("int8")["properties"]["block"]["default"] == 256


class Halved(Compressor):
    """A third party's compressor."""

    name = "halved"

    def wire_bytes(self, shape):
        return 4 * numel(shape)

    def to_wire(self, x, generator):
        return (x / 2).view(-1).view(torch.uint8)

    def from_wire(self, wire, shape):
        return wire.view(torch.float32) * 2


def offer(monkeypatch, name, value):
    """Make an entry point, as an installed package would."""
    entry = EntryPoint(name, value, registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINTS else [])


def test_an_entry_point_adds_a_compressor(monkeypatch):
    offer(monkeypatch, "halved", f"{__name__}:Halved")
    assert "halved" in available()
    x = normal(5)
    assert torch.equal(build("halved").decode(build("halved").encode(x), 5), x)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("int8", f"{__name__}:Halved", "takes the built-in compressor's name 'int8'"),
        ("other", f"{__name__}:Halved", "no Compressor class whose name is 'other'"),
        ("halved", f"{__name__}:normal", "no Compressor class whose name is 'halved'"),
    ],
)
def test_a_bad_entry_point_is_told(monkeypatch, name, value, message):
    offer(monkeypatch, name, value)
    with pytest.raises(BadInput, match=message):
        build(name)
