"""Optimizers that communicate: they average momenta, or the outcome of local steps, instead of gradients.

One file each; they replace AdamW where every rank, or under `hsdp` every island, holds the whole model::

    model = wrap(model, "ddp", reducer, device="cpu", average=False)
    optimizer = build("onebit_adam", model, groups, reducer, steps=900, lr=1e-3)
    norm, finite = optimizer.exchange(max_norm=1.0)  # after backward, instead of `reducer.finish()`
    if finite:
        optimizer.step()
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.collectives import Reducer
from gradwire.communication import PRESETS, Streaming, preset
from gradwire.config.strict import checked
from gradwire.errors import unknown
from gradwire.parallel.strategy import strategy_of

CLASSES = {  # by module
    "onebit_adam": "OneBitAdam",
    "zero_one_adam": "ZeroOneAdam",
    "diloco": "DiLoCo",
    "streaming": "StreamingDiLoCo",
    "desloc": "DesLoc",
    "demo": "DeMo",
}
NAMES = sorted({"onebit_adam", "zero_one_adam", *PRESETS})


class Communicating(Optimizer):
    """An optimizer that communicates in `exchange`, which is called before torch's ``step``."""

    model: nn.Module
    reducer: Reducer

    @property
    def in_step(self) -> bool:
        """Whether parameters are currently equal on all ranks."""
        return True

    @property
    @abstractmethod
    def dense_steps(self) -> int:
        """Number of first steps in which everything travels as float32."""

    @property
    def outer_bytes(self) -> int | None:
        """Memory of what this rank keeps of its rounds, such as anchors; None without rounds."""
        return None

    def synchronized(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are those that all ranks share, for an evaluation."""
        return nullcontext()

    def restart(self) -> None:
        """Begin a round at the present parameters, which were loaded without a `rank_state`."""

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield by name what else is equal on all ranks after every step."""
        yield from ()

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank alone, without the reducer's: tensors and plain data, for a checkpoint."""
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Load a `rank_state` of the same rank, after parameters and optimizer are loaded."""

    @abstractmethod
    def exchange(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """Average over the ranks for this optimizer step, and finish the reducer's step. Every rank must call it.

        Args:
            max_norm: Maximum Euclidean norm of the gradient; larger ones are clipped.
            total: A tensor that `Reducer.finish` sums in the same message.

        Returns:
            The gradient's norm before clipping, equal on every rank, and whether to call ``step`` (from
            `Reducer.finish`).

        Raises:
            NonFiniteGradient: As `Reducer.finish`.
            RunFault: If a parameter that this optimizer sends has no gradient.
        """

    def finish(self, norm: float, total: Tensor | None, *, wait: bool = True) -> tuple[float, bool]:
        """Finish the reducer's step, for an `exchange` in which every rank clips its own gradient.

        Args:
            norm: This rank's norm; one that is not finite sets the reducer's flag.
            total: As for `exchange`.
            wait: As for `Reducer.finish`.

        Returns:
            As `exchange`; the norm is the root mean square over the ranks.
        """
        group, device = strategy_of(self.model).group, strategy_of(self.model).device
        if not math.isfinite(norm):
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=device))
        square = torch.tensor([norm**2], device=device)
        sums = square if total is None else torch.cat([total, square])
        taken = self.reducer.finish(sums, wait=wait)
        if total is not None:
            total.copy_(sums[:-1])
        return (sums[-1] / dist.get_world_size(group)).sqrt().item(), taken


def synchronized(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Return a context in which the model has the parameters that all ranks share, whatever the optimizer."""
    return optimizer.synchronized() if isinstance(optimizer, Communicating) else nullcontext()


def available() -> list[str]:
    """Return the names of all optimizers that communicate, sorted."""
    return NAMES


def build(
    name: str, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **options: Any
) -> Communicating:
    """Build an optimizer that communicates; only its own file is imported.

    Args:
        name: One of `available`.
        model: The model returned by `parallel.wrap` with ``average=False``.
        groups: Parameter groups, as for torch's optimizers.
        reducer: Does the communication.
        options: Options of the class; those of a preset (`communication.PRESETS`) have its defaults.

    Raises:
        BadInput: If the name is unknown, or an option is out of range.
    """
    if name not in NAMES:
        raise unknown("optimizer that communicates,", name, NAMES)
    module = name
    if name in PRESETS:
        module, options = preset(name).module, {**preset(name).options, **options}
        streaming = options.pop("streaming", None)
        if streaming is not None:
            module, options["streaming"] = "streaming", checked(Streaming, streaming, "streaming")
    kind: type[Communicating] = getattr(import_module(f"{__name__}.{module}"), CLASSES[module])
    return kind(model, groups, reducer, **options)
