"""Norms and projected gradients of samples in anyone's training loop, from its forward and backward passes.

Shape legend: B = samples of a block, all its forward passes in order; D = width of a row.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradwire.attribution import projections
from gradwire.attribution.persample.batch import Reduction, shapes, trainable
from gradwire.attribution.persample.hooks import (
    BatchDims,
    Hook,
    Pass,
    Probe,
    Take,
    Watch,
    check_supported,
    probed_dims,
)
from gradwire.attribution.persample.layer_factors import SquareNorms
from gradwire.attribution.persample.norms import SampleLayout, check_unmixed, combined
from gradwire.attribution.projections.base import Images
from gradwire.attribution.store.row_writer import RowWriter
from gradwire.base.errors import BadInput, listed
from gradwire.comm.collectives import ops
from gradwire.comm.parallel.model import COMPILED, inside
from gradwire.comm.torch_internals import backward_id

WATCHED: WeakSet[nn.Module] = WeakSet()
Start = Callable[[int, torch.device], Take]


def per_sample(model: nn.Module, *, batch_dim: int = 0) -> Samples:
    """Return what computes norms and rows of single samples' gradients while a model trains.

    Each layer's input and output gradient give them in the backward pass that a training step has anyway. Parameters
    get their gradients as usual, and wrappers do not notice. A model may be plain, in `DistributedDataParallel`, or
    sharded by ``fully_shard``, with tied weights, adapters, checkpointed activations and autocast.

    A sample's gradient is what the loss sends back through that sample's rows. For a loss that is a sum or mean of the
    samples' losses, it is the gradient of the sample's own; a loss that compares samples has none of this kind. The
    model alone uses its parameters: of a second use in the loss, as of tied weights in a fused one, hooks know nothing.

    In the first forward pass with several samples, the model runs twice more, in evaluation mode, to find the batch
    dimension of each layer's input; without a change of its buffers, gradients and random numbers.

    Args:
        model: A model whose forward pass returns a tensor with a row per sample, alone or among others.
        batch_dim: The dimension of the samples in the model's first input and in its outputs.

    Raises:
        BadInput: If a layer mixes samples, as BatchNorm does, or a trainable parameter is in a layer without a rule;
            or if the model is compiled or wrapped by FSDP1.
    """
    return Samples(model, batch_dim)


class Samples:
    """Per-sample gradients of a model; see `per_sample`."""

    def __init__(self, model: nn.Module, batch_dim: int) -> None:
        check_model(model)
        self.model, self.batch_dim = inside(model), batch_dim

    def norms(self, *, reduction: Reduction = "mean", scale: float = 1.0, passes: int = 1) -> Norms:
        """Return a context whose passes give the norm of each sample's gradient.

        Args:
            reduction: How the loss combines the samples' losses. ``mean``: over the samples of a forward pass, so that
                norms are multiplied by their number. ``sum``: also weighted, where a norm is that of the sample's term.
            scale: Factor of the loss, such as a gradient scaler's, or 1/k with k accumulated passes: norms are divided
                by it. The ranks' average that follows a backward pass is no such factor.
            passes: Forward passes of the context, each with one backward pass; their samples follow one another.
        """
        return Norms(self, reduction, scale, passes)

    def rows(
        self,
        dim: int,
        projection: str = "sjlt",
        *,
        seed: int = 0,
        reduction: Reduction = "mean",
        scale: float = 1.0,
        passes: int = 1,
    ) -> Rows:
        """Return a context whose passes give each sample's projected gradient, as ``grads collect`` writes it.

        Args:
            dim: D.
            projection: ``rademacher``, ``sjlt``, ``factored`` or ``none``.
            seed: Seed of the projection.
            reduction: As of `norms`.
            scale: As of `norms`.
            passes: As of `norms`.

        Raises:
            BadInput: If the projection is unknown or does not have such rows.
        """
        of = shapes(self.model)
        projector = projections.build(projection, of, seed)
        projections.check_width([dim], sum(projector.sizes.values()))
        projector.width([dim])
        return Rows(self, projector, dim, reduction, scale, passes)


class Block(ABC):
    """A context around forward passes of a model and their backward passes."""

    def __init__(self, samples: Samples, reduction: Reduction, scale: float, passes: int) -> None:
        if reduction not in ("mean", "sum"):
            raise BadInput(f"reduction is {reduction!r}: it is 'mean' or 'sum'.")
        if not scale > 0 or passes < 1:
            raise BadInput(f"scale is {scale} and passes is {passes}: both must be positive.")
        self._reduction, self._scale, self._passes = reduction, scale, passes
        self._runs: list[Pass] = []
        self._front = Front(samples.model, samples.batch_dim, self._start, self._search)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Register the hooks."""
        self._stack.enter_context(self._front.watched())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the hooks.

        Raises:
            BadInput: If there were other passes than said.
        """
        self._stack.close()
        if kind is None:
            self._check()
            if len(self._runs) != self._passes:
                raise BadInput(
                    f"{len(self._runs)} forward passes of the model computed gradients, but passes is {self._passes}: "
                    "pass their number, and with accumulation the factor of each loss as scale."
                )

    @abstractmethod
    def _start(self, samples: int, device: torch.device) -> Take:
        """Return what takes the contributions to the gradients of a pass."""

    def _search(self, run: Pass, outputs: list[Tensor]) -> None:
        """Look for parameters that hooks miss, once the outputs of a pass are there."""
        self._front.watch.search(run, outputs)
        check_seen(run)
        self._runs.append(run)
        for name, parameter in trainable(self._front.model).items():
            if name not in run.due:
                self._stack.callback(parameter.register_hook(partial(self._outside, name)).remove)

    def _outside(self, name: str, _: Tensor) -> None:
        if all(name not in run.due for run in self._runs):
            raise BadInput(
                f"{name} is used outside the model's forward pass, where hooks do not see it: use it inside."
            )

    def _check(self) -> None:
        missing = sorted({name for run in self._runs for name in +run.due})
        if missing or not self._runs:
            raise BadInput(
                f"no gradient has reached {listed(missing) or 'any layer'}: call the model and loss.backward() first, "
                "with a loss that depends on all of the model's outputs."
            )

    def _scaled(self, values: Tensor) -> Tensor:
        """Return values [B] or [B, D] of the loss's gradient as those of the samples' own losses."""
        of_each = [run.samples if self._reduction == "mean" else 1 for run in self._runs]
        parts = values.split([run.samples for run in self._runs])
        return torch.cat([factor / self._scale * part for factor, part in zip(of_each, parts, strict=True)])


class Norms(Block):
    """Norms of the samples' gradients."""

    def __init__(self, samples: Samples, reduction: Reduction, scale: float, passes: int) -> None:
        super().__init__(samples, reduction, scale, passes)
        self._growing: list[SquareNorms] = []

    def _start(self, samples: int, device: torch.device) -> Take:
        self._growing.append(SquareNorms(samples, device))
        return self._growing[-1].take

    @property
    def values(self) -> Tensor:
        """The norms of this rank's samples, float64 [B], in the order of the batch; 0 for a sample without a loss.

        Raises:
            BadInput: If a backward pass is missing.
        """
        self._check()
        return self._scaled(torch.cat([growing.total() for growing in self._growing]).sqrt())

    def gathered(self, placement: SampleLayout = "distributed", group: ops.Group = None) -> Tensor:
        """Return the norms of all ranks' samples, float64, on every rank; all ranks call it.

        Args:
            placement: ``distributed``: ranks have samples of their own, and rank 0's come first. ``replicated``: all
                have the same samples, [B], and their norms must agree.
            group: The ranks.

        Raises:
            CheckFailed: If the norms of replicated samples differ.
        """
        values = self.values
        rank = ops.rank_in(group) if placement == "distributed" else 0
        ids = [f"{rank}/{position}" for position in range(len(values))]
        squares = combined(ids, values.square(), "complete", placement, group)
        return torch.tensor([*squares.values()], dtype=torch.float64, device=values.device).sqrt()


