"""Every registered compressor and chain keeps the contract, whoever wrote it.

Of `compressors/base.py`, `driver.py`, `methods/none.py`, `methods/zero.py`.
"""

from __future__ import annotations

import math
from contextlib import suppress
from random import Random

import pytest
import torch
from lockstep import lockstep
from samples import BUILDS, CHAINS, FLOAT32, SHAPES, SWEPT, draws, generator, normal, scattered

from gradwire.base.errors import NonFiniteGradient
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Quantizer, Shape
from gradwire.comm.compressors.rounds import Context


def cases(builds):
    """All builds as parameters; most chains in the sweep only, as they do what their members do."""
    made = [pytest.param(*build, marks=[pytest.mark.sweep] * (build in SWEPT)) for build in builds]
    return pytest.mark.parametrize(("name", "options"), made, ids=str)


every_build = cases(BUILDS)

# What these send need not hold the bad value; the flag still shows it.
NEED_NOT_SHOW = {"zero", "randomk"}
# A sign without a scale has no zero.
NO_ZERO = {("signsgd", "none")}


def form_of(shape: Shape) -> tuple[int, ...]:
    return shape if isinstance(shape, tuple) else (shape,)


def sends_no_zero(name: str, options: dict) -> bool:
    return (name, options.get("scale")) in NO_ZERO


@every_build
def test_round_trip_keeps_shape_and_states_its_bytes(name, options):
    compressor = build(name, **options)
    for shape in SHAPES:
        wire = compressor.encode(normal(shape), generator=generator())
        assert (wire.dtype, wire.ndim, wire.is_contiguous()) == (torch.uint8, 1, True), shape
        assert compressor.wire_bytes(shape) in (None, wire.numel()), shape
        assert 0 <= compressor.index_bytes(wire, shape) <= wire.numel(), shape
        decoded = compressor.decode(wire, shape)
        assert decoded.dtype == torch.float32, shape
        assert tuple(decoded.shape) == form_of(shape)
        assert decoded.isfinite().all(), shape


@every_build
def test_the_kernel_has_the_references_bytes(name, options):
    compressor = build(name, **options)
    for shape in (257, (7, 11), (64, 65)):
        x = normal(shape)
        wire = compressor.encode(x, generator=generator(3))
        assert torch.equal(wire, compressor.to_wire(x, generator(3))), shape
        reference = compressor.from_wire(wire, form_of(shape)).view(form_of(shape))
        assert torch.equal(compressor.decode(wire, shape), reference), shape


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
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        x = normal((11, 7)).to(dtype).T  # not contiguous
        plain = compressor.encode(x.to(torch.float32).contiguous(), generator=generator())
        assert torch.equal(compressor.encode(x, generator=generator()), plain)


@every_build
def test_an_encoding_is_self_contained_and_may_lie_anywhere_in_a_message(name, options):
    wire = build(name, **options).encode(normal(257), generator=generator())
    fresh = build(name, **options)  # another object, another place in memory
    message = torch.cat([wire.new_zeros(3), wire])
    assert torch.equal(fresh.decode(message[3:], 257), fresh.decode(wire, 257))


@every_build
def test_what_is_not_finite_is_flagged_or_raised_and_stays_visible(name, options):
    compressor = build(name, **options)
    for value in (math.nan, math.inf, -math.inf):
        x = normal(257)
        x[100] = value
        with pytest.raises(NonFiniteGradient):
            compressor.encode(x, generator=generator())
        flag = torch.zeros(1, dtype=torch.uint8)
        wire = compressor.encode(x, generator=generator(), flag=flag)
        assert flag.item() == 1, value
        if name.split("+")[0] not in NEED_NOT_SHOW:
            assert not compressor.decode(wire, 257).isfinite().all(), value
        compressor.encode(normal(257), generator=generator(), flag=flag)
        assert flag.item() == 1, "a later finite tensor must not clear the flag"


@every_build
def test_extreme_finite_values(name, options):
    for n in (1, 300):
        check_extreme_values(build(name, **options), n, sends_no_zero(name, options))


