"""Norms of per-sample gradients, which need not be formed for it; and what ranks must do to have each sample's right.

Two questions decide, and neither is answered by the number of ranks. What does a rank hold of a sample's norm?
``complete``: the norm over all parameters, as with hooks under DDP and FSDP alike, which gather parameters and never
activations. ``partial``: squares over a share of the parameters. And how do samples lie on the ranks?
``replicated``: all have the same. ``distributed``: each has its own.

| | replicated | distributed |
|:--|:--|:--|
| complete | all ranks have the same numbers, and must agree | gathered by id |
| partial | squares are summed over the ranks | refused: the shares are of different samples |
| averaged | refused: a mean over samples is no sample's own | refused |

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

from gradwire.collectives import ops
from gradwire.config import GradMethod
from gradwire.data.batches import Batch
from gradwire.errors import BadInput, CheckFailed, NonFiniteGradient
from gradwire.persample import hooks, loop, vmap
from gradwire.persample.batch import (
    PerSample,
    Reduction,
    n_targets,
    no_targets,
    note,
    out_of_memory,
    padded_width,
    trainable,
    zeroed,
)
from gradwire.persample.square_norms import SquareNorms
from gradwire.persample.uses import Use

Held = Literal["complete", "partial", "averaged"]
Spread = Literal["replicated", "distributed"]
Distribution = Literal["auto", "replicated", "distributed"]
TOLERANCE = 1e-4  # of two computations of one norm, relative
OTHERS = {"vmap": vmap.gradients, "loop": loop.gradients}


class Norms(NamedTuple):
    """Of B samples.

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
    """The norms of each sample's own gradient.

    Args:
        model: A causal language model.
        batch: Samples of any length, padded on the right.
        reduction: What a sample's loss is.
        names: The parameters whose squares are summed; None: all trainable ones.
        method: ``hooks``, ``vmap``, ``loop``, or ``auto``: hooks, and what they do not see by vmap, or by the loop
            where vmap cannot trace the model.

    Raises:
        BadInput: If a layer mixes samples, as BatchNorm does: then a sample has no gradient of its own. Or if hooks do
            not see every use of a parameter, and are asked for or the weights are sharded.
    """
    check_unmixed(model)
    batch = padded_width(batch)
    wanted = set(trainable(model)) if names is None else set(names)
    empty = no_targets(batch)
    if method in OTHERS:
        check_whole(model, method)
        found = OTHERS[method](model, batch, reduction, wanted)
        return Norms(zeroed(_squares(found), empty), found.loss, found.n_targets)
    growing = SquareNorms(len(batch.labels), batch.labels.device)

    def take(name: str, use: Use, last: bool) -> None:
        if name in wanted:
            growing.take(name, use, last)

    seen = hooks.backward(model, batch, take, reduction)
    losses = seen.losses if method == "auto" else hooks.all_seen(seen)
    squares = growing.total()
    if unseen := [name for name in seen.unseen if name in wanted]:
        squares.add_(_squares(_otherwise(model, batch, reduction, unseen)))
    return Norms(zeroed(squares, empty), losses, n_targets(batch.labels))


def _squares(found: PerSample) -> Tensor:
    """Squared norms over all parameters, float64 [B]."""
    each = [gradient.flatten(1).square().sum(1, dtype=torch.float64) for gradient in found.gradient.values()]
    return sum(each, torch.zeros(len(found.loss), dtype=torch.float64, device=found.loss.device))


def _otherwise(model: nn.Module, batch: Batch, reduction: Reduction, names: list[str]) -> PerSample:
    """The gradients of the parameters that hooks do not see."""
    of = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}"
    try:
        found = vmap.gradients(model, batch, reduction, names)
    except Exception as error:  # whatever a model does that torch.func cannot trace
        if out_of_memory(error):
            raise
        note(f"norms of {of} by the loop: hooks do not see every use of them, and vmap fails: {error}")
        return loop.gradients(model, batch, reduction, names)
    note(f"norms of {of} by vmap: hooks do not see every use of them")
    return found


def check_whole(model: nn.Module, method: str) -> None:
    """See that every rank has whole weights.

    Raises:
        BadInput: If they are sharded.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise BadInput(f"--method {method} needs whole weights on each rank: give --strategy ddp, or --method hooks.")


def check_unmixed(model: nn.Module) -> None:
    """See that no layer mixes the samples of a batch.

    Raises:
        BadInput: If one does.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise BadInput(
                f"{name} is a {type(module).__name__}, which mixes the samples of a batch: no sample has a gradient of "
                "its own. Replace it by a LayerNorm or GroupNorm."
            )


