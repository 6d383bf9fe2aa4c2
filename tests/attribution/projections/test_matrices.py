"""The projector against exact integers, the theory of its first two moments, and every way of cutting the work.

Of `projections/base.py`, `hashing.py`.
"""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from diagonals import swept

from gradwire.attribution import projections
from gradwire.attribution.projections import hashing, matrices
from gradwire.attribution.projections.matrices import NONZEROS
from gradwire.base.errors import BadInput

SHAPES = {"wte.weight": (4, 6), "ln.bias": (7,), "mlp.weight": (2, 5)}
N = 41
RANDOM = ("rademacher", "sjlt", "factored")
MASK = (1 << 64) - 1


def spiky(seed: int) -> torch.Tensor:
    """A vector whose 4-norm matters to the variance."""
    x = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    x[seed % N] *= 6
    return x


def projected(x: torch.Tensor, dim: int, seed: int, shapes=SHAPES, projection="rademacher") -> torch.Tensor:
    return projections.build(projection, shapes, seed).project(x[None], [dim])[dim][0]


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
    got = matrices.Rademacher({"h.0.attn": (2**41,)}, seed=9).entries("h.0.attn", columns, 131)
    want = [[sign(9, "h.0.attn", column, row) for row in range(131)] for column in columns.tolist()]
    assert got.tolist() == want


@pytest.mark.parametrize("projection", ["rademacher", "sjlt"])
def test_norms_and_inner_products_are_unbiased_with_the_variance_of_theory(projection, monkeypatch):
    monkeypatch.setattr(matrices, "SLOTS", 1 << 9)  # so many matrices would else take a minute
    dim, draws = 16, 1000
    x, y = spiky(1), spiky(2)
    both = torch.stack([x, y])
    images = [projections.build(projection, SHAPES, seed).project(both, [dim])[dim] for seed in range(draws)]
    images = torch.stack(images).double()
    x, y = x.double(), y.double()

    ratio = (images[:, 0] ** 2).sum(1) / (x @ x)
    variance = 2 / dim * (1 - float((x**4).sum() / (x @ x) ** 2))
    assert abs(ratio.mean() - 1) < 4 * math.sqrt(variance / draws)
    assert ratio.var() == pytest.approx(variance, rel=0.2)

    products = (images[:, 0] * images[:, 1]).sum(1)
    assert abs(products.mean() - x @ y) < 4 * products.std() / math.sqrt(draws)
    if projection == "rademacher":
        variance = ((x @ x) * (y @ y) + (x @ y) ** 2 - 2 * (x**2 * y**2).sum()) / dim
        assert products.var() == pytest.approx(variance.item(), rel=0.2)


@pytest.mark.parametrize("rank", [1, *swept(8)])
def test_a_factored_projection_has_the_variance_of_its_rank(rank):
    rows, columns, dim, draws = 20, 30, 64, 1000
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(rows, rank, generator=generator) @ torch.randn(rank, columns, generator=generator)
    flat = gradient.flatten()[None]
    shapes = {"w": (rows, columns)}
    images = [projections.build("factored", shapes, seed).project(flat, [dim])[dim][0] for seed in range(draws)]
    ratio = torch.stack(images).double().square().sum(1) / flat.double().square().sum()
    eigenvalues = torch.linalg.eigvalsh((gradient.T @ gradient).double())
    rho = ((eigenvalues**2).sum() / eigenvalues.sum() ** 2).item()
    normal = rho * (2 / 8 + 2 / 8 + 2 / 64) + 2 / 64
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(draws)
    assert 0.6 * normal < ratio.var() < 1.1 * normal  # signs spread less than normal numbers, in 20 rows by a tenth


@pytest.mark.parametrize("projection", RANDOM)
def test_bands_hold_true_rows_and_not_those_of_half_the_norm(projection):
    shapes = {"w": (40, 30), "b": (17,)}
    dim = 1024
    for seed in range(8):
        x = torch.randn(1217, generator=torch.Generator().manual_seed(seed))
        projector = projections.build(projection, shapes, seed)
        ratio = (projected(x, dim, seed, shapes, projection).norm() / x.norm()) ** 2
        low, high = projector.band(dim)
        assert low <= ratio <= high
        assert ratio / (1000 if projection == "factored" else 9) < low  # wide: it must hold for a gradient of rank 1
    assert low < 1 < high


@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (1,), "b": (70, 100)},
        *swept({"a": (3,)}, {f"p{i}": (5,) for i in range(40)}, {"a": (64, 64)}, {"c": (3, 5, 7)}),
    ],
)
@pytest.mark.parametrize("projection", RANDOM)
def test_scale_does_not_depend_on_the_shapes(projection, shapes, monkeypatch):
    monkeypatch.setattr(matrices, "SLOTS", 1 << 9)
    n = sum(math.prod(shape) for shape in shapes.values())
    draws, dim = 40, 16
    x = torch.randn(n, generator=torch.Generator().manual_seed(3))
    ratios = [(projected(x, dim, seed, shapes, projection).norm() / x.norm()) ** 2 for seed in range(draws)]
    spread = math.sqrt((1 + 2 / 4) ** 2 - 1 if projection == "factored" else 2 / dim)
    assert abs(sum(ratios) / draws - 1) < 4 * spread / math.sqrt(draws)


