"""EK-FAC: gradients under a Kronecker-factored curvature H of the loss; gradient type ``ekfac``.

George et al., "Fast Approximate Natural Gradient Descent in a Kronecker-factored Eigenbasis" (NeurIPS 2018); for the
influence of samples Grosse et al., "Studying Large Language Model Generalization with Influence Functions" (2023,
section 2.2). A matrix [rows, columns] that multiplies tokens has the gradient G = sum over tokens of ``left`` x
``right``. U and V are the eigenvectors of the second moments of ``left`` and ``right``, and M the mean over samples of
(Uᵀ G V)², elementwise. The type is

    H^-1/2 G = U [Uᵀ G V / sqrt(M + damping · mean(M))] Vᵀ,

so inner products of two rows are gᵀ H⁻¹ g'. Projection keeps them on average, with a variance that grows with both
norms: with H⁻¹ on one side alone, that side's norm is huge and the products of projected rows are noise.

Gradients are those of the labels (the empirical Fisher matrix). Sides of ids, or of more than `WIDEST` entries, keep
their own basis, and so do vectors: there M is the second moment of each entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.attribution.persample import hooks
from gradwire.attribution.persample.batch import PerSample, Reduction, trainable
from gradwire.attribution.persample.layer_factors import LayerFactor, OuterProduct
from gradwire.base import files
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import Batch

FILE = "ekfac.safetensors"
WIDEST = 8192  # entries of a side whose eigenvectors are computed
FLOOR = 1e-8  # of the mean M over all parameters: what is smaller is rounding noise of a gradient that is 0
SIDES = ("left", "right")


# Why: docs/decisions.md, "EK-FAC is a gradient type".
@dataclass(frozen=True)
class EKFAC:
    """H^-1/2 of a model; a `types.GradientType`.

    Attributes:
        bases: U (``left``) and V (``right``) by side and parameter name, float32; absent where a side keeps its basis.
        moments: M by parameter name, in the order of the rows' columns, float32 of the parameter's shape.
        damping: In units of a parameter's mean M.
        device: Device of the rows.
    """

    bases: Mapping[tuple[str, str], Tensor]
    moments: Mapping[str, Tensor]
    damping: float
    device: torch.device

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply gradients [samples, n] by H^-1/2, in place."""
        total = sum(float(moment.double().sum()) for moment in self.moments.values())
        floor = FLOOR * total / sum(moment.numel() for moment in self.moments.values())
        parts = rows.split([moment.numel() for moment in self.moments.values()], 1)
        for columns, (name, moment) in zip(parts, self.moments.items(), strict=True):
            inside = self.rotated(name, columns.unflatten(1, moment.shape))
            shift = max(self.damping * float(moment.double().mean()), floor)
            inside = inside / (moment.to(self.device) + shift).sqrt() if shift else torch.zeros_like(inside)
            columns.copy_(self.rotated(name, inside, back=True).flatten(1))
        return rows

    def rotated(self, name: str, gradient: Tensor, *, back: bool = False) -> Tensor:
        """Return UᵀGV of a parameter's gradients G [samples, *shape], or UGVᵀ."""
        left, right = (self.bases.get((side, name)) for side in SIDES)
        if left is not None:
            gradient = (left if back else left.T).to(gradient.device) @ gradient
        if right is not None:
            gradient = gradient @ (right.T if back else right).to(gradient.device)
        return gradient


def factored(
    model: nn.Module,
    batches: Callable[[], Iterable[Batch]],
    gradients: Callable[[Batch], PerSample],
    reduction: Reduction,
    device: torch.device,
) -> EKFAC:
    """Compute the factors of a model, undamped, in two passes over the samples.

    Args:
        model: A causal language model.
        batches: The samples; called once per pass.
        gradients: Computes their gradients.
        reduction: How a sample's loss reduces over its targets.
        device: The model's device.
    """
    sides = _sides(model, batches(), reduction)
    bases = {key: torch.linalg.eigh(moment)[1].float() for key, moment in sides.items()}
    shapes = {name: parameter.shape for name, parameter in trainable(model).items()}
    moments = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
    basis, samples = EKFAC(bases, moments, 0.0, device), 0
    for batch in batches():
        computed = gradients(batch)
        samples += len(batch.sample_id)
        for name, gradient in computed.gradient.items():
            moments[name] += basis.rotated(name, gradient).double().square().sum(0)
    return EKFAC(bases, {name: (moment / samples).float() for name, moment in moments.items()}, 0.0, device)


