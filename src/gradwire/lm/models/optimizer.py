"""Adam's moments of a saved model: ``optimizer.safetensors``, by parameter name, or a Trainer's ``optimizer.pt``.

Parameters in ``optimizer.pt`` have numbers, not names: torch numbers them group by group. `Trainer.create_optimizer`
makes two groups, of parameters with and without weight decay, each in the order of the model; other scripts make one
group. An order that gives every parameter moments of its shape is taken for the right one, unless another order
does so too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.base import files
from gradwire.base.errors import BadInput

KINDS = ("exp_avg", "exp_avg_sq")
FILE = "optimizer.safetensors"
NUMBERED = "optimizer.pt"
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # as Trainer does


class Moments(NamedTuple):
    """Adam's state of each parameter.

    Attributes:
        path: The file.
        exp_avg: First moments, by parameter name, read from the file when they are used.
        exp_avg_sq: Second moments, likewise.
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


class Read(Mapping[str, Tensor]):
    """The moments of one kind in an open file of safetensors, by parameter name; each is read when it is asked for."""

    def __init__(self, stream: Any, kind: str) -> None:
        self._stream, self._kind = stream, kind
        self._names = [key.partition("/")[2] for key in stream.keys() if key.startswith(f"{kind}/")]  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._stream.get_tensor(f"{self._kind}/{name}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter's moments, without reading them."""
        return tuple(self._stream.get_slice(f"{self._kind}/{name}").get_shape())

    def floating(self, name: str) -> bool:
        """Whether a parameter's moments are floating-point numbers."""
        return "F" in str(self._stream.get_slice(f"{self._kind}/{name}").get_dtype())


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
    return _load(path) if path.name == FILE else _load_numbered(path, model)


def _file(folder: Path) -> Path:
    """The file of a folder's moments.

    Raises:
        BadInput: If there is none.
    """
    for name in (FILE, NUMBERED):
        if (folder / name).is_file():
            return folder / name
    raise BadInput(f"{folder} has no {FILE} or {NUMBERED}: gradients of type adam need the moments from training.")


def _load(path: Path) -> Moments:
    from safetensors import SafetensorError, safe_open

    try:
        stream = safe_open(path, framework="pt")
        settings = json.loads((stream.metadata() or {})["adam"])
        first, second = (Read(stream, kind) for kind in KINDS)
        same = {*first} == {*second}
        if not same or not all(first.shape(name) == second.shape(name) and second.floating(name) for name in first):
            raise ValueError("first and second moments do not match")
        beta1, beta2 = map(float, settings["betas"])
        step = {name: int(settings["step"][name]) for name in first}
        return Moments(path, first, second, step, (beta1, beta2), float(settings["eps"]))
    except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
        raise BadInput(f"{path} is unusable: {type(error).__name__}: {error}") from error


def _load_numbered(path: Path, model: nn.Module) -> Moments:
    """Load the moments of a model's trainable parameters.

    Args:
        path: The file.
        model: The model, with its adapter if the optimizer was the adapter's.

    Raises:
        BadInput: If the file is damaged, is not of Adam, or its numbers cannot be matched with names.
    """
    groups, state = _read_numbered(path)
    first = groups[0]
    if "betas" not in first or not all(all(kind in of for kind in KINDS) for of in state.values()):
        raise BadInput(f"{path} has no exp_avg and exp_avg_sq of every trained parameter: it is not the state of Adam.")
    if any((group.get("betas"), group.get("eps")) != (first["betas"], first["eps"]) for group in groups):
        raise BadInput(f"{path} has groups of different betas or eps, which a gradient of type adam cannot have.")
    named = {name: state[number] for number, name in names(path, groups, state, model).items()}
    first_moments, second_moments = ({name: of[kind].float() for name, of in named.items()} for kind in KINDS)
    beta1, beta2 = map(float, first["betas"])
    step = {name: int(of["step"]) for name, of in named.items()}
    return Moments(path, first_moments, second_moments, step, (beta1, beta2), float(first["eps"]))


def names(
    path: Path, groups: Sequence[Mapping[str, Any]], state: Mapping[int, Mapping[str, Any]], model: nn.Module
) -> dict[int, str]:
    """Return the name of each number that has a state.

    Raises:
        BadInput: If no known order fits the model, or several do.
    """
    shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
    sizes = [len(group["params"]) for group in groups]
    numbers = [number for group in groups for number in group["params"]]
    if all("param_names" in group for group in groups):  # torch.optim was given names
        orders = [[group["param_names"] for group in groups]]
    else:
        orders = [*_orders(model, [*shapes])]
    matches: list[dict[int, str]] = []
    for order in orders:
        if [len(group) for group in order] == sizes:
            given = dict(zip(numbers, (name for group in order for name in group), strict=True))
            named = {number: given[number] for number in state}
            fits = all(of[kind].shape == shapes.get(named[number]) for number, of in state.items() for kind in KINDS)
            matches += [named] if fits and named not in matches else []
    if len(matches) != 1:
        reason = "several orders fit" if matches else "no order of Trainer or of a single group fits"
        raise BadInput(
            f"{path} numbers {len(numbers)} parameters in groups of {' and '.join(map(str, sizes))}, the model has "
            f"{len(shapes)} trainable ones, and {reason}: save the optimizer's state with names (torch.optim takes "
            "model.named_parameters())."
        )
    return matches[0]


def _orders(model: nn.Module, trainable: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield the known orders of a model's trainable parameters, in groups."""
    yield [[*trainable]]
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    decayed: Sequence[Callable[[str], bool]] = (
        lambda name: name not in norms and not NO_DECAY.search(name.lower()),
        lambda name: name not in norms and "bias" not in name,  # Trainer's earlier rule, of models with LayerNorm
        lambda name: name in matrices,  # the same with other norms, and many scripts
    )
    for chosen in decayed:
        yield [[name for name in trainable if chosen(name)], [name for name in trainable if not chosen(name)]]


def _read_numbered(path: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Read the groups and the state of each number; the file's code is never executed."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        groups, state = saved["param_groups"], saved["state"]
        numbers = {number for group in groups for number in group["params"]}
        whole = bool(groups) and state.keys() <= numbers
        tensors = all(isinstance(of[kind], Tensor) for of in state.values() for kind in KINDS if kind in of)
        if not whole or not tensors:
            raise ValueError("no state of numbered parameters")
        return groups, state
    except Exception as error:  # torch raises many types for unreadable files
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{path} is not an optimizer's state ({message}).") from None
