"""Gaussian noise on gradients, independent of the data-parallel framework.

The noise is the gradient of a term that is linear in the parameters. The backward pass therefore adds it to a rank's
local gradient before DDP's buckets, FSDP's reduce-scatter or a compressor see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradwire.attribution.persample.batch import trainable
from gradwire.attribution.persample.claims import nodes_of, unviewed
from gradwire.base.errors import BadInput

Draw = Callable[[str, Tensor, torch.device], Tensor | None]


@contextmanager
def noisy(model: nn.Module, std: float, seed: int, step: int, rank: int) -> Iterator[Callable[[Tensor], None]]:
    """Add noise of standard deviation ``std`` to the gradients of forward passes in this context.

    A parameter's noise depends on the arguments and its name only, so a resumed run draws the same noise. Each gets it
    once, in the first of its layers' calls that the backward pass reaches.

    Args:
        model: A model whose layers return tensors, or tuples, lists or dicts of them; under FSDP2 every rank draws
            noise for the unsharded parameter.
        std: Standard deviation of each element.
        seed: The run's seed. Anyone who knows it can subtract the noise.
        step: The optimizer step.
        rank: This rank; ranks draw independently.

    Yields:
        A check that the backward pass of a loss adds noise to every parameter; it raises BadInput.

    Raises:
        BadInput: If a layer returns no tensor.
    """

    def draw(name: str, like: Tensor, device: torch.device) -> Tensor | None:
        if name in drawn:
            return None
        drawn.add(name)
        generator = torch.Generator(device).manual_seed(_derived(seed, step, rank, name))
        return std * torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)

    def after(module: nn.Module, _: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        own = owned[module]
        if not places:
            raise BadInput(
                f"{', '.join(own.values())}: the layer that owns them returns a {type(output).__name__} without a "
                "tensor, so private training cannot add noise. Freeze them, or return a tensor, tuple, list or dict."
            )
        parameters = [getattr(module, local) for local in own]  # unsharded at this point under FSDP2
        added = _Added.apply(draw, tuple(own.values()), len(places), *(leaves[place] for place in places), *parameters)
        for place, values in zip(places, added, strict=True):
            leaves[place] = values
        return tree_unflatten(leaves, structure)

    def check(loss: Tensor) -> None:
        reached = {name for node in nodes_of(loss) for name in getattr(node, "noisy_names", ())}
        left_out = [name for name in trainable(model) if name not in reached]
        if left_out:
            raise BadInput(
                f"{', '.join(left_out[:3])}{f' and {len(left_out) - 3} more' if left_out[3:] else ''}: the loss does "
                "not depend on the layer that owns them, so private training cannot add noise to their gradients. "
                "Freeze them, or call the layer itself."
            )

    owned, drawn = _owned(model), set[str]()
    handles = [module.register_forward_hook(after, prepend=True) for module in owned]
    try:
        yield check
    finally:
        for handle in handles:
            handle.remove()


class _Added(torch.autograd.Function):
    """The identity on a layer's outputs; its backward adds drawn noise to the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, draw: Draw, names: tuple[str, ...], outputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.draw, ctx.noisy_names = draw, names
        ctx.like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in tensors[outputs:]]  # FSDP2 frees them
        ctx.device = tensors[0].device
        ctx.set_materialize_grads(False)
        return tuple(unviewed(values) for values in tensors[:outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        drawn = [ctx.draw(name, like, ctx.device) for name, like in zip(ctx.noisy_names, ctx.like, strict=True)]
        return None, None, None, *grads, *drawn


def _owned(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Names of the trainable parameters, by each layer that owns them and their local name in it."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    found: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        own = {local: names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in names}
        if own:
            found[module] = own
    return found


def _derived(*words: object) -> int:
    """A seed below 2^63."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1