def _sides(model: nn.Module, batches: Iterable[Batch], reduction: Reduction) -> dict[tuple[str, str], Tensor]:
    """Return the second moments of both sides of each matrix, summed over tokens with a gradient and uses."""
    sums: dict[tuple[str, str], Tensor] = {}
    kept: set[tuple[str, str]] = set()  # sides that keep their basis

    def take(name: str, use: LayerFactor, last: bool) -> None:
        if not isinstance(use, OuterProduct):
            kept.update((side, name) for side in SIDES)
            return
        left, right = use.left, use.right.flatten(0, 1)
        valid = right.ne(0).any(1) if use.one_hot else right.ne(0).any(1) & left.flatten(0, 1).ne(0).any(1)
        for side, values in (("left", None if use.one_hot else left.flatten(0, 1)), ("right", right)):
            if values is None or values.shape[1] > WIDEST:
                kept.add((side, name))
            else:
                tokens = values[valid].double()
                sums[side, name] = sums.get((side, name), 0) + tokens.T @ tokens

    for batch in batches:
        hooks.backward(model, batch, take, reduction)
    return {key: moment for key, moment in sums.items() if key not in kept}


def save(factors: EKFAC, damping: float, folder: Path, made_of: Mapping[str, Any]) -> None:
    """Write factors with their damping into ``folder``, and what they were made of."""
    from safetensors.torch import save_file

    tensors = {f"{side}/{name}": basis for (side, name), basis in factors.bases.items()}
    tensors |= {f"moment/{name}": moment for name, moment in factors.moments.items()}
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.dumps({"damping": damping, **made_of})
    with files.atomic_write(folder / FILE) as path:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, path, {"ekfac": settings})
    files.write_sums(folder, (FILE,))


def digest(folder: Path) -> str:
    """A digest of the factors in a folder, in hex.

    Raises:
        BadInput: If the file is missing.
    """
    if not (folder / FILE).is_file():
        raise BadInput(
            f"{folder} has no {FILE}: make it with `gradwire grads factors`, and pass it as --optimizer_dir."
        )
    return files.sha256_file(folder / FILE)


def load(
    folder: Path,
    model_digest: str,
    loss: Reduction,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    adapter: str | dict[str, int] | None = None,
) -> EKFAC:
    """Load the factors of a model, or of its LoRA adapter.

    Args:
        folder: Their folder.
        model_digest: The model's digest.
        loss: How the rows' losses reduce over a sample's targets.
        shapes: Its trainable parameters, in the order of the rows' columns.
        device: Device of the rows.
        adapter: The adapter's digest, or what a new one is made from; None: the model itself.

    Raises:
        BadInput: If they are missing, damaged, or of another model, adapter, modules or loss.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        raise BadInput(f"{path} is missing.")
    files.check_sums(folder, (FILE,))
    try:
        with safe_open(path, framework="pt") as stream:
            settings = json.loads((stream.metadata() or {})["ekfac"])
            tensors = {key.partition("/")[::2]: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
        damping, of_loss = float(settings["damping"]), settings["loss"]
        made_of = settings["model_digest"], settings.get("lora")
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is unusable: {type(error).__name__}: {error}") from error
    moments = {name: tensors[side, name] for side, name in tensors if side == "moment"}
    if made_of != (model_digest, adapter) or {name: tuple(moment.shape) for name, moment in moments.items()} != shapes:
        raise BadInput(
            f"{path} has the factors of another model, LoRA adapter or modules: run `gradwire grads factors` with the "
            "same --model_dir, --lora_dir and --modules."
        )
    if of_loss != loss:
        raise BadInput(f"{path} has the factors of the {of_loss} of a sample's losses: collect with --loss {of_loss}.")
    moments = {name: moments[name] for name in shapes}  # in the order of the columns
    return EKFAC({key: basis for key, basis in tensors.items() if key[0] in SIDES}, moments, damping, device)
