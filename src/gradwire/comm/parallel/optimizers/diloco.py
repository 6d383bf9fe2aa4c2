"""DiLoCo and other local updates: each rank trains alone for a round, then the ranks average what they changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105, 2023). In a
local step a rank takes a step of its inner optimizer with its own gradient; nothing of the model's size is sent. At the
end of a round each rank's pseudo-gradient is its anchor minus its parameters. The compressor and error feedback work on
it, and SGD with Nesterov momentum takes a step with the mean. The inner moments stay on their rank. Other methods are
the same with other arguments: `communication.PRESETS`. In islands that hold the model in shards, "rank" means an
island, whose ranks send their shards.

The step that ends a round communicates, and so does the last step of the run. Between rounds the ranks' parameters
differ; what all ranks share are the anchors, the parameters after the last round.

A value that is not finite follows the reducer's ``nonfinite``. Under ``skip`` all ranks leave out a local step, and if
it ends a round, discard the round: they return to the anchors.
"""

from __future__ import annotations

import copy
import inspect
import math
from bisect import bisect_right
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pydantic import InstanceOf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradwire.base.errors import BadInput
from gradwire.base.strict import checked, checked_arguments
from gradwire.comm.collectives import Layout, Reducer, state
from gradwire.comm.collectives.islands import QuorumReducer
from gradwire.comm.collectives.queue import Handle
from gradwire.comm.communication import Count, Interval, Outer
from gradwire.comm.parallel.checks import described, parameters_of, shown
from gradwire.comm.parallel.optimizers.base import LOCAL_STEP, AnyCompressor, Communicating, copy_tensors, duplicate
from gradwire.comm.parallel.optimizers.quorum import Quorum, digest_of, prepare_group
from gradwire.comm.parallel.strategy import clip_grad_norm, local, strategy_of
from gradwire.comm.torch_internals import cloned

OUTER = Outer()


