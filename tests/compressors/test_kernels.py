"""The CUDA forms have the plain forms' bytes: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from samples import METHODS, generator, normal

from gradwire.compressors import build, kernels
from gradwire.compressors.sparse import Sparsifier
from gradwire.errors import BadInput

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def fused(kind: str) -> list[str]:
    folder = [f"{path}/{kind}" for path in kernels.__path__]
    return [module.name for module in pkgutil.iter_modules(folder)]


CASES = [(name, options) for name, options in METHODS if name in fused("cuda")]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("shape", [0, 1, 257, 5003, (64, 129)], ids=str)
def test_the_cuda_form_has_the_plain_forms_bytes(name, options, shape):
    compressor = build(name, **options)
    module = kernels.load("cuda", name)
    if not module.covers(compressor):
        pytest.skip("these options have no CUDA form")
    x = normal(shape).to(DEVICE)
    form = (shape,) if isinstance(shape, int) else shape
    if isinstance(compressor, Sparsifier):
        plain_head, plain_values = compressor.pick(x, generator(3, DEVICE))
        head, values, bad = module.pick(compressor, x, generator(3, DEVICE))
        assert torch.equal(head, plain_head) and torch.equal(values, plain_values)
        message = torch.cat([head, values.view(torch.uint8)])
        places, used = module.places(compressor, message, shape)
        plain_places, plain_used = compressor.places(message, shape)
        assert torch.equal(places, plain_places) and used == plain_used
        placed = module.place(compressor, values, places, shape)
        assert torch.equal(placed, compressor.place(values, places, shape))
    else:
        wire, bad = module.to_wire(compressor, x, generator(3, DEVICE))
        assert torch.equal(wire, compressor.to_wire(x, generator(3, DEVICE)))
        assert torch.equal(module.from_wire(compressor, wire, form), compressor.from_wire(wire, form))
    assert not bad.any()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_cuda_form_tells_what_is_not_finite(name, options, value):
    compressor = build(name, **options)
    module = kernels.load("cuda", name)
    if not module.covers(compressor):
        pytest.skip("these options have no CUDA form")
    x = normal(5003).to(DEVICE)
    x[4097] = value
    code = module.pick if isinstance(compressor, Sparsifier) else module.to_wire
    assert code(compressor, x, generator(3, DEVICE))[-1].any()


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
    assert kernels.find(build("none"), device) is None, "what has no kernel needs no such GPU"
    with pytest.raises(BadInput, match=r"int8: .* 8\.0 or later .* Tesla T4 has 7\.5; use --device cpu"):
        kernels.find(build("int8"), device)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_fused_form_belongs_to_a_method(kind):
    forms = {name for name in fused(kind) if hasattr(kernels.load(kind, name), "covers")}
    assert forms and forms <= {name for name, _ in METHODS}
