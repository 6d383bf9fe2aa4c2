"""Random projections of gradients: P with E[PᵀP] = I, so that norms and inner products keep their expected value.

P is never stored as a whole. Each entry is a function of (seed, parameter name, column, row) alone, in integer
arithmetic, so one seed gives one matrix on every device, rank, batch and tile size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.errors import BadInput, unknown
from gradwire.gradients.projections.base import Projector, Shapes
from gradwire.gradients.projections.dense import Normal, Rademacher
from gradwire.gradients.projections.factored import Factored
from gradwire.gradients.projections.sjlt import Sjlt
from gradwire.gradients.projections.srht import Srht
from gradwire.gradients.projections.whole import Whole

__all__ = ["PROJECTORS", "Projector", "Shapes", "build", "check_width"]

PROJECTORS: dict[str, Callable[[Shapes, int], Projector]] = {
    "rademacher": Rademacher,
    "normal": Normal,
    "sjlt": Sjlt,
    "srht": Srht,
    "factored": Factored,
    "none": Whole,
}


def build(projection: str, shapes: Shapes, seed: int) -> Projector:
    """The projector of a name.

    Args:
        projection: One of `PROJECTORS`.
        shapes: The shape of each parameter, by name, in the model's order.
        seed: Seed of the matrix.

    Raises:
        BadInput: If there is no such projection.
    """
    if projection not in PROJECTORS:
        raise unknown("projection", projection, PROJECTORS)
    return PROJECTORS[projection](shapes, seed)


def check_width(dims: Sequence[int], entries: int) -> None:
    """Check that rows are not wider than what is projected.

    Raises:
        BadInput: If they are.
    """
    if max(dims) > entries:
        raise BadInput(
            f"--dim {max(dims)}: the model's gradients have {entries} entries; give at most as many columns."
        )
