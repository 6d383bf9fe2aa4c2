"""Per-sample gradients from each layer's input and output gradient, captured by hooks in one backward pass.

The parameters of a supported layer are frozen while it runs. A parameter that is in the graph afterwards was used where
the hooks cannot see it: in an unsupported layer, or outside its layer. Such parameters are reported, never skipped.
The outputs of the first layers replace the parameters as leaves of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.data.batches import Batch
from gradwire.errors import BadInput
from gradwire.persample.batch import (
    PerSample,
    Reduction,
    allocated,
    evaluation,
    losses_of,
    n_targets,
    no_targets,
    padded_width,
    trainable,
    zeroed,
)
from gradwire.persample.layer_factors import LayerFactor
from gradwire.persample.rules import Rule, rule_of

Take: TypeAlias = Callable[[str, LayerFactor, bool], None]


def unsupported(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters of unsupported layers."""
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    return [
        names[id(parameter)]
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if id(parameter) in names and rule_of(module) is None
    ]


class Seen(NamedTuple):
    """The result of a pass: the losses [B], and the names of the parameters with uses that the hooks missed."""

    losses: Tensor
    unseen: list[str]


def backward(model: nn.Module, batch: Batch, take: Take, reduction: Reduction = "mean") -> Seen:
    """Call ``take(name, use, last)`` for each use of a trainable parameter, in backward order.

    Args:
        model: A causal language model that returns ``logits``.
        batch: Samples of any length, padded on the right; a sample without a target has a zero gradient.
        take: Called during the backward pass; ``last`` marks a parameter's last use. Skipped for unseen parameters.
        reduction: How the loss reduces over a sample's targets.

    Raises:
        BadInput: If a parameter is unseen and the weights are sharded.
    """
    watch = _Watch(model, len(batch.labels), take)
    with evaluation(model), watch.hooked():
        losses = losses_of(model, batch, reduction)
        leaves = _leaves(losses)
        watch.unseen = {watch.names[id(leaf)] for leaf in leaves if id(leaf) in watch.names}
        if watch.unseen and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise BadInput(
                f"{min(watch.unseen)} is sharded and used by an unsupported layer or outside its layer: use --strategy "
                "ddp."
            )
        if leaves:
            torch.autograd.grad(losses.sum(), leaves)
    return Seen(losses.detach(), [name for name in trainable(model) if name in watch.unseen])


class _Watch:
    """Tracks the trainable parameters through one forward and one backward pass.

    Attributes:
        names: Parameter names by ``id``; FSDP2 swaps a layer's parameters while it runs.
        unseen: Names of the parameters with missed uses; set between the two passes.
    """

    def __init__(self, model: nn.Module, samples: int, take: Take) -> None:
        self.names = {id(parameter): name for name, parameter in trainable(model).items()}
        self.unseen: set[str] = set()
        self._parameters = list(trainable(model).values())
        self._owned = {
            module: {local: self.names[id(p)] for local, p in module.named_parameters(recurse=False) if p.requires_grad}
            for module in model.modules()
        }
        self._samples, self._take, self._open = samples, take, Counter[str]()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Register hooks on every layer that owns parameters, and remove them on exit."""
        owners = [module for module, own in self._owned.items() if own]
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in owners]
        handles += [module.register_forward_hook(self._after, with_kwargs=True) for module in owners]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._parameters:
                parameter.requires_grad_(True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for local, name in self._owned[module].items():
            parameter = getattr(module, local)
            self.names[id(parameter)] = name
            parameter.requires_grad_(self._rule(module, args, kwargs) is None)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        own = self._owned[module]
        for local in own:
            getattr(module, local).requires_grad_(True)
        rule = self._rule(module, args, kwargs)
        if rule is None or not torch.is_grad_enabled():
            return output
        if len(output) != self._samples:  # position embeddings have one row for all samples; expand it
            output = output.expand(self._samples, *output.shape[1:]).clone()
        if not output.requires_grad:
            output = output.detach().requires_grad_().clone()  # not a leaf, so that in-place operations are allowed
        x = _entering(args, kwargs).detach()
        self._open.update(own.values())

        def store(grad: Tensor) -> None:
            found = rule(module, self._by_sample(module, x), self._by_sample(module, grad.detach(), output=True))
            for local, name in own.items():
                self._open[name] -= 1
                if name not in self.unseen:
                    self._take(name, found[local], not self._open[name])

        output.register_hook(store)
        return output

    def _rule(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule | None:
        """Return the layer's rule if its input has a batch dimension: ``[B, ..., *features]``."""
        x = _entering(args, kwargs)
        apart = x.ndim >= 2 + _features(module) and len(x) in (1, self._samples)
        return rule_of(module) if apart and self._owned[module].keys() <= {"weight", "bias"} else None

    def _by_sample(self, module: nn.Module, values: Tensor, output: bool = False) -> Tensor:
        """Reshape to ``[B, N, *features]``."""
        features = max(_features(module), int(output))
        values = values.expand(self._samples, *values.shape[1:])
        return values.reshape(self._samples, -1, *values.shape[values.ndim - features :])


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the single input of a supported layer."""
    return args[0] if args else next(iter(kwargs.values()), torch.empty(()))


def _features(module: nn.Module) -> int:
    """Count the trailing feature dimensions of a supported layer's input; 0 for the ids of an embedding."""
    return 0 if isinstance(module, nn.Embedding) else len(getattr(module, "normalized_shape", (1,)))


def _leaves(output: Tensor) -> list[Tensor]:
    """Return the leaves of the autograd graph of ``output``."""
    found, met, ahead = [], set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if isinstance(node, torch._C._functions.AccumulateGrad):
            found.append(node.variable)
        ahead += [following for following, _ in node.next_functions]
    return found


class Unseen(BadInput):
    """The ``hooks`` method missed a use of a parameter."""


def all_seen(seen: Seen) -> Tensor:
    """Return the losses of a pass that saw every use of every parameter.

    Raises:
        Unseen: If it missed one.
    """
    if seen.unseen:
        raise Unseen(
            f"--method hooks does not see every use of {', '.join(seen.unseen[:3])}: its layer is not supported, or it "
            "is used outside its layer. Use --method vmap or loop."
        )
    return seen.losses


def gradients(
    model: nn.Module, batch: Batch, reduction: Reduction = "mean", out: dict[str, Tensor] | None = None
) -> PerSample:
    """Compute the per-sample gradients of a batch layer by layer.

    Args:
        model: A causal language model.
        batch: Samples of any length, padded on the right.
        reduction: How the loss reduces over a sample's targets.
        out: Where the gradients are written, as `PerSample.gradient`; None: new tensors.

    Raises:
        Unseen: If the hooks miss a use of a parameter.
    """
    batch = padded_width(batch)
    out = allocated(model, len(batch.labels)) if out is None else out
    written: set[str] = set()

    def take(name: str, use: LayerFactor, last: bool) -> None:
        use.write(out[name], add=name in written)
        written.add(name)

    losses = all_seen(backward(model, batch, take, reduction))
    empty = no_targets(batch)
    for name, gradient in out.items():
        zeroed(gradient, empty if name in written else torch.ones_like(empty))
    return PerSample(out, losses, n_targets(batch.labels))
