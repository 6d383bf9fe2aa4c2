"""Casts round as the definition of their format says, everywhere; their rounds sum what was cast.

Of `methods/bf16.py`, `methods/fp16.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from floats import Format, nearest, turning_points
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import lockstep
from samples import FLOAT32, normal

from gradwire.base.errors import NonFiniteGradient
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor
from gradwire.comm.compressors.rounds import Context

FORMATS = {
    "fp16": Format(mantissa=10, lowest=-14, top=65504.0),
    "bf16": Format(mantissa=7, lowest=-126, top=2.0**128 - 2.0**120),
}
DTYPES = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
every_cast = pytest.mark.parametrize("name", FORMATS)


def through(compressor: Compressor, x: torch.Tensor) -> torch.Tensor:
    return compressor.decode(compressor.encode(x), x.shape)


@every_cast
def test_every_number_and_every_tie_of_the_format_rounds_by_the_definition(name):
    form, compressor = FORMATS[name], build(name)
    x = turning_points(form)
    wire = compressor.encode(x)
    sent = compressor.decode(wire, x.shape).double()
    assert torch.equal(sent, nearest(x, form))
    assert torch.equal(wire, compressor.to_wire(x, None)), "the kernel differs from torch's cast"
    normal = x.abs() >= 2.0**form.lowest
    assert ((sent - x.double()).abs() / x.double().abs())[normal].max() == form.relative_error  # reached, not passed


@every_cast
def test_below_the_normal_numbers_the_steps_are_even(name):
    form = FORMATS[name]
    step = 2.0 ** (form.lowest - form.mantissa)
    halves = torch.arange(2 ** (form.mantissa + 1) + 2, dtype=torch.float64)
    sent = through(build(name), (halves * (step / 2)).float()).double() / step
    assert torch.equal(sent, (halves / 2).round())  # 0.5 goes to 0, 1.5 to 2


def test_wires_by_hand():
    half = build("fp16").encode(torch.tensor([1.0, -2.0, 65504.0, 2.0**-24, -0.0]))
    assert bytes(half.tolist()).hex() == "003c00c0ff7b01000080"
    brain = build("bf16").encode(torch.tensor([1.0, -2.0, 3.0, -0.0]))
    assert bytes(brain.tolist()).hex() == "803f00c040400080"
    plain = build("none").encode(torch.tensor([1.0, -2.0]))
    assert bytes(plain.tolist()).hex() == "0000803f000000c0"


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 300), exponent=st.integers(-9, 4), seed=st.integers(0, 2**31))
def test_casts_are_torchs(name, size, exponent, seed):
    x = normal(size, seed).clamp(-6, 6) * 10.0**exponent
    assert torch.equal(through(build(name), x), x.to(DTYPES[name]).float())


@every_cast
def test_a_cast_counts_as_not_finite_from_where_it_overflows(name):
    overflow = torch.tensor([build(name).overflow], dtype=torch.float32)
    below = torch.nextafter(overflow, torch.zeros(1))
    assert overflow.to(DTYPES[name]).isinf().all()
    assert through(build(name), -below).item() == -FORMATS[name].top
    with pytest.raises(NonFiniteGradient, match=name):
        build(name).encode(-overflow)
    flag = torch.zeros(1, dtype=torch.uint8)
    wire = build(name).encode(torch.cat([below, -overflow]), flag=flag)
    assert flag.item() == 1 and build(name).decode(wire, 2).tolist() == [FORMATS[name].top, -math.inf]


@every_cast
def test_any_nan_stays_one(name):
    patterns = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert patterns.isnan().all()
    wire = build(name).encode(patterns, flag=torch.zeros(1, dtype=torch.uint8))
    assert build(name).decode(wire, 4).isnan().all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_rounds_sum_the_casts_in_their_own_precision(name, world):
    xs = [normal(1003, seed=rank + 1) for rank in range(world)]
    xs = [x + x.sign() / 4 for x in xs]  # so far from float16's limits that a power of two changes nothing
    means, sents, handed = lockstep(build(name), xs, [{} for _ in xs], Context("w", (1003,), 0, world, 0))
    assert handed == 1003 * DTYPES[name].itemsize
    assert all(torch.equal(sent, through(build(name), x)) for sent, x in zip(sents, xs, strict=True))
    total = torch.zeros(1003, dtype=DTYPES[name])
    for x in xs:
        total = total + x.to(DTYPES[name])
    assert torch.equal(means[0], total.float() / world)


@pytest.mark.parametrize(("world", "fits"), [(1, 65504.0), (2, 65504.0), (4, 32752.0), (16, 16376.0)])
def test_fp16_rounds_hold_larger_sums_than_float16_and_show_an_overflow(world, fits):
    for value, mean in ((fits, fits), (2.01 * fits, math.inf)):
        xs = [torch.full((3,), value)] * world
        means, _, _ = lockstep(build("fp16"), xs, [{}] * world, Context("w", (3,), 0, world, 0))
        assert means[0].tolist() == [mean] * 3


def test_none_is_exact_to_the_last_bit():
    x = torch.cat([normal(1000), torch.tensor([FLOAT32.max, -FLOAT32.tiny, math.ldexp(1, -149), -0.0])])
    assert torch.equal(through(build("none"), x).view(torch.int32), x.view(torch.int32))
