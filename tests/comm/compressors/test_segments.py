"""Tables of segments: what they refuse, methods that know nothing of them, and their size at work in a real buffer."""

from __future__ import annotations

import math
import pkgutil
from importlib import import_module

import pytest
import torch
from numba.core.registry import CPUDispatcher as Dispatcher
from samples import generator, normal, scattered

from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor, numel
from gradwire.comm.compressors.segments import Segment, Segments


class Halved(Compressor):
    """A third party's compressor without a method for many tensors."""

    name = "halved"

    def wire_bytes(self, shape):
        return 4 * numel(shape)

    def to_wire(self, x, generator):
        return (x / 2).view(-1).view(torch.uint8)

    def from_wire(self, wire, shape):
        return wire.clone().view(torch.float32)


def test_a_third_partys_method_needs_nothing_for_many_tensors():
    segments, values = scattered(Halved(), [(5,), (2, 3), (0,), (1,)])
    residual = torch.zeros_like(values)
    wire, _ = Halved().encode_many(values, segments, residual=residual)
    out = torch.zeros(segments.numel)
    Halved().decode_add(wire, segments, out)
    for segment in segments:
        assert torch.equal(out[segment.elements], values[segment.elements] / 2)
        assert torch.equal(residual[segment.elements], values[segment.elements] / 2)
        assert torch.equal(wire[segment.bytes].clone().view(torch.float32), values[segment.elements] / 2)


@pytest.mark.parametrize("name", ["bf16", "int8", "topk", "none"])
def test_a_sum_over_ranks_has_the_bits_of_decoding_each_and_adding_from_zero(name):
    """Zeros of either sign are where a sum that does not begin at 0 would differ."""
    compressor = build(name)
    segments = Segments.of(compressor, [(0, (400,)), (400, (7, 11))])
    ranks = [torch.where(normal(477, seed) > 0, -0.0, normal(477, seed + 9)) for seed in range(3)]
    wires = torch.stack([compressor.encode_many(values, segments)[0] for values in ranks])
    out, at_once, expected = torch.full((477,), math.nan), torch.full((477,), math.nan), torch.zeros(477)
    compressor.decode_add(wires, segments, at_once, onto="zero")
    for wire, onto in zip(wires, ("zero", "sum", "sum"), strict=True):
        compressor.decode_add(wire, segments, out, onto=onto)
        for segment in segments:
            expected[segment.elements] += compressor.decode(wire[segment.bytes], segment.form).view(-1)
    for found in (out, at_once):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert ((out == 0) & ~out.signbit()).sum() > 40 and not (out.signbit() & (out == 0)).any()


def test_segments_follow_each_other_and_say_where_they_end():
    compressor = build("int8", block=7)
    segments = Segments.of(compressor, [(10, (20,)), (30, (3, 4)), (50, (0,))], at=5)
    assert list(segments) == [
        Segment(10, (20,), 5, 32),
        Segment(30, (3, 4), 37, 20),
        Segment(50, (0,), 57, 0),
    ]
    assert (segments.nbytes, segments.numel, len(segments), segments.fixed) == (57, 50, 3, True)
    assert segments.rows == [(10, 20, 5, 32), (30, 12, 37, 20), (50, 0, 57, 0)]
    of_data = Segments.of(build("threshold"), [(0, (9,)), (9, (5,))])
    assert (of_data.nbytes, of_data.fixed) == (None, False)
    placed = of_data.placed([6, 8])
    assert (placed.nbytes, placed.fixed, [segment.at for segment in placed]) == (14, False, [0, 6])
    assert (Segments([]).nbytes, Segments([]).numel) == (0, 0)


@pytest.mark.parametrize("name", ["int8", "topk", "none", "randomk"])
def test_buffers_that_do_not_fit_are_refused(name):
    compressor = build(name)
    segments = Segments.of(compressor, [(0, (300,)), (300, (5, 7))])
    values, wire = normal(335), torch.zeros(segments.nbytes, dtype=torch.uint8)
    generators = [generator(), generator()]
    for bad in (values[:-1], values.view(5, 67), values.to(torch.int32)):
        with pytest.raises(ValueError, match="values of segments take a vector of at least 335"):
            compressor.encode_many(bad, segments, generators=generators)
    for bad in (wire[:-1], wire.to(torch.int16), torch.zeros(2 * wire.numel(), dtype=torch.uint8)[::2]):
        with pytest.raises(ValueError, match="wire of segments take a vector of at least"):
            compressor.encode_many(values, segments, bad, generators=generators)
        with pytest.raises(ValueError, match="wire of segments take a vector of at least"):
            compressor.decode_add(bad, segments, values)
    for bad in (values[:-1], values.double()):
        with pytest.raises(ValueError, match="residual of segments take a vector of at least 335"):
            compressor.encode_many(values, segments, generators=generators, residual=bad)
        with pytest.raises(ValueError, match="sum of segments take a vector of at least 335"):
            compressor.decode_add(wire, segments, bad)


def test_sizes_that_depend_on_the_data_must_be_placed():
    compressor = build("threshold")
    segments = Segments.of(compressor, [(0, (300,))])
    with pytest.raises(ValueError, match="take the segments that encode_many returned"):
        compressor.decode_add(torch.zeros(99, dtype=torch.uint8), segments, torch.zeros(300))


def test_every_tensor_needs_a_generator_of_its_own():
    compressor = build("qsgd")
    segments = Segments.of(compressor, [(0, (3,)), (3, (4,))])
    for few in (None, [generator()], [generator(), None]):
        with pytest.raises(ValueError, match="generator"):
            compressor.encode_many(normal(7), segments, generators=few)
    with pytest.raises(ValueError, match="flags of 2 segments"):
        compressor.encode_many(normal(7), segments, generators=[generator(), generator()], flags=torch.zeros(1).byte())


def test_values_of_any_float_type_are_encoded_as_float32():
    compressor = build("int8")
    segments, values = scattered(compressor, [(300,), (7, 11)])
    half = values.to(torch.bfloat16)
    wire, _ = compressor.encode_many(half, segments, torch.zeros(segments.nbytes, dtype=torch.uint8))
    other, _ = compressor.encode_many(half.float(), segments, torch.zeros(segments.nbytes, dtype=torch.uint8))
    assert torch.equal(wire, other)


def test_compiled_loops_let_other_threads_run():
    """A communication thread encodes and decodes while the backward pass goes on."""
    package = "gradwire.comm.compressors.kernels.cpu"
    folder = import_module(package)
    modules = [folder, *(import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder.__path__))]
    kernels = [kernel for module in modules for kernel in getattr(module, "KERNELS", {}).values()]
    forms = [kernel.encode_many.__self__ for kernel in kernels if kernel.encode_many]
    values = [value for held in (*modules, *forms) for value in vars(held).values()]
    loops = [value for value in values if isinstance(value, Dispatcher)]
    assert len(loops) > 50
    assert [loop.py_func.__qualname__ for loop in loops if not loop.targetoptions["nogil"]] == []
