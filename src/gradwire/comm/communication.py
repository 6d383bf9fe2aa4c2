"""The tensors that travel in a cell: gradients, or those of an optimizer that communicates; with its options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from gradwire.base.errors import BadInput
from gradwire.base.flags import COUNT, NATURAL
from gradwire.base.strict import Direct, Strict
from gradwire.comm.compressors import as_compressor
from gradwire.comm.reduction import ReducerOptions, by_step

Inner = Literal["adamw", "muon", "sgd"]


class Preset(NamedTuple):
    """An optimizer that communicates, and the defaults of a cell with it.

    Attributes:
        home: Its file in ``comm.parallel.optimizers``, and its class; empty for averaged gradients.
        options: The defaults of its options.
        takes: Options that a cell may give.
        method: The method; None: the label names it, as everywhere.
        reduction: Options of the reducer.
        betas: Whether its steps, or its inner optimizer's, are AdamW's.
        warms_up: Whether it averages gradients in the first ``dense_steps``, of which it needs one.
    """

    home: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    takes: tuple[str, ...] = ()
    method: str | None = None
    reduction: Mapping[str, Any] = MappingProxyType({})
    betas: bool = True
    warms_up: bool = False


def local_updates(H: int, outer_lr: float, outer_momentum: float, *, inner: str | None = None, **cell: Any) -> Preset:
    """Return the preset of an optimizer that trains alone for H steps, and sends what that changed."""
    options = {"H": H, "outer_lr": outer_lr, "outer_momentum": outer_momentum, **({"inner": inner} if inner else {})}
    takes = ("H", "outer_lr", "outer_momentum", "streaming", "embeddings", "inner")
    return Preset("diloco:DiLoCo", options, takes, **cell)


# The one place that names an optimizer, besides its file: no optimizer's file is imported to read a configuration.
PRESETS = {
    "gradient": Preset(takes=("inner",)),
    "onebit_adam": Preset("adam:OneBitAdam", warms_up=True),
    # Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105, 2023).
    "diloco": local_updates(500, 0.7, 0.9),
    # Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo" (arXiv:2508.15706, 2025).
    "sparseloco": local_updates(
        30, 1.0, 0.0, method="chunktopk+bins", reduction={"algorithm": "gather", "ef_decay": 0.95}
    ),
    # Thérien et al., "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo" (arXiv:2505.23725, 2025).
    "muloco": local_updates(30, 0.7, 0.6, inner="muon", method="bins", reduction={"ef_decay": 0.9}),
    # Peng et al., "DeMo: Decoupled Momentum Optimization" (arXiv:2411.19870, 2024).
    "demo": Preset("demo:DeMo", method="dcttopk", reduction={"ef_decay": 0.999}, betas=False),
}
VARIANTS = {"streaming": "streaming:StreamingDiLoCo", "embeddings": "replay:ReplayDiLoCo"}
"""Options of local updates that another class has, with its home."""

LOCAL = tuple(name for name, chosen in PRESETS.items() if "H" in chosen.options)
"""Optimizers that train alone for H steps, and send what that changed."""

if TYPE_CHECKING:
    CommOptimizer = str
else:
    CommOptimizer = Literal[tuple(PRESETS)]


def home(comm_optimizer: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the module and the class of an optimizer with the given options."""
    chosen = [variant for option, variant in VARIANTS.items() if options.get(option) is not None]
    module, _, kind = (chosen[0] if chosen else PRESETS[comm_optimizer].home).partition(":")
    return f"gradwire.comm.parallel.optimizers.{module}", kind


def preset(comm_optimizer: Any) -> Preset:
    """The defaults of a cell with an optimizer."""
    return PRESETS.get(comm_optimizer, Preset()) if isinstance(comm_optimizer, str) else Preset()


def steps_per_message(cell: Mapping[str, Any]) -> float:
    """Steps per message of a cell: the last ``H`` of local updates, over the fragments that one round sends; else 1."""
    last = cell.get("H", preset(cell.get("comm_optimizer")).options.get("H", 1))
    if isinstance(last, Mapping):
        last = last[max(last, key=int)]
    return float(last) / (cell.get("streaming") or {}).get("fragments", 1)


