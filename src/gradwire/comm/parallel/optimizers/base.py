"""Base of the optimizers that communicate: an AdamW that averages gradients or momenta itself.

During warm-up it averages gradients as float32 and takes exactly AdamW's step. Afterwards the variance is frozen, so
that the step is linear in the momentum, and the ranks average momenta through the reducer's compressor.

Choices that the papers leave open:

- Weight decay is decoupled from the momentum, as in AdamW, in every phase; each group has its own learning rate.
- The momentum's bias correction continues; the variance's uses the number of steps that updated it. DeepSpeed's 1-bit
  Adam corrects neither: after a warm-up of t steps its steps are ``1 / sqrt(1 - beta2**t)`` times as large, 3.2 times
  with 0.999 and t = 100, so a learning rate that was tuned there is too small here.
- Adam's step is bounded: no element moves further than ``lr max(1, (1 - beta1) / sqrt(1 - beta2))`` (Kingma and Ba,
  "Adam: A Method for Stochastic Optimization", ICLR 2015, section 2.1). A frozen variance breaks the bound: an element
  whose gradient was small or zero until then, as in a rare row of an embedding, would take huge steps later. So the
  ratio of momentum to root variance is clipped to it elementwise. (DeepSpeed's users mask such rows by hand.)
- The norm of the mean gradient is unknown before communication. While the ranks average gradients the mean is clipped
  to ``max_norm``; afterwards all ranks scale their own gradients by one factor, from the root mean square of their
  norms, which is an upper bound of the mean's norm.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from gradwire.base.errors import BadInput, RunFault
from gradwire.comm.collectives import Layout, Reducer, ops
from gradwire.comm.parallel.mesh import local
from gradwire.comm.parallel.optimizers import Communicating
from gradwire.comm.parallel.optimizers.torch_step import step_without_hooks
from gradwire.comm.parallel.strategy import clip_grad_norm, strategy_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class CommunicatingAdam(Communicating, AdamW):
    """Adam that averages itself: `exchange` communicates, then ``step`` updates the parameters.

    Gradients must not be averaged before (``wrap(..., average=False)``), and every trainable parameter must have one.
    The first ``dense_steps`` of the reducer are the warm-up.

    Args:
        model: The model returned by `comm.parallel.wrap`; frozen parameters are ignored.
        groups: Parameter groups, as for AdamW.
        reducer: Averages over the ranks; used by this optimizer only.
        adamw: AdamW's other options: ``lr``, ``betas``, ``eps``, ``weight_decay``.

    Raises:
        BadInput: If there is no warm-up, a group has ``amsgrad`` or ``maximize``, or as `Communicating.attach`.
    """

    def __init__(self, model: nn.Module, groups: Iterable[dict[str, Any]], reducer: Reducer, **adamw: Any) -> None:
        if reducer.codec.options.dense_steps < 1:
            raise BadInput(
                f"{type(self).__name__} freezes the variance after dense_steps steps; dense_steps must be at least 1."
            )
        super().__init__(groups, **adamw)
        self._check_groups(self.param_groups)
        self.attach(model, reducer)
        self.shards = {name: local(p) for name, p in self.parameters.items()}
        self._group = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._device = strategy_of(model).device
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.shards.items()], reducer.world)
        self.delivered: dict[str, Tensor] | None = None  # averaged momenta, from `exchange` to `step`
        for p in self.parameters.values():  # allocate all state now: loading a checkpoint needs it
            self.state[p] = moments_of(p)

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.exchange`; with frozen variance the norm is the root mean square of the ranks' norms."""
        gradients = self._gradients()
        if self.averages_gradients:
            self.delivered = None
            with self.reducer.plain():
                means = self.means(gradients)
            for name, mean in means.items():
                gradients[name].copy_(mean)
            finite = self.reducer.finish(total)
            return clip_grad_norm(self.model, max_norm), finite
        norm = self._norm_of_ranks(gradients)
        if not math.isfinite(norm):  # the encoding may not detect it
            self.reducer.codec.note(torch.ones(1, dtype=torch.uint8, device=self._device))
        scale = max_norm / norm if max_norm < norm < math.inf else 1.0
        momenta = {
            name: torch.lerp(self.kept(p, "exp_avg"), gradients[name] * scale, 1 - self.group_of(p)["betas"][0])
            for name, p in self.parameters.items()
        }
        self.exchange_momenta(momenta)
        return norm, self.reducer.finish(total)

    def move(self) -> None:
        """Take AdamW's step, or one with the variance frozen."""
        if self.delivered is None:
            step_without_hooks(AdamW)(self)
            for p in self.parameters.values():
                self.state[p]["variance_steps"] += 1
        else:
            self.apply(self.delivered)
            self.delivered = None

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """Load moments and groups, also those of AdamW, whose every step updates the variance.

        Raises:
            BadInput: If a parameter has other moments, or a group an option that this optimizer does not have.
        """
        self._check_groups(state_dict["param_groups"])
        names = (name for group in state_dict["param_groups"] for name in group["params"])
        for name, p in zip(names, (p for group in self.param_groups for p in group["params"]), strict=False):
            shapes = {
                key: tuple(getattr(value, "shape", ())) for key, value in state_dict["state"].get(name, {}).items()
            }
            if shapes and not {"step": (), **dict.fromkeys(MOMENTS, tuple(p.shape))}.items() <= shapes.items():
                raise BadInput(
                    f"{type(self).__name__} continues from the step and moments (exp_avg, exp_avg_sq) of AdamW, for a "
                    f"parameter of shape {list(p.shape)}, and this state has {shapes}: it is of another optimizer or "
                    f"model."
                )
        super().load_torch_state(state_dict)
        for p in self.parameters.values():
            kept = self.state[p]
            steps = {"variance_steps": kept["step"].clone()} if kept else {}
            self.state[p] = moments_of(p) | steps | kept

    def _check_groups(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Check that no group asks for a step that the frozen variance does not take.

        Raises:
            BadInput: If one does.
        """
        for option in ("amsgrad", "maximize"):
            if any(group.get(option) for group in groups):
                raise BadInput(f"{type(self).__name__} has no {option}.")

    @property
    def dense_steps(self) -> int:
        """The reducer's."""
        return self.reducer.codec.options.dense_steps

    @property
    def averages_gradients(self) -> bool:
        """Whether the current step averages gradients and takes AdamW's step."""
        return self.reducer.step < self.dense_steps

    @abstractmethod
    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Set `delivered`; must not change anything else, because the step may still be skipped.

        Args:
            momenta: Momenta by name, updated with this rank's gradient.
        """

    @abstractmethod
    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Take a step with the frozen variance."""

    def advance(self, p: nn.Parameter, momentum: Tensor, rate: float) -> None:
        """Take Adam's step with the frozen variance and store the momentum."""
        group, shard = self.group_of(p), local(p)
        beta1, beta2 = group["betas"]
        bound = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
        shard.mul_(1 - group["lr"] * group["weight_decay"])
        shard.add_((momentum / self.denominator(p)).clamp_(-bound, bound), alpha=-rate)
        self.kept(p, "exp_avg").copy_(momentum)
        self.state[p]["step"] += 1

    def means(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means over the ranks of one tensor per trainable parameter, by name, in float32."""
        means = {name: torch.empty(p.shape, device=p.device) for name, p in self.shards.items()}
        self.layout.unpack(self.reducer.all_reduce(self.layout.pack(tensors), self.layout), means)
        return means

    def kept(self, p: nn.Parameter, key: str) -> Tensor:
        """Return this rank's part of a parameter's moment."""
        return local(self.state[p][key])

    def group_of(self, p: nn.Parameter) -> dict[str, Any]:
        """Return a parameter's group; not cached, because loading a checkpoint replaces the groups."""
        return self.param_groups[self._group[p]]

    def rate(self, p: nn.Parameter) -> float:
        """Return the next step's learning rate, with the momentum's bias correction."""
        group = self.group_of(p)
        made = int(self.state[p]["step"])
        return float(group["lr"] / (1 - group["betas"][0] ** (made + 1)))

    def denominator(self, p: nn.Parameter) -> Tensor:
        """Return the divisor of the momentum once the variance is frozen."""
        group, updates = self.group_of(p), int(self.state[p]["variance_steps"])
        variance = self.kept(p, "exp_avg_sq") / (1 - group["betas"][1] ** updates)
        return variance.sqrt_().add_(group["eps"])

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradient of every trainable parameter, or its shard of its island's."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if missing:
            raise RunFault(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient: {', '.join(missing[:5])}"
                f"{', ...' if len(missing) > 5 else ''}. Use them in the loss, or freeze them before `wrap`."
            )
        return {name: local(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def _norm_of_ranks(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the root mean square over the ranks, or islands, of each one's total gradient norm."""
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients.values()]
        square = torch.stack(norms).double().square().sum()
        ops.all_reduce(square, "sum", strategy_of(self.model).group)
        return (square / self.reducer.world).sqrt().item()


def moments_of(p: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter that took no step."""
    counts = {key: torch.zeros((), dtype=torch.float32) for key in ("step", "variance_steps")}
    return counts | {key: torch.zeros_like(p) for key in MOMENTS}
