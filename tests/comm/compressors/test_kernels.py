"""The CUDA kernels write the reference's bytes: on a GPU where there is one, else in Triton's interpreter.

Of `kernels/cuda/__init__.py`, `kernels/cuda/quantizers.py`, `kernels/cuda/signs.py`.
"""

from __future__ import annotations

import math
import pkgutil
from importlib import import_module

import pytest
import torch
from diagonals import swept
from samples import METHODS, generator, normal, scattered

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build, kernels
from gradwire.comm.compressors.driver import Driver
from gradwire.comm.compressors.segments import Buffers, Segments

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


CASES = [(name, options) for name, options in METHODS if kernels.load("cuda", name) is not kernels.REFERENCE]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("shape", [5003, *swept(0, 1, 257, ((64, 129),))], ids=str)
def test_a_cuda_kernel_has_the_references_bytes(name, options, shape):
    compressor = build(name, **options)
    module = kernels.load("cuda", name)
    if not module.covers(compressor):
        pytest.skip("these options have no CUDA kernel")
    x = normal(shape).to(DEVICE)
    form = (shape,) if isinstance(shape, int) else shape
    wire, bad = module.encode(compressor, x, generator(3, DEVICE))
    assert torch.equal(wire, compressor.to_wire(x, generator(3, DEVICE)))
    assert torch.equal(module.decode(compressor, wire, form), compressor.from_wire(wire, form))
    assert not bad.any()


FORMS = [(257,), (7, 11), (0,), (1,), (5003,), (33, 40)]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow encountered")
@pytest.mark.parametrize(
    "apart", [pytest.param(True, id="scattered"), pytest.param(False, id="aligned", marks=pytest.mark.sweep)]
)
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*case, marks=[pytest.mark.sweep] * bool(case[1])) for case in CASES], ids=str
)
def test_a_launch_for_many_tensors_has_the_bits_of_one_for_each(name, options, apart):
    """Scattered encodings lie at odd bytes, where a GPU cannot read or write a number at once."""
    compressor = build(name, **options)
    module = kernels.load("cuda", name)
    if not module.covers(compressor):
        pytest.skip("these options have no CUDA kernel")
    segments, values = scattered(compressor, FORMS)
    if not apart:
        segments = Segments(segment._replace(start=2**13 * i, at=2**15 * i) for i, segment in enumerate(segments))
        values = normal(segments.numel)
    values, count = values.to(DEVICE), len(FORMS)
    wire, residual = torch.zeros(segments.nbytes + 7, dtype=torch.uint8), normal(values.numel(), 5)
    wire, residual = wire.to(DEVICE), residual.to(DEVICE)
    again, kept, bad = wire.clone(), residual.clone(), torch.zeros(count, dtype=torch.uint8, device=DEVICE)
    drawn, each = ([generator(20 + i, DEVICE) for i in range(count)] for _ in range(2))
    for fed in (None, residual):
        if fed is not None:
            values[segments[4].start] = 1e38  # what rounding may make infinite, or a sum
            values[segments[5].start + 3] = math.inf
        bad.zero_()
        flags = torch.zeros_like(bad)
        module.encode_many(compressor, Buffers(values, segments, wire, drawn, bad, fed))
        Driver.encode_each(compressor, Buffers(values, segments, again, each, flags, None if fed is None else kept))
        sound = [segment for segment, flag in zip(segments, flags, strict=True) if not flag]
        assert torch.equal(bad != 0, flags != 0)
        for segment in sound:
            assert torch.equal(wire[segment.bytes], again[segment.bytes]), segment
    assert torch.equal(residual.view(torch.int32), kept.view(torch.int32))
    table = Segments(sound)
    messages = torch.stack([wire, wire])
    for onto in ("sum", "zero", "blank"):
        out, expected = normal(values.numel(), 8).to(DEVICE).abs_(), normal(values.numel(), 8).to(DEVICE).abs_()
        module.decode_add(compressor, messages, table, out, onto)
        for i in range(2):
            for segment in table:
                value = compressor.from_wire(wire[segment.bytes].clone(), segment.form).view(-1)
                part = expected[segment.elements]
                part.copy_(part + value if i or onto == "sum" else value if onto == "blank" else value + 0.0)
        assert torch.equal(out.view(torch.int32), expected.view(torch.int32)), onto


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("value", [math.nan, *swept(math.inf, -math.inf)])
def test_the_cuda_form_flags_what_is_not_finite(name, options, value):
    compressor = build(name, **options)
    module = kernels.load("cuda", name)
    if not module.covers(compressor):
        pytest.skip("these options have no CUDA kernel")
    x = normal(5003).to(DEVICE)
    x[4097] = value
    assert module.encode(compressor, x, generator(3, DEVICE))[-1].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "options"), METHODS, ids=str)
def test_what_a_gpu_encodes_a_cpu_decodes(name, options):
    compressor = build(name, **options)
    wire = compressor.encode(normal((64, 129)).cuda(), generator=generator(3, "cuda"))
    here = compressor.decode(wire.cpu(), (64, 129))
    assert torch.allclose(compressor.decode(wire, (64, 129)).cpu(), here, rtol=1e-6, atol=0)


def test_a_gpu_older_than_the_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    device = torch.device("cuda", 93)  # of no other test: what is found is kept
    assert kernels.find(build("none"), device) is kernels.REFERENCE, "what has no kernel needs no such GPU"
    with pytest.raises(BadInput, match=r"int8: .* 8\.0 or later .* Tesla T4 has 7\.5; use --device cpu"):
        kernels.find(build("int8"), device)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_fused_form_belongs_to_a_method(kind):
    package = f"{kernels.__name__}.{kind}"
    modules = [
        import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(import_module(package).__path__)
    ]
    forms = {name: kernel for module in modules for name, kernel in getattr(module, "KERNELS", {}).items()}
    assert len(forms) >= 6 and forms.keys() <= {name for name, _ in METHODS}
    assert all(kernels.load(kind, name) is kernel for name, kernel in forms.items())
