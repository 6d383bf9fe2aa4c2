"""Methods of computing per-sample gradients: which of them a model allows, and whether one agrees with the loop.

Rows may be projected during the backward pass, which then holds the gradient of one parameter at a time, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.attribution.collect.gradient_types import GradientType
from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    no_targets,
    note,
    out_of_memory,
    padded_width,
    trainable,
    zeroed,
)
from gradwire.attribution.persample.layer_factors import Direct, LayerFactor
from gradwire.attribution.projections import Projector
from gradwire.attribution.projections.base import Images
from gradwire.base.errors import BadInput, GradwireError, NonFiniteGradient, RunFault, listed
from gradwire.lm.data.batches import Batch
from gradwire.lm.models import saved

# Largest deviation from the loop, relative to the gradient's norm: of float32, with TF32 allowed, and of bfloat16.
CHECKED, CHECKED_BF16 = 1e-3, 0.1

METHODS: dict[str, Callable[..., PerSample]] = {
    "loop": loop.gradients,
    "vmap": vmap.gradients,
    "hooks": hooks.gradients,
}
FALLBACKS = {"hooks": "vmap", "vmap": "loop"}


def check_dense(model_dir: Path) -> None:
    """Check that a model is not a mixture of experts, whose per-sample gradients are not supported.

    Raises:
        BadInput: If it is one.
    """
    saved.check(model_dir)
    if count := saved.experts(model_dir):
        raise BadInput(
            f"the model in {model_dir} is a mixture of {count} experts ({saved.model_type(model_dir)}), which has no "
            "gradient rows: routing may tie samples to each other. Use a dense model."
        )


def resolved(method: str, model: nn.Module) -> str:
    """Resolve ``auto``: hooks if the layers of all trainable parameters are supported, else vmap.

    Raises:
        BadInput: If the method is ``hooks`` and a layer is not supported.
    """
    unknown = hooks.unsupported(model)
    if method == "hooks" and unknown:
        raise BadInput(f"--method hooks does not support the layer of {listed(unknown)}: use vmap or loop.")
    if method != "auto":
        return method
    if unknown:
        print(f"gradwire: --method auto uses vmap: hooks do not support the layer of {unknown[0]}", file=sys.stderr)
        return "vmap"
    return "hooks"


def following(method: str, error: Exception, automatic: bool) -> str:
    """Return the method to use instead of one that failed, if the choice is ``automatic``.

    Raises:
        Exception: ``error``, if memory ran out, a gradient is not finite, or the choice is not automatic; a BadInput
            instead of an error of another library.
    """
    if out_of_memory(error) or isinstance(error, NonFiniteGradient):
        raise error
    if not automatic:
        if isinstance(error, GradwireError):
            raise error
        raise BadInput(f"--method {method} does not support this model, use loop: {error}") from error
    note(f"--method auto uses {FALLBACKS[method]}, because {method} fails: {error}")
    return FALLBACKS[method]


def compare(
    method: str,
    ids: Sequence[str],
    rows: Mapping[int, Tensor],
    looped: Mapping[int, Tensor],
    tolerance: float = CHECKED,
) -> None:
    """Compare rows or gradients of samples, by dim, with those of the loop.

    Raises:
        NonFiniteGradient: If a sample's gradient is not finite.
        RunFault: If the method computes a different gradient.
    """
    for dim, expected in looped.items():
        norms, deviations = (of.flatten(1).norm(dim=1).tolist() for of in (expected, rows[dim] - expected))
        for id_, norm, deviation in zip(ids, norms, deviations, strict=True):
            if not norm < float("inf"):
                raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite.")
            if not deviation <= tolerance * norm:
                raise RunFault(
                    f"--method {method} computes a different gradient of sample {id_!r} than the loop: "
                    f"deviation {deviation:.1e}, norm {norm:.1e}. Use --method vmap or loop."
                )


def flattened(gradients: PerSample) -> Tensor:
    """Concatenate the gradients of all parameters into rows [B, n]."""
    return torch.cat([gradient.flatten(1) for gradient in gradients.gradient.values()], dim=1)


class Fused(NamedTuple):
    """Results for B samples and P parts of the parameters.

    Attributes:
        rows: [B, P, dim] by dim.
        loss: [B].
        square_norm: Squared gradient norms, float64 [B, P].
    """

    rows: Mapping[int, Tensor]
    loss: Tensor
    square_norm: Tensor


def fused_rows(
    model: nn.Module,
    batch: Batch,
    parts: Sequence[Projector],
    dims: Sequence[int],
    reduction: Reduction = "mean",
    kind_of: Callable[[str], GradientType] | None = None,
) -> Fused:
    """Project each layer's gradients during the backward pass; `Factored` does not form them.

    Args:
        model: A causal language model.
        batch: B samples.
        parts: The projections of P parts of its parameters.
        dims: Widths of the rows.
        reduction: How a sample's loss reduces over its targets.
        kind_of: The gradient type of a parameter, whose gradient is then formed; None for the gradient itself.

    Raises:
        Unseen: If the hooks miss a use of a parameter.
    """
    batch = padded_width(batch)
    samples, device = len(batch.labels), batch.labels.device
    images = Images(parts, samples, dims, device)
    formed: dict[str, Tensor] = {}  # of parameters whose uses have not all come
    left = dict(trainable(model)) if kind_of else {}

    def take(name: str, use: LayerFactor, last: bool) -> None:
        if kind_of is None:
            return images.take(name, use, last)
        gradient = use.gradient().flatten(1).float()
        formed[name] = formed[name] + gradient if name in formed else gradient
        if last:
            del left[name]
            images.take(name, Direct(kind_of(name)(formed.pop(name))), True)
        return None

    losses = hooks.all_seen(hooks.backward(model, batch, take, reduction))
    for name, parameter in left.items():  # without a use, a gradient is 0, but its type need not be
        assert kind_of is not None
        images.take(name, Direct(kind_of(name)(torch.zeros(samples, parameter.numel(), device=device))), True)
    empty = no_targets(batch)
    rows = {dim: zeroed(projected, empty) for dim, projected in images.finished().items()}
    return Fused(rows, losses, zeroed(images.square_norms(), empty))


def looped_rows(
    model: nn.Module,
    batch: Batch,
    parts: Sequence[Projector],
    dims: Sequence[int],
    reduction: Reduction = "mean",
    sharded: bool = False,
) -> dict[int, Tensor]:
    """Compute the rows of `fused_rows`, [B, P, dim] by dim, by one backward pass per sample, as a reference."""
    rows = []
    for sample in batch.split(1):
        images = Images(parts, 1, dims, batch.labels.device)
        if sharded:
            gradients: Iterable[tuple[str, Tensor]] = loop.of_sharded(model, sample, reduction)
        else:
            gradients = loop.gradients(model, sample, reduction).gradient.items()
        for name, gradient in gradients:
            images.add(name, Direct(gradient))
        rows.append(images.finished())
    return {dim: torch.cat([of_sample[dim] for of_sample in rows]) for dim in dims}
