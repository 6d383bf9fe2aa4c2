"""Checks that a reducer averages every gradient of a model, once: before it is attached, and after each step."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.base.errors import BadInput
from gradwire.comm.collectives import Layout, Reducer, ops
from gradwire.comm.parallel.mesh import has_gradient
from gradwire.comm.parallel.names import inside, named_parameters, unwrapped
from gradwire.comm.parallel.strategy import Strategy, is_prepared, strategy_of
from gradwire.comm.torch_internals import NormWithStatistics, version_of

STEPPED = -1  # in place of a version: an optimizer has stepped since


# Why: docs/decisions.md, "`finish` compares the gradients that a model has with what was reduced".
class Completeness:
    """Compares the gradients that a model has with those that were reduced in the optimizer step.

    They differ where the framework's hooks no longer see a gradient: after a forward pass around the wrapper, in a pass
    that does not synchronize, on a copy of the model, for a parameter that was replaced, converted or unfrozen.

    Args:
        model: The wrapped model. Its parameters are looked up at each step, by name.
        strategy: The model's strategy, which knows the parameters that are averaged.
    """

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self._model = weakref.ref(model, self._forget)
        self._strategy: Strategy | None = strategy
        self._parameters = strategy.averaged(model)
        self._reduced: dict[str, int] = {}  # in this optimizer step, with the parameter's version at the time
        self._warned = False
        stepped = weakref.WeakMethod(self._stepped)
        hook = register_optimizer_step_post_hook(lambda *args: (call := stepped()) and call(*args))
        weakref.finalize(self, hook.remove)

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients are averaged."""
        return {*self._parameters}

    @property
    def reduced(self) -> bool:
        """Whether a gradient was reduced since the last `finish`."""
        return bool(self._reduced)

    def begun(self, layout: Layout) -> None:
        """Record a reduction; warn, once, if a parameter has changed since it was reduced in the same step.

        Parameters change when the optimizer steps, and not between the micro-batches of one step, whether or not all of
        them are reduced. An optimizer may step in the backward pass, after each reduction. Autograd's version counters
        show a change without reading a value, and a hook the steps of torch's optimizers: one with
        ``foreach`` leaves no trace in the counters of DTensors.
        """
        for name in layout.parameters:
            version = version_of(self._parameters[name]) if name in self._parameters else 0
            if not self._warned and self._reduced.get(name, version) != version:
                self._warned = True
                warnings.warn(
                    "parameters changed between two reductions, and no step of the compressor ended: pass the "
                    "optimizers that step, as they are now, to gradwire.compress_gradients (a copy of one has no "
                    "hooks), or call finish() once per optimizer step, after backward and before optimizer.step(). "
                    "Without it schedules do not advance, and NaN or infinity is not detected.",
                    stacklevel=2,
                )
            self._reduced[name] = version

    def finish(self) -> list[str] | None:
        """End the step.

        Returns:
            The parameters that this rank has a gradient of that was not reduced; None if nothing was reduced of a model
            that has trainable parameters.
        """
        reduced, self._reduced = self._reduced, {}
        if (model := self._model()) is None or self._strategy is None:
            return [] if reduced else None
        self._parameters = self._strategy.averaged(model)
        if self._parameters and reduced.keys().isdisjoint(self._parameters):
            return None
        missing = [name for name, p in self._parameters.items() if name not in reduced and has_gradient(p)]
        return [*dict.fromkeys(missing + self._strategy.held_back(model))]

    def left_out(self) -> set[str]:
        """Return the parameters that this rank's backward passes left out in the step, and that were reduced."""
        model = self._model()
        return set() if model is None or self._strategy is None else self._strategy.left_out(model)

    def leave_out(self, names: set[str]) -> None:
        """Leave parameters without a gradient that all ranks left out."""
        if (model := self._model()) is not None and self._strategy is not None:
            self._strategy.leave_out(model, names)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Record that an optimizer has stepped."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in self._reduced:
            if id(self._parameters.get(name)) in held:
                self._reduced[name] = STEPPED

    def _forget(self, _: object) -> None:
        """Let the parameters go with their model."""
        self._parameters, self._strategy = {}, None


def check_unprepared(model: nn.Module, *wrappers: type) -> None:
    """Check that `comm.parallel.wrap` has prepared no part of a model: its reducer would average a second time.

    Args:
        model: The model.
        wrappers: Frameworks' wrappers, which may be prepared.

    Raises:
        BadInput: If it has, or an optimizer that communicates has the model, whose gradients are never averaged then.
    """
    for module in filter(is_prepared, model.modules()):
        if not strategy_of(module).averages:
            raise BadInput(
                f"an optimizer that communicates, such as DiLoCo, has this {type(module).__name__} already: it "
                f"averages what its steps change, and gradients never. Give the compressor to the optimizer, as "
                f"DiLoCo(…, compressor='int8'), or build and wrap the model again without it."
            )
        if not isinstance(module, wrappers):
            raise BadInput(
                f"{type(module).__name__} is prepared already, by gradwire.comm.parallel.wrap with strategy "
                f"{strategy_of(module).name}: pass a model that is not."
            )


