"""Adam's moments of a saved model: ``optimizer.safetensors``, by parameter name, or a Trainer's ``optimizer.pt``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gradwire.base import files
from gradwire.base.errors import BadInput
from gradwire.lm.models import numbered
from gradwire.lm.models.moments import KINDS, Moments

FILE = "optimizer.safetensors"


def save(state: Mapping[str, Any], folder: Path) -> None:
    """Write the moments of a full optimizer state (from ``comm.parallel.full_optimizer_state``) into ``folder``.

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
    return files.sha256_file(_file(folder))


def load(folder: Path, model: nn.Module) -> Moments:
    """Load a saved model's moments.

    Args:
        folder: The folder of ``optimizer.safetensors`` or, without one, of ``optimizer.pt``.
        model: The model, whose trainable parameters give the numbers in ``optimizer.pt`` their names.

    Raises:
        BadInput: If they are missing, damaged or not as they were saved, or do not belong to the model.
    """
    path = _file(folder)
    files.check_sums(folder, (path.name,))
    return _load(path) if path.name == FILE else numbered.load(path, model)


def _file(folder: Path) -> Path:
    """The file of a folder's moments.

    Raises:
        BadInput: If there is none.
    """
    for name in (FILE, numbered.FILE):
        if (folder / name).is_file():
            return folder / name
    raise BadInput(f"{folder} has no {FILE} or {numbered.FILE}: gradients of type adam need the moments from training.")


def _load(path: Path) -> Moments:
    from safetensors import SafetensorError, safe_open

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