class Rows(Block):
    """Projected gradients of the samples."""

    def __init__(
        self,
        samples: Samples,
        projector: projections.Projector,
        dim: int,
        reduction: Reduction,
        scale: float,
        passes: int,
    ) -> None:
        super().__init__(samples, reduction, scale, passes)
        self._projector, self._dim = projector, dim
        self._images: list[Images] = []

    def _start(self, samples: int, device: torch.device) -> Take:
        self._images.append(Images([self._projector], samples, [self._dim], device))
        return self._images[-1].take

    @property
    def values(self) -> Tensor:
        """The rows, float32 [B, D], in the order of the batch.

        Raises:
            BadInput: If a backward pass is missing.
        """
        self._check()
        return self._scaled(torch.cat([images.finished()[self._dim][:, 0] for images in self._images]))

    @property
    def norms(self) -> Tensor:
        """The norms of the gradients before projection, float64 [B]."""
        self._check()
        return self._scaled(torch.cat([images.square_norms()[:, 0] for images in self._images]).sqrt())

    def write(self, store: RowWriter, ids: Sequence[str]) -> None:
        """Append the rows with the ids of their samples to a store that `GradientStore.create` writes.

        Raises:
            BadInput: As `RowWriter.append`.
        """
        store.append(self.values, ids, self.norms)


