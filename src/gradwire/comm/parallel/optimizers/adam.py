"""1-bit Adam: AdamW whose ranks average gradients while they warm up, and then momenta.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed" (ICML 2021,
Algorithm 1). During warm-up it averages gradients as float32 and takes exactly AdamW's step. Afterwards the variance is
frozen, so that the step is linear in the momentum. Each rank adds its own gradient to the momentum, sends it through
any compressor, and continues with the decoded mean, so momenta and parameters stay equal. Error feedback is the
reducer's: on the momentum that a rank sends, and in an exchange also on the mean that the owner of a row sends.

Choices that the paper leaves open:

- Weight decay is decoupled from the momentum, as in AdamW, in both phases; each group has its own learning rate.
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
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.optim import AdamW

from gradwire.base.errors import BadInput, RunFault, listed
from gradwire.base.flags import POSITIVE
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import Layout, Reducer, ops
from gradwire.comm.communication import Natural
from gradwire.comm.parallel.optimizers.base import AnyCompressor, Communicating, check_rates, step_without_hooks
from gradwire.comm.parallel.strategy import clip_grad_norm, local, strategy_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class OneBitAdam(Communicating, AdamW):
    """1-bit Adam; see the module for the algorithm.

    Every trainable parameter must have a gradient. The first ``dense_steps`` are the warm-up.

    Args:
        params: Parameters or parameter groups, as for AdamW.
        model: The model, with equal weights on all ranks: a module (rank 0's weights are broadcast), a
            `DistributedDataParallel` (whose averaging is switched off), a model that ``fully_shard`` has sharded over
            a mesh of islands × ranks, with neighbouring ranks in an island, or one returned by `comm.parallel.wrap`
            with ``average=False``. Frozen parameters are ignored.
        compressor: Encodes the momenta.
        dense_steps: Steps of the warm-up.
        max_norm: Maximum Euclidean norm of the gradient; larger ones are clipped (see the module).
            None: no limit.
        reducer: A reducer of your own instead of ``compressor``, ``dense_steps`` and ``options``; used by this
            optimizer only.
        lr: As for AdamW, as ``betas``, ``eps`` and ``weight_decay``.
        options: Options of `Reducer`, such as ``algorithm``; ``error_feedback`` is True unless given.

    Raises:
        BadInput: If there is no warm-up, a group has ``amsgrad`` or ``maximize``, an option of AdamW is out
            of range, or as `Communicating.attach`.
    """

    @checked_arguments
    @torch.inference_mode(False)  # later steps change what it allocates
    def __init__(
        self,
        params: Iterable[Any],
        model: nn.Module,
        *,
        compressor: AnyCompressor = "onebit",
        dense_steps: Natural | None = None,
        max_norm: Annotated[float, POSITIVE] | None = None,
        reducer: InstanceOf[Reducer] | None = None,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **options: Any,
    ) -> None:
        options |= {} if dense_steps is None else {"dense_steps": dense_steps}
        warm_up = options.get("dense_steps", 0) if reducer is None else reducer.codec.options.dense_steps
        if warm_up < 1:
            raise BadInput(
                f"{type(self).__name__} freezes the variance after dense_steps steps; dense_steps must be at least 1."
            )
        rates: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, **check_rates(type(self).__name__, rates))
        self._check_groups(self.param_groups)
        self.attach(model, compressor, reducer, options)
        self.max_norm = math.inf if max_norm is None else max_norm
        self.bind()
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.shards.items()], self.reducer.world)
        self.delivered: dict[str, Tensor] | None = None  # averaged momenta, from `average` to `move`
        for p in self.parameters.values():  # allocate all state now: loading a checkpoint needs it
            self.state[p] = moments_of(p)

    def bind(self) -> None:
        """As `Communicating.bind`."""
        self.shards = {name: local(p) for name, p in self.parameters.items()}

    @property
    def dense_steps(self) -> int:
        """The reducer's."""
        return self.reducer.codec.options.dense_steps

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.communicate`; with frozen variance the norm is the root mean square of the ranks' norms."""
        gradients = self._gradients()
        if self.reducer.step < self.dense_steps:
            self.delivered = None
            with self.reducer.plain():
                means = self.means(gradients)
            for name, mean in means.items():
                gradients[name].copy_(mean)
            finite = self.reducer.finish(total)
            return clip_grad_norm(self.model, max_norm), finite
        norm = self._norm_of_ranks(gradients)
        if not math.isfinite(norm):  # the encoding may not detect it
            flag = torch.ones(1, dtype=torch.uint8, device=strategy_of(self.model).device)
            self.reducer.codec.note(flag)
        scale = max_norm / norm if max_norm < norm < math.inf else 1.0
        momenta = {
            name: torch.lerp(self.kept(p, "exp_avg"), gradients[name] * scale, 1 - group["betas"][0])
            for name, p, group in self._grouped()
        }
        self.delivered = self.means(momenta)
        return norm, self.reducer.finish(total)

    def move(self) -> None:
        """Take AdamW's step, or Adam's with the variance frozen and the mean momenta."""
        if self.delivered is None:
            step_without_hooks(AdamW)(self)
            for p in self.parameters.values():
                self.state[p]["variance_steps"] += 1
            return
        for name, p, group in self._grouped():
            momentum, shard = self.delivered[name], local(p)
            lr, (beta1, beta2) = group["lr"], group["betas"]
            bound = max(1.0, (1 - beta1) / math.sqrt(1 - beta2))
            rate = float(lr / (1 - beta1 ** (int(self.state[p]["step"]) + 1)))
            shard.mul_(1 - lr * group["weight_decay"])
            shard.add_((momentum / self.denominator(p, group)).clamp_(-bound, bound), alpha=-rate)
            self.kept(p, "exp_avg").copy_(momentum)
            self.state[p]["step"] += 1
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

    def means(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the means over the ranks of one tensor per trainable parameter, by name, in float32."""
        means = {name: torch.empty(p.shape, dtype=torch.float32, device=p.device) for name, p in self.shards.items()}
        self.layout.unpack(self.reducer.all_reduce(self.layout.pack(tensors), self.layout), means)
        return means

    def kept(self, p: nn.Parameter, key: str) -> Tensor:
        """Return this rank's part of a parameter's moment."""
        return local(self.state[p][key])

    def denominator(self, p: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        """Return the divisor of the momentum once the variance is frozen."""
        updates = int(self.state[p]["variance_steps"])
        variance = self.kept(p, "exp_avg_sq") / (1 - group["betas"][1] ** updates)
        return variance.sqrt_().add_(group["eps"])

    def _grouped(self) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Return each parameter with its name and its group."""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        return [(name, p, groups[p]) for name, p in self.parameters.items()]

    def _gradients(self) -> dict[str, Tensor]:
        """Return this rank's gradient of every trainable parameter, or its shard of its island's."""
        missing = [name for name, p in self.parameters.items() if p.grad is None]
        if missing:
            raise RunFault(
                f"{len(missing)} of {len(self.parameters)} parameters got no gradient: {listed(missing, 5)}. "
                f"Use them in the loss, or freeze them before `wrap`."
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
    counts = {key: torch.zeros((), dtype=torch.float32, device="cpu") for key in ("step", "variance_steps")}
    return counts | {key: torch.zeros_like(p) for key in MOMENTS}