@pytest.mark.parametrize("projection", RANDOM)
def test_every_column_is_hit_and_has_unit_norm(projection):
    for column in (0, N // 2, N - 1):
        image = projected(torch.eye(N)[column], 48, 4, projection=projection)
        assert image[image != 0].abs().unique().numel() == 1
        assert image.norm().item() == pytest.approx(1)
        if projection == "sjlt":
            assert image.count_nonzero() == NONZEROS


def test_columns_of_different_blocks_of_an_sjlt_may_meet_and_those_of_one_never():
    numel = 3 * 2**16 + 5
    projector = projections.build("sjlt", {"w": (numel,)}, 3)
    at = [0, 2**16 - 1, 2**16, numel - 1]
    rows = torch.zeros(len(at), numel)
    rows[range(len(at)), at] = 1.0
    slots = torch.zeros(len(at), 2**16)
    projector.add_values(slots, [8], "w", rows)
    assert slots.count_nonzero(1).tolist() == [1] * len(at)
    places = slots.abs().argmax(1).tolist()
    turned = projector.rotations("w", torch.device("cpu"))[:4].tolist()
    assert places == [turned[0], (turned[0] - 1) % 2**16, turned[1], (turned[3] + 4) % 2**16]
    assert len(set(turned)) == 4


@pytest.mark.parametrize("dim", [7, 26, 10])
def test_a_factored_width_is_a_product_of_like_numbers(dim):
    projector = projections.build("factored", SHAPES, 0)
    if dim == 10:
        assert projector.project(spiky(0)[None], [dim])[dim].shape == (1, 10)
    else:
        with pytest.raises(BadInput, match=f"--dim {dim} .* product of two similar numbers"):
            projector.project(spiky(0)[None], [dim])


@pytest.mark.parametrize(("projection", "tile"), [("rademacher", 1), ("rademacher", 100), ("sjlt", 1), ("factored", 1)])
def test_neither_tiles_nor_batches_change_a_row(projection, tile, monkeypatch):
    rows = torch.stack([spiky(seed) for seed in range(5)])
    whole = projections.build(projection, SHAPES, 0).project(rows, [48])[48]
    monkeypatch.setattr(matrices, "TILE", tile)
    one_by_one = torch.cat([projections.build(projection, SHAPES, 0).project(row[None], [48])[48] for row in rows])
    torch.testing.assert_close(one_by_one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("projection", RANDOM)
def test_several_widths_in_one_pass_are_the_widths_one_by_one(projection):
    rows = torch.stack([spiky(1), spiky(2)])
    p = projections.build(projection, SHAPES, 0)
    together = p.project(rows, [4, 64, 36])
    for dim, image in together.items():
        torch.testing.assert_close(image, p.project(rows, [dim])[dim], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("projection", RANDOM)
def test_the_projection_of_a_model_is_the_sum_over_its_parameters(projection):
    x = spiky(5)
    parts = x.split([math.prod(shape) for shape in SHAPES.values()])
    images = [
        projected(part, 36, 0, {name: SHAPES[name]}, projection) for name, part in zip(SHAPES, parts, strict=True)
    ]
    torch.testing.assert_close(sum(images), projected(x, 36, 0, projection=projection))


def test_seeds_and_names_give_unrelated_signs():
    columns = torch.arange(200)
    signs = [
        matrices.Rademacher({}, seed).entries(name, columns, 128).flatten()
        for seed, name in [(0, "a"), (1, "a"), (0, "b"), (10, "a")]
    ]
    gram = torch.stack(signs) @ torch.stack(signs).T / len(signs[0])
    assert (gram - torch.eye(4)).abs().max() < 5 / math.sqrt(len(signs[0]))


@pytest.mark.parametrize("projection", RANDOM)
def test_the_fingerprint_shows_every_difference(projection):
    def fingerprint(shapes=SHAPES, seed=0, dim=36, projection=projection):
        return projections.build(projection, shapes, seed).fingerprint(dim)

    others = [
        fingerprint(seed=1),
        fingerprint(dim=64),
        fingerprint({**SHAPES, "wte.weight": (5, 6)}),
        fingerprint({"x": (24,), **SHAPES}),
        fingerprint(projection="none", dim=N),
    ]
    assert fingerprint() == fingerprint()
    assert len({fingerprint(), *others}) == 6


def test_none_keeps_the_gradient_and_only_its_own_width():
    rows = torch.stack([spiky(1), spiky(2)])
    p = projections.build("none", SHAPES, 0)
    assert torch.equal(p.project(rows, [N])[N], rows)
    with pytest.raises(BadInput, match=f"--dim 64 .* {N} entries"):
        p.project(rows, [64])
    with pytest.raises(BadInput, match="Did you mean 'rademacher'"):
        projections.build("radamacher", SHAPES, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("projection", RANDOM)
def test_one_seed_is_one_matrix_on_cpu_and_cuda(projection):
    p = projections.build(projection, SHAPES, 0)
    identity = torch.eye(N)
    torch.testing.assert_close(p.project(identity.cuda(), [36])[36].cpu(), p.project(identity, [36])[36])
    columns = torch.arange(24)
    assert torch.equal(hashing.sign_table(7, columns.cuda(), 100).cpu(), hashing.sign_table(7, columns, 100))
