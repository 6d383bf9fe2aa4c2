"""fully_shard (FSDP2): each parameter is cut along its first dimension, and reduced in groups of one unit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from gradwire.collectives import Layout, Reducer
from gradwire.errors import BadInput
from gradwire.parallel.strategy import Strategy, units

NEEDED = ("set_custom_reduce_scatter", "set_force_sum_reduction_for_comms", "set_gradient_divide_factor")


class FSDP2(Strategy):
    """Sharded parameters; the reducer is each unit's reduce-scatter, and all of the averaging is its own."""

    kind = "reduce_scatter"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard each unit, then what is left of the model; in place."""
        mesh = self.mesh()
        for unit in units(model):
            fully_shard(unit, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Replace the reduce-scatter of every group of parameters."""
        missing = [setter for setter in NEEDED if not hasattr(FSDPModule, setter)]
        if missing:
            raise BadInput(f"strategy fsdp2 with a compressor needs FSDPModule.{missing[0]}: take torch 2.11 or later.")
        names = {id(parameter): name for name, parameter in wrapped.named_parameters()}
        for module in wrapped.modules():
            if isinstance(module, FSDPModule) and (shapes := group_shapes(module, names)):
                # The framework shall neither divide nor average: it hands over and takes back what is summed once.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
                module.set_custom_reduce_scatter(ReduceScatter(reducer, Layout.dim0(shapes, reducer.world)))

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Reduce in the last micro-batch only: gradients stay whole until then."""
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_requires_gradient_sync(last)
        return nullcontext()


class ReduceScatter:
    """The form in which FSDP2 takes a reduce-scatter; it calls by the names of the arguments."""

    def __init__(self, reducer: Reducer, layout: Layout) -> None:
        self.reducer = reducer
        self.layout = layout

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for the gradients that go in, or for the shard that comes out."""
        return torch.empty(size, dtype=dtype, device=device)

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


def group_shapes(module: nn.Module, names: dict[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of the parameters that a module's reduce-scatter carries, in buffer order.

    The order is the framework's own (children before own parameters), so it is read from there.

    Raises:
        BadInput: If this version of torch keeps its parameters elsewhere.
    """
    try:
        group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
        parameters = [] if group is None else [member.sharded_param for member in group.fsdp_params]
    except AttributeError as error:
        raise BadInput(f"strategy fsdp2 with a compressor does not know this version of torch ({error}).") from error
    return [(names[id(p)], tuple(p.shape)) for p in parameters if p.requires_grad]
