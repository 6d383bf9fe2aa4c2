"""fully_shard (FSDP2): each parameter is cut along its first dimension, and reduced in groups of one unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from gradwire.collectives import Layout, Reducer
from gradwire.collectives.ops import Group
from gradwire.collectives.parameters import ParameterGather
from gradwire.errors import BadInput
from gradwire.parallel.strategy import Strategy, units

NEEDED = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")


class FSDP2(Strategy):
    """Sharded parameters; the reducer is each unit's reduce-scatter, and all of the averaging is its own.

    Args:
        group: The ranks; None is the default group.
        device: Where the model computes.
        param_compress: How parameters travel to the ranks that compute with them: ``none`` (as they are), ``bf16`` or
            ``int8``. The shards stay exact, and so do the weights in evaluation mode. With one rank nothing travels.
    """

    kind = "reduce_scatter"

    def __init__(self, group: Group, device: torch.device, *, param_compress: str = "none") -> None:
        super().__init__(group, device)
        self.gather = None if param_compress == "none" else ParameterGather(param_compress, group)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard each unit, then what is left of the model; in place."""
        mesh = self.mesh()
        for unit in units(model):
            fully_shard(unit, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if self.gather is not None:
            compress_parameters(wrapped, self.gather)
        return wrapped

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the reduce-scatter of every group of parameters."""
        check_offered("a compressor", *NEEDED)
        for module, parameters in groups(wrapped):
            if shapes := [(name, tuple(p.shape)) for name, p in parameters.items() if p.requires_grad]:
                # The framework shall neither divide nor average: it hands over and takes back what is summed once.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.set_custom_reduce_scatter(ReduceScatter(reducer, Layout.dim0(shapes, reducer.world)))

    def reduced_numel(self, wrapped: nn.Module) -> int:
        """Rows are padded until the ranks divide them."""
        shapes = [(name, tuple(p.shape)) for name, p in wrapped.named_parameters() if p.requires_grad]
        return Layout.dim0(shapes, dist.get_world_size(self.group)).numel

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Reduce in the last micro-batch only: gradients stay whole until then."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(last)
        return nullcontext()


class Collective:
    """What FSDP2 wants of any collective that replaces its own; it calls by the names of the arguments."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for what goes in or comes out."""
        return torch.empty(size, dtype=dtype, device=device)


class ReduceScatter(Collective):
    """The form in which FSDP2 takes a reduce-scatter."""

    def __init__(self, reducer: Reducer, layout: Layout) -> None:
        self.reducer = reducer
        self.layout = layout

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this rank's row of the mean; ``op`` says sum, because FSDP2 was told to divide nothing."""
        output_tensor.copy_(self.reducer.reduce_scatter(input_tensor, self.layout))


class AllGather(Collective):
    """The form in which FSDP2 takes an all-gather.

    The layout has frozen parameters too: unlike gradients, they travel.
    """

    def __init__(self, gather: ParameterGather, layout: Layout, module: nn.Module) -> None:
        self.gather = gather
        self.layout = layout
        self.module = module

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Fill all rows; this rank's is there already, because the input is a view of it."""
        self.gather(output_tensor, self.layout, exact=not self.module.training)


def compress_parameters(wrapped: nn.Module, gather: ParameterGather) -> None:
    """Replace the all-gather of every group of parameters.

    Raises:
        BadInput: If a parameter is not float32, or this version of torch does not offer it.
    """
    check_offered("param_compress", "set_custom_all_gather")
    for name, parameter in wrapped.named_parameters():
        if parameter.dtype != torch.float32:
            raise BadInput(f"param_compress encodes float32 parameters, and {name} is {parameter.dtype}; leave it out.")
    for module, parameters in groups(wrapped):
        layout = Layout.dim0([(name, tuple(p.shape)) for name, p in parameters.items()], gather.ranks.world)
        module.set_custom_all_gather(AllGather(gather, layout, module))
    wrapped.register_forward_pre_hook(reshard_evaluated, prepend=True)  # before the framework's own
    wrapped.register_forward_hook(reshard_evaluated)


def reshard_evaluated(module: nn.Module, *_: object) -> None:
    """Let the root gather its weights anew around an evaluation.

    It keeps them from a forward pass to the next backward pass, so an evaluation would compute with those of training,
    or training with the exact ones.
    """
    assert isinstance(module, FSDPModule)
    if not module.training:
        module.reshard()


def check_offered(what: str, *setters: str) -> None:
    """Make sure that FSDP2 has these setters.

    Raises:
        BadInput: If this version of torch does not.
    """
    missing = [setter for setter in setters if not hasattr(FSDPModule, setter)]
    if missing:
        raise BadInput(f"strategy fsdp2 with {what} needs FSDPModule.{missing[0]}: take torch 2.11 or later.")


def groups(wrapped: nn.Module) -> Iterator[tuple[FSDPModule, dict[str, nn.Parameter]]]:
    """Every module that has a group of parameters, and these by name, in buffer order.

    The order is the framework's own (children before own parameters), so it is read from there.

    Raises:
        BadInput: If this version of torch keeps its parameters elsewhere.
    """
    names = {id(parameter): name for name, parameter in wrapped.named_parameters()}
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            try:
                group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
                members = [] if group is None else [member.sharded_param for member in group.fsdp_params]
            except AttributeError as error:
                raise BadInput(f"our strategy fsdp2 does not know this version of torch ({error}).") from error
            if members:
                yield module, {names[id(parameter)]: parameter for parameter in members}
