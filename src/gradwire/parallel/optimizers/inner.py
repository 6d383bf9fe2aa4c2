"""The inner optimizers of local updates, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from gradwire.errors import unknown

NAMES = ("adamw", "sgd")


def build(name: str, groups: Iterable[dict[str, Any]], **adamw: Any) -> Optimizer:
    """Build an inner optimizer.

    Args:
        name: ``adamw``, or ``sgd`` (without momentum, and only ``lr`` and the groups' weight decay apply).
        groups: Parameter groups, as for torch's optimizers.
        adamw: AdamW's options, such as ``lr`` and ``betas``.

    Raises:
        BadInput: If the name is unknown.
    """
    if name not in NAMES:
        raise unknown("inner optimizer", name, NAMES)
    if name == "sgd":
        return SGD(groups, lr=adamw["lr"])
    return AdamW(groups, **adamw)
