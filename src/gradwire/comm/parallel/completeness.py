"""A check that an optimizer step ends with `finish`, and that every gradient that it uses was reduced."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from gradwire.comm.collectives import Layout
from gradwire.comm.parallel.strategy import Strategy, has_gradient


class Completeness:
    """Compares the gradients that a model has with those that were reduced in the optimizer step.

    They differ where the framework's hooks no longer see a gradient: after a forward pass around the wrapper, in a pass
    that does not synchronize, on a copy of the model, for a parameter that was replaced, converted or unfrozen.

    Args:
        model: The wrapped model. Its parameters are looked up at each step, by name.
        strategy: The model's strategy, which knows the parameters that are averaged.
        warns: Whether to warn where the caller does not end steps; False if an optimizer does.
    """

    def __init__(self, model: nn.Module, strategy: Strategy, *, warns: bool = True) -> None:
        self._model = weakref.ref(model, self._forget)
        self._strategy: Strategy | None = strategy
        self._parameters = strategy.averaged(model)
        self._reduced: dict[str, int] = {}  # in this optimizer step, with the parameter's version at the time
        self._warns = warns

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients are averaged."""
        return {*self._parameters}

    @property
    def reduced(self) -> bool:
        """Whether a gradient was reduced since the last `finish`."""
        return bool(self._reduced)

    def begun(self, layout: Layout) -> None:
        """Take notice of a reduction; warn, once, if a parameter has changed since it was reduced in the same step.

        Parameters change when the optimizer steps, and not between the micro-batches of one step, whether or not all of
        them are reduced. An optimizer may step in the backward pass, after each reduction. Autograd's version counters
        show a change without reading a value.
        """
        for name in layout.parameters:
            version = self._parameters[name]._version if name in self._parameters else 0
            if self._warns and self._reduced.get(name, version) != version:
                self._warns = False
                warnings.warn(
                    "parameters changed between two reductions without finish(): pass optimizer to "
                    "gradwire.compress_gradients, or call finish() once per optimizer step, after backward and before "
                    "optimizer.step(). Without it schedules do not advance, and NaN or infinity is not detected.",
                    stacklevel=2,
                )
            self._reduced[name] = version

    def finish(self) -> list[str] | None:
        """End the step.

        Returns:
            The parameters that this rank has a gradient of that was not reduced; None if nothing was reduced of a model
            that has trainable parameters.
        """
        reduced, self._reduced = self._reduced, {}
        if (model := self._model()) is None or self._strategy is None:
            return [] if reduced else None
        self._parameters = self._strategy.averaged(model)
        if self._parameters and reduced.keys().isdisjoint(self._parameters):
            return None
        missing = [name for name, p in self._parameters.items() if name not in reduced and has_gradient(p)]
        return [*dict.fromkeys(missing + self._strategy.held_back(model))]

    def _forget(self, _: object) -> None:
        """Let the parameters go with their model."""
        self._parameters, self._strategy = {}, None