def share(model: nn.Module, rank: int, world: int) -> list[str]:
    """The parameters whose squares this rank sums where all ranks have the same samples: 1/W of the work.

    A parameter's work grows with its size, or with its sides if its gradient is not formed; the largest go first, each
    to the rank with the least so far.
    """
    cost = {name: sum(parameter.shape) for name, parameter in trainable(model).items()}
    load = [0] * world
    own = []
    for name in sorted(cost, key=lambda name: (-cost[name], name)):
        least = load.index(min(load))
        load[least] += cost[name]
        if least == rank:
            own.append(name)
    return own


def spread_of(batch: Batch, distribution: Distribution = "auto", group: ops.Group = None) -> Spread:
    """How the samples lie on the ranks, by comparing their ids; fillers have none.

    Raises:
        BadInput: If two ranks hold one id with different tokens, if the ranks share some samples but not all, if
            batches differ in size, or if it is not as ``distribution`` says. On all ranks alike.
    """
    ranks = ops.gather_objects((batch.sample_id, _contents(batch)), group)
    if len({len(ids) for ids, _ in ranks}) > 1:
        raise BadInput(
            f"the ranks have batches of {', '.join(str(len(ids)) for ids, _ in ranks)} samples: give all one size."
        )
    contents: dict[str, str] = {}
    for rank, (_, of_rank) in enumerate(ranks):
        for id_, content in of_rank.items():
            if contents.setdefault(id_, content) != content:
                raise BadInput(
                    f"sample {id_!r} has other tokens on rank {rank} than on a rank before it: ids must be unique."
                )
    sets = [frozenset(of_rank) for _, of_rank in ranks]
    shared = {id_ for i, one in enumerate(sets) for other in sets[:i] for id_ in one & other}
    same = all(ids == ranks[0][0] for ids, _ in ranks)
    if shared and not same:
        some = ", ".join(map(repr, sorted(shared)[:3]))
        raise BadInput(
            f"the ranks share {some} ({len(shared)} in all) but not all samples: give all the same, or none twice."
        )
    found: Spread = "replicated" if same else "distributed"
    if distribution not in ("auto", found) and len(ranks) > 1:
        raise BadInput(f"--distribution {distribution}: the ranks' samples are {found}, by their ids.")
    return cast(Spread, distribution) if distribution != "auto" else found


def _contents(batch: Batch) -> dict[str, str]:
    """A digest of each sample's tokens and labels, without its padding, by id."""
    found = {}
    for id_, tokens, labels in zip(batch.sample_id, batch.input_ids.cpu(), batch.labels.cpu(), strict=True):
        if id_:
            used = (labels != -100).nonzero()
            end = int(used[-1]) + 1 if len(used) else 0
            row = torch.stack([tokens[:end], labels[:end]])
            found[id_] = hashlib.sha256(row.numpy().tobytes()).hexdigest()
    return found


def combined(
    ids: Sequence[str], square: Tensor, held: Held, spread: Spread, group: ops.Group = None
) -> Mapping[str, float]:
    """Every sample's squared norm by id, the same on all ranks.

    Args:
        ids: This rank's samples; "" marks a filler.
        square: What this rank holds, float64 [B].
        held: What that is.
        spread: How samples lie on the ranks.
        group: The ranks.

    Raises:
        BadInput: For partial norms of distributed samples, and for gradients that were averaged.
        CheckFailed: If ranks that must agree do not.
    """
    if held == "averaged":
        raise BadInput(
            "norms of gradients that were averaged: after the backward pass a parameter's gradient is of all samples "
            "of all ranks, and what was each one's own is gone. Take a batch's norms before, by norms(model, batch)."
        )
    if held == "partial" and spread == "distributed":
        raise BadInput(
            "partial norms of distributed samples: the ranks' shares are of different samples, and their sum is no "
            "norm. Give all ranks the same samples, or have each compute complete norms."
        )
    if held == "partial":
        total = ops.all_reduce(square.clone(), group=group, purpose="control")
        return {id_: value for id_, value in zip(ids, total.tolist(), strict=True) if id_}
    found: dict[str, float] = {}
    for of_rank in ops.gather_objects(
        [(id_, value) for id_, value in zip(ids, square.tolist(), strict=True) if id_], group
    ):
        for id_, value in of_rank:
            known = found.setdefault(id_, value)
            check_agree(id_, known, value)
    return found


def check_agree(id_: str, one: float, other: float) -> None:
    """See that two computations of a squared norm agree.

    Raises:
        NonFiniteGradient: If one is not finite, which no computation is to blame for.
        CheckFailed: If they do not.
    """
    if not math.isfinite(one + other):
        raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite (squared norms {one} and {other}).")
    if not abs(one - other) <= TOLERANCE * max(one, other):
        raise CheckFailed(f"two squared norms of sample {id_!r} differ, {one:.6g} and {other:.6g}: they must agree.")