def check_extreme_values(compressor, n, no_zero):
    huge = torch.linspace(-1, 1, n) * min(6e4, compressor.overflow / 2)
    for x in (
        torch.full((n,), -1e-3),
        torch.full((n,), FLOAT32.tiny / 3),
        torch.full((n,), math.ldexp(1, -149)),
        torch.eye(1, n)[0],
        -torch.eye(1, n)[0] * 1e30 if compressor.overflow > 1e31 else -torch.eye(1, n)[0],
        huge,
    ):
        assert compressor.decode(compressor.encode(x, generator=generator()), n).isfinite().all()
    if not no_zero:
        zeros = compressor.encode(torch.zeros(n), generator=generator())
        assert torch.equal(compressor.decode(zeros, n), torch.zeros(n))


@every_build
def test_a_wire_of_another_size_is_refused(name, options):
    compressor = build(name, **options)
    wire = compressor.encode(normal(257), generator=generator())
    for other in (wire[:-1], torch.cat([wire, wire.new_zeros(1)]), wire[: wire.numel() // 3]):
        if other.numel() != wire.numel():
            with pytest.raises(ValueError):
                compressor.decode(other, 257)
    with pytest.raises(ValueError):
        compressor.decode(wire.to(torch.int16), 257)


@every_build
def test_a_corrupted_wire_is_refused_or_decodes_within_its_bounds(name, options):
    compressor = build(name, **options)
    for seed in range(12):
        shape, drawn = (1, 37, 257, (7, 11))[seed % 4], Random(seed)
        wire = compressor.encode(normal(shape), generator=generator()).clone()
        for _ in range(drawn.randint(1, 4) if wire.numel() else 0):
            wire[drawn.randrange(wire.numel())] = drawn.randrange(256)
        with suppress(ValueError):
            assert tuple(compressor.decode(wire, shape).shape) == form_of(shape)


FORMS = [(257,), (7, 11), (0,), (1,), (33, 40), (3, 0), (5003,), (1, 255), (2,)]


def generators() -> list[torch.Generator]:
    return [generator(20 + i) for i in range(len(FORMS))]


@every_build
def test_one_call_for_many_tensors_has_the_bytes_of_a_call_for_each(name, options):
    compressor = build(name, **options)
    segments, values = scattered(compressor, FORMS)
    before = torch.full((segments.nbytes or 0,), 0xA5, dtype=torch.uint8)
    flags = torch.zeros(len(FORMS), dtype=torch.uint8)
    once, each = generators(), generators()
    for _ in range(2):  # the second time with what the first has drawn and derived
        wire, placed = compressor.encode_many(values, segments, before.clone(), generators=once, flags=flags)
        wires = [
            compressor.encode(values[segment.elements].view(segment.form), generator=drawn)
            for segment, drawn in zip(segments, each, strict=True)
        ]
        expected = before if segments.nbytes is not None else torch.cat(wires)
        for segment, encoding in zip(placed, wires, strict=True):
            expected[segment.bytes] = encoding
        assert torch.equal(wire, expected)
        assert not flags.any()


@every_build
def test_decoding_into_a_sum_has_the_bits_of_decoding_and_adding(name, options):
    compressor = build(name, **options)
    segments, values = scattered(compressor, FORMS)
    wire, placed = compressor.encode_many(values, segments, generators=generators())
    begun = torch.rand(segments.numel, generator=generator(2)) + 1
    others = values[: segments.numel] - begun
    second = compressor.encode_many(others, segments, generators=generators())[0] if segments.fixed else wire
    for messages in (wire, torch.stack([wire, second])):
        for onto in ("sum", "zero", "blank"):
            out, expected = begun.clone(), begun.clone()
            for segment in placed:
                for message in messages if messages.ndim == 2 else [messages]:
                    value = compressor.decode(message[segment.bytes], segment.form).view(-1)
                    begins = onto != "sum" and message.data_ptr() == messages.data_ptr()
                    expected[segment.elements] = value + 0.0 if begins else expected[segment.elements] + value
                    if begins and onto == "blank":
                        expected[segment.elements] = value
            compressor.decode_add(messages, placed, out, onto=onto)
            assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), (onto, messages.ndim)


@every_build
def test_error_feedback_in_one_pass_has_the_bits_of_three(name, options):
    compressor = build(name, **options)
    segments, values = scattered(compressor, FORMS)
    residual = torch.full_like(values, 7.0)
    for segment in segments:
        residual[segment.elements] = 0
    kept = residual.clone()
    once, each = generators(), generators()
    for step in range(4):
        given = values * (step + 1)
        if step == 2:
            given[segments[4].start + 700] = math.inf  # drops this tensor's residual, and no other
        flags = torch.zeros(len(FORMS), dtype=torch.uint8)
        wire, placed = compressor.encode_many(given, segments, generators=once, flags=flags, residual=residual)
        assert flags.tolist() == [int(step == 2 and i == 4) for i in range(len(FORMS))]
        for segment, drawn in zip(placed, each, strict=True):
            corrected = (kept[segment.elements] + given[segment.elements]).view(segment.form)
            bad = torch.zeros(1, dtype=torch.uint8)
            encoding = compressor.encode(corrected, generator=drawn, flag=bad)
            assert torch.equal(wire[segment.bytes], encoding), (step, segment)
            error = (corrected - compressor.decode(encoding, segment.form)).view(-1)
            kept[segment.elements] = torch.zeros_like(error) if bad else error
        assert torch.equal(residual.view(torch.int32), kept.view(torch.int32)), step


@every_build
def test_what_is_not_finite_flags_its_own_tensor_only(name, options):
    compressor = build(name, **options)
    segments, values = scattered(compressor, FORMS)
    for i in (0, 3, 6):
        given = values.clone()
        given[segments[i].elements][-1] = math.nan
        flags = torch.zeros(len(FORMS), dtype=torch.uint8)
        flags[1] = 1  # stays
        compressor.encode_many(given, segments, generators=generators(), flags=flags)
        assert flags.nonzero().view(-1).tolist() == sorted({1, i})
        with pytest.raises(NonFiniteGradient, match=name.replace("+", r"\+")):
            compressor.encode_many(given, segments, generators=generators())


@every_build
def test_what_is_no_float_vector_or_matrix_is_refused(name, options):
    for x in (torch.zeros(2, 2, 2), torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=name.replace("+", r"\+")):
            build(name, **options).encode(x)


@cases([(name, options) for name, options in BUILDS if build(name, **options).unbiased])
def test_declared_unbiased_is_unbiased(name, options):
    """A sieve for every build: the mean's squared error is what the draws' own variance allows, within 6 sigma.

    The exact variances, coordinate by coordinate, are in each method's own tests.
    """
    x, count = normal((7, 11)), 500
    decoded = draws(build(name, **options), x, count)
    allowed = decoded.var(dim=0).sum() / count
    rounding = (FLOAT32.eps * x.double()).square().sum()
    assert (decoded.mean(dim=0) - x.double()).square().sum() <= allowed * (1 + 6 * math.sqrt(2 / x.numel())) + rounding


@cases([(name, options) for name, options in BUILDS if build(name, **options).has_rounds])
@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.sweep)])
def test_rounds_end_alike_on_all_ranks_and_state_their_bytes(name, options, world):
    for shape in (0, 1, 257, (7, 11), (33, 40)):
        check_rounds(build(name, **options), world, shape)


def check_rounds(compressor, world, shape):
    form = form_of(shape)
    states = [compressor.new_state(shape, seed=4) for _ in range(world)]
    before = torch.get_rng_state()
    for step in range(3):
        xs = [normal(shape, seed=10 * step + rank + 1) for rank in range(world)]
        kept = [x.clone() for x in xs]
        means, sents, handed = lockstep(compressor, xs, states, Context("weight", form, step, world, 4))
        assert all(torch.equal(x, copy) for x, copy in zip(xs, kept, strict=True)), "x was changed"
        assert handed == compressor.round_bytes(shape, step)
        for mean, sent in zip(means, sents, strict=True):
            assert mean.dtype == sent.dtype == torch.float32
            assert mean.shape == sent.shape == torch.Size(form)
            assert mean.isfinite().all() and sent.isfinite().all()
            assert torch.equal(mean, means[0]), "the replicas would drift"
    assert torch.equal(before, torch.get_rng_state())


def test_a_chain_takes_its_quantizer_from_the_quantizers():
    chains = [build(name) for name, _ in CHAINS]
    assert all(isinstance(chain.quantizer, Quantizer) for chain in chains)
