"""The reducer's options: their names, values and defaults, for the configuration, the reducer and its codec."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradwire.base.errors import BadInput, unknown
from gradwire.base.flags import NATURAL
from gradwire.comm.compressors.exempt import Exempt

ResidualDtype = Literal["float32", "bf16", "int8"]


class ReducerOptions(BaseModel):
    """How gradients are reduced; ``comm.collectives.Reducer`` explains the options."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    error_feedback: bool = Field(False, description="add what an encoding lost to the next gradient")
    ef_decay: float = Field(1.0, gt=0, le=1, description="what is lost is multiplied by this before it is added")
    ef_average: float = Field(0.0, ge=0, lt=1, description="weight of the old residual in the new one")
    ef_reset: Annotated[int, Field(**NATURAL.limits)] = Field(
        0, description="optimizer steps after which residuals are dropped; 0: never"
    )
    residual_dtype: ResidualDtype = Field("float32", description="how that is stored")
    algorithm: Literal["auto", "exchange", "gather", "native"] = Field(
        "auto", description="which collectives carry the encodings"
    )
    granularity: Literal["piece", "row"] = Field("piece", description="what is encoded at once")
    second: Literal["encoded", "float32"] = Field("encoded", description="second half of an all-reduce")
    exempt: Exempt = Field(default_factory=Exempt, description="tensors sent as float32")
    dense_steps: Annotated[int, Field(**NATURAL.limits)] = Field(0, description="first steps without compression")
    overlap: bool = Field(True, description="reduce beside the backward pass")
    nonfinite: Literal["raise", "skip", "propagate"] = Field("raise", description="what a NaN or infinity does")

    @classmethod
    def of(cls, **options: Any) -> Self:
        """The options of a reducer.

        Raises:
            BadInput: If one has a value that it does not take.
        """
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
        """How a compressor's error is kept and added to the next gradient; None: it is lost."""
        return self.residual_dtype if self.error_feedback else None

    @property
    def keeps_all(self) -> bool:
        """Whether all of an error is added to the next gradient, as far as its storage allows."""
        return self.ef_decay == 1 and self.ef_average == 0
