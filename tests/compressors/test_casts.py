"""float32 travels unchanged; a cast is torch's, and overflows where it says."""

from __future__ import annotations

import pytest
import torch
from samples import normal

from gradwire.compressors import build
from gradwire.errors import NonFiniteGradient


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