class Front:
    """Begins a `Pass` in each forward pass of a model that computes gradients.

    Args:
        model: The model, without DDP.
        batch_dim: The dimension of the samples in its first input and in its outputs.
        start: Returns what takes the contributions of a pass, by its number of samples and device.
        ended: Called with a pass and the tensors that the model returned.
    """

    def __init__(
        self,
        model: nn.Module,
        batch_dim: int,
        start: Start,
        ended: Callable[[Pass, list[Tensor]], None],
    ) -> None:
        self.model, self.batch_dim, self.watch = model, batch_dim, Watch(model, gradients=True)
        self._start, self._ended, self._probing = start, ended, False

    def watched(self) -> ExitStack:
        """Register the hooks; leaving the context removes them.

        Raises:
            BadInput: If the model has hooks of another one.
        """
        if self.model in WATCHED:
            raise BadInput("the model is watched already: end the other context, or detach the private training.")
        WATCHED.add(self.model)
        stack = ExitStack()
        stack.callback(WATCHED.discard, self.model)
        stack.callback(self.model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True).remove)
        stack.callback(self.model.register_forward_hook(Hook(self._after), prepend=True, always_call=True).remove)
        stack.enter_context(self.watch.hooked())
        return stack

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._probing or not torch.is_grad_enabled() or backward_id() != -1:
            return
        first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        if first is None or first.ndim <= self.batch_dim:
            raise BadInput(f"the model's first input has no dimension {self.batch_dim}: pass batch_dim.")
        samples = first.shape[self.batch_dim]
        probed = samples > 1 or self.watch.sharded  # a sharded model's passes are those of all ranks
        dims = self._dims(samples, first.device, args, kwargs) if probed else {}
        self.watch.run = Pass(samples, self._start(samples, first.device), dims)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._probing or self.watch.run is None:
            return
        run, self.watch.run = self.watch.run, None
        if output is not None:
            self._ended(run, tensors_of(output))

    def _dims(
        self, samples: int, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Mapping[nn.Module, BatchDims]:
        """Find the batch dimensions from samples of the first forward pass, in numbers that no other size has."""
        dim = self.batch_dim
        leaves, structure = tree_flatten((args, kwargs))
        batched = [isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == samples for leaf in leaves]
        sizes = {
            size for leaf in leaves if isinstance(leaf, Tensor) for size in (*leaf.shape[:dim], *leaf.shape[dim + 1 :])
        }

        def losses(count: int) -> Tensor:
            if not samples:
                raise BadInput(
                    "the first forward pass of a sharded model has no samples on this rank: begin with some."
                )
            rows = torch.arange(count, device=device) % samples
            some = [
                leaf.index_select(dim, rows) if of_batch else leaf
                for leaf, of_batch in zip(leaves, batched, strict=True)
            ]
            args, kwargs = tree_unflatten(some, structure)
            outputs = [
                output.movedim(dim, 0).reshape(count, -1).sum(1)
                for output in tensors_of(self.model(*args, **kwargs))
                if output.requires_grad and output.ndim > dim and output.shape[dim] == count
            ]
            if not outputs:
                raise BadInput(
                    f"the model returns no tensor whose dimension {dim} has the size of its first input's, {count} in "
                    "a probe: return the samples' losses or outputs, or pass batch_dim."
                )
            if any(bool(output.isnan().any()) for output in outputs):
                raise BadInput(
                    "the model's first outputs have NaN, which finds the batch dimension: begin with a batch without."
                )
            return sum(outputs[1:], outputs[0])

        few, more = islice((count for count in itertools.count(2) if count not in sizes), 2)
        self._probing, self.watch.run = True, Pass(samples, None, {})  # without dimensions, nothing is claimed
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                return probed_dims(
                    self.model,
                    [Probe(partial(losses, few), (few,), 0), Probe(partial(losses, more), (more,), more - 1)],
                )
        finally:
            self._probing, self.watch.run = False, None


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors that a model returns: alone, in containers, or as attributes of an object."""
    leaves = tree_leaves(output)
    parts = [leaf if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", None)) for leaf in leaves]
    return [tensor for tensor in tree_leaves(parts) if isinstance(tensor, Tensor)]


def check_model(model: nn.Module) -> None:
    """Check that hooks can see the uses of a model's trainable parameters.

    Raises:
        BadInput: If they cannot.
    """
    compiled = any(hasattr(module, COMPILED) or module._compiled_call_impl is not None for module in model.modules())
    if compiled:
        raise BadInput("the model is compiled, so that hooks do not see its layers: pass one that is not.")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BadInput("FSDP1 hides the layers' parameters from hooks: use fully_shard.")
    check_unmixed(model)
    check_supported(inside(model))


def check_seen(run: Pass) -> None:
    """Check that hooks saw every use of the parameters in a pass.

    Raises:
        BadInput: If they missed one.
    """
    if run.unseen:
        raise BadInput(
            f"hooks do not see every use of {listed(sorted(run.unseen))}: its layer has an input without a batch "
            "dimension, or mixes samples, or it is used outside its layer. Freeze it, or change the layer."
        )
