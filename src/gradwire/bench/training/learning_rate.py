"""The learning rate, a function of the step."""

from __future__ import annotations

import math

import torch

from gradwire.bench.config import Training


def set_learning_rate(optimizer: torch.optim.Optimizer, training: Training, step: int) -> float:
    """Set and return the learning rate of ``step``, a function of the step only, so resuming needs no state."""
    lr = learning_rate(training, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up to ``lr``, then cosine decay to a tenth of it."""
    if step < training.lr_warmup_steps:
        return training.lr * (step + 1) / training.lr_warmup_steps
    done = (step - training.lr_warmup_steps) / max(1, training.steps - training.lr_warmup_steps)
    return training.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