# Why: docs/decisions.md, "An optimizer around an optimizer".
class DiLoCo(Communicating):
    """DiLoCo; see the module for the algorithm.

    Like torch's `PostLocalSGDOptimizer`, it has no groups and no state of torch's own: both are the inner optimizer's.
    Clip this rank's gradient before ``step``, if at all.

    Args:
        optimizer: The inner optimizer: any of torch but `LBFGS` and `SparseAdam`, over all trainable parameters of the
            model.
        model: The model, with equal weights on all ranks: a module (rank 0's weights are broadcast), a
            `DistributedDataParallel` (whose averaging is switched off), a model that ``fully_shard`` has sharded over
            a mesh of islands × ranks, with neighbouring ranks in an island, or one returned by `comm.parallel.wrap`
            with ``average=False``.
        sync_every: Steps of a round, or a schedule, such as ``{0: 1, 100: 5}``.
        compressor: Encodes the pseudo-gradients.
        outer: The outer step, an `Outer` or a mapping of its fields.
        steps: Number of steps of the run; the last one ends a round. None: unknown.
        reducer: A reducer of your own instead of ``compressor`` and ``options``; used by this optimizer only.
        manager: A `torchft.Manager`, by which groups may be lost and may join; see `quorum`. The default process group
            is this rank's group then, and building the optimizer joins the run: it waits for the other groups.
        options: Options of `Reducer`, such as ``algorithm``; ``error_feedback`` is True unless given.

    Raises:
        BadInput: If an argument is out of range, ``dense_steps`` is given, or as `Communicating.attach`.
    """

    regroups: ClassVar[bool] = True
    """Whether it takes a manager."""

    @checked_arguments
    @torch.inference_mode(False)  # later steps change what it allocates
    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        sync_every: Interval,
        compressor: AnyCompressor = "none",
        outer: Outer | Mapping[str, Any] = OUTER,
        steps: Count | None = None,
        reducer: InstanceOf[Reducer] | None = None,
        manager: Any = None,
        **options: Any,
    ) -> None:
        check_inner(optimizer, type(self).__name__)
        if options.get("dense_steps") if reducer is None else reducer.codec.options.dense_steps:
            raise BadInput("local updates send the outcome of rounds, and have no dense_steps: omit it.")
        self.outer = checked(Outer, outer, "outer")
        self.rounds = Rounds(sync_every, steps)
        self.inner = optimizer
        self.__setstate__({})  # gives torch's optimizers their hooks
        if manager is not None and not self.regroups:
            raise BadInput(f"{type(self).__name__} cannot change its groups: with a manager take DiLoCo.")
        if manager is not None and reducer is None:
            model, reducer = prepare_group(model, compressor, manager, {"error_feedback": True, **options})
            options = {}
        settings = {"sync_every": sync_every, "outer": self.outer, "steps": steps}
        self.attach(model, compressor, reducer, options, **settings)
        self.bind()
        self.anchors = {name: p.detach().to(torch.float32, copy=True) for name, p in self.trained.items()}
        self.momenta = {name: torch.zeros_like(p) for name, p in self.anchors.items()} if self.outer.momentum else {}
        self.layout = self.cut(self.trained)
        self.delivered: dict[str, Tensor] = {}  # mean pseudo-gradients, from `average` to `move`
        self.sent = False  # whether the present step communicates; from `average` to `move`
        self.anchored = True  # whether the anchors are those of the parameters
        self.quorum: Quorum | None = None
        if manager is not None:
            if not isinstance(self.reducer, QuorumReducer):
                raise BadInput("a manager needs a QuorumReducer: give compressor and options instead of a reducer.")
            same = {"optimizer": type(self).__name__, **{name: shown(value) for name, value in settings.items()}}
            same |= {**described(self.reducer), **parameters_of(self.model)}
            self.quorum = Quorum(manager, self.reducer, self.served, same)
            self.continue_with(self.quorum.join())

    def bind(self) -> None:
        """As `Communicating.bind`."""
        self.trained = {name: local(p) for name, p in self.parameters.items()}  # this rank's part of them

    def kind(self, step: int) -> str:
        """Whether a step ends a round."""
        return "end of round" if self.rounds.ends(step) else LOCAL_STEP

    def due(self, step: int) -> bool:
        """Whether a step communicates: the last one of a round does."""
        return self.rounds.ends(step)

    def average(self, max_norm: float, total: Tensor | None) -> tuple[float, bool]:
        """As `Communicating.communicate`; the norm is the root mean square of the ranks' own norms, each clipped alone.

        A step that communicates takes the inner step here, because what is sent includes it.
        """
        if not self.anchored:
            raise BadInput(
                f"{type(self).__name__} has loaded a state without this rank's rounds: load the whole state_dict(), "
                f"or call load_rank_state(), or restart() to begin a round at the present parameters."
            )
        norm = clip_grad_norm(self.model, max_norm)
        self.sent = self.due(self.reducer.step)
        if self.sent:
            if not math.isfinite(norm) and self.reducer.nonfinite == "skip":
                self.inner.zero_grad(set_to_none=False)  # every rank counts the step, and what it receives is dropped
            self.step_inner()
            self.close()
        else:
            self.rest()
        norm, taken = self.finish(norm, total, wait=False)
        if self.sent and not taken:
            self.discard()
            self.meet()
        return norm, taken

    def move(self) -> None:
        """Take the inner step, or, in a step that communicates, move by what was received."""
        if self.sent:
            self.advance()
            self.meet()
        else:
            self.step_inner()

    def step_inner(self) -> None:
        """Take a step of the inner optimizer."""
        self.inner.step()

    def rest(self) -> None:
        """Count a step that sends nothing."""
        self.reducer.skip(self.layout)

    def close(self) -> None:
        """Communicate; with a manager until no group is lost meanwhile."""
        if self.quorum is None:
            self.send()
        else:
            self.quorum.close(self.send, digest_of([*self.anchors.values(), *self.momenta.values()]))

    def meet(self) -> None:
        """With a manager, agree on the groups of the next round."""
        if self.quorum is not None:
            self.continue_with(self.quorum.meet())

    def fit(self) -> None:
        """Cut the layout for the ranks that the reducer has now."""
        if self.layout.world != self.reducer.world:
            self.layout = self.cut(self.layout.parameters)

    def send(self) -> None:
        """Communicate, after the step's inner step: average the pseudo-gradients over the ranks that there are now."""
        self.fit()
        self.receive(self.begin(self.layout).wait(), self.layout)

    def begin(self, layout: Layout) -> Handle:
        """Begin to average the pseudo-gradients of a layout's parameters."""
        deltas = {name: self.anchors[name] - self.trained[name] for name in layout.parameters}
        return self.reducer.begin_all_reduce(layout.pack(deltas), layout)

    def cut(self, names: Iterable[str]) -> Layout:
        """Cut some parameters as the whole model's layout cuts them, so that residuals go with them."""
        return Layout.dim0([(name, tuple(self.trained[name].shape)) for name in names], self.reducer.world)

    def receive(self, mean: Tensor, layout: Layout) -> None:
        """Keep the mean pseudo-gradients of a layout's parameters for `advance`."""
        self.delivered |= {name: torch.empty_like(self.anchors[name]) for name in layout.parameters}
        layout.unpack(mean, self.delivered)

    def advance(self) -> None:
        """Take the outer step, and continue from the anchors."""
        for name, mean in self.delivered.items():
            if self.outer.momentum:
                momentum = self.momenta[name].mul_(self.outer.momentum).add_(mean)
                mean = mean.add_(momentum, alpha=self.outer.momentum) if self.outer.nesterov else momentum
            self.anchors[name].add_(mean, alpha=-self.outer.lr)
            self.settle(name)
        self.delivered = {}

    def settle(self, name: str) -> None:
        """Continue from a parameter's anchor."""
        self.trained[name].copy_(self.anchors[name])

    def discard(self) -> None:
        """Drop what was received, and return its parameters to their anchors."""
        for name in self.delivered:
            self.trained[name].copy_(self.anchors[name])
        self.delivered = {}

    def return_to_anchors(self) -> None:
        """Set the parameters to the anchors."""
        for name, p in self.trained.items():
            p.copy_(self.anchors[name])

    @torch.no_grad()
    def restart(self) -> None:
        """Begin a round at the present parameters, without outer momentum."""
        for name, p in self.trained.items():
            self.anchors[name].copy_(p)
        for momentum in self.momenta.values():
            momentum.zero_()
        self.anchored = True

    @property
    def outer_bytes(self) -> int:
        """Memory of the anchors and the outer momentum."""
        return sum(kept.nbytes for kept in (*self.anchors.values(), *self.momenta.values()))

    @property
    def in_step(self) -> bool:
        """Whether the last step ended a round."""
        return self.reducer.step == 0 or self.rounds.ends(self.reducer.step - 1)

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """As `Communicating.synchronized`: inside, the parameters are the anchors."""
        with torch.no_grad():
            trained, strategy = {name: p.clone() for name, p in self.trained.items()}, strategy_of(self.model)
            self.return_to_anchors()
            strategy.changed(self.model)
            yield
            for name, p in self.trained.items():
                p.copy_(trained[name])
            strategy.changed(self.model)

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the anchors and the outer momentum."""
        for name, anchor in self.anchors.items():
            yield f"the anchor of {name}", anchor
        for name, momentum in self.momenta.items():
            yield f"the outer momentum of {name}", momentum

    def round_state(self) -> dict[str, Any]:
        """Return the anchors, the outer momentum, and this rank's own parameters and inner state."""
        return {
            "parameters": {name: p.detach() for name, p in self.trained.items()},
            "anchors": self.anchors,
            "momenta": self.momenta,
            "inner": {
                name: {key: local(kept) if isinstance(kept, Tensor) else kept for key, kept in state_of(self.inner, p)}
                for name, p in self.parameters.items()
            },
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups],
        }

    def check_round_state(self, saved: Mapping[str, Any]) -> None:
        """Check names and shapes."""
        state.check_keys(saved, {"parameters", "anchors", "momenta", "inner", "groups"}, type(self).__name__)
        state.check_tensors(saved["parameters"], self.trained, "parameters")
        state.check_tensors(saved["anchors"], self.anchors, "anchors")
        state.check_tensors(saved["momenta"], self.momenta, "outer momenta")
        state.check_keys(saved["inner"], set(self.parameters), f"{type(self).__name__} (inner)")
        if len(saved["groups"]) != len(self.param_groups):
            raise BadInput(
                f"the state has {len(saved['groups'])} parameter groups, and this one {len(self.param_groups)}."
            )

    @torch.no_grad()
    def load_round_state(self, saved: Mapping[str, Any]) -> None:
        """Copy what `round_state` returned."""
        for name, p in self.parameters.items():
            self.trained[name].copy_(saved["parameters"][name])
            self.anchors[name].copy_(saved["anchors"][name])
            before = dict(state_of(self.inner, p))
            moments = saved["inner"][name].items()
            self.inner.state[p] = {key: copied(value, before.get(key), p) for key, value in moments}
        for group, options in zip(self.param_groups, saved["groups"], strict=True):
            group |= copy.deepcopy(options)
        for name, momentum in self.momenta.items():
            momentum.copy_(saved["momenta"][name])
        self.delivered = {}
        self.anchored = True

    def served(self) -> dict[str, Any]:
        """Return copies of what a group that joins needs: `round_state` at the anchors, and the reducer's step."""
        kept = self.reducer.codec.state_dict()
        reducer = {"step": kept["step"], "began": kept["began"], "states": kept["states"]}
        copies: dict[str, Any] = duplicate({**self.round_state(), "parameters": self.anchors, "reducer": reducer})
        return copies

    def continue_with(self, served: dict[str, Any] | None) -> None:
        """Begin a round: from what another group served, if this one is behind; then without residuals."""
        if served is not None:
            self.check_round_state(served)
            self.reducer.codec.load_state_dict({**served["reducer"], "generators": {}, "residuals": {}})
            self.load_round_state(served)
        self.fit()

    # What torch and training loops ask of an optimizer is the inner one's.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's defaults."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none)

    def load_torch_state(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state; the rounds are still to be loaded."""
        self.inner.load_state_dict(state_dict)
        copy_tensors(self.inner.state)
        self.anchored = False


def state_of(optimizer: Optimizer, p: nn.Parameter) -> ItemsView[str, Any]:
    """Return an optimizer's state of a parameter, which is empty before its first step."""
    return optimizer.state.get(p, {}).items()


def copied(saved: Any, present: Any, p: nn.Parameter) -> Any:
    """Copy a saved moment of a parameter, into the present one where there is one, and return it."""
    if not isinstance(saved, Tensor):
        return duplicate(saved)
    if isinstance(present, Tensor):
        local(present).copy_(saved)
        return present
    if not saved.ndim:
        return saved.to("cpu", copy=True)  # the number of steps
    moment = cloned(saved.to(p.device))
    if not isinstance(p, DTensor) or moment.shape != p.to_local().shape:
        return moment
    return DTensor.from_local(moment, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())


# Why: docs/decisions.md, "Rounds are a function of the step".
class Rounds:
    """The rounds of a run.

    Args:
        interval: Steps of a round.
        steps: Optimizer steps of the run; the last one ends a round. None: unknown.
    """

    def __init__(self, interval: Interval, steps: int | None = None) -> None:
        lengths = {0: interval} if isinstance(interval, int) else dict(sorted(interval.items()))
        self._starts, self._lengths = list(lengths), list(lengths.values())
        self._steps = steps

    def ends(self, step: int) -> bool:
        """Whether optimizer step ``step``, counted from 0, is the last one of a round."""
        if step + 1 in (self._steps, *self._starts):
            return True
        interval = bisect_right(self._starts, step) - 1
        return (step + 1 - self._starts[interval]) % self._lengths[interval] == 0


def check_inner(optimizer: object, whose: str) -> None:
    """Check that local updates can step an optimizer and save its state.

    Raises:
        BadInput: If it is none of torch's; steps others, such as torchtitan's container, whose state is not in its own;
            or computes the loss itself, several times, such as `LBFGS`.
    """
    given = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, Communicating):
        raise BadInput(f"{whose} takes an optimizer of torch, such as AdamW, then the model, not {given}.")
    held = [value if isinstance(value, list | tuple) else [value] for value in vars(optimizer).values()]
    if any(isinstance(value, Optimizer) for values in held for value in values):
        raise BadInput(
            f"{whose} saves the state of the optimizer that it is given, and {given} keeps moments in optimizers that "
            f"it holds: give one that it holds."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise BadInput(
            f"{whose} takes the steps of the optimizer that it is given without a closure, and {given} needs one: give "
            f"another optimizer, such as AdamW."
        )
