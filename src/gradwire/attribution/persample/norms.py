"""Norms of per-sample gradients, without forming the gradients, and their combination across ranks.

How norms are combined depends on two things. The first is which part of a norm a rank holds: ``complete`` is the norm
over all parameters, as hooks compute it under DDP and FSDP, which gather parameters and never activations;
``partial`` sums squares over a share of the parameters. The second is the placement of samples: ``replicated`` ranks
hold the same samples, ``distributed`` ranks hold different ones.

| | replicated | distributed |
|:--|:--|:--|
| complete | the ranks' values must agree | gathered by id |
| partial | squares are summed over the ranks | refused: the shares belong to different samples |
| averaged | refused: an average over samples has no per-sample norm | refused |

Squares of complete norms are never summed over ranks: that inflates norms by √W with replicated samples, and adds norms
of unrelated samples with distributed ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.attribution.options import GradMethod
from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.persample.batch import (
    PerSample,
    Reduction,
    n_targets,
    no_targets,
    note,
    out_of_memory,
    padded_width,
    squares,
    trainable,
    zeroed,
)
from gradwire.attribution.persample.layer_factors import LayerFactor, SquareNorms
from gradwire.base.errors import BadInput, CheckFailed, NonFiniteGradient, listed
from gradwire.comm.collectives import ops
from gradwire.lm.data.batches import Batch

NormScope = Literal["complete", "partial", "averaged"]
SampleLayout = Literal["replicated", "distributed"]
Distribution = Literal["auto", "replicated", "distributed"]
TOLERANCE = 1e-4  # relative difference of two computations of one norm
OTHERS = {"vmap": vmap.gradients, "loop": loop.gradients}


class Norms(NamedTuple):
    """Per-sample gradient norms of B samples.

    Attributes:
        square: Squared norms, float64 [B]; 0 for a sample without a target.
        loss: Losses, [B].
        n_targets: Valid targets, int64 [B].
    """

    square: Tensor
    loss: Tensor
    n_targets: Tensor


def norms(
    model: nn.Module,
    batch: Batch,
    reduction: Reduction = "mean",
    names: Collection[str] | None = None,
    method: GradMethod = "auto",
) -> Norms:
    """Compute the norm of each sample's gradient.

    Args:
        model: A causal language model.
        batch: Samples of any length, padded on the right.
        reduction: How the loss reduces over a sample's targets.
        names: Parameters to sum over; None for all trainable ones.
        method: ``hooks``, ``vmap``, ``loop``, or ``auto``: hooks, with vmap for the parameters they miss, or the loop
            if vmap cannot trace the model.

    Raises:
        BadInput: If a layer mixes samples, as BatchNorm does. Or if hooks miss a use of a parameter and either
            ``method`` is ``hooks`` or the weights are sharded.
    """
    check_unmixed(model)
    batch = padded_width(batch)
    wanted = set(trainable(model)) if names is None else set(names)
    empty = no_targets(batch)
    if method in OTHERS:
        check_whole(model, method)
        computed = OTHERS[method](model, batch, reduction, wanted)
        return Norms(zeroed(_squares(computed), empty), computed.loss, computed.n_targets)
    growing = SquareNorms(len(batch.labels), batch.labels.device)

    def take(name: str, use: LayerFactor, last: bool) -> None:
        if name in wanted:
            growing.take(name, use, last)

    seen = hooks.backward(model, batch, take, reduction)
    losses = seen.losses if method == "auto" else hooks.all_seen(seen)
    total = growing.total()
    if unseen := [name for name in seen.unseen if name in wanted]:
        total.add_(_squares(_otherwise(model, batch, reduction, unseen)))
    return Norms(zeroed(total, empty), losses, n_targets(batch.labels))


def _squares(computed: PerSample) -> Tensor:
    """Sum squares over all parameters: float64 [B]."""
    of_parameters = [squares(gradient.flatten(1)) for gradient in computed.gradient.values()]
    return sum(of_parameters, torch.zeros(len(computed.loss), dtype=torch.float64, device=computed.loss.device))


def _otherwise(model: nn.Module, batch: Batch, reduction: Reduction, names: list[str]) -> PerSample:
    """Compute the gradients of the parameters that hooks miss."""
    of = listed(names)
    try:
        computed = vmap.gradients(model, batch, reduction, names)
    except Exception as error:  # torch.func may fail with any exception
        if out_of_memory(error):
            raise
        note(f"computing norms of {of} by the loop: hooks do not see every use of them, and vmap fails: {error}")
        return loop.gradients(model, batch, reduction, names)
    note(f"computing norms of {of} by vmap: hooks do not see every use of them")
    return computed


def check_whole(model: nn.Module, method: str) -> None:
    """Check that the weights are not sharded.

    Raises:
        BadInput: If they are.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise BadInput(f"--method {method} needs unsharded weights: use --strategy ddp or --method hooks.")


