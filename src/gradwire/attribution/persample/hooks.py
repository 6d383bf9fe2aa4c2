"""Per-sample gradients from each layer's input and output gradient, captured by hooks in one backward pass.

While a supported layer runs, its parameters are replaced by marked ones, and a node of the graph claims the gradient of
its output. Before the backward pass the graph is searched, up to the marks. A parameter that it still reaches was used
where the hooks cannot see it: in an unsupported layer, without a batch dimension, or outside its layer. Such parameters
are reported, never skipped. Each claim in the graph must receive a gradient.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    allocated,
    evaluation,
    losses_of,
    n_targets,
    no_targets,
    note,
    out_of_memory,
    padded_width,
    read,
    trainable,
    widened,
    zeroed,
)
from gradwire.attribution.persample.layer_factors import LayerFactor, Rule, features, input_of, rule_of
from gradwire.base.errors import BadInput, RunFault, listed
from gradwire.comm.torch_internals import backward_id
from gradwire.lm.data.batches import Batch

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


def check_supported(model: nn.Module) -> None:
    """Check that the layers of all trainable parameters have a rule.

    Raises:
        BadInput: If one has none.
    """
    if names := unsupported(model):
        raise BadInput(f"the layer of {listed(names)} has no rule for per-sample gradients: freeze it, or replace it.")


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
        RunFault: If a claim in the graph receives no gradient.
    """
    run = Pass(len(batch.labels), take, batch_dims(model, batch) if len(batch.labels) > 1 else {})
    watch = Watch(model)
    with evaluation(model), watch.hooked():
        watch.run = run
        losses = losses_of(model, batch, reduction)
        watch.search(run, [losses])
        if run.unseen and watch.sharded:
            raise BadInput(
                f"{min(run.unseen)} is sharded and used by an unsupported layer or outside its layer: use --strategy "
                "ddp."
            )
        if run.due.total():
            torch.autograd.grad(losses.sum(), watch.root, allow_unused=True)
    if run.due.total():
        raise RunFault(f"a use of {listed([*+run.due])} received no gradient: use --method vmap or loop.")
    return Seen(losses.detach(), [name for name in trainable(model) if name in run.unseen])


@dataclass(eq=False)
class Pass:
    """A forward pass of a batch, and its backward pass.

    Attributes:
        samples: B.
        take: Called during the backward pass, as `backward` says; None: the claims let their gradients pass.
        dims: The batch dimensions of the layers' inputs, which a single sample does not need.
        unseen: Names of the parameters with missed uses; set by the search between the two passes.
        due: Number of uses whose gradients are to come, by name; set by the search.
        noise: Returns what is added to a parameter's gradient, by its name and an example.
    """

    samples: int
    take: Take | None
    dims: Mapping[nn.Module, BatchDims]
    unseen: set[str] = field(default_factory=set)
    due: Counter[str] = field(default_factory=Counter)
    noise: Callable[[str, Tensor], Tensor] | None = None

    def receive(self, use: _Use, factors: dict[str, LayerFactor]) -> None:
        """Hand on a use's contributions to the gradients of its parameters."""
        for local, name in use.names.items():
            if not self.due[name]:
                raise BadInput(
                    f"{name} got a gradient that no pass awaits: take one backward pass for each forward pass, with "
                    "private training by private.backward(losses)."
                )
            self.due[name] -= 1
            if name not in self.unseen and self.take is not None:
                self.take(name, factors[local], not self.due[name])


