"""Random projections of gradients: P with E[PᵀP] = I, which preserves norms and inner products in expectation.

P is never stored in full. Each entry depends only on (seed, parameter name, column, row), in integer arithmetic, so a
seed gives the same matrix on every device, rank, batch and tile size.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence

from gradwire.attribution.projections.base import Projector, Shapes, Whole
from gradwire.attribution.projections.matrices import Factored, Rademacher, Sjlt
from gradwire.base.errors import BadInput, did_you_mean, unknown

__all__ = ["OF_PARTS", "PROJECTORS", "Projector", "Shapes", "build", "check_width", "of_modules"]

PROJECTORS: dict[str, Callable[[Shapes, int], Projector]] = {
    "rademacher": Rademacher,
    "sjlt": Sjlt,
    "factored": Factored,
    "none": Whole,
}

OF_PARTS = ("rademacher", "factored")
"""Projections that project a part of the parameters as the whole, with zeros elsewhere, and keep norms of small ones.

`none` depends on all parameters; a row of `sjlt` may lose a quarter of the squared norm of a gradient that
has two large entries, which the band of `sjlt` excludes.
"""


def build(projection: str, shapes: Shapes, seed: int) -> Projector:
    """Build a projector by name.

    Args:
        projection: One of `PROJECTORS`.
        shapes: The shape of each parameter, by name, in the model's order.
        seed: Seed of the matrix.

    Raises:
        BadInput: If the projection is unknown.
    """
    if projection not in PROJECTORS:
        raise unknown("projection", projection, PROJECTORS)
    return PROJECTORS[projection](shapes, seed)


def by_module(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by the module that owns them, whose parameters follow each other in a model."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        modules.setdefault(name.rpartition(".")[0], {})[name] = shape
    return modules


def of_modules(shapes: Shapes, patterns: Sequence[str]) -> Shapes:
    """Return the shapes of the parameters of the modules that match one of some patterns; without patterns, of all.

    Args:
        shapes: The shape of each parameter, by name. A tied parameter is of the module of its first name.
        patterns: Names of modules, or shell-style patterns of whole names (`fnmatch`), such as ``*.mlp.*``.

    Raises:
        BadInput: If a pattern matches no module.
    """
    modules = by_module(shapes)
    known = {word for module in modules for word in module.split(".")}
    chosen: set[str] = set()
    for pattern in patterns or ["*"]:
        matching = fnmatch.filter(modules, pattern)
        if not matching:
            unknown_words = (word for word in re.split(r"[.*]+", pattern) if word and word not in known)
            hint = did_you_mean(next(unknown_words, ""), known)
            raise BadInput(
                f"--modules {pattern} matches no module with trainable parameters.{hint} A pattern matches whole "
                f"names, such as {[*modules][-1]}."
            )
        chosen.update(matching)
    return {name: shape for module in modules if module in chosen for name, shape in modules[module].items()}


def check_width(dims: Sequence[int], entries: int) -> None:
    """Check that rows are not wider than the gradients.

    Raises:
        BadInput: If they are.
    """
    if max(dims) > entries:
        raise BadInput(
            f"--dim {max(dims)}: the model's gradients have {entries} entries; give at most as many columns."
        )
