"""A check that an optimizer step ends with `finish`, and that every gradient that it uses was reduced."""

from __future__ import annotations

import warnings
import weakref

from torch import nn

from gradwire.collectives import Layout
from gradwire.parallel.mesh import local
from gradwire.parallel.strategy import Strategy


class Completeness:
    """Compares the gradients that a model has with those that were reduced in the optimizer step.

    They differ where the framework's hooks no longer see a gradient: after a forward pass around the wrapper, in a pass
    that does not synchronize, on a copy of the model, for a parameter that was replaced, converted or unfrozen.

    Args:
        model: The wrapped model. Its parameters are looked up at each step, by name.
        strategy: The model's strategy, which knows the parameters that are averaged.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model = weakref.ref(model)
        self._strategy = strategy
        self._parameters = strategy.averaged(model)
        self._reduced: set[str] = set()  # in this optimizer step
        self._version = 0  # of the parameters, at the last reduction
        self._warned = False

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients are averaged."""
        return {*self._parameters}

    def begun(self, layout: Layout) -> None:
        """Take notice of a reduction; warn, once, if the optimizer has stepped since the last one of the same step.

        Parameters change when the optimizer steps, and not between the micro-batches of one step, whether or not all of
        them are reduced. Autograd's version counters show a change without reading a value.
        """
        if not self._warned:
            version = sum(parameter._version for parameter in self._parameters.values())
            if self._reduced and version != self._version:
                self._warned = True
                warnings.warn(
                    "parameters changed between two reductions without reducer.finish(): call it once per optimizer "
                    "step, after backward and before optimizer.step(). Without it schedules do not advance, and NaN or "
                    "infinity is not detected.",
                    stacklevel=2,
                )
            self._version = version
        self._reduced |= layout.parameters.keys()

    def finish(self) -> list[str] | None:
        """End the step.

        Returns:
            The parameters that this rank has a gradient of that was not reduced; None if nothing was reduced.
        """
        reduced, self._reduced = self._reduced, set()
        if (model := self._model()) is not None:
            self._parameters = self._strategy.averaged(model)
        if reduced.isdisjoint(self._parameters):
            return None
        missing = [name for name, p in self._parameters.items() if name not in reduced and has_gradient(p)]
        return missing if model is None else missing + self._strategy.held_back(model)


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether an optimizer would use this rank's part of a gradient; one of zeros is that of an unused parameter."""
    return parameter.grad is not None and bool(local(parameter.grad).count_nonzero())
