"""The random words are Philox's, and look random where codecs use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import generator
from scipy import stats

from gradwire.comm.compressors import philox
from gradwire.comm.compressors.kernels.cpu import fill_words


def philox_of_the_paper(counter: int, key: tuple[int, int], rounds: int) -> list[int]:
    """Philox4x32 as Salmon et al. define it, in Python's integers."""
    c, k = [counter, 0, 0, 0], list(key)
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_definition_has_the_published_answer():
    assert philox_of_the_paper(0, (0, 0), 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's kat


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 12345, 2**63 - 2])
def test_words_are_philoxs_in_both_forms(seed):
    expected = [
        word
        for block in range(3)
        for word in philox_of_the_paper(block, (seed & 0xFFFFFFFF, seed >> 32), philox.ROUNDS)
    ]
    assert philox.words(torch.tensor([seed]), 11).tolist() == expected[:11]
    out = np.empty(12, np.uint32)
    fill_words(seed, 0, out)
    assert out.tolist() == expected
    fill_words(seed, 4, out[:8])
    assert out[:8].tolist() == expected[4:]


def test_uniforms_are_uniform():
    u = philox.uniforms(torch.tensor([77]), 200_000).numpy()
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    neighbours = np.histogram2d(u[::2], u[1::2], bins=16)[0]
    assert stats.chisquare(neighbours.ravel()).pvalue > 1e-6


def test_seeds_come_from_the_generator_alone():
    before = torch.get_rng_state()
    seeds = [philox.draw_seed(generator(3), torch.device("cpu"), "x").item() for _ in range(2)]
    assert seeds[0] == seeds[1] and torch.equal(before, torch.get_rng_state())
    with pytest.raises(ValueError, match="qsgd draws random numbers and needs a generator"):
        philox.draw_seed(None, torch.device("cpu"), "qsgd")