def _interval(value: Any) -> Any:
    """Steps of a round, at least one, from step 0 on; JSON has a schedule's steps as strings."""
    value = by_step(value)
    lengths = value if isinstance(value, Mapping) else {0: value}
    numbers = all(type(number) is int for number in (*lengths, *lengths.values()))
    if not numbers or 0 not in lengths or min(lengths) < 0 or not 1 <= min(lengths.values()) <= COUNT.most:
        raise ValueError("give a number of steps from 1 on, or a schedule from step 0 on, such as {0: 1, 100: 5}")
    return value


Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Interval = Annotated[Count | Mapping[Natural, Count], BeforeValidator(_interval)]
"""Steps of a round, or, as a schedule, the steps of a round from a step on: ``{0: 1, 100: 5}``."""


class Outer(Strict, metaclass=Direct):
    """The outer step of local updates: SGD, whose gradient is the mean pseudo-gradient. DiLoCo's by default."""

    lr: float = Field(default=0.7, gt=0, description="learning rate; 1 without momentum moves to the mean of the ranks")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum; 0: none")
    nesterov: bool = Field(default=True, description="Nesterov momentum, as in DiLoCo")


class Streaming(Strict, strict=True, metaclass=Direct):
    """How local updates send the model in fragments while training goes on; ``comm.parallel.optimizers.streaming``."""

    fragments: Count = Field(description="number of fragments; one is in flight at a time")
    delay: Natural = Field(default=1, description="steps from sending a fragment to receiving it")
    alpha: float = Field(
        default=0.5, ge=0, lt=1, description="weight of a rank's own parameters in the mixture with the received ones"
    )


class Communication(Strict, strict=True):
    """The tensors that travel, as given in a cell; ``comm.parallel.optimizers`` explains the options.

    A field that is None has the default of its optimizer.
    """

    comm_optimizer: CommOptimizer = Field(
        default="gradient",
        description="what travels: gradients, an optimizer's momenta, or the outcome of local updates",
    )
    H: Interval | None = Field(default=None, description="local steps of a round, or a schedule: {0: 1, 100: 5}")
    outer_lr: float | None = Field(default=None, gt=0, description="learning rate of the outer step")
    outer_momentum: float | None = Field(default=None, ge=0, lt=1, description="Nesterov momentum of the outer step")
    inner: Inner | None = Field(default=None, description="the optimizer of a rank's steps")
    streaming: Streaming | None = Field(default=None, description="send in fragments while training goes on")
    embeddings: str | dict[str, Any] | None = Field(
        default=None,
        description="replay embeddings and their head; the compressor of their gradients: {method: int8, num_bits: 4}",
    )

    @property
    def averages_gradients(self) -> bool:
        """Whether the strategy averages gradients, so that any optimizer will do."""
        return self.comm_optimizer == "gradient"

    @property
    def optimizer(self) -> str:
        """The record's ``optimizer``."""
        return self.inner or "adamw" if self.averages_gradients else self.comm_optimizer

    @property
    def module(self) -> str:
        """The module that has the optimizer."""
        return home(self.comm_optimizer, self.options)[0]

    @property
    def methods(self) -> list[str]:
        """The compressors that its options name."""
        return [] if self.embeddings is None else [as_compressor(self.embeddings).name]

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's own options, as given."""
        return self.model_dump(exclude_unset=True, exclude={"comm_optimizer"})


def check_communication(communication: Communication, method: str, reduction: ReducerOptions) -> None:
    """Refuse an optimizer that communicates where its cell does not suit it.

    Raises:
        BadInput: If it does not have an option; if it streams and replays; if it sends momenta and has no compressor or
            no warm-up; if it takes local steps and has ``dense_steps``.
    """
    name, dense_steps = communication.comm_optimizer, reduction.dense_steps
    for option in communication.options:
        if option not in PRESETS[name].takes:
            takers = ", ".join(other for other, chosen in PRESETS.items() if option in chosen.takes)
            raise BadInput(f"{option}: an option of comm_optimizer {takers}, not of {name}.")
    if communication.embeddings is not None:
        as_compressor(communication.embeddings)
        if communication.streaming is not None:
            raise BadInput("embeddings are replayed at the end of a round, which streaming lacks: omit one of them.")
    if name in LOCAL and dense_steps:
        raise BadInput(f"comm_optimizer {name} sends the outcome of rounds, and has no dense_steps: omit it.")
    if not PRESETS[name].warms_up:
        return
    if method == "none" and "algorithm" not in reduction.model_fields_set:
        raise BadInput(
            f"comm_optimizer {name} sends its momentum through a compressor: give a method, or algorithm: exchange for "
            "the control without compression."
        )
    if dense_steps == 0:
        raise BadInput(f"comm_optimizer {name} freezes its variance after a warm-up: dense_steps must be at least 1.")
