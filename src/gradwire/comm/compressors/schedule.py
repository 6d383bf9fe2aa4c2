"""Options of a compressor as functions of the optimizer step: a density that falls, bits that shrink."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from gradwire.base.errors import BadInput, unknown
from gradwire.comm.compressors import registry

if TYPE_CHECKING:
    from gradwire.comm.compressors.base import Compressor


def by_step(values: Any) -> Any:
    """A schedule's values by step; JSON has steps as strings."""
    if not isinstance(values, Mapping):
        return values
    steps = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in values]
    if len(set(steps)) < len(steps):
        raise ValueError("a step is given twice")
    return dict(zip(steps, values.values(), strict=True))


ByStep = Annotated[dict[int, Any], BeforeValidator(by_step)]


class Schedule:
    """Which compressor each optimizer step uses.

    Args:
        name: The method or chain.
        options: Its options where the schedule says nothing.
        changes: For an option, its value from a step on: ``{"density": {0: 0.25, 20: 0.05, 60: 0.01}}``.

    Raises:
        BadInput: If an option is unknown or takes no such value, or a step is not a number from 0 on.
    """

    def __init__(self, name: str, options: Mapping[str, Any], changes: Mapping[str, Mapping[int, Any]]) -> None:
        known = registry.options(name)
        for option, values in changes.items():
            if option not in known:
                raise unknown(f"{name} option in the schedule,", option, known)
            if not values or any(step < 0 for step in values):
                raise BadInput(f"schedule of {option!r}: give at least one value, from step 0 or a later one on.")
        self._starts = sorted({0, *(step for values in changes.values() for step in values)})
        self.plateaus = [registry.build(name, **{**options, **_values(changes, start)}) for start in self._starts]

    def __repr__(self) -> str:
        """Each compressor by the step at which it begins."""
        return repr(dict(zip(self._starts, self.plateaus, strict=True)))

    def at(self, step: int) -> Compressor:
        """The compressor of optimizer step ``step``, from 0."""
        return self.plateaus[bisect_right(self._starts, step) - 1]

    def began(self, step: int) -> int:
        """The step from which on the compressor of ``step`` is used."""
        return self._starts[bisect_right(self._starts, step) - 1]


def _values(changes: Mapping[str, Mapping[int, Any]], step: int) -> dict[str, Any]:
    """The scheduled options that have begun at ``step``."""
    return {
        option: values[max(begun)]
        for option, values in changes.items()
        if (begun := [start for start in values if start <= step])
    }
