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

from gradwire.errors import BadInput
from gradwire.persample.batch import trainable

Draw = Callable[[str, Tensor, torch.device], Tensor]


@contextmanager
def noisy(model: nn.Module, std: float, seed: int, step: int, rank: int) -> Iterator[None]:
    """Add noise of standard deviation ``std`` to the gradients of forward passes in this context.

    A parameter's noise depends on the arguments and its name only, so a resumed run draws the same noise. A tied
    parameter gets it once, in the first of its layers.

    Args:
        model: A model whose layers return tensors; under FSDP2 every rank draws noise for the unsharded parameter.
        std: Standard deviation of each element.
        seed: The run's seed. Anyone who knows it can subtract the noise.
        step: The optimizer step.
        rank: This rank; ranks draw independently.

    Raises:
        BadInput: If a layer was not called, or its parameters were used without calling it: they would get no noise.
    """

    def draw(name: str, like: Tensor, device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(_derived(seed, step, rank, name))
        return std * torch.randn(like.shape, generator=generator, dtype=like.dtype, device=device)

    def after(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        own = owned[module]
        parameters = [getattr(module, local) for local in own]  # unsharded at this point under FSDP2
        passed.add(module)
        added: Tensor = _Added.apply(output, draw, tuple(own.values()), *parameters)
        return added

    owned, passed = _owned(model), set[nn.Module]()
    handles = [module.register_forward_hook(after) for module in owned]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    left_out = [name for module, own in owned.items() if module not in passed for name in own.values()]
    if left_out:
        raise BadInput(
            f"{', '.join(left_out)}: the layer that owns them is never called, so private training cannot clip their "
            "gradients or add noise. Freeze them, or call the layer itself."
        )


class _Added(torch.autograd.Function):
    """The identity on a layer's output; its backward adds drawn noise to the gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, draw: Draw, names: tuple[str, ...], *parameters: Tensor) -> Tensor:
        ctx.draw, ctx.names = draw, names
        ctx.like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parameters]  # FSDP2 frees them
        ctx.device = output.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        drawn = [ctx.draw(name, like, ctx.device) for name, like in zip(ctx.names, ctx.like, strict=True)]
        return grads[0], None, None, *drawn


def _owned(model: nn.Module) -> dict[nn.Module, dict[str, str]]:
    """Names of the trainable parameters, by the first layer that owns them and their local name in it."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    found: dict[nn.Module, dict[str, str]] = {}
    for module in model.modules():
        own = {local: names.pop(id(p)) for local, p in module.named_parameters(recurse=False) if id(p) in names}
        if own:
            found[module] = own
    return found


def _derived(*words: object) -> int:
    """A seed below 2^63."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:8], "little") >> 1
