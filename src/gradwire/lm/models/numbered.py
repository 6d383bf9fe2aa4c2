"""Adam's moments from ``optimizer.pt``, as Hugging Face's Trainer saves them: its parameters have numbers, not names.

torch numbers parameters group by group. `Trainer.create_optimizer` makes two groups, of parameters with and without
weight decay, each in the order of the model; other scripts make one group. An order that gives every parameter moments
of its own shape is taken for the right one, unless another order does so too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.base.errors import BadInput
from gradwire.lm.models.moments import KINDS, Moments

FILE = "optimizer.pt"
NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # as Trainer does


def load(path: Path, model: nn.Module) -> Moments:
    """Load the moments of a model's trainable parameters.

    Args:
        path: The file.
        model: The model, with its adapter if the optimizer was the adapter's.

    Raises:
        BadInput: If the file is damaged, is not of Adam, or its numbers cannot be matched with names.
    """
    groups, state = _read(path)
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
    found: list[dict[int, str]] = []
    for order in orders:
        if [len(group) for group in order] == sizes:
            given = dict(zip(numbers, (name for group in order for name in group), strict=True))
            named = {number: given[number] for number in state}
            fits = all(of[kind].shape == shapes.get(named[number]) for number, of in state.items() for kind in KINDS)
            found += [named] if fits and named not in found else []
    if len(found) != 1:
        reason = "several orders fit" if found else "no order of Trainer or of a single group fits"
        raise BadInput(
            f"{path} numbers {len(numbers)} parameters in groups of {' and '.join(map(str, sizes))}, the model has "
            f"{len(shapes)} trainable ones, and {reason}: save the optimizer's state with names (torch.optim takes "
            "model.named_parameters())."
        )
    return found[0]


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


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Read the groups and the state of each number; the file's code is never executed."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        groups, state = found["param_groups"], found["state"]
        numbers = {number for group in groups for number in group["params"]}
        whole = bool(groups) and state.keys() <= numbers
        tensors = all(isinstance(of[kind], Tensor) for of in state.values() for kind in KINDS if kind in of)
        if not whole or not tensors:
            raise ValueError("no state of numbered parameters")
        return groups, state
    except Exception as error:  # torch raises many types for unreadable files
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{path} is not an optimizer's state ({message}).") from None
