"""A model that a framework has wrapped: its parameters by their own names, its blocks, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.torch_internals import compile_held, shards_of

COMPILED = "_orig_mod"  # torch.compile(model) holds the model by this name
INSERTED = f"{COMPILED}.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."
"""Names that torch.compile, FSDP1 and activation checkpointing (or offloading) insert; state dicts omit them too."""


def unwrapped(name: str) -> str:
    """Return a name without what was inserted into it."""
    for inserted in INSERTED:
        name = name.replace(inserted, "")
    return name


def inside(model: nn.Module) -> nn.Module:
    """Return the model that DDP and `torch.compile` hold."""
    model = getattr(model, COMPILED, model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Return the model itself, with every part that `torch.compile` holds compiled in place, as by `Module.compile`.

    FSDP1 would keep the inserted names in its state dicts.
    """
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if hasattr(child, COMPILED):
                setattr(module, name, compiled_in_place(child))
    if not hasattr(model, COMPILED):
        return model
    held: nn.Module = getattr(model, COMPILED)
    compile_held(model, held)
    return held


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters for an optimizer, with their names in the unwrapped model."""
    for name, parameter in inside(model).named_parameters():
        yield unwrapped(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers, with their names in the unwrapped model."""
    for name, buffer in inside(model).named_buffers():
        yield unwrapped(name), buffer


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, by their names in the unwrapped model."""
    return {name: parameter for name, parameter in named_parameters(model) if parameter.requires_grad}


def trainable_shapes(model: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the trainable parameters."""
    return [tuple(parameter.shape) for parameter in model.parameters() if parameter.requires_grad]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules sharded as one, the transformer blocks: the repeated module that holds the most parameters.

    They are the children of an `nn.ModuleList`, or of a `repeats` in another container, that is in no other one, as
    every architecture of transformers has it.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) or repeats(module)]
    inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
    outer = [module for module in lists if id(module) not in inner]
    largest = max(outer, key=lambda each: sum(p.numel() for p in each.parameters()), default=nn.ModuleList())
    return list(largest.children())


def repeats(module: nn.Module) -> bool:
    """Whether a `ModuleDict` or `Sequential` holds modules of one class that are themselves made of modules.

    Those of layers such as `Linear`, or of containers, are not blocks: they have nothing in common but their class.
    """
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleDict | nn.Sequential)
        and len({type(child) for child in children}) == 1
        and not any(isinstance(child, nn.ModuleDict | nn.ModuleList | nn.Sequential) for child in children)
        and all(list(child.children()) for child in children)
    )


def compile_blocks(model: nn.Module) -> None:
    """Compile each of `blocks` in place, before the model is wrapped: their code is the same, and is compiled once.

    What a framework's hooks do stays outside of the compiled code, and parameters keep their names.
    """
    for block in blocks(model):
        block.compile()


def block_sizes(model: nn.Module) -> list[int]:
    """Return the number of elements outside the blocks, then that of each block."""
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks(model)]
    return [sum(parameter.numel() for parameter in model.parameters()) - sum(sizes), *sizes]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, another tensor as it is; both share memory with it."""
    if (shards := shards_of(tensor)) is not None:
        return shards[0].tensor if shards else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """Return where this rank's shard of a tensor begins along its first dimension; 0 of one that is not sharded."""
    if (shards := shards_of(tensor)) is not None:
        return int(shards[0].metadata.shard_offsets[0]) if shards else 0
    if not isinstance(tensor, DTensor):
        return 0
    (dim,) = (dim for dim, placement in enumerate(tensor.placements) if placement == Shard(0))
    mesh = tensor.device_mesh
    return min(mesh.get_local_rank(dim) * -(-tensor.shape[0] // mesh.size(dim)), tensor.shape[0])


def has_gradient(parameter: nn.Parameter) -> bool:
    """Whether an optimizer would use this rank's part of a gradient; one of zeros is that of an unused parameter."""
    return parameter.grad is not None and bool(local(parameter.grad).count_nonzero())
