"""Curvature of a store's rows: scores aᵀ H⁻¹ b instead of aᵀ b, for ``--curvature fisher``.

H = ΦᵀΦ / n + λ · tr(ΦᵀΦ / n) / D · I for the n training rows Φ [n, D]: their second moment, damped by λ times its mean
diagonal. It is the empirical Fisher matrix in the projected space: the kernel of Park et al., 2023, "TRAK", section 3,
with the gradient of the loss itself. λ = 0.1 of the mean eigenvalue is that of Grosse et al., 2023, for EK-FAC.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from gradwire.attribution.options import DAMPING
from gradwire.base.errors import BadInput
from gradwire.base.flags import NOT_NEGATIVE
from gradwire.base.strict import Strict

if TYPE_CHECKING:
    from gradwire.attribution.store.row_file import RowFile

Solve = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # rows [m, D] to H⁻¹ of each
LEAST = 1e-12  # of the trace: a smaller pivot is rounding noise in float64


class CurvatureOptions(Strict):
    """Flags of curvature."""

    curvature: Literal["none", "fisher"] = Field(
        "none",
        description="fisher: products and cosines under the inverse second moment of the training rows (as TRAK)",
    )
    damping: Annotated[float, NOT_NEGATIVE] | None = Field(
        None, description=f"added to that moment, in units of its mean diagonal (default: {DAMPING})"
    )

    @model_validator(mode="after")
    def _check_damping(self) -> Self:
        if self.curvature == "none" and self.damping is not None:
            raise ValueError(f"--damping {self.damping:g} is given without a curvature: add --curvature fisher")
        return self

    @property
    def chosen_damping(self) -> float | None:
        """The damping; None without curvature."""
        if self.curvature == "none":
            return None
        return DAMPING if self.damping is None else self.damping


def identity(wide: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows as they are."""
    return wide


def solver(rows: RowFile, damping: float | None) -> Solve:
    """Return the function that applies H⁻¹ to rows, in float64; `identity` if ``damping`` is None.

    Takes the memory of three matrices [d, d], d = min(n, D): with fewer rows than columns, H⁻¹ is computed from their
    products, H⁻¹x = (x − Φᵀ(ΦΦᵀ + n c I)⁻¹Φx) / c, c the damping times the mean diagonal.

    Args:
        rows: The training rows.
        damping: λ.

    Raises:
        BadInput: If H is singular.
    """
    if damping is None:
        return identity
    from scipy.linalg import cho_solve

    count, dim = rows.shape
    if dim <= count:
        moment = _moment(rows)
        factor = _cholesky(rows, moment, damping * np.trace(moment) / dim, damping)
        return lambda wide: cho_solve(factor, wide.T).T
    wide_rows = rows.read(0, count).astype(np.float64)
    kernel = wide_rows @ wide_rows.T
    shift = damping * np.trace(kernel) / dim
    factor = _cholesky(rows, kernel, shift, damping, least=shift)
    return lambda wide: (wide - cho_solve(factor, wide_rows @ wide.T).T @ wide_rows) * (count / shift)


def _moment(rows: RowFile) -> NDArray[np.float64]:
    """Return ΦᵀΦ / n, [D, D], from blocks of D rows."""
    moment = np.zeros((rows.shape[1], rows.shape[1]))
    for block in rows.chunks(rows.shape[1]):
        wide = block.astype(np.float64)
        moment += wide.T @ wide
    return moment / rows.shape[0]


def _cholesky(
    rows: RowFile, matrix: NDArray[np.float64], shift: float, damping: float, least: float = np.inf
) -> tuple[NDArray[np.float64], bool]:
    """Factorise ``matrix + shift · I``, of which ``least`` bounds the smallest eigenvalue where it has none.

    Raises:
        BadInput: If it is singular.
    """
    from scipy.linalg import LinAlgError, cho_factor

    trace = np.trace(matrix)
    matrix[np.diag_indices_from(matrix)] += shift
    try:
        factor = cho_factor(matrix, lower=True)
        smallest = min(float(np.diag(factor[0]).min()) ** 2, least)
    except (LinAlgError, ValueError):
        smallest = 0.0
    if not smallest > LEAST * trace:
        raise BadInput(
            f"the second moment of the rows in {rows.path} is singular with --damping {damping:g}: use a larger "
            "--damping, or rows that are not all zero."
        )
    return factor
