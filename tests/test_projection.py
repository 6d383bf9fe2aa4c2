"""The projector against exact integers, the theory of its first two moments, and every way of cutting the work."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from gradwire.errors import BadInput
from gradwire.gradients import project

SIZES = {"wte.weight": 24, "ln.bias": 7, "mlp.weight": 10}
N = sum(SIZES.values())
MASK = (1 << 64) - 1


def spiky(seed: int) -> torch.Tensor:
    """A vector whose 4-norm matters to the variance."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    x[seed % N] *= 6
    return x


def projected(x: torch.Tensor, dim: int, seed: int, sizes=SIZES) -> torch.Tensor:
    return project.build("rademacher", sizes, seed).project(x[None], [dim])[dim][0]


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def sign(seed: int, name: str, column: int, row: int) -> int:
    """The sign by Python's exact integers."""
    golden = 0x9E3779B97F4A7C15
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    word = mix(mix(key + column * golden) + (row // 64 + 1) * golden)
    return -1 if word >> (row % 64) & 1 else 1


def test_signs_are_the_documented_hash_of_seed_name_column_and_row():
    columns = torch.tensor([0, 5, 2**31 + 3, 2**40])
    got = project.Rademacher({"h.0.attn": 2**41}, seed=9).signs("h.0.attn", columns, 131)
    want = [[sign(9, "h.0.attn", column, row) for row in range(131)] for column in columns.tolist()]
    assert got.tolist() == want


def test_norms_and_inner_products_are_unbiased_with_the_exact_variance():
    dim, draws = 16, 3000
    x, y = spiky(1), spiky(2)
    both = torch.stack([x, y])
    images = torch.stack([project.build("rademacher", SIZES, seed).project(both, [dim])[dim] for seed in range(draws)])
    images = images.double()
    x, y = x.double(), y.double()
    square, inner = x @ x, x @ y

    ratio = (images[:, 0] ** 2).sum(1) / square
    variance = 2 / dim * (1 - (x**4).sum() / square**2)
    assert abs(ratio.mean() - 1) < 4 * (variance / draws).sqrt()
    assert ratio.var() == pytest.approx(variance.item(), rel=0.2)

    products = (images[:, 0] * images[:, 1]).sum(1)
    variance = (square * (y @ y) + inner**2 - 2 * (x**2 * y**2).sum()) / dim
    assert abs(products.mean() - inner) < 4 * (variance / draws).sqrt()
    assert products.var() == pytest.approx(variance.item(), rel=0.2)


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 4096}, {"a": 1, "b": 70_000}, {f"p{i}": 5 for i in range(40)}])
def test_scale_does_not_depend_on_the_shapes(sizes):
    n, dim = sum(sizes.values()), 2048
    x = torch.randn(n, generator=torch.Generator().manual_seed(3))
    ratio = (projected(x, dim, 0, sizes).norm() / x.norm()) ** 2
    assert abs(ratio - 1) < 5 * math.sqrt(2 / dim)


def test_every_column_is_hit_and_has_unit_norm():
    for column in (0, N // 2, N - 1):
        image = projected(torch.eye(N)[column], 96, 4)
        assert image.abs().unique().numel() == 1
        assert image.norm().item() == pytest.approx(1)


@pytest.mark.parametrize("tile", [1, 100, 1 << 20])
def test_neither_tiles_nor_batches_change_a_row(tile, monkeypatch):
    rows = torch.stack([spiky(seed) for seed in range(5)])
    whole = project.build("rademacher", SIZES, 0).project(rows, [65])[65]
    monkeypatch.setattr(project, "TILE", tile)
    one_by_one = torch.cat([project.build("rademacher", SIZES, 0).project(row[None], [65])[65] for row in rows])
    torch.testing.assert_close(one_by_one, whole, rtol=1e-5, atol=1e-5)


def test_several_widths_in_one_pass_are_the_widths_one_by_one():
    rows = torch.stack([spiky(1), spiky(2)])
    p = project.build("rademacher", SIZES, 0)
    together = p.project(rows, [3, 64, 100])
    for dim, image in together.items():
        torch.testing.assert_close(image, p.project(rows, [dim])[dim], rtol=1e-5, atol=1e-5)


def test_the_projection_of_a_model_is_the_sum_over_its_parameters():
    x = spiky(5)
    parts = x.split(list(SIZES.values()))
    images = [projected(part, 33, 0, {name: len(part)}) for name, part in zip(SIZES, parts, strict=True)]
    torch.testing.assert_close(sum(images), projected(x, 33, 0))


def test_seeds_and_names_give_unrelated_signs():
    columns = torch.arange(200)
    signs = [
        project.Rademacher({}, seed).signs(name, columns, 128).flatten()
        for seed, name in [(0, "a"), (1, "a"), (0, "b"), (10, "a")]
    ]
    gram = torch.stack(signs) @ torch.stack(signs).T / len(signs[0])
    assert (gram - torch.eye(4)).abs().max() < 5 / math.sqrt(len(signs[0]))


def test_the_fingerprint_tells_every_difference():
    def fingerprint(sizes=SIZES, seed=0, dim=64, projection="rademacher"):
        return project.build(projection, sizes, seed).fingerprint(dim)

    others = [
        fingerprint(seed=1),
        fingerprint(dim=65),
        fingerprint({**SIZES, "wte.weight": 25}),
        fingerprint({"x": 24, **SIZES}),
        fingerprint(projection="none", dim=N),
    ]
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *others}) == 6


def test_none_keeps_the_gradient_and_only_its_own_width():
    rows = torch.stack([spiky(1), spiky(2)])
    p = project.build("none", SIZES, 0)
    assert torch.equal(p.project(rows, [N])[N], rows)
    with pytest.raises(BadInput, match=f"--dim 64 .* {N} entries"):
        p.project(rows, [64])
    with pytest.raises(BadInput, match="Did you mean 'rademacher'"):
        project.build("radamacher", SIZES, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_seed_is_one_matrix_on_cpu_and_cuda():
    p = project.Rademacher(SIZES, 0)
    columns = torch.arange(24)
    assert torch.equal(p.signs("wte.weight", columns.cuda(), 100).cpu(), p.signs("wte.weight", columns, 100))
