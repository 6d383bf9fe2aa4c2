"""The Hadamard rotation: its matrix, its inverse, its tail, and what it does for a quantizer of few bits.

Of `compressors/rotation.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from samples import generator, normal
from scipy.linalg import hadamard

from gradwire.base.errors import BadInput
from gradwire.comm.compressors import build

LENGTHS = [0, 1, 2, 3, 16, 31, 32, 33, 53, 63, 64, 4096 + 21]


def matrix(n):
    """The whole transform as a float64 matrix: groups of 32, then of the binary digits of what is left."""
    sizes = [32] * (n // 32) + [h for h in (16, 8, 4, 2, 1) if n % 32 & h]
    whole, at = np.zeros((n, n)), 0
    for size in sizes:
        whole[at : at + size, at : at + size] = hadamard(size) / math.sqrt(size)
        at += size
    return torch.from_numpy(whole)


@pytest.mark.parametrize("n", LENGTHS)
def test_it_is_scipys_matrix_and_its_own_inverse(n):
    method, x = build("hadamard"), normal(n)
    exact = matrix(n) @ x.double()
    assert torch.allclose(method.rotated(x).double(), exact, rtol=1.001 * 2.0**-24, atol=1e-14)
    allowed = 2.0**-24 * (x.abs() + math.sqrt(32) * method.rotated(x).abs().max()) if n else x
    assert (method.rotated(method.rotated(x)) - x).abs().le(allowed).all()
    assert torch.equal(method.rotated(x), method.rotate(x)), "the kernel has the reference's bits"
    assert method.wire_bytes(n) == 4 * n
    for bits in (2, 4, 8):
        assert build("hadamard+int8", num_bits=bits).wire_bytes(n) == build("int8", num_bits=bits).wire_bytes(n)


def test_a_chain_is_its_members_one_after_the_other():
    chain, x = build("hadamard+int8", num_bits=4, block=32, rounding="stochastic"), normal((7, 43))
    assert (chain.name, chain.unbiased, chain.quantizer.block) == ("hadamard+int8", True, 32)
    assert not build("hadamard+int8").unbiased
    rotated = (matrix(301) @ x.view(-1).double()).float()
    wire = chain.encode(x, generator=generator(4))
    inner = chain.quantizer.encode(build("hadamard").rotated(x.view(-1)), generator=generator(4))
    assert torch.equal(wire, inner)
    decoded = chain.quantizer.decode(wire, 301)
    assert (decoded - rotated).abs().max() <= float(rotated.abs().max()) / 7 * 1.001
    back = (matrix(301) @ decoded.double()).view(7, 43)
    assert torch.allclose(chain.decode(wire, (7, 43)).double(), back, rtol=0, atol=1e-5)


def test_an_outlier_costs_its_neighbours_less():
    """An outlier sets the scale of its block; spread over its group it is no larger than the rest."""
    x = normal(32 * 200).view(200, 32)
    x[:, 5] = 25.0
    off = {}
    for name in ("int8", "hadamard+int8"):
        method = build(name, num_bits=4, block=32)
        off[name] = float((method.decode(method.encode(x.view(-1)), x.numel()) - x.view(-1)).norm() / x.norm())
    assert 0 < off["hadamard+int8"] < 0.6 * off["int8"]


def test_bad_chains_are_refused():
    for name in ("int8+hadamard", "topk+hadamard", "hadamard+topk", "hadamard+hadamard"):
        with pytest.raises(BadInput, match=r"a chain is sparsifier\+quantizer or rotation\+quantizer; .* a rotation"):
            build(name)
    with pytest.raises(BadInput, match="a chain has two members"):
        build("hadamard+topk+int8")
