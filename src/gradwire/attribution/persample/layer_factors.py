"""Contribution of one use of a parameter in a forward pass to its per-sample gradient.

For B samples of T tokens, the gradient of a matrix that multiplies tokens is G[b] = Σ_t left[b, t] ⊗ right[b, t]. Its
norm and its projection follow from the two factors, without forming G. A rule of a layer gives the uses of its
parameters from its input and output gradient. Layers are known by their ``forward``, since a subclass that overrides it
may compute something else. Two families that every library writes again, RMS norms and scaled embeddings, are known by
what their ``forward`` computes on a probe.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm, rms_norm, unfold

from gradwire.attribution.persample.batch import squares


@dataclass(frozen=True)
class OuterProduct:
    """A gradient given as a sum of outer products.

    Attributes:
        rows: Rows of the parameter.
        left: ``[B, T, rows]``, or int64 ids ``[B, T]`` of an embedding, which represent unit vectors.
        right: ``[B, T, columns]``.
    """

    rows: int
    left: Tensor
    right: Tensor

    @property
    def one_hot(self) -> bool:
        """Whether ``left`` holds ids."""
        return not self.left.is_floating_point()

    def gradient(self) -> Tensor:
        """Form G, ``[B, rows, columns]``."""
        samples, _, columns = self.right.shape
        formed = self.right.new_empty(samples, self.rows, columns)
        self.write(formed)
        return formed

    def write(self, out: Tensor, add: bool = False) -> None:
        """Write G into ``out``, or add it there."""
        out = out.flatten(2)  # a kernel's dimensions are columns
        if not self.one_hot:
            torch.baddbmm(out, self.left.transpose(1, 2), self.right, beta=int(add), out=out)
            return
        if not add:
            out.zero_()
        for of, ids, right in zip(out, self.left, self.right, strict=True):
            of.index_add_(0, ids, right)


@dataclass(frozen=True)
class Direct:
    """A gradient that is already formed.

    Attributes:
        value: ``[B, *shape]``.
    """

    value: Tensor

    def gradient(self) -> Tensor:
        """Return the value."""
        return self.value

    def write(self, out: Tensor, add: bool = False) -> None:
        """Write the value into ``out``, or add it there."""
        if add:
            out += self.value
        else:
            out.copy_(self.value)


LayerFactor: TypeAlias = OuterProduct | Direct


def square_norm(uses: Sequence[LayerFactor]) -> Tensor:
    """Compute ``‖Σ G‖²`` over all uses of one parameter: float64 [B].

    The inner products between the uses of a tied parameter are included; they may have either sign.
    """
    if all(isinstance(use, OuterProduct) for use in uses):
        outer = [use for use in uses if isinstance(use, OuterProduct)]
        pairs = [
            (left, right, 1.0 if i == j else 2.0)
            for i, left in enumerate(outer)
            for j, right in enumerate(outer[: i + 1])
        ]
        return sum((factor * inner(left, right) for left, right, factor in pairs), torch.zeros(())).clamp(min=0)
    total = sum((use.gradient() for use in uses[1:]), uses[0].gradient())
    return squares(total.flatten(1))


def inner(use: OuterProduct, second: OuterProduct) -> Tensor:
    """Compute ``⟨G, G'⟩`` of two uses with gradients of equal shape: float64 [B].

    Uses Σ_{t,t'} ⟨left_t, left'_t'⟩ ⟨right_t, right'_t'⟩ where that is cheaper than forming G.
    """
    tokens, columns = use.right.shape[1:]
    if use is second and not use.one_hot and 2 * tokens**2 > use.rows * columns:
        return squares(use.gradient().flatten(1))
    products = _gram(use.left, second.left) * _gram(use.right, second.right)
    return products.sum(2).sum(1, dtype=torch.float64)  # in float64 at once, all products would be copied


def _gram(first: Tensor, second: Tensor) -> Tensor:
    """Compute the inner products of all pairs of tokens, ``[B, T, T']``; ids represent unit vectors."""
    if first.is_floating_point() and second.is_floating_point():
        return first @ second.transpose(1, 2)
    if first.is_floating_point():
        return _gram(second, first).transpose(1, 2)
    if second.is_floating_point():
        wanted = first[:, None, :].expand(-1, second.shape[1], -1)
        return second.gather(2, wanted).transpose(1, 2)
    return (first[:, :, None] == second[:, None, :]).float()


class SquareNorms:
    """Sums squared norms over parameters. The uses of a tied parameter are added before its norm is taken.

    Args:
        samples: B.
        device: Device of the pass.
    """

    def __init__(self, samples: int, device: torch.device) -> None:
        self._met = defaultdict[str, list[LayerFactor]](list)
        self._squares = torch.zeros(samples, dtype=torch.float64, device=device)

    def take(self, name: str, use: LayerFactor, last: bool) -> None:
        """Add a use; the last use of a parameter adds its squared norm to the sum."""
        self._met[name].append(use)
        if last:
            self._squares.add_(square_norm(self._met.pop(name)))

    def total(self) -> Tensor:
        """Return the sums, float64 [B], after the pass."""
        return self._squares


# (module, input, output gradient) -> uses; tensors are [B, N, *features], ids [B, N].
Rule: TypeAlias = Callable[[Any, Tensor, Tensor], dict[str, LayerFactor]]


# Why: docs/decisions.md, "A layer is what it computes".
def linear(module: nn.Linear, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = x Wᵀ + b."""
    weight = OuterProduct(len(module.weight), grad, x)
    return {"weight": weight} if module.bias is None else {"weight": weight, "bias": Direct(grad.sum(1))}


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


def convolution(module: nn.Conv1d | nn.Conv2d, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = W ∗ x + b: a linear layer on the patches of x; in groups, one for each."""
    patches = unfolded(module, x.flatten(0, 1))  # [B, columns · groups, positions]
    of_output, groups = grad.flatten(0, 1).flatten(2), module.groups
    if groups == 1:
        weight: LayerFactor = OuterProduct(len(module.weight), of_output.transpose(1, 2), patches.transpose(1, 2))
    else:
        left, right = (values.unflatten(1, (groups, -1)) for values in (of_output, patches))
        weight = Direct((left @ right.transpose(2, 3)).reshape(-1, *module.weight.shape))
    return {"weight": weight, "bias": Direct(of_output.sum(2))}


def unfolded(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Return the patches that a kernel sees in x, ``[B, channels · kernel, positions]``."""
    flat = isinstance(module, nn.Conv1d)
    sides = [module.kernel_size, module.dilation, module.padding, module.stride]
    of_row = (1, 1, 0, 1)  # a row of an image is as high as its kernel
    both: list[Any] = [(fill, *side) if flat else side for fill, side in zip(of_row, sides, strict=True)]
    return unfold(x[:, :, None] if flat else x, *both)


def group_normalisation(module: nn.GroupNorm, x: Tensor, grad: Tensor) -> dict[str, LayerFactor]:
    """y = γ ∘ x̂ + β, with γ and β of channels."""
    x, grad = x.flatten(0, 1), grad.flatten(0, 1)
    normalised = group_norm(x, module.num_groups, None, None, module.eps)
    weight, bias = (values.flatten(1).unflatten(1, (x.shape[1], -1)).sum(2) for values in (grad * normalised, grad))
    return {"weight": Direct(weight), "bias": Direct(bias)}


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
OF_TORCH: dict[Callable[..., Any], Rule] = {
    nn.Linear.forward: linear,
    nn.Embedding.forward: embedding,
    nn.LayerNorm.forward: layer_normalisation,
    nn.GroupNorm.forward: group_normalisation,
    nn.Conv1d.forward: convolution,
    nn.Conv2d.forward: convolution,
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
    if isinstance(module, CONVOLUTIONS) and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
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


def features(module: nn.Module, x: Tensor) -> int:
    """Count the trailing feature dimensions of a supported layer's input; 0 for the ids of an embedding."""
    if isinstance(module, (*CONVOLUTIONS, nn.GroupNorm)):
        return x.ndim - 1
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
