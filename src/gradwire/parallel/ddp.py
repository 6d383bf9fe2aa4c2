"""DistributedDataParallel: replicas, and an all-reduce of each gradient bucket during backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Layout, Reducer
from gradwire.parallel.strategy import Strategy


class DDP(Strategy):
    """Replicated parameters; the reducer is DDP's communication hook.

    DDP rebuilds its buckets after the first step. The layout of a bucket therefore follows from the parameters that it
    holds, not from its index.
    """

    kind = "all_reduce"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the whole model."""
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(model, device_ids=devices, process_group=self.group)

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Register a hook that takes each bucket apart, reduces it and puts the mean back."""
        assert isinstance(wrapped, DistributedDataParallel)
        names = {id(parameter): name for name, parameter in wrapped.module.named_parameters()}

        @cache
        def layout_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Layout:
            return Layout.dim0(shapes, reducer.world)

        # DDP insists on the name of the second argument, and refuses annotations that are strings, as these become.
        def reduce_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            parameters = zip(bucket.parameters(), bucket.gradients(), strict=True)
            gradients = {names[id(parameter)]: gradient for parameter, gradient in parameters}
            layout = layout_of(tuple((name, tuple(gradient.shape)) for name, gradient in gradients.items()))
            layout.unpack(reducer.all_reduce(layout.pack(gradients), layout), gradients)
            reduced: torch.futures.Future[Tensor] = torch.futures.Future()
            reduced.set_result(bucket.buffer())
            return reduced

        reduce_bucket.__annotations__.clear()
        wrapped.register_comm_hook(None, reduce_bucket)

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """`no_sync` but for the last micro-batch."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()
