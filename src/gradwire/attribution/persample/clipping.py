"""Per-sample clipping (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1).

No per-sample gradient is formed: with c = min(1, C / n) for a gradient of norm n, the gradient of Σ c · loss is the
clipped sum. One pass computes the norms, a second one the clipped sum (Lee and Kifer, "Scaling up Differentially
Private Deep Learning with Fast Per-Example Gradient Clipping", PETS 2021, section 4).
"""

from __future__ import annotations

from torch import Tensor, nn

from gradwire.base.errors import BadInput


def coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """Compute each sample's clipping coefficient min(1, max_norm / norm).

    Args:
        norms: [B]; NaN stays NaN.
        max_norm: C; infinity disables clipping.

    Returns:
        [B], of the same dtype.
    """
    return (max_norm / norms).clamp(max=1.0)


def check_repeatable(model: nn.Module) -> None:
    """Check that two passes over a batch compute the same gradients.

    Raises:
        BadInput: If the model has dropout with p > 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise BadInput(
                f"{name} has dropout {module.p:.0%}: the norms of the first pass would not match the gradients of the "
                "second. Set the model's dropout to 0."
            )
