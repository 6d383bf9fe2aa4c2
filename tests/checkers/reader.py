"""Names that a reader of a page has already; `test_page_code.names` makes those of blocks that run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer

import gradwire

gw = gradwire
model: nn.Module
ddp: DistributedDataParallel
optimizer: Optimizer
compression: gradwire.Compression
scaler: torch.amp.GradScaler
batch: Tensor
batches: list[Tensor]
inputs: Tensor
targets: Tensor
data: list[Tensor]
loader: list[tuple[Tensor, Tensor]]
loss_of: Callable[[Tensor], Tensor]
losses_of: Callable[[Tensor, Tensor], Tensor]
checkpoint: dict[str, Any]
folder: Path
trainer: Trainer
number: int
batch_of: Callable[[int, int], Tensor]
warmup: Callable[[int], float]
config: Any
self: Any
