"""Adam's moments of a saved model: ``optimizer.safetensors``, keyed by parameter name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gradwire import files
from gradwire.errors import BadInput

FILE = "optimizer.safetensors"
KINDS = ("exp_avg", "exp_avg_sq")


class Moments(NamedTuple):
    """Adam's state of each parameter.

    Attributes:
        path: The file.
        exp_avg: First moments, by parameter name.
        exp_avg_sq: Second moments, by parameter name.
        step: Completed steps, by parameter name.
        betas: β₁ and β₂, shared by all parameters.
        eps: ε, shared by all parameters.
    """

    path: Path
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]
    step: Mapping[str, int]
    betas: tuple[float, float]
    eps: float


def save(state: Mapping[str, Any], folder: Path) -> None:
    """Write the moments of a full optimizer state (from ``parallel.full_optimizer_state``) into ``folder``.

    Parameters without moments, which were never updated or not by Adam, are omitted; without any there is no file.
    """
    from safetensors.torch import save_file

    trained = {name: of for name, of in state["state"].items() if all(kind in of for kind in KINDS)}
    group = next((group for group in state["param_groups"] if "betas" in group), None)
    if group is None:
        return
    settings = {
        "step": {name: int(of["step"]) for name, of in trained.items()},
        "betas": list(group["betas"]),
        "eps": group["eps"],
    }
    tensors = {f"{kind}/{name}": of[kind].float().cpu().contiguous() for name, of in trained.items() for kind in KINDS}
    save_file(tensors, folder / FILE, metadata={"adam": json.dumps(settings)})


def digest(folder: Path) -> str:
    """A digest of a saved model's moments, in hex.

    Raises:
        BadInput: If the file is missing.
    """
    if not (folder / FILE).is_file():
        raise BadInput(f"{folder} has no {FILE}: gradients of type adam need the moments from training.")
    return files.sha256_file(folder / FILE)


def load(folder: Path) -> Moments:
    """Load a saved model's moments.

    Raises:
        BadInput: If they are missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.is_file():
        raise BadInput(f"{path} is missing.")
    try:
        with safe_open(path, framework="pt") as stream:
            settings = json.loads((stream.metadata() or {})["adam"])
            found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
            for key in stream.keys():  # noqa: SIM118  # not a mapping
                kind, _, name = key.partition("/")
                found[kind][name] = stream.get_tensor(key)
        first, second = (found[kind] for kind in KINDS)
        alike = all(first[name].shape == second[name].shape and second[name].is_floating_point() for name in first)
        if first.keys() != second.keys() or not alike:
            raise ValueError("first and second moments do not match")
        beta1, beta2 = map(float, settings["betas"])
        step = {name: int(settings["step"][name]) for name in first}
        return Moments(path, first, second, step, (beta1, beta2), float(settings["eps"]))
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is unusable: {type(error).__name__}: {error}") from error
