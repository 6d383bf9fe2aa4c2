"""Optimizers that communicate: they average momenta, or the outcome of local steps, instead of gradients.

One file each; every rank, or every island, holds the whole model and trains with its own gradients::

    optimizer = DiLoCo(torch.optim.AdamW(model.parameters()), model, sync_every=5, compressor="onebit")
    optimizer.step()  # after backward

Importing this room imports none of them; `gradwire` has them by name. An optimizer of cells is a file here, and an
entry of `communication.PRESETS` with its name, its options and their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.base.errors import unknown
from gradwire.base.strict import checked
from gradwire.comm.collectives import Reducer
from gradwire.comm.communication import LOCAL, PRESETS, Streaming, home
from gradwire.comm.parallel.optimizers.base import ALIKE, Communicating, synchronized

__all__ = ["ALIKE", "Communicating", "available", "build", "build_inner", "synchronized"]

INNER = ("adamw", "muon", "sgd")


def available() -> list[str]:
    """Return the names of all optimizers that communicate, sorted, as a cell has them."""
    return sorted(name for name, chosen in PRESETS.items() if chosen.home)


def build(
    name: str, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **options: Any
) -> Communicating:
    """Build the optimizer of a cell; only its own file is imported.

    Args:
        name: One of `available`.
        model: The model returned by `comm.parallel.wrap` with ``average=False``.
        groups: Parameter groups, as for torch's optimizers.
        reducer: Does the communication.
        options: A cell's options of the optimizer, with the defaults of its preset (`communication.PRESETS`), the
            run's ``steps``, and options of AdamW; what it has no use for is left out.

    Raises:
        BadInput: If the name is unknown, or an option is out of range.
    """
    if name not in available():
        raise unknown("optimizer that communicates,", name, available())
    chosen, (module, kind) = PRESETS[name], home(name, options)
    optimizer_class: type[Any] = getattr(import_module(module), kind)
    options = {**chosen.options, **options}
    if not chosen.betas:
        options.pop("betas", None)
    if name not in LOCAL:
        options.pop("steps", None)
        return optimizer_class(groups, model, reducer=reducer, **options)  # type: ignore[no-any-return]
    rounds: dict[str, Any] = {"sync_every": options.pop("H"), "steps": options.pop("steps", None)}
    rounds |= {"outer": {"lr": options.pop("outer_lr"), "momentum": options.pop("outer_momentum")}}
    if (streaming := options.pop("streaming", None)) is not None:
        rounds |= dict(checked(Streaming, streaming, "streaming"))
    if (embeddings := options.pop("embeddings", None)) is not None:
        rounds["embeddings"] = embeddings
    inner = build_inner(options.pop("inner", "adamw"), model, groups, **options)
    return optimizer_class(inner, model, reducer=reducer, **rounds)  # type: ignore[no-any-return]


def build_inner(name: str, model: nn.Module, groups: Iterable[dict[str, Any]], **adamw: Any) -> Optimizer:
    """Build an optimizer of a rank's own steps.

    Args:
        name: ``adamw``; ``muon``, for the matrices inside of the model's blocks, with AdamW for the rest; or ``sgd``,
            without momentum (only ``lr`` and the groups' weight decay apply).
        model: The wrapped model.
        groups: Parameter groups, as for torch's optimizers.
        adamw: AdamW's options, such as ``lr`` and ``betas``.

    Raises:
        BadInput: If the name is unknown, or the model has no matrix for Muon.
    """
    if name not in INNER:
        raise unknown("inner optimizer", name, INNER)
    if name == "sgd":
        return SGD(groups, lr=adamw["lr"])
    if name == "muon":
        from gradwire.comm.parallel.optimizers.muon import Muon

        return Muon(groups, model, **adamw)
    return AdamW(groups, **adamw)
