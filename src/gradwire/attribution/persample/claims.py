"""Nodes of the autograd graph that receive the gradient of a layer's output, and the search of a graph for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


# Why: docs/decisions.md, "A layer's use is claimed by a node of the graph, not by a hook on a tensor".
def unviewed(values: Tensor) -> Tensor:
    """Return a tensor of the same memory that autograd does not know as a view.

    An operation in place on a view replaces the view's node of the graph; on such a tensor it adds a node.
    """
    return torch.ops.aten._unsafe_view(values, values.shape)


def claimed(values: Tensor, root: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """Return a layer's output behind a node of the graph that calls ``receive`` with its gradient.

    Args:
        values: The output.
        root: A leaf that requires a gradient; ``torch.autograd.grad(loss, root)`` runs every such node of the graph.
        receive: Called once per backward pass, if the loss depends on the output. It is the node's ``receive``.
    """
    claim: Tensor = _Claim.apply(values, root, receive)
    return claim


class _Claim(torch.autograd.Function):
    """The identity, with a callback in its backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, root: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return unviewed(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.receive(grads[0])
        return grads[0], None, None


def nodes_of(output: Tensor) -> Iterator[Any]:
    """Yield each node of the autograd graph of ``output``."""
    met, ahead = set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        met.add(node)
        yield node
        ahead += [following for following, _ in node.next_functions]


@contextmanager
def hooked(modules: Iterable[nn.Module], after: After, before: Before | None = None) -> Iterator[None]:
    """Call ``after`` after each forward pass of the modules, ahead of others' hooks, and ``before`` last before it."""
    handles = []
    for module in modules:
        handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
        if before is not None:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
