"""The batch dimension of each layer's input, found by gradients that are NaN for one sample of a probe.

Where the loss of a sample is NaN, so are exactly the gradients that depend on it, whatever the weights. If they are one
row of one dimension, in two passes with different numbers of samples, then this is the batch dimension. Sizes would not
tell: a batch may have as many samples as tokens or heads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradwire.attribution.persample.batch import evaluation, losses_of, note, out_of_memory, read
from gradwire.attribution.persample.claims import claimed, hooked
from gradwire.attribution.persample.rules import features, input_of, rule_of
from gradwire.base.errors import BadInput
from gradwire.lm.data.batches import Batch

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
    """Return the batch dimensions of the inputs of supported layers, trainable or not; None where there is none.

    A model is probed once, and again if it has other layers: two passes of five samples in all. If it fails in the
    probe, no layer has a batch dimension.

    Args:
        model: A causal language model.
        batch: Some of its samples.

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
        for samples, marked in PASSES:
            mixing &= _probe(model, _of(batch, samples), marked, calls)
    except Exception as error:  # any model's code may run
        if out_of_memory(error):
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
    return values.movedim(dim.dim, 0).reshape(samples, -1, *values.shape[leading:])


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


def _probe(model: nn.Module, batch: Batch, marked: int, calls: dict[nn.Module, _Calls]) -> set[nn.Module]:
    """Add the possible batch dimensions of every call of a layer in a pass whose sample ``marked`` has a NaN.

    Returns:
        The layers with an input ``[B, T, ...]`` in which it reaches other samples, too.
    """
    samples, root = len(batch.labels), torch.zeros((), requires_grad=True)
    mixing: set[nn.Module] = set()

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = input_of(module, args, kwargs)
        if x is None or not torch.is_grad_enabled():
            return output
        leading = x.ndim - features(module)
        shared = len(x) == 1 and samples not in x.shape[:leading]

        def receive(grad: Tensor) -> None:
            depends = grad.isnan().flatten(leading).any(-1)
            if x.shape[:2] == read(batch.input_ids).shape and {marked} < set(_rows(depends, 0)):
                mixing.add(module)
            calls[module][x.ndim].append(
                {
                    BatchDim(dim, shared)
                    for dim, size in enumerate(depends.shape)
                    if size == samples and depends.ndim > 1 and _rows(depends, dim) == [marked]
                }
            )

        return claimed(repeated(output, BatchDim(0, shared), samples), root, receive)

    with evaluation(model), hooked(calls, after), torch.autograd.set_detect_anomaly(False):
        losses = losses_of(model, batch)
        weights = torch.ones_like(losses)
        weights[marked] = torch.nan
        torch.autograd.grad(losses, root, weights, allow_unused=True)
    return mixing


def _rows(mask: Tensor, dim: int) -> list[int]:
    """Return the rows of a dimension in which a mask is set."""
    return [row for row, values in enumerate(mask.unbind(dim)) if values.any()]