class Watch:
    """Claims the uses of a model's trainable parameters.

    Args:
        model: The model.
        gradients: Whether the parameters get their gradients, too.

    Attributes:
        root: A leaf; its gradient runs the backward pass through all claims, and no further.
        sharded: Whether the weights are sharded.
        run: The pass that is watched; None: nothing is.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = False) -> None:
        self.root, self.run = torch.zeros((), requires_grad=True), cast(Pass | None, None)
        self.sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._gradients = gradients
        self._names = {id(p): name for name, p in trainable(model).items()}  # FSDP2 swaps those of a layer that runs
        owned = {
            module: {name: self._names[id(p)] for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            for module in model.modules()
        }
        self._owned = {module: names for module, names in owned.items() if names}
        self._running: dict[nn.Module, tuple[_Use | None, dict[str, Any]]] = {}

    def hooked(self) -> AbstractContextManager[None]:
        """Register hooks on every layer that owns parameters, and remove them on exit."""
        return hooked(self._owned, self._after, self._before)

    def search(self, run: Pass, outputs: Iterable[Tensor]) -> None:
        """Find the claims and the unseen parameters in the graph of a pass's outputs, after the forward pass.

        Raises:
            BadInput: If the graph has parts of another pass, or hides some.
        """
        for node in nodes_of(outputs):
            use = getattr(node, "receive", None)
            if isinstance(use, _Use):
                if use.run is not run:
                    raise BadInput("a forward pass depends on an earlier one: detach its input, or the earlier output.")
                run.due.update(use.names.values())
                if use.x is None or use.x._version != use.version:
                    run.unseen.update(use.names.values())
            elif isinstance(node, torch._C._functions.AccumulateGrad) and isinstance(node.variable, nn.Parameter):
                name = self._names.get(id(node.variable))
                run.unseen.update([name] if name else ["a parameter"] * self.sharded)
            elif type(node).__name__ == "CheckpointFunctionBackward":
                raise BadInput(
                    "a reentrant checkpoint hides the layers inside it: call torch.utils.checkpoint.checkpoint with "
                    "use_reentrant=False."
                )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or (self.run is None and backward_id() != -1):
            return
        if self.run is None:
            raise BadInput(
                f"{listed([*self._owned[module].values()])}: the layer runs outside a forward pass of the model, where "
                "its samples are not known. Call the model itself."
            )
        use = self._use(self.run, module, args, kwargs)
        leaves = {local: module._parameters[local] for local in self._owned[module]}
        self._running[module] = use, leaves
        for local, name in self._owned[module].items():
            leaf = leaves[local]
            self._names[id(leaf)] = name
            if use is not None:
                module._parameters[local] = _Mark.apply(leaf, name, self.run) if self._gradients else leaf.detach()

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        use, leaves = self._running.pop(module, (None, dict[str, Any]()))
        module._parameters.update(leaves)
        if use is None or output is None:  # a recomputation in the backward pass ends a layer early
            return output
        return claimed(repeated(output, use.dim, use.run.samples), self.root, use)

    def _use(self, run: Pass, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Use | None:
        """Return the call of a layer, or None if it is not supported or its input has no batch dimension."""
        names, rule, x = self._owned[module], rule_of(module), input_of(module, args, kwargs)
        if rule is None or x is None or not names.keys() <= {"weight", "bias"} or isinstance(x, DTensor):
            return None
        dim = BatchDim(0, False)
        if run.samples > 1:
            known = run.dims.get(module, {}).get(x.ndim)
            if known is None or x.shape[known.dim] != (1 if known.repeated else run.samples):
                return None
            dim = known
        return _Use(run, module, names, rule, x.detach(), x._version, dim)


@dataclass(eq=False)
class _Use:
    """One call of a supported layer; called with its output gradient.

    Attributes:
        run: The pass.
        module: The layer.
        names: Names of its parameters, by their names in the layer.
        rule: Its gradient rule.
        x: Its input.
        version: Changes of the input in place before the call.
        dim: The batch dimension.
    """

    run: Pass
    module: nn.Module
    names: dict[str, str]
    rule: Rule
    x: Tensor | None
    version: int
    dim: BatchDim

    def __call__(self, grad: Tensor) -> None:
        """Compute the contributions to the gradients of the parameters, and let the input go."""
        if self.run.take is None:
            return
        if self.x is None:
            raise BadInput("a second backward pass over one forward pass counts its samples twice: take one.")
        leading, samples = self.x.ndim - features(self.module, self.x), self.run.samples
        x = by_sample(widened(self.x), leading, self.dim, samples)
        of_output = by_sample(widened(grad.detach()), leading, BatchDim(self.dim.dim, False), samples)
        self.x = None
        self.run.receive(self, self.rule(self.module, x, of_output))


class Unseen(BadInput):
    """The ``hooks`` method missed a use of a parameter."""


def all_seen(seen: Seen) -> Tensor:
    """Return the losses of a pass that saw every use of every parameter.

    Raises:
        Unseen: If it missed one.
    """
    if seen.unseen:
        raise Unseen(
            f"--method hooks does not see every use of {listed(seen.unseen)}: its layer is not supported "
            "or has an input without a batch dimension, or it is used outside its layer. Use --method vmap or loop."
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


Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


# Why: docs/decisions.md, "A layer's use is claimed by a node of the graph, not by a hook on a tensor".
def unviewed(values: Tensor) -> Tensor:
    """Return a tensor of the same memory that autograd does not know as a view.

    An operation in place on a view replaces the view's node of the graph; on such a tensor it adds a node.
    """
    return torch.ops.aten._unsafe_view(values, values.shape)


def claimed(values: Tensor, root: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
    """Return a layer's output behind a node of the graph that calls ``receive`` with its gradient.

    Args:
        values: The output.
        root: A leaf that requires a gradient; ``torch.autograd.grad(loss, root)`` runs every such node of the graph.
        receive: Called once per backward pass, if the loss depends on the output. It is the node's ``receive``.
    """
    claim: Tensor = _Claim.apply(values, root, receive)
    return claim


class _Mark(torch.autograd.Function):
    """The identity on a parameter that is used where a claim sees it; its gradient may get noise."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, name: str, run: Pass) -> Tensor:
        ctx.marked, ctx.run = name, run
        return unviewed(parameter)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        noise: Callable[[str, Tensor], Tensor] | None = ctx.run.noise
        return grads[0] if noise is None else noise(ctx.marked, grads[0]), None, None


