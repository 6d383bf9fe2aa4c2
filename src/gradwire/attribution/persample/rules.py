"""Gradient rules of layers: the per-sample gradients of a layer's parameters from its input and output gradient.

Layers are known by their ``forward``, since a subclass that overrides it may compute something else. Two families that
every library writes again, RMS norms and scaled embeddings, are known by what their ``forward`` computes on a probe.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from gradwire.attribution.persample.layer_factors import Direct, LayerFactor, OuterProduct

# (module, input, output gradient) -> uses; tensors are [B, N, *features], ids [B, N].
Rule: TypeAlias = Callable[[Any, Tensor, Tensor], dict[str, LayerFactor]]


# Why: docs/decisions.md, "A layer is what it computes".
def linear(module: nn.Linear, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = x Wᵀ + b."""
    return {"weight": OuterProduct(len(module.weight), grad, x), "bias": Direct(grad.sum(1))}


def conv1d(module: Any, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = x W + b: GPT-2's linear layer in transformers, with a transposed weight."""
    return {"weight": OuterProduct(len(module.weight), x, grad), "bias": Direct(grad.sum(1))}


def embedding(module: nn.Embedding, ids: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = W[ids]; the row of ``padding_idx`` gets no gradient."""
    if module.padding_idx is not None:
        grad = grad.masked_fill((ids == module.padding_idx)[..., None], 0.0)
    return {"weight": OuterProduct(len(module.weight), ids, grad)}


def layer_normalisation(module: nn.LayerNorm, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = γ ∘ x̂ + β."""
    normalised = layer_norm(x, module.normalized_shape, None, None, module.eps)
    return {"weight": Direct((grad * normalised).sum(1)), "bias": Direct(grad.sum(1))}


def rms_normalisation(module: Any, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = γ ∘ x / rms(x), or (1 + γ) ∘ x / rms(x)."""
    return {"weight": Direct((grad * rms_norm(x, module.weight.shape, None, epsilon(module))).sum(1))}


def scaled_embedding(scale: float, module: nn.Embedding, ids: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = c W[ids]."""
    return embedding(module, ids, scale * grad)


OF_TORCH: dict[Callable[..., Any], Rule] = {
    nn.Linear.forward: linear,
    nn.Embedding.forward: embedding,
    nn.LayerNorm.forward: layer_normalisation,
    nn.RMSNorm.forward: rms_normalisation,
}
OF_TRANSFORMERS: dict[tuple[str, str], Rule] = {  # looked up without importing them
    ("transformers.pytorch_utils", "Conv1D"): conv1d,
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"): linear,
}
PROBED: WeakKeyDictionary[nn.Module, Rule | None] = WeakKeyDictionary()  # what `probed_rule` returned


def rule_of(module: nn.Module) -> Rule | None:
    """Return the gradient rule of a layer, or None if the layer is not supported."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return None
    forward = getattr(module.forward, "__func__", None)
    for (place, name), rule in OF_TRANSFORMERS.items():
        if place in sys.modules and forward is getattr(sys.modules[place], name).forward:
            return rule
    if forward in OF_TORCH:
        return OF_TORCH[forward]
    if module not in PROBED:
        PROBED[module] = probed_rule(module)
    return PROBED[module]


def input_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the input of a call; None if the layer is not supported, or gets more, such as a norm that gets a gate."""
    given = [*args, *kwargs.values()]
    x = given[0] if len(given) == 1 else None  # a rule is right for a single input only
    return x if isinstance(x, Tensor) and rule_of(module) is not None else None


def features(module: nn.Module) -> int:
    """Count the trailing feature dimensions of a supported layer's input; 0 for the ids of an embedding."""
    return 0 if isinstance(module, nn.Embedding) else len(getattr(module, "normalized_shape", (1,)))


def epsilon(module: Any) -> float | None:
    """Return the number that an RMS norm adds to the mean square; None if the layer has none."""
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def probed_rule(module: nn.Module) -> Rule | None:
    """Return the rule of a layer that is an RMS norm or a scaled embedding by its outputs for a random weight."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or "forward" in vars(module):
        return None
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    if isinstance(module, nn.Embedding):
        ids, weight = torch.tensor([[1, 4, 0]]), draw(5, module.embedding_dim)
        output, plain = output_of(module, weight, ids), weight[ids]
        scale = output.flatten()[0].item() / plain.flatten()[0].item()
        return partial(scaled_embedding, scale) if same(output, scale * plain) else None
    if module.weight.ndim != 1 or epsilon(module) is None:
        return None
    weight, x = draw(len(module.weight)), 1e-3 * draw(1, 3, len(module.weight))  # so small that epsilon counts
    output, normalised = output_of(module, weight, x), rms_norm(x, weight.shape, None, epsilon(module))
    return rms_normalisation if any(same(output, factor * normalised) for factor in (weight, 1 + weight)) else None


def output_of(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """Return what the layer computes from ``x`` with another weight; NaN if it needs something else."""
    device = module.weight.device
    probe = copy.copy(module)  # shares all else with the layer, but not these two
    probe.__dict__ |= {"_parameters": {"weight": weight.to(device)}, "padding_idx": None}
    try:
        with torch.no_grad():
            return type(module).forward(probe, x.to(device)).cpu()
    except Exception:  # a layer of another kind may raise anything
        return torch.tensor(math.nan)


def same(output: Tensor, expected: Tensor) -> bool:
    """Whether two outputs agree to the precision of float32."""
    return output.shape == expected.shape and torch.allclose(output, expected, rtol=1e-5, atol=1e-12)
