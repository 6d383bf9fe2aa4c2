"""Per-sample clipping (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1).

No gradient is formed for it: a gradient of norm n counts c = min(1, C / n) times in the gradient of Σ c · loss, so one
pass tells the norms and a second one the clipped sum (Lee and Kifer, "Scaling up Differentially Private Deep Learning
with Fast Per-Example Gradient Clipping", PETS 2021, section 4).
"""

from __future__ import annotations

from torch import Tensor, nn

from gradwire.data.batches import Batch
from gradwire.errors import BadInput
from gradwire.persample.batch import Reduction, sample_losses


def coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """By how much each sample's gradient is to be scaled: 1 where its norm is at most ``max_norm``.

    Args:
        norms: [B]; NaN stays NaN.
        max_norm: C, infinity to clip nothing.

    Returns:
        [B], of the same type.
    """
    return (max_norm / norms).clamp(max=1.0)


def losses(model: nn.Module, batch: Batch, reduction: Reduction = "mean") -> Tensor:
    """Each sample's own loss, [B], differentiable: of what `persample.norms` gives the norms."""
    return sample_losses(model(batch.input_ids, use_cache=False).logits, batch.labels, reduction)


def check_repeatable(model: nn.Module) -> None:
    """See that a second pass has the gradients whose norms the first one told.

    Raises:
        BadInput: If the model drops activations at random.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise BadInput(
                f"{name} drops {module.p:.0%} of its input at random: a gradient would be clipped by another one's "
                "norm. Set the model's dropout to 0."
            )
