"""Two repairs of torch's optimizers, for classes that are built on them: hooks that run once, and a state by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def step_without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the step of an optimizer's class without its step hooks.

    Torch wraps the ``step`` of each class that was instantiated. Where a subclass's ``step`` calls its base's, both are
    wrapped, and hooks would run twice.
    """
    step: Any = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def copy_tensors(state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Replace an optimizer's tensors by copies: torch keeps those that it loads, and would change them in place."""
    for kept in state.values():
        kept |= {key: value.clone() for key, value in kept.items() if isinstance(value, Tensor)}
