"""Names, literals and number types that the configuration and its flags share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gradwire.base.flags import COUNT, NATURAL, RANKS, SEED
from gradwire.base.strict import Strict
from gradwire.base.units import UNSHAPED
from gradwire.comm.topology import BETWEEN, STRATEGIES, link_of_classes, link_rate
from gradwire.lm.models import presets

SCHEMA_VERSION = 1  # of record.json and results.jsonl
BASELINE = "none"  # the label of the framework's own reduction in fp32

Precision = Literal["fp32", "bf16"]


def _strategy(name: str) -> str:
    """Check a strategy's name."""
    STRATEGIES.check(name)
    return name


def _link(given: Any) -> Any:
    """The name of a link that is given by class, such as ``{inside: none, between: 100mbit}``."""
    return link_of_classes(given) if isinstance(given, Mapping) else given


def _rate(link: str) -> str:
    """Check that `tc` accepts a link's rate."""
    link_rate(link)
    return link


def _known_model(model: str | dict[str, Any]) -> str | dict[str, Any]:
    """Check a model's name, or the names of its options."""
    options = presets.options(presets.text(model))
    if isinstance(model, dict) and options is not None:  # imports transformers, so only if necessary
        from gradwire.lm.models.architecture import check_options

        check_options(options)
    return model


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]  # becomes a folder
Strategy = Annotated[str, AfterValidator(_strategy)]
ModelOption = Annotated[str | dict[str, Any], AfterValidator(_known_model)]
RATE = r"\d+(\.\d+)?[kmgt]?bit"  # as tc spells it
LinkName = Annotated[str, Field(pattern=rf"^({UNSHAPED}|({BETWEEN})?{RATE})$")]


class LinkClasses(Strict):
    """A link by class."""

    inside: Literal["none"] = Field("none", description="between ranks of an island, which share an interface")
    between: Annotated[str, Field(pattern=f"^{RATE}$")] = Field(description="rate of the cable of each island")


Link = Annotated[LinkName, AfterValidator(_rate), BeforeValidator(_link, json_schema_input_type=LinkName | LinkClasses)]
Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Seed = Annotated[int, SEED]
Ranks = Annotated[int, RANKS]
