"""A check before the first collective that all ranks train the same parameters in the same way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import IslandReducer, Reducer, ops
from gradwire.comm.parallel.names import named_parameters


def check_agreement(group: ops.Group, reducer: Reducer | None, parameters: Mapping[str, str], **settings: Any) -> None:
    """Compare settings, the reducer's options and the parameters over the ranks; every rank must call it.

    Args:
        group: The ranks; None is the default group.
        reducer: The reducer; None if there is none.
        parameters: What `parameters_of` says of the model.
        settings: What else must be equal, by the name that the message gives it.

    Raises:
        BadInput: On all ranks, with the first difference and the ranks that have it. Without this check they would
            wait for each other, or take each other's bytes for something else.
    """
    if dist.get_world_size(group) == 1:
        return
    own = {name: shown(value) for name, value in settings.items()} | described(reducer) | dict(parameters)
    found = ops.gather_objects(own, group)
    for rank, other in enumerate(found):
        for key in [*found[0], *other]:
            one, two = found[0].get(key, "nothing"), other.get(key, "nothing")
            if one != two:
                raise BadInput(
                    f"ranks reduce gradients differently: {key} is {one} on rank 0 and {two} on rank {rank}; build the "
                    f"same model and reducer on every rank."
                )


def described(reducer: Reducer | None) -> dict[str, str]:
    """A reducer's options, those of the one inside islands included."""
    if reducer is None:
        return {"reducer": "none"}
    own = {"reducer": type(reducer).__name__, **reducer._options, "algorithm": reducer.algorithm}
    if isinstance(reducer, IslandReducer):
        own |= {f"inside.{name}": value for name, value in described(reducer.inside).items()}
    return own


def parameters_of(model: nn.Module) -> dict[str, str]:
    """The number of parameters, and each one's name, shape and type, by its place."""
    found = [
        f"{name} {list(each.shape)} {str(each.dtype).removeprefix('torch.')}{'' if each.requires_grad else ' frozen'}"
        for name, each in named_parameters(model)
    ]
    return {"parameters": str(len(found)), **{f"parameter {place}": one for place, one in enumerate(found)}}


def shown(value: Any) -> str:
    """A setting as text that is equal on ranks with equal settings: without the address of an object."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
