"""A cell's compressor setting: the method and its options, the reducer's options, and what is communicated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import Field

from gradwire.base.errors import BadInput, nearest, unknown
from gradwire.base.strict import Strict, checked, short
from gradwire.bench.config.values import Name, Precision, Training
from gradwire.comm.communication import CommOptimizer, Communication, check_communication, preset
from gradwire.comm.compressors import registry
from gradwire.comm.reduction import ENCODINGS, ParamCompress, ReducerOptions, Schedule

OF_TRAINING = ("lr", "beta2", "precision")  # keys of a cell that replace those of `training`
# Keys of a cell that are options neither of its method, nor the reducer, nor a communicating optimizer.
OTHERS = ("inside", "param_compress", *OF_TRAINING)
KEYS = (*ReducerOptions.model_fields, *Communication.model_fields, *OTHERS, "method")
# Flags of `train` that are also keys of a cell.
FLAGS = {"comm_compress": "method", "comm_optimizer": "comm_optimizer", "param_compress": "param_compress"}


class Cell(Strict):
    """A compressor setting: a method, its options, the reducer's options, and what ranks communicate.

    Args:
        label: The cell's name: its folder and the record's ``compressor``.
        method: The registered method.
        options: The method's own options.
        reduction: The reducer's options, as given (without defaults).
        communication: The communicating optimizer and its options, as given.
        inside: The compressor setting inside islands (hsdp); None keeps the framework's own reduction there.
        param_compress: Compression of FSDP's parameter all-gathers.
        lr: The peak learning rate of the cell's runs; None takes that of ``training``.
        beta2: The decay rate of AdamW's second moments in them; None takes that of ``training``.
        precision: The precision of their forward pass; None takes that of ``training``.
    """

    label: Name
    method: str
    options: dict[str, Any]
    reduction: ReducerOptions
    communication: Communication
    inside: Cell | None = None
    param_compress: ParamCompress = "none"
    lr: float | None = Field(None, gt=0)
    beta2: float | None = Field(None, gt=0, lt=1)
    precision: Precision | None = None

    @classmethod
    def parse(cls, label: str, mapping: Any) -> Cell:
        """Parse the flat mapping of ``compressors:`` and ``--comm_config_json``.

        Raises:
            BadInput: If it is not a mapping, has an unknown method or option, or a value of the wrong type.
        """
        where = f"compressor cell {short(label)!r}"
        if not isinstance(mapping, Mapping):
            raise BadInput(f"{where}: expected a mapping of options such as {{}}, got {json.dumps(mapping)}.")
        given = dict(mapping)
        chosen = preset(given.get("comm_optimizer"))
        method = given.pop("method", chosen.method or label)
        if not isinstance(method, str):
            raise BadInput(f"{where}: `method` must be a name, got {json.dumps(method)}.")
        reduction = {key: given.pop(key) for key in ReducerOptions.model_fields if key in given}
        communication = {key: given.pop(key) for key in Communication.model_fields if key in given}
        others = {key: given.pop(key) for key in OTHERS if key in given}
        try:
            if "inside" in others:
                others["inside"] = cls._parse_inside(others["inside"])
            method = "+".join(cls._members(method, given))
            if given or "+" in method or "schedule" in reduction:  # imports torch, so only if necessary
                known = [*registry.options(method), *KEYS]
                for key in given:
                    if key not in known:
                        raise unknown(f"option of {method}", key, known)
                registry.build(method, **given)
            optimizer = communication.setdefault("comm_optimizer", "gradient")
            if optimizer not in get_args(CommOptimizer):
                raise unknown("comm_optimizer", str(optimizer), get_args(CommOptimizer))
            if optimizer == "gradient":
                del communication["comm_optimizer"]
            else:
                reduction = {"error_feedback": True, **chosen.reduction, **reduction}
            parts = {"options": given, "reduction": reduction, "communication": communication, **others}
            cell = checked(cls, {"label": label, "method": method, **parts}, "")
            check_communication(cell.communication, method, cell.reduction)
            if cell.beta2 is not None and (not chosen.betas or cell.communication.inner == "sgd"):
                raise BadInput("beta2 is a decay rate of AdamW, which this cell does not use; omit it.")
            if cell.reduction.schedule:
                Schedule(registry.build(method, **given), cell.reduction.schedule)
            return cell
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None

    @staticmethod
    def _members(method: str, given: Mapping[str, Any]) -> list[str]:
        """The members of a method.

        Raises:
            BadInput: As `registry.members`; if the label does not name a method and a key resembles ``method``, names
                that key.
        """
        try:
            return registry.members(method)
        except BadInput:
            for key in given:
                if nearest(key, KEYS, 1) == ["method"]:
                    raise unknown("key", key, KEYS) from None
            raise

    @classmethod
    def _parse_inside(cls, mapping: Any) -> Cell:
        """Parse the setting inside islands, such as ``{method: int8}``.

        Raises:
            BadInput: As `parse`, or if it has more than a method and options of it and the reducer.
        """
        inside = cls.parse("none", mapping)
        if inside.flat().keys() & {*Communication.model_fields, *OTHERS}:
            raise BadInput("`inside` takes a method, its options and the reducer's.")
        return inside

    @property
    def methods(self) -> list[str]:
        """The compressors in use: the method, that of stored residuals, of parameters, in islands and of embeddings."""
        stored = self.reduction.error_feedback and self.reduction.residual_dtype != "float32"
        parameters = [] if self.param_compress == "none" else [ENCODINGS[self.param_compress].method]
        inside = [] if self.inside is None else self.inside.methods
        others = [*parameters, *inside, *self.communication.methods]
        return [self.method, *([self.reduction.residual_dtype] if stored else []), *others]

    @property
    def hooked(self) -> bool:
        """Whether a reducer is attached; ``none: {}`` keeps the framework's own reduction."""
        return self.method != "none" or bool(self.reduction.model_fields_set) or self.inside is not None

    def applied_to(self, training: Training) -> Training:
        """The settings of training with those that the cell replaces."""
        replaced = {key: value for key in OF_TRAINING if (value := getattr(self, key)) is not None}
        return training.model_copy(update=replaced)

    def flat(self) -> dict[str, Any]:
        """The mapping that `parse` reads, as for ``--comm_config_json``."""
        reduction = self.reduction.model_dump(mode="json", exclude_unset=True)
        communication = self.communication.model_dump(mode="json", exclude_unset=True)
        others = self.model_dump(include={"param_compress", *OF_TRAINING}, exclude_defaults=True)
        others |= {} if self.inside is None else {"inside": self.inside.flat()}
        return {"method": self.method, **self.options, **reduction, **communication, **others}

    def check_strategy(self, strategy: str) -> None:
        """Check that a strategy supports the cell.

        Raises:
            BadInput: If ``param_compress`` is set for a strategy other than fsdp2 and hsdp, ``inside`` for one other
                than hsdp, Muon for fsdp1, or a communicating optimizer for one that shards gradients over all ranks.
        """
        where = f"compressor cell {self.label!r}"
        if self.param_compress != "none" and strategy not in ("fsdp2", "hsdp"):
            raise BadInput(
                f"{where}: param_compress is {self.param_compress!r}, and only strategies fsdp2 and hsdp support it, "
                f"not {strategy}; omit it, or remove these runs from the grid."
            )
        if self.inside is not None and strategy != "hsdp":
            raise BadInput(f"{where}: `inside` is for the islands of strategy hsdp; {strategy} has none. Omit it.")
        name = self.communication.comm_optimizer
        inner = self.communication.inner or preset(name).options.get("inner")
        if strategy == "fsdp1" and inner == "muon":
            raise BadInput(
                f"{where}: the inner optimizer muon orthogonalizes matrices, and strategy fsdp1 flattens them; "
                "use fsdp2."
            )
        if self.communication.averages_gradients:
            return
        if strategy in ("fsdp1", "fsdp2"):
            raise BadInput(
                f"{where}: comm_optimizer {name} needs each rank's whole gradient, and strategy {strategy} shards it "
                f"over all ranks; use hsdp, where it works between islands, or naive, bucket or ddp."
            )


def check_private(training: Training, cell: Cell, strategy: str) -> None:
    """Check that the norms of private training are those of the communicated gradients.

    Raises:
        BadInput: In bf16, under fsdp1, with compressed parameters, or with an optimizer that communicates.
    """
    if not training.private:
        return
    reason = None
    if cell.applied_to(training).precision != "fp32":
        reason = f"precision {cell.precision} is not that of the float32 gradients whose norms clip; omit it"
    elif strategy == "fsdp1":
        reason = "strategy fsdp1 flattens parameters, so that layers do not have their own; use fsdp2"
    elif cell.inside is not None:
        reason = "epsilon does not cover what `inside` does to a rank's own gradient; omit it"
    elif cell.param_compress != "none":
        reason = f"param_compress {cell.param_compress} trains with other weights than the norms use; omit it"
    elif not cell.communication.averages_gradients:
        reason = f"comm_optimizer {cell.communication.comm_optimizer} sends no gradients; omit it"
    if reason is not None:
        raise BadInput(f"dp_max_grad_norm (private training), compressor cell {cell.label!r}: {reason}.")
