"""Methods of computing per-sample gradients: which of them a model allows, and whether one agrees with the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gradwire.attribution.collect.fused import fused_rows, looped_rows
from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.persample.batch import PerSample, note, out_of_memory
from gradwire.base.errors import BadInput, GradwireError, NonFiniteGradient, RunFault
from gradwire.lm.data.batches import Batch
from gradwire.lm.models import saved

if TYPE_CHECKING:
    from gradwire.attribution.collect.rows import RowMaker

CHECKED = 1e-3  # largest deviation from the loop, relative to the gradient's norm; float32 with TF32 allowed

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
        raise BadInput(f"--method hooks does not support the layer of {', '.join(unknown[:3])}: use vmap or loop.")
    if method != "auto":
        return method
    if unknown:
        print(f"gradwire: --method auto uses vmap: hooks do not support the layer of {unknown[0]}", file=sys.stderr)
        return "vmap"
    return "hooks"


def settle(maker: RowMaker, batch: Batch) -> None:
    """Check that the method of ``maker`` agrees with the loop; with ``auto``, give it the next one that does.

    Raises:
        BadInput: If the method does not support the model.
        NonFiniteGradient: If a sample's gradient is not finite.
        RunFault: If the method computes a different gradient.
    """
    while maker.method != "loop":
        try:
            _compare(maker, batch)
            break
        except Exception as error:
            if out_of_memory(error) or isinstance(error, NonFiniteGradient):
                raise
            if maker.provenance.method != "auto" or maker.sharded:
                if isinstance(error, GradwireError):
                    raise
                raise BadInput(f"--method {maker.method} does not support this model, use loop: {error}") from error
            failed, maker.method = maker.method, FALLBACKS[maker.method]
            note(f"--method auto uses {maker.method}, because {failed} fails: {error}")


def _compare(maker: RowMaker, batch: Batch) -> None:
    """Compare rows if they are projected during the backward pass, else gradients."""
    loss = maker.provenance.loss
    if maker.fused:
        wanted = looped_rows(maker.model, batch, maker.parts, maker.dims, loss, maker.sharded)
        made = fused_rows(maker.model, batch, maker.parts, maker.dims, loss).rows
    else:
        wanted = {0: _flattened(loop.gradients(maker.model, batch, loss))}
        made = {0: _flattened(METHODS[maker.method](maker.model, batch, loss))}
    for dim, rows in made.items():
        norms, deviations = (of.flatten(1).norm(dim=1).tolist() for of in (wanted[dim], rows - wanted[dim]))
        for id_, norm, deviation in zip(batch.sample_id, norms, deviations, strict=True):
            if not norm < float("inf"):
                raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite.")
            if not deviation <= CHECKED * norm:
                raise RunFault(
                    f"--method {maker.method} computes a different gradient of sample {id_!r} than the loop: "
                    f"deviation {deviation:.1e}, norm {norm:.1e}. Use --method vmap or loop."
                )


def _flattened(gradients: PerSample) -> Tensor:
    """Concatenate the gradients of all parameters into rows [B, n]."""
    return torch.cat([gradient.flatten(1) for gradient in gradients.gradient.values()], dim=1)
