"""1-bit Adam and 0/1 Adam: AdamW whose ranks average gradients while they warm up, and then momenta.

**1-bit Adam**: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed"
(ICML 2021, Algorithm 1). During warm-up it averages gradients as float32 and takes exactly AdamW's step. Afterwards the
variance is frozen, so that the step is linear in the momentum. Each rank adds its own gradient to the momentum, sends
it through any compressor, and continues with the decoded mean, so momenta and parameters stay equal. Error feedback is
the reducer's: on the momentum that a rank sends, and in an exchange also on the mean that the owner of a row sends.

**0/1 Adam**: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam" (ICLR 2023,
Algorithm 1). The variance is updated at growing intervals, and then the ranks synchronise at growing intervals. Between
two synchronisations each rank takes Adam's steps with its own momentum. Then the ranks average their updates through
the compressor, apply the mean to the last synchronised parameters, and set the momentum to the mean one of the steps
in between. Differences from the paper: steps that update the variance average gradients as float32, so their momentum
is the exact mean and needs no second message. And ranks send the mean momentum (the paper's u divided by the sum of
learning rates), so that residuals keep their unit when rates or intervals change; with an interval of 1 this is 1-bit
Adam.

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
from itertools import takewhile
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.optim import AdamW

from gradwire.base.errors import BadInput, RunFault
from gradwire.base.flags import POSITIVE
from gradwire.base.strict import checked_arguments
from gradwire.comm.collectives import Layout, Reducer, ops, state
from gradwire.comm.communication import Count, Natural
from gradwire.comm.parallel.optimizers.base import LOCAL_STEP, AnyCompressor, Communicating, step_without_hooks
from gradwire.comm.parallel.strategy import clip_grad_norm, local, strategy_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class CommunicatingAdam(Communicating, AdamW):
    """Adam that averages itself: ``step`` communicates, then updates the parameters.

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
        BadInput: If there is no warm-up, a group has ``amsgrad`` or ``maximize``, or as `Communicating.attach`.
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
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self._check_groups(self.param_groups)
        self.attach(model, compressor, reducer, options)
        self.max_norm = math.inf if max_norm is None else max_norm
        self.bind()
        self._group = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        self._device = strategy_of(self.model).device
        self.layout = Layout.dim0([(name, tuple(p.shape)) for name, p in self.shards.items()], self.reducer.world)
        self.delivered: dict[str, Tensor] | None = None  # averaged momenta, from `average` to `move`
        for p in self.parameters.values():  # allocate all state now: loading a checkpoint needs it
            self.state[p] = moments_of(p)

    def bind(self) -> None:
        """As `Communicating.bind`."""
        self.shards = {name: local(p) for name, p in self.parameters.items()}

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.communicate`; with frozen variance the norm is the root mean square of the ranks' norms."""
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
        means = {name: torch.empty(p.shape, dtype=torch.float32, device=p.device) for name, p in self.shards.items()}
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


class OneBitAdam(CommunicatingAdam):
    """1-bit Adam; see the module for the algorithm, and `CommunicatingAdam` for the arguments."""

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average the momenta."""
        self.delivered = self.means(momenta)

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Step with the mean momenta."""
        for name, p in self.parameters.items():
            self.advance(p, delivered[name], self.rate(p))


class Drift(NamedTuple):
    """A parameter's local updates since the last synchronisation.

    Attributes:
        start: The parameter at the last synchronisation.
        momentum: Mean momentum since then, weighted by the learning rates.
        moved: Sum of these rates, each with the momentum's bias correction.
        kept: Factor that weight decay has applied to ``start``.
    """

    start: Tensor
    momentum: Tensor
    moved: float = 0.0
    kept: float = 1.0


class ZeroOneAdam(CommunicatingAdam):
    """0/1 Adam; see the module for the algorithm.

    Args:
        params: As for `CommunicatingAdam`.
        model: As for `CommunicatingAdam`.
        freeze_step: The step that ends the updates of the variance, which follow the dense steps at intervals of 2, 4,
            8, ... steps; default: twice the dense steps.
        variance_kappa: Number of updates before that interval doubles.
        local_doubling: Number of steps after the freeze before the interval between synchronisations becomes 2, and
            before each further doubling; default: ``freeze_step``.
        max_local_steps: Maximum interval between synchronisations.
        steps: Number of steps of the run; the last one synchronises. None: unknown.
        options: Other options of `CommunicatingAdam`; the ``dense_steps`` all update the variance.

    Raises:
        BadInput: If an option is out of range, or as the base class.
    """

    @checked_arguments
    @torch.inference_mode(False)  # later steps change what it allocates
    def __init__(
        self,
        params: Iterable[Any],
        model: nn.Module,
        *,
        freeze_step: Count | None = None,
        variance_kappa: Count = 16,
        local_doubling: Count | None = None,
        max_local_steps: Count = 16,
        steps: Count | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, model, **options)
        dense = self.dense_steps
        self.freeze_step = 2 * dense if freeze_step is None else freeze_step
        self.local_doubling = self.freeze_step if local_doubling is None else local_doubling
        self.max_local_steps = max_local_steps
        self.last_step = None if steps is None else steps - 1
        if self.freeze_step < dense:
            raise BadInput(f"freeze_step is {freeze_step}; it must be at least dense_steps ({dense}).")
        self.updates = update_steps(dense, self.freeze_step, variance_kappa)
        self._kinds: list[str] = []  # of the first steps, as far as they were asked for
        self.drifts: dict[str, Drift] = {}  # by parameter; empty while the ranks are synchronised
        self.local_steps = 0  # since the last synchronisation
        self.alone = False  # whether the current step sends nothing; from `average` to `move`

    @property
    def averages_gradients(self) -> bool:
        """Whether the current step is in the warm-up or updates the variance."""
        return super().averages_gradients or self.reducer.step in self.updates

    def kind(self, step: int) -> str:
        """Whether a step averages gradients, synchronises, or does neither."""
        while len(self._kinds) <= step:
            self._kinds.append(self._next_kind())
        return self._kinds[step]

    def _next_kind(self) -> str:
        """The kind of the step after the known ones."""
        step = len(self._kinds)
        if step < self.dense_steps or step in self.updates:
            return "mean gradient"
        made = sum(1 for _ in takewhile(LOCAL_STEP.__eq__, reversed(self._kinds)))
        return LOCAL_STEP if self.rests(step, made) else "mean momentum"

    @property
    def in_step(self) -> bool:
        """Whether the last step synchronised the ranks."""
        return not self.drifts

    def move(self) -> None:
        """As the base class; after the warm-up a mean gradient updates first the variance, then the momentum."""
        if self.delivered is not None or self.reducer.step <= self.dense_steps:
            super().move()
            return
        for p in self.parameters.values():
            beta1, beta2 = self.group_of(p)["betas"]
            assert p.grad is not None
            gradient = local(p.grad)
            self.kept(p, "exp_avg_sq").mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            self.state[p]["variance_steps"] += 1
            self.advance(p, torch.lerp(self.kept(p, "exp_avg"), gradient, 1 - beta1), self.rate(p))

    def exchange_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Average the mean momenta since the last synchronisation if one is due; otherwise send nothing."""
        self.alone = self.rests(self.reducer.step, self.local_steps)
        if self.alone:
            self.reducer.skip(self.layout)
            self.delivered = dict(momenta)
        else:
            self.delivered = self.means({name: self._mean(name, momentum) for name, momentum in momenta.items()})

    def rests(self, step: int, local_steps: int) -> bool:
        """Whether a step of momenta sends nothing, after so many that sent nothing either."""
        interval = min(2 ** (max(0, step - self.freeze_step) // self.local_doubling), self.max_local_steps)
        return local_steps + 1 < interval and step != self.last_step

    def apply(self, delivered: Mapping[str, Tensor]) -> None:
        """Take a local step, or a step from the last synchronised parameters with the mean momenta."""
        for name, p in self.parameters.items():
            momentum, rate = delivered[name], self.rate(p)
            if self.alone:
                mean = self._mean(name, momentum)
                before = self.drifts.get(name) or Drift(local(p).detach().clone(), mean)
                kept = before.kept * (1 - self.group_of(p)["lr"] * self.group_of(p)["weight_decay"])
                self.drifts[name] = Drift(before.start, mean, before.moved + rate, kept)
            elif drift := self.drifts.pop(name, None):
                local(p).copy_(drift.start).mul_(drift.kept)
                rate += drift.moved
            self.advance(p, momentum, rate)
        self.local_steps = self.local_steps + 1 if self.alone else 0

    def restart(self) -> None:
        """Forget the drifts."""
        self.drifts, self.local_steps = {}, 0

    def round_state(self) -> dict[str, Any]:
        """Return the drifts, and the parameters and momenta that have drifted."""
        return {
            "local_steps": self.local_steps,
            "drifts": {name: drift._asdict() for name, drift in self.drifts.items()},
            "parameters": {name: self.shards[name].detach() for name in self.drifts},
            "momenta": {name: self.kept(self.parameters[name], "exp_avg") for name in self.drifts},
        }

    def check_round_state(self, saved: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        state.check_keys(saved, {"local_steps", "drifts", "parameters", "momenta"}, "ZeroOneAdam")
        drifts = saved["drifts"]
        drifted = self.shards if drifts else {}  # all of them, or none
        for key in ("start", "momentum"):
            state.check_tensors({name: drift[key] for name, drift in drifts.items()}, drifted, f"drifts ({key})")
        for key in ("parameters", "momenta"):
            state.check_tensors(saved[key], drifted, key)

    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """Copy the drifts, and the parameters and momenta that have drifted."""
        self.local_steps = saved["local_steps"]
        self.drifts = {
            name: Drift(**{**drift, "start": drift["start"].clone(), "momentum": drift["momentum"].clone()})
            for name, drift in saved["drifts"].items()
        }
        with torch.no_grad():
            for name in self.drifts:
                self.shards[name].copy_(saved["parameters"][name])
                self.kept(self.parameters[name], "exp_avg").copy_(saved["momenta"][name])

    def _mean(self, name: str, momentum: Tensor) -> Tensor:
        """Return the mean momentum since the last synchronisation, this step included, weighted by learning rates."""
        drift, rate = self.drifts.get(name), self.rate(self.parameters[name])
        if drift is None or drift.moved + rate == 0:
            return momentum
        return torch.lerp(drift.momentum, momentum, rate / (drift.moved + rate))


def update_steps(dense: int, end: int, kappa: int) -> set[int]:
    """Return the steps from ``dense`` to ``end`` that update the variance; ``kappa`` updates double the interval."""
    steps: set[int] = set()
    step = dense - 1
    while step < end:
        step += 2 ** (1 + len(steps) // kappa)
        steps.add(step)
    return {step for step in steps if step < end}


def moments_of(p: nn.Parameter) -> dict[str, Tensor]:
    """Return the state of a parameter that took no step."""
    counts = {key: torch.zeros((), dtype=torch.float32, device="cpu") for key in ("step", "variance_steps")}
    return counts | {key: torch.zeros_like(p) for key in MOMENTS}
