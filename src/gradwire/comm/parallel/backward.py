"""The end of a backward pass, for which torch has no public hook; DDP and FSDP use the same callback."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether this thread runs a backward pass, or a forward pass that one repeats for its activations."""
    return torch._C._current_graph_task_id() >= 0


# Why: docs/decisions.md, "The end of a backward pass".
class EndOfBackward:
    """Calls a function at the end of each backward pass in which `expect` was called.

    Args:
        call: The function. What it raises, ``backward`` raises.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self._backward = -1  # autograd's id of the last pass

    def expect(self) -> bool:
        """Call the function at the end of the current pass; called from a gradient hook.

        Returns:
            Whether there is such a pass. Outside of one, as `torch.distributed.pipelining` reduces gradients, nobody
            waits later, so the hook must.
        """
        if not in_backward():
            return False
        if self._backward != (backward := torch._C._current_graph_task_id()):
            self._backward = backward
            Variable._execution_engine.queue_callback(self.call)
        return True
