"""The inner optimizers of local updates, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.base.errors import unknown
from gradwire.comm.parallel.optimizers.muon import Muon
from gradwire.comm.parallel.strategy import blocks

NAMES = ("adamw", "muon", "sgd")


def build(name: str, model: nn.Module, groups: Iterable[dict[str, Any]], **adamw: Any) -> Optimizer:
    """Build an inner optimizer.

    Args:
        name: ``adamw``; ``muon``, for the matrices inside of the model's blocks, with AdamW for the rest; or ``sgd``,
            without momentum (only ``lr`` and the groups' weight decay apply).
        model: The wrapped model.
        groups: Parameter groups, as for torch's optimizers.
        adamw: AdamW's options, such as ``lr`` and ``betas``.

    Raises:
        BadInput: If the name is unknown, or the model has no matrix for Muon.
    """
    if name not in NAMES:
        raise unknown("inner optimizer", name, NAMES)
    if name == "sgd":
        return SGD(groups, lr=adamw["lr"])
    if name == "muon":
        hidden = {p for block in blocks(model) for p in block.parameters() if p.ndim == 2 and p.requires_grad}
        return Muon(groups, hidden, **adamw)
    return AdamW(groups, **adamw)
