"""The kernels of projections against the reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from gradwire.attribution import projections
from gradwire.attribution.projections import hashing, matrices

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SLOTS = matrices.SLOTS if DEVICE == "cuda" else 1 << 10  # the interpreter is slow


@pytest.fixture
def kernels(monkeypatch):
    """Use the kernels on a CPU too."""
    from gradwire.attribution.projections import cuda

    monkeypatch.setattr(matrices, "kernels_for", lambda device: cuda)
    monkeypatch.setattr(matrices, "SLOTS", SLOTS)


def gradients(samples: int, numel: int) -> torch.Tensor:
    return torch.randn(samples, numel, generator=torch.Generator().manual_seed(1)).to(DEVICE)


# Three blocks of slots, of which the last is short; more samples than a program takes; two whole blocks.
@pytest.mark.parametrize(("samples", "numel"), [(5, 2 * SLOTS + 77), (3, 2 * SLOTS)])
def test_an_sjlt_by_the_kernel_has_the_references_bits(samples, numel, kernels, monkeypatch):
    shapes, rows = {"ln.bias": (31,), "w": (numel,)}, gradients(samples, 31 + numel)
    by_kernel = projections.build("sjlt", shapes, 3).project(rows, [64])[64]
    monkeypatch.setattr(matrices, "kernels_for", lambda device: None)
    assert torch.equal(by_kernel, projections.build("sjlt", shapes, 3).project(rows, [64])[64])


# Odd rows and columns; a share of columns that ends inside of a program's; more samples than a launch takes.
@pytest.mark.parametrize(("samples", "numel", "dim"), [(5, 1001, 200), (1, 63, 64), (131, 70, 65)])
def test_signs_made_where_they_are_multiplied_are_those_of_the_hash(samples, numel, dim, kernels):
    rows = gradients(samples, 17 + numel)
    projector = projections.build("rademacher", {"ln.bias": (17,), "w": (numel,)}, 3)
    columns = {"ln.bias": torch.arange(17), "w": torch.arange(numel)}
    signs = torch.cat([hashing.sign_table(hashing.key(3, name), of, dim) for name, of in columns.items()])
    expected = rows.double().cpu() @ signs.double() / dim**0.5
    torch.testing.assert_close(projector.project(rows, [dim])[dim].double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_contiguous_project_alike(kernels):
    for name, numel in (("sjlt", SLOTS + 5), ("rademacher", 701)):
        rows = gradients(3, 2 * numel)
        projector = projections.build(name, {"w": (numel,)}, 3)
        assert torch.equal(projector.project(rows[:, ::2], [65])[65], projector.project(rows[:, ::2].clone(), [65])[65])


@pytest.mark.parametrize(
    ("triton", "capability", "said"), [(False, (9, 0), "triton is not"), (True, (7, 5), "Tesla T4")]
)
def test_a_gpu_without_kernels_warns(triton, capability, said, monkeypatch):
    monkeypatch.setattr(matrices, "find_spec", lambda name: object() if triton else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    matrices.kernels_for.cache_clear()
    with pytest.warns(UserWarning, match=f"{said}.* slow reference implementation"):
        assert matrices.kernels_for(torch.device("cuda", 0)) is None
    matrices.kernels_for.cache_clear()
