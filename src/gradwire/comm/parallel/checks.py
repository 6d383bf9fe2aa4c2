"""Checks of a model before a reducer is attached, and of what the ranks have to have in common."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.base.errors import BadInput, listed
from gradwire.base.units import amount
from gradwire.comm.collectives import Reducer, ops
from gradwire.comm.parallel.model import inside, named_parameters, trainable, unwrapped
from gradwire.comm.torch_internals import NormWithStatistics


def check_gradients(model: nn.Module) -> None:
    """Check that a reducer can average all gradients of a model; warn if it loses precision.

    Raises:
        BadInput: If a gradient is complex or sparse: a reducer averages dense vectors of real numbers.
    """
    for name, module in inside(model).named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise BadInput(
                f"{unwrapped(name) or type(module).__name__} has sparse gradients, and a reducer averages dense ones: "
                f"build it with sparse=False."
            )
    trained = trainable(model)
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise BadInput(
                f"{name} is {shown_type(parameter)}, and a reducer averages real gradients: store its real and "
                f"imaginary part (torch.view_as_real), and combine them in forward (torch.view_as_complex)."
            )
    if wide := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
        warnings.warn(
            f"gradients travel as float32 at most, and {len(wide)} parameters are float64 ({wide[0]}, …): their means "
            f"are rounded to float32.",
            stacklevel=3,
        )


def check_has_values(model: nn.Module) -> None:
    """Check that no parameter or buffer of a model is on the meta device: there is nothing to broadcast, or to train.

    Raises:
        BadInput: If one is.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"{name} of {type(model).__name__} is on the meta device and has no values: build the model on the "
                f"CPU, or call model.to_empty(device=...) and set or load its values first. To fill shards only, call "
                f"fully_shard, then to_empty, set or load the values, and then call gradwire.compress_gradients."
            )


# Why: docs/decisions.md, "Ranks compare how they will train".
def check_agreement(group: ops.Group, reducer: Reducer | None, parameters: Mapping[str, str], **settings: Any) -> None:
    """Compare settings, the reducer's options and the parameters over the ranks; every rank must call it.

    Args:
        group: The ranks; None is the default group.
        reducer: The reducer; None if there is none.
        parameters: As from `parameters_of`.
        settings: Further values that must be equal, by their names in the message.

    Raises:
        BadInput: On all ranks, with the first difference and the ranks that have it. Without this check they would
            wait for each other, or take each other's bytes for something else.
    """
    if dist.get_world_size(group) == 1:
        return
    described_here = {name: shown(value) for name, value in settings.items()} | described(reducer) | dict(parameters)
    members, by_rank = ops.ranks_of(group), ops.gather_objects(described_here, group)
    for rank, described_there in zip(members, by_rank, strict=True):
        for key in [*by_rank[0], *described_there]:
            here, there = by_rank[0].get(key, "nothing"), described_there.get(key, "nothing")
            if here != there:
                raise BadInput(
                    f"ranks reduce gradients differently: {key} is {here} on rank {members[0]} and {there} on rank "
                    f"{rank}; build the same model and reducer on every rank."
                )


def described(reducer: Reducer | None) -> dict[str, str]:
    """A reducer's options, those of its parts included."""
    if reducer is None:
        return {"reducer": "none"}
    options = {"reducer": type(reducer).__name__, **reducer._options, "algorithm": reducer.algorithm}
    for part, joined in reducer.parts.items():
        options |= {f"{part}.{name}": value for name, value in described(joined).items()}
    return options


def parameters_of(model: nn.Module) -> dict[str, str]:
    """The number of parameters, and each one's name, shape and type, by its place."""
    described = [
        f"{name} {list(parameter.shape)} {shown_type(parameter)}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in named_parameters(model)
    ]
    return {"parameters": str(len(described)), **{f"parameter {place}": text for place, text in enumerate(described)}}


def shown(value: Any) -> str:
    """A setting as text that is equal on ranks with equal settings: without the address of an object."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def shown_type(parameter: nn.Parameter) -> str:
    """Return a parameter's type as text."""
    return str(parameter.dtype).removeprefix("torch.")


def warn_of_statistics(model: nn.Module) -> None:
    """Warn of running statistics, as of BatchNorm, for a strategy that does not synchronise them.

    Only DDP that averages gradients does: it sends rank 0's at the beginning of each forward pass. `nn.SyncBatchNorm`
    computes equal ones.
    """
    names = [
        unwrapped(name)
        for name, module in inside(model).named_modules()
        if isinstance(module, NormWithStatistics)
        and module.running_mean is not None
        and not isinstance(module, nn.SyncBatchNorm)
    ]
    if names:
        warnings.warn(
            f"running statistics of {amount(len(names), 'layer')} ({listed(names)}) are of each rank's samples and "
            f"differ between ranks; a saved model has rank 0's. Use nn.SyncBatchNorm on GPUs, strategy ddp with "
            f"averaged gradients, which takes rank 0's everywhere, or a norm without statistics.",
            stacklevel=3,
        )