def check_gradients(model: nn.Module) -> None:
    """Check that a reducer can average all gradients of a model; warn if it loses precision.

    Raises:
        BadInput: If a gradient is complex or sparse: a reducer averages dense vectors of real numbers.
    """
    for name, module in inside(model).named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise BadInput(
                f"{unwrapped(name) or type(module).__name__} has sparse gradients, and a reducer averages dense ones: "
                f"build it with sparse=False."
            )
    trained = {name: p for name, p in named_parameters(model) if p.requires_grad}
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise BadInput(
                f"{name} is {shown_type(parameter)}, and a reducer averages real gradients: store its real and "
                f"imaginary part (torch.view_as_real), and combine them in forward (torch.view_as_complex)."
            )
    if wide := [name for name, parameter in trained.items() if parameter.dtype == torch.float64]:
        warnings.warn(
            f"gradients travel as float32 at most, and {len(wide)} parameters are float64 ({wide[0]}, …): their means "
            f"are rounded to float32.",
            stacklevel=3,
        )


def check_has_values(model: nn.Module) -> None:
    """Check that no parameter or buffer of a model is on the meta device: there is nothing to broadcast, or to train.

    Raises:
        BadInput: If one is.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BadInput(
                f"{name} of {type(model).__name__} is on the meta device and has no values: build the model on the "
                f"CPU, or call model.to_empty(device=...) and set or load its values first. To fill shards only, call "
                f"fully_shard, then to_empty, set or load the values, and then call gradwire.compress_gradients."
            )


# Why: docs/decisions.md, "Ranks compare how they will train".
def check_agreement(group: ops.Group, reducer: Reducer | None, parameters: Mapping[str, str], **settings: Any) -> None:
    """Compare settings, the reducer's options and the parameters over the ranks; every rank must call it.

    Args:
        group: The ranks; None is the default group.
        reducer: The reducer; None if there is none.
        parameters: As from `parameters_of`.
        settings: What else must be equal, by the name that the message gives it.

    Raises:
        BadInput: On all ranks, with the first difference and the ranks that have it. Without this check they would
            wait for each other, or take each other's bytes for something else.
    """
    if dist.get_world_size(group) == 1:
        return
    described_here = {name: shown(value) for name, value in settings.items()} | described(reducer) | dict(parameters)
    members, by_rank = ops.ranks_of(group), ops.gather_objects(described_here, group)
    for rank, described_there in zip(members, by_rank, strict=True):
        for key in [*by_rank[0], *described_there]:
            here, there = by_rank[0].get(key, "nothing"), described_there.get(key, "nothing")
            if here != there:
                raise BadInput(
                    f"ranks reduce gradients differently: {key} is {here} on rank {members[0]} and {there} on rank "
                    f"{rank}; build the same model and reducer on every rank."
                )


def described(reducer: Reducer | None) -> dict[str, str]:
    """A reducer's options, those of its parts included."""
    if reducer is None:
        return {"reducer": "none"}
    options = {"reducer": type(reducer).__name__, **reducer._options, "algorithm": reducer.algorithm}
    for part, joined in reducer.parts.items():
        options |= {f"{part}.{name}": value for name, value in described(joined).items()}
    return options


def parameters_of(model: nn.Module) -> dict[str, str]:
    """The number of parameters, and each one's name, shape and type, by its place."""
    described = [
        f"{name} {list(parameter.shape)} {shown_type(parameter)}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in named_parameters(model)
    ]
    return {"parameters": str(len(described)), **{f"parameter {place}": text for place, text in enumerate(described)}}


def shown(value: Any) -> str:
    """A setting as text that is equal on ranks with equal settings: without the address of an object."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def shown_type(parameter: nn.Parameter) -> str:
    """Return a parameter's type as text."""
    return str(parameter.dtype).removeprefix("torch.")


def warn_of_statistics(model: nn.Module) -> None:
    """Warn of running statistics, as of BatchNorm, for a strategy that does not synchronise them.

    Only DDP that averages gradients does: it sends rank 0's at the beginning of each forward pass. `nn.SyncBatchNorm`
    computes equal ones.
    """
    names = [
        unwrapped(name)
        for name, module in inside(model).named_modules()
        if isinstance(module, NormWithStatistics)
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
