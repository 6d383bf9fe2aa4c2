"""Muon: the momentum of a hidden matrix, orthogonalized, is its step; AdamW takes the other parameters' steps.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the step scaled to AdamW's root
mean square, 0.2 sqrt(max(rows, columns)), as in Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982,
2025). So both kinds of parameters have one learning rate. The numbers are those of `torch.optim.Muon` with
``adjust_lr_fn="match_rms_adamw"``, which older versions of torch do not have.

Of a matrix that FSDP2 shards, every rank gathers the momentum, in bf16 as it is orthogonalized anyway, and applies its
own rows of the step: the numbers are those without shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from gradwire.base.errors import BadInput
from gradwire.base.machine import multiplies_bf16
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import ops
from gradwire.comm.parallel.model import blocks, local
from gradwire.comm.parallel.optimizers.base import check_rates, copy_tensors, step_without_hooks

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration
ITERATIONS = 5
MOMENTUM = 0.95  # Nesterov


# Why: docs/decisions.md, "Muon of shards gathers momenta".
class Muon(AdamW):
    """Muon for the matrices inside of a model's blocks, AdamW for the rest.

    Args:
        params: Parameters or parameter groups, as for AdamW; a group that has both kinds is split.
        model: The model that has the blocks: the modules in its first `nn.ModuleList`, or the like.
        adamw: AdamW's options.

    Raises:
        BadInput: If there is no matrix for Muon, or an option of AdamW is out of range.
    """

    @checked_arguments
    def __init__(self, params: Iterable[Any], model: InstanceOf[nn.Module], **adamw: Any) -> None:
        adamw = check_rates(type(self).__name__, adamw)
        matrices = {p for block in blocks(model) for p in block.parameters() if p.ndim == 2 and p.requires_grad}
        groups = [*params]
        groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
        split = []
        for group in groups:
            for muon in (True, False):
                of_kind = [p for p in group["params"] if (p in matrices) == muon]
                split += [{**group, "params": of_kind, "muon": muon}] if of_kind else []
        if not any(group["muon"] for group in split):
            raise BadInput("Muon updates the matrices inside of a model's blocks (its first nn.ModuleList): none is.")
        super().__init__(split, **adamw)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take AdamW's step with the other parameters, then Muon's; the ranks that share a matrix do so together.

        Args:
            closure: Computes the loss and the gradients; called first, once.

        Returns:
            The closure's loss; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [(p, p.grad, group) for group in self.param_groups if group["muon"] for p in group["params"]]
        for p, _, _ in matrices:
            p.grad = None  # AdamW leaves out what has no gradient
        step_without_hooks(AdamW)(self)
        for p, gradient, group in matrices:
            p.grad = gradient
            if gradient is None:
                continue
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                self.state[p]["step"] = torch.zeros(
                    (), dtype=torch.float32, device="cpu"
                )  # AdamW looks for it in a loaded state
            self.state[p]["step"] += 1
            shard_gradient, momentum = local(gradient), local(self.state[p]["momentum_buffer"])
            momentum.lerp_(shard_gradient, 1 - MOMENTUM)
            direction = step_direction(shard_gradient.lerp(momentum, MOMENTUM), p)
            shard = local(p)
            shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict``; tensors are copied."""
        super().load_state_dict(state_dict)
        copy_tensors(self.state)


def step_direction(momentum: Tensor, matrix: Tensor) -> Tensor:
    """Orthogonalize a momentum; of a sharded matrix, this rank's rows of it: ``[rows, columns]`` as ``momentum``."""
    if not isinstance(matrix, DTensor):
        return orthogonalized(momentum)
    (dim,) = (dim for dim, placement in enumerate(matrix.placements) if placement.is_shard())
    mesh = matrix.device_mesh
    most = -(-matrix.shape[0] // mesh.size(dim))  # rows of a rank; the last ones may have fewer
    padded = momentum.new_zeros((most, matrix.shape[1]), dtype=torch.bfloat16)
    padded[: len(momentum)] = momentum
    whole = ops.all_gather(padded, mesh.get_group(dim), "momenta").flatten(0, 1)[: matrix.shape[0]]
    first = most * mesh.get_local_rank(dim)
    return orthogonalized(whole)[first : first + len(momentum)]


def orthogonalized(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors and singular values near 1, by Newton and Schulz's iteration in bf16.

    Where bf16 products are slow, float32 ones are rounded: the same numbers but for the order of a sum.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=1e-7))
    x = x if multiplies_bf16(x.device.type) else x.float()
    for _ in range(ITERATIONS):
        gram = rounded(x @ x.T)
        x = rounded(torch.addmm(x, rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    x = x.bfloat16()
    return x.T if tall else x


def rounded(x: Tensor) -> Tensor:
    """Round to bf16 and keep the type."""
    return x.bfloat16().to(x.dtype)
