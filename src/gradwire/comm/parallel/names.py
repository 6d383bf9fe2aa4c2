"""Names of parameters in the model itself: what a framework or `torch.compile` inserts is left out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.torch_internals import compile_held

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