def check_unmixed(model: nn.Module) -> None:
    """Check that no layer mixes the samples of a batch.

    Raises:
        BadInput: If one does.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise BadInput(
                f"{name} is a {type(module).__name__}, which mixes the samples of a batch: per-sample gradients are "
                "undefined. Replace it with a LayerNorm or GroupNorm."
            )


def share(model: nn.Module, rank: int, world: int) -> list[str]:
    """Return this rank's share of the parameters when samples are replicated: about 1/W of the work.

    A parameter's cost is the sum of its side lengths. Parameters are assigned greedily, the largest first, each to the
    least loaded rank.
    """
    cost = {name: sum(parameter.shape) for name, parameter in trainable(model).items()}
    load = [0] * world
    mine = []
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        least = load.index(min(load))
        load[least] += cost[name]
        if least == rank:
            mine.append(name)
    return mine


def layout_of(batch: Batch, distribution: Distribution = "auto", group: ops.Group = None) -> SampleLayout:
    """Detect from the sample ids whether samples are replicated or distributed; fillers have no id.

    Raises:
        BadInput: On all ranks, if two ranks hold one id with different tokens, if they share only some of their
            samples, if batches differ in size, or if the result contradicts ``distribution``.
    """
    ranks = ops.gather_objects((batch.sample_id, _contents(batch)), group)
    if len({len(ids) for ids, _ in ranks}) > 1:
        raise BadInput(
            f"the ranks have batches of {', '.join(str(len(ids)) for ids, _ in ranks)} samples: use equal sizes."
        )
    contents: dict[str, str] = {}
    for rank, (_, of_rank) in enumerate(ranks):
        for id_, content in of_rank.items():
            if contents.setdefault(id_, content) != content:
                raise BadInput(
                    f"sample {id_!r} has different tokens on rank {rank} than on a lower rank: ids must be unique."
                )
    sets = [frozenset(of_rank) for _, of_rank in ranks]
    shared = {id_ for i, left in enumerate(sets) for right in sets[:i] for id_ in left & right}
    same = all(ids == ranks[0][0] for ids, _ in ranks)
    if shared and not same:
        some = ", ".join(map(repr, sorted(shared)[:3]))
        raise BadInput(
            f"the ranks share {some} ({len(shared)} in all) but not all samples: use identical or disjoint batches."
        )
    detected: SampleLayout = "replicated" if same else "distributed"
    if distribution not in ("auto", detected) and len(ranks) > 1:
        raise BadInput(f"--distribution {distribution}: the ranks' samples are {detected}, as their ids show.")
    return cast(SampleLayout, distribution) if distribution != "auto" else detected


def _contents(batch: Batch) -> dict[str, str]:
    """Digest each sample's tokens and labels without padding, by id."""
    digests = {}
    for id_, tokens, labels in zip(batch.sample_id, batch.input_ids.cpu(), batch.labels.cpu(), strict=True):
        if id_:
            used = (labels != -100).nonzero()
            end = int(used[-1]) + 1 if len(used) else 0
            row = torch.stack([tokens[:end], labels[:end]])
            digests[id_] = hashlib.sha256(row.numpy().tobytes()).hexdigest()
    return digests


def combined(
    ids: Sequence[str], square: Tensor, scope: NormScope, spread: SampleLayout, group: ops.Group = None
) -> Mapping[str, float]:
    """Combine squared norms across ranks: every sample's, by id, the same on all ranks.

    Args:
        ids: This rank's samples; "" marks a filler.
        square: This rank's squared norms, float64 [B].
        scope: Which part of the norms this rank holds.
        spread: Placement of the samples.
        group: The process group.

    Raises:
        BadInput: For partial norms of distributed samples, and for averaged gradients.
        CheckFailed: If replicated norms differ between ranks.
    """
    if scope == "averaged":
        raise BadInput(
            "invalid scope 'averaged': gradients averaged over samples or ranks have no per-sample norms. Compute the "
            "norms before averaging, with norms(model, batch)."
        )
    if scope == "partial" and spread == "distributed":
        raise BadInput(
            "invalid combination of partial norms and distributed samples: the ranks' shares belong to different "
            "samples. Replicate the samples, or compute complete norms."
        )
    if scope == "partial":
        total = ops.all_reduce(square.clone(), group=group, purpose="control")
        return {id_: value for id_, value in zip(ids, total.tolist(), strict=True) if id_}
    squares: dict[str, float] = {}
    for of_rank in ops.gather_objects(
        [(id_, value) for id_, value in zip(ids, square.tolist(), strict=True) if id_], group
    ):
        for id_, value in of_rank:
            known = squares.setdefault(id_, value)
            check_agree(id_, known, value)
    return squares


def check_agree(id_: str, first: float, second: float) -> None:
    """Check that two computations of a squared norm agree.

    Raises:
        NonFiniteGradient: If one is not finite.
        CheckFailed: If they differ by more than `TOLERANCE`.
    """
    if not math.isfinite(first + second):
        raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite (squared norms {first} and {second}).")
    if not abs(first - second) <= TOLERANCE * max(first, second):
        raise CheckFailed(f"two squared norms of sample {id_!r} differ, {first:.6g} and {second:.6g}: they must agree.")


def coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """Compute each sample's clipping coefficient min(1, max_norm / norm).

    Args:
        norms: [B]; NaN stays NaN.
        max_norm: C; infinity disables clipping.

    Returns:
        [B], of the same dtype.
    """
    return (max_norm / norms).clamp(max=1.0)


def check_repeatable(model: nn.Module) -> None:
    """Check that two passes over a batch compute the same gradients.

    Raises:
        BadInput: If the model has dropout with p > 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise BadInput(
                f"{name} has dropout {module.p:.0%}: the norms of the first pass would not match the gradients of the "
                "second. Set the model's dropout to 0."
            )
