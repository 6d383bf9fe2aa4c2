"""Strict models: unknown keys are errors, and one message names the place, the value and what is allowed."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gradwire.errors import BadInput
from gradwire.explain import explain

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A frozen model without unknown keys and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def checked(model: type[Model], value: Any, where: str) -> Model:
    """Build ``model`` from ``value``.

    Raises:
        BadInput: If a value is invalid; the message has the place, the value and what is allowed.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = explain(model, error)
        raise BadInput(f"{where}: {problems}." if where else f"{problems}.") from None
