"""Per-sample gradients from what enters and leaves each layer: one backward pass that forms no parameter's gradient.

Parameters are frozen while it runs. What the embeddings look up takes their place as the leaves of the graph, so the
backward pass goes through every layer's input and output and through nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from gradwire.data.batches import Batch
from gradwire.persample.batch import (
    PerSample,
    Reduction,
    evaluation,
    frozen,
    n_targets,
    no_targets,
    padded_width,
    sample_losses,
    trainable,
    zeroed,
)
from gradwire.persample.uses import Direct, Outer, Use

Rule: TypeAlias = Callable[[Any, Tensor, Tensor], dict[str, Use]]
Take: TypeAlias = Callable[[str, Use], None]


def linear(module: nn.Linear, x: Tensor, grad: Tensor) -> dict[str, Use]:
    """y = x Wᵀ + b."""
    return {"weight": Outer(len(module.weight), grad, x), "bias": Direct(grad.sum(1))}


def conv1d(module: Any, x: Tensor, grad: Tensor) -> dict[str, Use]:
    """y = x W + b: GPT-2's linear layer in transformers, its weight the other way round."""
    return {"weight": Outer(len(module.weight), x, grad), "bias": Direct(grad.sum(1))}


def embedding(module: nn.Embedding, ids: Tensor, grad: Tensor) -> dict[str, Use]:
    """y = W[ids]; torch gives the row of ``padding_idx`` no gradient."""
    if module.padding_idx is not None:
        grad = grad.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    return {"weight": Outer(len(module.weight), ids, grad)}


def layer_normalisation(module: nn.LayerNorm, x: Tensor, grad: Tensor) -> dict[str, Use]:
    """y = γ ∘ x̂ + β."""
    normalised = layer_norm(x, module.normalized_shape, None, None, module.eps)
    return {"weight": Direct((grad * normalised).sum(1)), "bias": Direct(grad.sum(1))}


def rms_normalisation(module: Any, x: Tensor, grad: Tensor) -> dict[str, Use]:
    """y = γ ∘ x / rms(x)."""
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return {"weight": Direct((grad * normalised).sum(1))}


def rule_of(module: nn.Module) -> Rule | None:
    """How a layer's parameters get their gradients, or None for a layer that is not known."""
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return linear
    if isinstance(module, nn.Embedding):
        return embedding
    if isinstance(module, nn.LayerNorm):
        return layer_normalisation
    if name == "Conv1D":  # transformers', which need not be imported for it
        return conv1d
    if isinstance(module, nn.RMSNorm) or name == "LlamaRMSNorm":
        return rms_normalisation
    return None


def unsupported(model: nn.Module) -> list[str]:
    """The trainable parameters whose layer is not known, by name."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    return [
        names[id(parameter)]
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if id(parameter) in names and rule_of(module) is None
    ]


def uses(model: nn.Module) -> dict[str, int]:
    """How many layers use each trainable parameter: two for a tied one."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    counts = dict.fromkeys(names.values(), 0)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in names:
                counts[names[id(parameter)]] += 1
    return counts


def backward(model: nn.Module, batch: Batch, take: Take, reduction: Reduction = "mean") -> Tensor:
    """Hand each use of each trainable parameter to ``take(name, use)``, in the order of the backward pass.

    Args:
        model: A causal language model that returns ``logits``, its token embedding an `nn.Embedding`, without trainable
            parameters that are `unsupported`.
        batch: Samples of any length, padded on the right; one without a target gives zeros.
        take: Called inside of the backward pass.
        reduction: What a sample's loss is.

    Returns:
        The losses, ``[B]``.
    """
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    owned = {
        module: {local: names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in names}
        for module in model.modules()
    }
    with evaluation(model), frozen(model), _hooked(owned, len(batch.labels), take):
        losses = sample_losses(model(batch.input_ids, use_cache=False).logits, batch.labels, reduction)
        losses.sum().backward()
    return losses.detach()


@contextmanager
def _hooked(owned: Mapping[nn.Module, Mapping[str, str]], samples: int, take: Take) -> Iterator[None]:
    """Every layer tells what its parameters' gradients are made of."""

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):  # one row of positions serves all samples: each gets its own
            output = output.detach().expand(samples, *output.shape[1:]).clone().requires_grad_()
        rule = rule_of(module)
        if owned[module] and rule is not None:
            x = inputs[0].detach()

            def tell(grad: Tensor) -> None:
                of_sample = x.expand(samples, *x.shape[1:])
                for local, use in rule(module, of_sample, grad.detach()).items():
                    if local in owned[module]:
                        take(owned[module][local], use)

            output.register_hook(tell)
        return output

    chosen = [module for module, own in owned.items() if own or isinstance(module, nn.Embedding)]
    handles = [module.register_forward_hook(after) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: nn.Module, batch: Batch, reduction: Reduction = "mean") -> PerSample:
    """The gradients of a batch's samples, formed layer by layer."""
    batch = padded_width(batch)
    found: dict[str, Tensor] = {}

    def take(name: str, use: Use) -> None:
        gradient = use.gradient()
        found[name] = found[name] + gradient if name in found else gradient

    losses = backward(model, batch, take, reduction)
    empty = no_targets(batch)
    ordered = {
        name: zeroed(found[name], empty) if name in found else parameter.new_zeros(len(losses), *parameter.shape)
        for name, parameter in trainable(model).items()
    }
    return PerSample(ordered, losses, n_targets(batch.labels))
