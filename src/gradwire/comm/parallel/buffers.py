"""A warning of statistics that layers collect in the forward pass, which differ between the ranks."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gradwire.comm.parallel.names import inside, unwrapped


def warn_of_statistics(model: nn.Module) -> None:
    """Warn of running statistics, as of BatchNorm, for a strategy that does not synchronise them.

    Only DDP that averages gradients does: it sends rank 0's at the beginning of each forward pass. `nn.SyncBatchNorm`
    computes equal ones.
    """
    names = [
        unwrapped(name)
        for name, module in inside(model).named_modules()
        if isinstance(module, _NormBase)
        and module.running_mean is not None
        and not isinstance(module, nn.SyncBatchNorm)
    ]
    if names:
        warnings.warn(
            f"{len(names)} layers ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}) keep running statistics of "
            f"each rank's samples, which differ between ranks; a saved model has rank 0's. Use "
            f"nn.SyncBatchNorm on GPUs, strategy ddp with averaged gradients, which takes rank 0's everywhere, or a "
            f"norm without statistics.",
            stacklevel=3,
        )