class _Claim(torch.autograd.Function):
    """The identity, with a callback in its backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, root: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return unviewed(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.receive(grads[0])
        return grads[0], None, None


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graph of some tensors, up to marked parameters."""
    met, ahead = set[Any](), [output.grad_fn for output in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        met.add(node)
        yield node
        if not hasattr(node, "marked"):
            ahead += [following for following, _ in node.next_functions]


# Why: docs/decisions.md, "A copy of a model has no compressor".
class Hook:
    """A hook of a module; those of copies of the module do nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        return self._call(*args) if self._call is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        """Return a hook that does nothing."""
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        """Load as a hook that does nothing, with a warning."""
        return unhooked, ()


def unhooked() -> Hook:
    """Warn that a model is loaded without the hooks that it was saved with."""
    warnings.warn(
        "the model was saved with hooks on its samples' gradients, and is loaded without: call gradwire.per_sample or "
        "gradwire.make_private again. A state_dict has the model and no more.",
        stacklevel=2,
    )
    return Hook()


@contextmanager
def hooked(modules: Iterable[nn.Module], after: After, before: Before | None = None) -> Iterator[None]:
    """Call ``after`` after each forward pass of the modules, ahead of others' hooks, and ``before`` last before it."""
    handles = []
    for module in modules:
        handles.append(module.register_forward_hook(Hook(after), with_kwargs=True, prepend=True, always_call=True))
        if before is not None:
            handles.append(module.register_forward_pre_hook(Hook(before), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The batch dimension of a layer's input is found by gradients that are NaN for one sample of a probe. Where the loss of
# a sample is NaN, so are exactly the gradients that depend on it, whatever the weights. If they are one row of one
# dimension, in two passes with different numbers of samples, then this is the batch dimension. Sizes would not tell: a
# batch may have as many samples as tokens or heads.
PASSES = ((2, 0), (3, 2))  # samples of a pass, and the position of the one with a NaN
WIDTH = 5  # smallest number of tokens of a sample in a probe, so that it reads more tokens than there are samples


class BatchDim(NamedTuple):
    """A batch dimension.

    Attributes:
        dim: The dimension of the layer's input and output.
        repeated: Whether all samples share one row, as of position embeddings, which is then repeated.
    """

    dim: int
    repeated: bool


BatchDims = Mapping[int, BatchDim | None]  # by the input's number of dimensions
PROBED: WeakKeyDictionary[nn.Module, WeakKeyDictionary[nn.Module, BatchDims]] = WeakKeyDictionary()


# Why: docs/decisions.md, "The batch dimension is found by NaN".
def batch_dims(model: nn.Module, batch: Batch) -> Mapping[nn.Module, BatchDims]:
    """Return the batch dimensions of a language model, from two passes of five samples in all; see `probed_dims`.

    Args:
        model: A causal language model.
        batch: Some of its samples.
    """
    probes = []
    for samples, marked in PASSES:
        some = _of(batch, samples)
        probes.append(Probe(partial(losses_of, model, some), tuple(read(some.input_ids).shape), marked))
    return probed_dims(model, probes)


class Probe(NamedTuple):
    """A pass whose gradients are NaN for one sample.

    Attributes:
        losses: Computes what is differentiated, [B].
        shape: Leading dimensions of the model's input, [B, T] or [B].
        marked: The sample with a NaN.
    """

    losses: Callable[[], Tensor]
    shape: tuple[int, ...]
    marked: int


def probed_dims(model: nn.Module, probes: Iterable[Probe]) -> Mapping[nn.Module, BatchDims]:
    """Return the batch dimensions of the inputs of supported layers, trainable or not; None where there is none.

    A model is probed once, and again if it has other layers. If it fails in the probe, no layer has a batch dimension.

    Raises:
        BadInput: If a layer mixes the samples of a batch.
    """
    layers = [module for module in model.modules() if rule_of(module) is not None]
    known = PROBED.get(model)
    if known is not None and all(layer in known for layer in layers):
        return known
    calls: dict[nn.Module, _Calls] = {layer: defaultdict(list) for layer in layers}
    mixing = set(calls)
    try:
        for probe in probes:
            mixing &= _probe(model, probe, calls)
    except Exception as error:  # any model's code may run
        if out_of_memory(error) or isinstance(error, BadInput):
            raise
        note(f"hooks find no batch dimensions: the model fails in a probe: {type(error).__name__}: {error}")
        calls, mixing = {layer: defaultdict(list) for layer in calls}, set()
    for name, module in model.named_modules():
        if module in mixing:
            raise BadInput(
                f"the loss of a sample depends on other samples in {name}: a layer after it mixes the samples of a "
                "batch, so that per-sample gradients are undefined. Replace the layer."
            )
    PROBED[model] = WeakKeyDictionary(
        {layer: {ndim: _common(possible) for ndim, possible in of_layer.items()} for layer, of_layer in calls.items()}
    )
    return PROBED[model]


def repeated(output: Tensor, dim: BatchDim, samples: int) -> Tensor:
    """Repeat an output that all samples share."""
    return output.expand(samples, *output.shape[1:]).clone() if dim.repeated else output


def by_sample(values: Tensor, leading: int, dim: BatchDim, samples: int) -> Tensor:
    """Reshape an input or output with ``leading`` dimensions before its features to ``[B, N, *features]``."""
    if samples == 1:
        return values.reshape(1, -1, *values.shape[leading:])
    if dim.repeated:
        values = values.expand(samples, *values.shape[1:])
    values = values.movedim(dim.dim, 0)
    return values.flatten(1, leading - 1) if leading > 1 else values[:, None]


_Calls = defaultdict[int, list[set[BatchDim]]]  # possible dimensions of each call, by its input's number of dimensions


def _common(possible: list[set[BatchDim]]) -> BatchDim | None:
    """Return the only dimension that is possible for all calls."""
    common = set.intersection(*possible)
    return common.pop() if len(common) == 1 else None


def _of(batch: Batch, samples: int) -> Batch:
    """Return ``samples`` rows of a batch's tokens, repeated if there are fewer; every token is a target."""
    rows, columns = (
        torch.arange(size, device=batch.labels.device) for size in (samples, max(WIDTH, batch.labels.shape[1]))
    )
    tokens = batch.input_ids[rows % len(batch.labels)][:, columns % batch.labels.shape[1]]
    return Batch(tokens, tokens, [str(row) for row in range(samples)])


def _probe(model: nn.Module, probe: Probe, calls: dict[nn.Module, _Calls]) -> set[nn.Module]:
    """Add the possible batch dimensions of every call of a layer in a probe.

    Returns:
        The layers with an input ``[B, T, ...]`` in which the NaN reaches other samples, too.
    """
    (samples, *rest), marked, root = probe.shape, probe.marked, torch.zeros((), requires_grad=True)
    mixing: set[nn.Module] = set()

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = input_of(module, args, kwargs)
        if x is None or output is None or not torch.is_grad_enabled():
            return output
        leading = x.ndim - features(module, x)
        shared = len(x) == 1 and samples not in x.shape[:leading]

        def receive(grad: Tensor) -> None:
            depends = grad.isnan().flatten(leading).any(-1)
            if rest and x.shape[:2] == probe.shape and {marked} < set(_rows(depends, 0)):
                mixing.add(module)
            calls[module][x.ndim].append(
                {
                    BatchDim(dim, shared)
                    for dim, size in enumerate(depends.shape)
                    if size == samples and depends.ndim >= len(probe.shape) and _rows(depends, dim) == [marked]
                }
            )

        return claimed(repeated(output, BatchDim(0, shared), samples), root, receive)

    with evaluation(model), hooked(calls, after), torch.autograd.set_detect_anomaly(False):
        losses = probe.losses()
        weights = torch.ones_like(losses)
        weights[marked] = torch.nan
        torch.autograd.grad(losses, root, weights, allow_unused=True)
    return mixing


def _rows(mask: Tensor, dim: int) -> list[int]:
    """Return the rows of a dimension in which a mask is set."""
    return [row for row, values in enumerate(mask.unbind(dim)) if values.any()]
