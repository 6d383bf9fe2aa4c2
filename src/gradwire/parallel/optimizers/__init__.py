"""Optimizers that do their own communication: what travels is not the gradient but what they make of it.

One file each; they take the place of AdamW where every rank holds the whole model (`naive`, `bucket`, `ddp`)::

    model = wrap(model, "ddp", reducer, device="cpu", average=False)
    optimizer = build("onebit_adam", model, groups, reducer, steps=900, lr=1e-3)
    norm, finite = optimizer.exchange(max_norm=1.0)  # after backward, in the place of `reducer.finish()`
    if finite:
        optimizer.step()
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.collectives import Reducer
from gradwire.errors import unknown

CLASSES = {"onebit_adam": "OneBitAdam", "zero_one_adam": "ZeroOneAdam"}


class Communicating(Optimizer):
    """An optimizer that communicates, as a training loop sees it: `exchange`, then torch's own ``step``."""

    @property
    def in_step(self) -> bool:
        """Whether the ranks have equal parameters now."""
        return True

    def rank_state(self) -> dict[str, Any]:
        """What is this rank's alone, beside the reducer's state: tensors and plain data, for a checkpoint."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Take over what `rank_state` gave on the same rank, after parameters and optimizer were loaded."""

    @abstractmethod
    def exchange(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """Average over the ranks what this optimizer step needs, and end the reducer's step; every rank calls it.

        Args:
            max_norm: The gradient is clipped to this Euclidean norm.
            total: What `Reducer.finish` sums in the same message.

        Returns:
            The gradient's norm before clipping, the same on every rank, and what `Reducer.finish` says: whether to call
            ``step``.

        Raises:
            NonFiniteGradient: As `Reducer.finish`.
            RunFault: If a parameter has no gradient.
        """


def available() -> list[str]:
    """Every such optimizer's name, sorted."""
    return sorted(CLASSES)


def build(
    name: str, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **options: Any
) -> Communicating:
    """Build an optimizer that communicates; only its own file is imported.

    Args:
        name: One of `available`.
        model: What `parallel.wrap` returned, with ``average=False``.
        groups: Parameter groups, as torch's optimizers take them.
        reducer: Sends what is sent.
        options: As `base.CommunicatingAdam` and the class take them.

    Raises:
        BadInput: For an unknown name, or an option out of range.
    """
    if name not in CLASSES:
        raise unknown("optimizer that communicates,", name, CLASSES)
    optimizer: Communicating = getattr(import_module(f"{__name__}.{name}"), CLASSES[name])(
        model, groups, reducer, **options
    )
    return optimizer
