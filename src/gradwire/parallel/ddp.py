"""DistributedDataParallel: replicas, and an all-reduce of the gradients during the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Layout, Reducer
from gradwire.parallel.strategy import Strategy


class DDP(Strategy):
    """Replicated parameters; the reducer is DDP's communication hook.

    Buckets are collected and reduced together with the last one. The hook blocks, so nothing would overlap with the
    backward pass anyway; this needs fewer collectives; and the result does not depend on DDP's bucket plan, which
    changes after the first step, and again after a resumption.
    """

    kind = "all_reduce"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the whole model."""
        devices = None if self.device.type == "cpu" else [self.device]
        return DistributedDataParallel(model, device_ids=devices, process_group=self.group)

    def hook(self, wrapped: nn.Module, reducer: Reducer) -> None:
        """Register a hook that unpacks the buckets, reduces them and writes the mean back."""
        assert isinstance(wrapped, DistributedDataParallel)
        names = {id(p): name for name, p in wrapped.module.named_parameters() if p.requires_grad}
        shapes = [(name, tuple(p.shape)) for name, p in wrapped.module.named_parameters() if p.requires_grad]
        layout = Layout.dim0(shapes, reducer.world)
        gradients: dict[str, Tensor] = {}
        waiting: list[tuple[torch.futures.Future[Tensor], Tensor]] = []

        # DDP requires the name of the second argument, and rejects string annotations, as these become.
        def reduce_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                gradients[names[id(parameter)]] = gradient
            reduced: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices_of(self.device))
            waiting.append((reduced, bucket.buffer()))
            if bucket.is_last():
                layout.unpack(reducer.all_reduce(layout.pack(gradients), layout), gradients)
                for future, buffer in waiting:
                    future.set_result(buffer)
                waiting.clear()
                gradients.clear()
            return reduced

        reduce_bucket.__annotations__.clear()
        wrapped.register_comm_hook(None, reduce_bucket)

    def accumulation(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
        """Use `no_sync` except for the last micro-batch."""
        assert isinstance(wrapped, DistributedDataParallel)
        return nullcontext() if last else wrapped.no_sync()


def devices_of(device: torch.device) -> list[torch.device] | None:
    """Return the ``devices`` of a future that will hold a tensor on ``device``."""
    return None if device.type == "cpu" else [device]
