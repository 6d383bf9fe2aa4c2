"""The reducer's options: their names, values and defaults, for the configuration, the reducer and its codec."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradwire.base.errors import BadInput, unknown
from gradwire.base.flags import NATURAL
from gradwire.base.strict import Direct
from gradwire.comm.compressors import registry

if TYPE_CHECKING:
    from gradwire.comm.compressors.base import Compressor

ResidualDtype = Literal["float32", "bf16", "int8"]


class Exempt(BaseModel, metaclass=Direct):
    """A parameter is exempt if any of the given conditions holds; by default none is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_numel: int | None = Field(
        default=None, ge=0, le=2**63 - 1, description="exempt parameters of at most so many elements"
    )
    max_ndim: Annotated[int, NATURAL] | None = Field(
        default=None, description="exempt parameters of at most so many dimensions"
    )
    names: tuple[str, ...] = Field(
        default=(), strict=False, description="exempt parameters whose name matches a pattern (* ? [])"
    )

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the parameter of that name and whole shape is exempt."""
        return (
            (self.max_numel is not None and math.prod(shape) <= self.max_numel)
            or (self.max_ndim is not None and len(shape) <= self.max_ndim)
            or any(fnmatchcase(name, pattern) for pattern in self.names)
        )


def by_step(values: Any) -> Any:
    """Return a schedule's values by step; JSON has steps as strings."""
    if not isinstance(values, Mapping):
        return values
    steps = [int(key) if isinstance(key, str) and key.isdecimal() else key for key in values]
    if len(set(steps)) < len(steps):
        raise ValueError("a step is given twice")
    return dict(zip(steps, values.values(), strict=True))


ByStep = Annotated[dict[int, Any], BeforeValidator(by_step)]


class ReducerOptions(BaseModel):
    """Options of a reduction: the keywords of `comm.collectives.Reducer`, and keys of a cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    error_feedback: bool = Field(default=False, description="add what an encoding lost to the next gradient")
    ef_decay: float = Field(
        default=1.0, gt=0, le=1, description="factor of residuals before they are added; 1 forgets nothing"
    )
    ef_average: float = Field(
        default=0.0, ge=0, lt=1, description="weight of the old residual in the new one; 0 keeps the last error only"
    )
    ef_reset: Annotated[int, NATURAL] = Field(
        default=0, description="optimizer steps after which residuals are dropped; 0: never"
    )
    residual_dtype: ResidualDtype = Field(default="float32", description="type of stored residuals")
    algorithm: Literal["auto", "exchange", "gather", "native"] = Field(
        default="auto",
        description="encodings go to the owner of their row (exchange) or to all ranks (gather), or collectives sum "
        "the compressor's rounds (native); auto chooses once",
    )
    granularity: Literal["piece", "row"] = Field(
        default="piece", description="encode each shard of a parameter (piece), or all of a row, at once"
    )
    second: Literal["encoded", "float32"] = Field(
        default="encoded", description="an all-reduce sends means encoded again, or as float32"
    )
    exempt: Exempt = Field(default=Exempt(), description="tensors sent as float32")
    dense_steps: Annotated[int, NATURAL] = Field(default=0, description="first steps without compression")
    overlap: bool = Field(
        default=True, description="reduce during the backward pass; the means are the same, bit for bit"
    )
    nonfinite: Literal["raise", "skip", "propagate"] = Field(
        default="raise",
        description="on NaN or infinity finish raises on all ranks, or returns False (skip) or True (propagate)",
    )
    schedule: dict[str, ByStep] = Field(
        default={}, description="values of an option from given steps on, as {density: {0: 0.25, 20: 0.05}}"
    )

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return the options of a reducer.

        Raises:
            BadInput: If one is unknown or has a value that it does not take.
        """
        for option in options.keys() - cls.model_fields.keys():
            raise unknown("option of Reducer", option, cls.model_fields)
        try:
            return cls(**options)
        except ValidationError as error:
            complaint = error.errors()[0]
        option, value = ".".join(map(str, complaint["loc"])), complaint["input"]
        if complaint["type"] == "literal_error":
            known = get_args(cls.model_fields[option].annotation)
            raise unknown(f"value of the reducer's option {option!r},", str(value), known)
        raise BadInput(f"the reducer's option {option} is {value!r}: {complaint['msg']}.")

    @property
    def feedback(self) -> ResidualDtype | None:
        """Type in which a compressor's error is kept and added to the next gradient; None: it is lost."""
        return self.residual_dtype if self.error_feedback else None


