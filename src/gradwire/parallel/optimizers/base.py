"""What optimizers that communicate share: an AdamW whose gradients stay on their ranks until it averages something.

While it warms up it averages gradients as float32 and takes exactly AdamW's step. Afterwards the variance is frozen, so
that the step is linear in the momentum, and the ranks average momenta, through the reducer's compressor.

Choices that the papers leave open:

- Weight decay is decoupled from the momentum, as in AdamW, in every phase; each group has its own learning rate.
- The momentum's bias correction goes on; the variance is corrected for as many steps as have entered it.
- Adam's step is bounded: no element moves further than ``lr max(1, (1 - beta1) / sqrt(1 - beta2))`` (Kingma and Ba,
  "Adam: A Method for Stochastic Optimization", ICLR 2015, section 2.1). A frozen variance loses that: an element whose
  gradient was small or zero until then, as an embedding's rare row, would take huge steps later. So each element's
  quotient of momentum and root variance is clipped to that bound. (DeepSpeed has its users mask such rows by hand.)
- Nobody knows the mean gradient's norm before it was sent. While the ranks average gradients it is clipped to
  ``max_norm``; afterwards all ranks scale their own gradients by one factor, from the root mean square of their norms.
  The mean's norm is never larger than that.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gradwire.collectives import Layout, Reducer, ops
from gradwire.errors import BadInput, RunFault
from gradwire.parallel.optimizers import Communicating
from gradwire.parallel.state import named_parameters
from gradwire.parallel.step import clip_grad_norm
from gradwire.parallel.strategy import strategy_of


class CommunicatingAdam(AdamW, Communicating):
    """Adam that averages itself: `exchange` communicates, `step` then changes the parameters.

    Every rank's gradients must be its own (``wrap(..., average=False)``), and every trained parameter must have one.
    The first ``dense_steps`` of the reducer are the warm-up.

    Args:
        model: What `parallel.wrap` returned; parameters that need no gradient are left alone.
        groups: Parameter groups, as AdamW takes them.
        reducer: Averages over the ranks; it is this optimizer's alone.
        adamw: AdamW's other options: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        BadInput: If there is no warm-up.
    """

    def __init__(self, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **adamw: Any) -> None:
        if reducer.codec.dense_steps < 1:
            raise BadInput(
                f"{type(self).__name__} freezes the variance that its first steps have gathered: dense_steps, the "
                "number of these steps, must be at least 1."
            )
        super().__init__(groups, **adamw)
        self.model = model
        self.reducer = reducer
        self.trained = {name: p for name, p in named_parameters(model) if p.requires_grad}
        self._group = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._device = strategy_of(model).device
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.trained.items()], reducer.world)
        self.delivered: dict[str, Tensor] | None = None  # averaged momenta, from `exchange` to `step`
        for p in self.trained.values():  # all of it now: a checkpoint is loaded into what is there
            self.state[p] = {key: torch.zeros((), dtype=torch.float32) for key in ("step", "variance_steps")}
            self.state[p] |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        if reducer.world > 1:
            reducer.prepare("all_reduce", sum(p.numel() for p in self.trained.values()))

    def exchange(self, max_norm: float, total: Tensor | None = None) -> tuple[float, bool]:
        """See `Communicating`; once the variance is frozen the norm is the root mean square of the ranks' norms."""
        gradients = self._gradients()
        if self.averages_gradients:
            self.delivered = None
            with self.reducer.plain():
                means = self.average(gradients)
            for name, mean in means.items():
                gradients[name].copy_(mean)
            finite = self.reducer.finish(total)
            return clip_grad_norm(self.model, max_norm), finite
        norm = self._norm_of_ranks(gradients)
        if not math.isfinite(norm):  # no encoding might see it
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=self._device))
        scale = max_norm / norm if max_norm < norm < math.inf else 1.0
        momenta = {
            name: torch.lerp(self.state[p]["exp_avg"], gradients[name] * scale, 1 - self.group_of(p)["betas"][0])
            for name, p in self.trained.items()
        }
        self.exchange_momenta(momenta)
        return norm, self.reducer.finish(total)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the parameters by what `exchange` has averaged; it sends nothing."""
        if self.delivered is None:
            super().step()
            for p in self.trained.values():
                self.state[p]["variance_steps"] += 1
        else:
            self.apply(self.delivered)
            self.delivered = None

    @property
    def averages_gradients(self) -> bool:
        """Whether the present step is AdamW's own."""
        return self.reducer.step < self.reducer.codec.dense_steps

    @abstractmethod
    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Set `delivered`; nothing else may change, because the step may yet be skipped.

        Args:
            momenta: By name, each with this rank's own gradient added.
        """

    @abstractmethod
    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Take a step after the freeze."""

    def advance(self, p: nn.Parameter, momentum: Tensor, rate: float) -> None:
        """Adam's step with the frozen variance, by a momentum that the parameter keeps."""
        group, state = self.group_of(p), self.state[p]
        beta1, beta2 = group["betas"]
        bound = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((momentum / self.denominator(p)).clamp_(-bound, bound), alpha=-rate)
        state["exp_avg"].copy_(momentum)
        state["step"] += 1

    def average(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean over the ranks of a tensor for every trained parameter, by name, in float32."""
        means = {name: torch.empty(p.shape, device=p.device) for name, p in self.trained.items()}
        self.layout.unpack(self.reducer.all_reduce(self.layout.pack(tensors), self.layout), means)
        return means

    def group_of(self, p: nn.Parameter) -> dict[str, Any]:
        """A parameter's group; loading a checkpoint makes new ones."""
        return self.param_groups[self._group[p]]

    def rate(self, p: nn.Parameter) -> float:
        """The learning rate of the step after those made, corrected for the momentum's start from zero."""
        group = self.group_of(p)
        made = int(self.state[p]["step"])
        return float(group["lr"] / (1 - group["betas"][0] ** (made + 1)))

    def denominator(self, p: nn.Parameter) -> Tensor:
        """What the momentum is divided by once the variance is frozen."""
        group, state = self.group_of(p), self.state[p]
        variance = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["variance_steps"]))
        return variance.sqrt_().add_(group["eps"])

    def _gradients(self) -> dict[str, Tensor]:
        """Every trained parameter's gradient on this rank."""
        missing = [name for name, p in self.trained.items() if p.grad is None]
        if missing:
            raise RunFault(
                f"{len(missing)} of {len(self.trained)} parameters got no gradient: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}. Use them in the loss, or freeze them before `wrap`."
            )
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}

    def _norm_of_ranks(self, gradients: Mapping[str, Tensor]) -> float:
        """Root mean square over the ranks of the norm of all of a rank's gradients."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
        square = torch.stack(norms).double().square().sum()
        ops.all_reduce(square, "sum", self.reducer.group)
        return (square / self.reducer.world).sqrt().item()
