"""Per-sample gradients by `torch.func`: one vectorised backward pass, for any model that vmap can trace."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    evaluation,
    n_targets,
    no_targets,
    padded_width,
    read,
    sample_losses,
    trainable,
    widened,
    zeroed,
)
from gradwire.lm.data.batches import Batch


def gradients(
    model: nn.Module,
    batch: Batch,
    reduction: Reduction = "mean",
    names: Collection[str] | None = None,
    out: dict[str, Tensor] | None = None,
) -> PerSample:
    """Compute the per-sample gradients of a batch; attention uses PyTorch's math backend under vmap.

    Args:
        model: A causal language model.
        batch: Samples of any length, padded on the right.
        reduction: How the loss reduces over a sample's targets.
        names: Parameters to differentiate; None for all trainable ones.
        out: Where the gradients are written, as `PerSample.gradient`; None: new tensors.
    """
    batch = padded_width(batch)
    wanted = trainable(model)
    parameters = {name: p.detach() for name, p in wanted.items() if names is None or name in names}

    def loss_of(parameters: Mapping[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
        logits = functional_call(model, dict(parameters), (read(tokens[None]),), {"use_cache": False}).logits
        return sample_losses(widened(logits), labels[None], reduction)[0]

    with evaluation(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels do not support vmap
        of_each_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0), randomness="error")
        computed, losses = of_each_sample(parameters, batch.input_ids, batch.labels)
    empty = no_targets(batch)
    for name, gradient in computed.items():
        computed[name] = gradient = widened(gradient)
        zeroed(gradient, empty)
        if out is not None:
            out[name].copy_(gradient)
    return PerSample(computed if out is None else out, losses, n_targets(batch.labels))