class Schedule:
    """The compressor of each optimizer step.

    Args:
        compressor: The compressor before anything changes.
        changes: For an option, its value from a step on: ``{"density": {0: 0.25, 20: 0.05, 60: 0.01}}``.

    Raises:
        BadInput: If an option is unknown or takes no such value, or a step is not a number from 0 on.
    """

    def __init__(self, compressor: Compressor, changes: Mapping[str, Mapping[int, Any]]) -> None:
        known = registry.options(compressor.name) if changes else {}
        for option, values in changes.items():
            if option not in known:
                raise unknown(f"{compressor.name} option in the schedule,", option, known)
            if not values or any(step < 0 for step in values):
                raise BadInput(f"schedule of {option!r}: give at least one value, from step 0 or a later one on.")
        self._starts = sorted({0, *(step for values in changes.values() for step in values)})
        self.plateaus = [changed(compressor, values_at(changes, start)) for start in self._starts]

    def __repr__(self) -> str:
        """Each compressor by the step at which it begins; one that never changes alone."""
        return repr(dict(zip(self._starts, self.plateaus, strict=True)) if len(self._starts) > 1 else self.at(0))

    def at(self, step: int) -> Compressor:
        """Return the compressor of optimizer step ``step``, from 0."""
        return self.plateaus[bisect_right(self._starts, step) - 1]

    def began(self, step: int) -> int:
        """Return the step from which on the compressor of ``step`` is used."""
        return self._starts[bisect_right(self._starts, step) - 1]


def values_at(changes: Mapping[str, Mapping[int, Any]], step: int) -> dict[str, Any]:
    """Return the scheduled options that have begun at ``step``."""
    return {
        option: values[max(begun)]
        for option, values in changes.items()
        if (begun := [start for start in values if start <= step])
    }


def changed(compressor: Compressor, options: Mapping[str, Any]) -> Compressor:
    """Return a compressor with other values of some options, with the keys of `registry.options`."""
    if not options:
        return compressor
    kept = {
        key: value for key, value in options_of(compressor).items() if not {key, key.rpartition(".")[2]} & {*options}
    }
    return registry.build(compressor.name, **kept, **options)


def options_of(compressor: BaseModel) -> dict[str, Any]:
    """Return a compressor's options, or those of a chain's members, by ``method.option``."""
    options: dict[str, Any] = {}
    for key, value in compressor:
        name = f"{compressor.name}.{key}"  # type: ignore[attr-defined]
        options |= options_of(value) if isinstance(value, BaseModel) else {name: value}
    return options


# Parameters in an all-gather

ParamCompress = Literal["none", "bf16", "int8", "fp8", "int4", "int4-diff"]

MATRICES = Exempt(max_ndim=1)  # norms and biases travel as float32: they are small, and codes are too coarse for them


class ParameterEncoding(NamedTuple):
    """An encoding of parameters.

    Attributes:
        method: The compressor.
        options: Its options.
        exempt: Parameters that travel as float32.
        differences: Whether differences from a replica travel, instead of the parameters themselves.
    """

    method: str
    options: Mapping[str, Any] = MappingProxyType({})
    exempt: Exempt = MATRICES
    differences: bool = False


FOUR_BITS = MappingProxyType({"num_bits": 4, "block": 256})

ENCODINGS = {
    "bf16": ParameterEncoding("bf16", exempt=Exempt()),
    "int8": ParameterEncoding("int8"),
    "fp8": ParameterEncoding("fp8"),
    "int4": ParameterEncoding("int8", FOUR_BITS),
    # Whatever a code misses is part of the next difference, so vectors need no exemption.
    "int4-diff": ParameterEncoding("int8", FOUR_BITS, Exempt(), differences=True),
}


def encoding_of(name: str | None) -> ParameterEncoding:
    """Return an encoding of parameters by name.

    Raises:
        BadInput: If it is unknown.
    """
    if name not in ENCODINGS:
        raise unknown("parameter compression", str(name), ["none", *ENCODINGS])
    return ENCODINGS[name]
