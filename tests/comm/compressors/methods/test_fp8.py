"""fp8 rounds as its formats are defined, block by block."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from floats import Format, nearest, turning_points
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import FLOAT32, generator

from gradwire.comm.compressors import build, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"e4m3": Format(mantissa=3, lowest=-6, top=448.0), "e5m2": Format(mantissa=2, lowest=-14, top=57344.0)}
every_format = pytest.mark.parametrize("name", FORMATS)


def fp8_scales(x: torch.Tensor, form: Format, block: int) -> torch.Tensor:
    """Each element's scale in float64, from the definition; at least float32's smallest normal number."""
    chunks = x.double().split(block)
    scales = [(chunk.abs().max() / form.top).clamp_min(FLOAT32.tiny) for chunk in chunks]
    return torch.cat([scale.expand(chunk.numel()) for scale, chunk in zip(scales, chunks, strict=True)])


def unscaled(form: Format, block: int) -> torch.Tensor:
    """Every turning point of the format, each block led by its largest value, so that the scale is 1."""
    rows = turning_points(form)
    rows = torch.nn.functional.pad(rows, (0, -rows.numel() % (block - 1))).view(-1, block - 1)
    return torch.nn.functional.pad(rows, (1, 0), value=form.top).view(-1)


@every_format
@pytest.mark.parametrize("block", [32, 1000])
def test_every_number_and_every_tie_of_the_format_rounds_by_the_definition(name, block):
    form, compressor = FORMATS[name], build("fp8", format=name, block=block)
    x = unscaled(form, block)
    wire = compressor.encode(x)
    sent = compressor.decode(wire, x.shape).double()
    assert torch.equal(sent, nearest(x, form))
    assert torch.equal(wire, compressor.to_wire(x, None)), "the kernel differs from torch's cast"
    normal = x.abs() >= 2.0**form.lowest
    assert ((sent - x.double()).abs() / x.double().abs())[normal].max() == form.relative_error  # reached, not passed
    assert (sent - x.double()).abs()[~normal].max() == form.step / 2


@pytest.mark.filterwarnings("ignore:invalid value")
@every_format
def test_all_256_codes_decode_to_the_formats_numbers(name):
    form, compressor = FORMATS[name], build("fp8", format=name)
    numbers = torch.from_numpy(form.numbers())
    wire = torch.cat([torch.ones(1).view(torch.uint8), torch.arange(256, dtype=torch.uint8)])
    forms = [compressor.decode(wire, 256), compressor.from_wire(wire, (256,))]
    if (module := kernels.load("cuda", "fp8")).decode_add:
        forms.append(module.decode(compressor, wire.to(DEVICE), (256,)).cpu())
    for decoded in forms:
        for half, sign in ((decoded[:128], 1), (decoded[128:], -1)):
            assert torch.equal(half[: len(numbers)].double(), sign * numbers)
            assert not half[len(numbers) :].isfinite().any()
            assert half[len(numbers) :].isinf().sum() == (name == "e5m2")  # e4m3 has no infinity


def test_wires_by_hand():
    x = torch.tensor([448.0, -1.0, 2.0**-9, 0.0, -0.0, 896.0, 1.0])
    wire = build("fp8", block=5).encode(x)
    assert wire[:8].view(torch.float32).tolist() == [1.0, 2.0]
    assert bytes(wire[8:].tolist()).hex() == "7eb80100807e30"
    wire = build("fp8", format="e5m2", block=4).encode(torch.tensor([-57344.0, 1.0, 2.0**-16, 1.5]))
    assert wire[:4].view(torch.float32).item() == 1.0
    assert bytes(wire[4:].tolist()).hex() == "fb3c013e"


@every_format
@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 60), block=st.integers(1, 20), exponent=st.integers(-44, 37), spread=st.integers(0, 8),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_the_error_is_the_formats_times_the_scale(name, size, block, exponent, spread, seed):
    x = torch.rand(size, generator=generator(seed), dtype=torch.float64) * 2 - 1
    x = (x.sign() * x.abs() ** (1 + spread) * 10.0**exponent).float()
    compressor, form = build("fp8", format=name, block=block), FORMATS[name]
    sent = compressor.decode(compressor.encode(x), size)
    scale = fp8_scales(x, form, block)
    allowed = torch.maximum(x.double().abs() * form.relative_error, scale * form.step / 2)
    # The scale, x / scale and the product round in float32: at most three of its half steps.
    rounding = 1.5 * FLOAT32.eps * x.double().abs() + math.ldexp(1, -149)
    assert ((sent.double() - x.double()).abs() <= allowed + rounding).all()
    assert torch.equal(compressor.decode(compressor.encode(-x), size), -sent)


@every_format
def test_what_rounds_above_the_largest_number_stays_finite(name):
    top = np.float32(FORMATS[name].top)
    largest = np.random.default_rng(5).uniform(1, 2, 20_000).astype(np.float32)
    above = largest[largest / (largest / top) > top]
    assert above.size > 100, "float32 rounds some up, or this tests nothing"
    x = torch.from_numpy(np.concatenate([above, -above, [FLOAT32.max, -FLOAT32.max]]).astype(np.float32))
    wire = build("fp8", format=name, block=1).encode(x)
    assert set((wire[4 * x.numel() :] & 0x7F).tolist()) == {0x7E if name == "e4m3" else 0x7B}
    decoded = build("fp8", format=name, block=1).decode(wire, x.shape)
    assert ((decoded.double() - x.double()).abs() <= FLOAT32.eps * x.double().abs()).all()


@every_format
def test_denormal_blocks_keep_their_scale_normal_and_zero_blocks_are_zero(name):
    form = FORMATS[name]
    x = torch.zeros(40)
    x[:10] = torch.arange(-5, 5) * math.ldexp(1, -149)
    x[20:30] = torch.arange(-5, 5) * FLOAT32.tiny
    compressor = build("fp8", format=name, block=10)
    wire = compressor.encode(x)
    assert wire[:16].view(torch.float32).min() == FLOAT32.tiny
    assert torch.equal(wire, compressor.to_wire(x, None))
    decoded = compressor.decode(wire, 40)
    half = torch.maximum(x.double().abs() * form.relative_error, torch.tensor(FLOAT32.tiny * form.step / 2))
    assert ((decoded - x).double().abs() <= half + math.ldexp(1, -150)).all()
    assert torch.equal(decoded[10:20], torch.zeros(10)) and torch.equal(decoded[30:], torch.zeros(10))


@every_format
def test_a_block_that_is_not_finite_is_nan_and_no_other(name):
    compressor = build("fp8", format=name, block=10)
    for value in (math.nan, math.inf, -math.inf):
        x = torch.linspace(-3, 4, 30)
        x[13] = value
        wire = compressor.encode(x, flag=torch.zeros(1, dtype=torch.uint8))
        for decoded in (compressor.decode(wire, 30), compressor.from_wire(compressor.to_wire(x, None), (30,))):
            assert decoded[10:20].isnan().all()
            assert decoded[:10].isfinite().all() and decoded[20:].isfinite().all()
