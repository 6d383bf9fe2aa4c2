"""Batches of samples with their ids, and their distribution over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from gradwire.base.errors import BadInput
from gradwire.lm.data.shards import Sample, Shards

IGNORED = -100  # the label that losses ignore


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of tokens.

    Attributes:
        input_ids: ``[B, T]`` int64, T the longest sample's length.
        labels: ``[B, T]`` int64: the tokens, and -100 for padding and for what is not a target, such as a prompt; the
            model shifts them by one.
        sample_id: The ids of the B samples; "" marks a filler row, which has no labels.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_id: list[str]

    @property
    def n_targets(self) -> int:
        """Number of predicted tokens."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def split(self, size: int) -> list[Batch]:
        """Split the rows into batches of ``size``; the last one may be smaller."""
        return [self._rows(slice(start, start + size)) for start in range(0, len(self.sample_id), size)]

    def _rows(self, rows: slice) -> Batch:
        return replace(self.of_tensors(lambda values: values[rows]), sample_id=self.sample_id[rows])

    def pinned(self) -> Batch:
        """Return a copy in page-locked memory, from which a GPU copies while the host goes on."""
        return self.of_tensors(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy of the batch on ``device``; from pinned memory it is made while the host goes on."""
        return self.of_tensors(lambda values: values.to(device, non_blocking=True))

    def of_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a batch of the changed tensors."""
        return Batch(change(self.input_ids), change(self.labels), self.sample_id)


def collate(samples: Sequence[Sample], pad_id: int, rows: int) -> Batch:
    """Combine samples into a batch of ``rows`` rows; rows without a sample are filler."""
    longest = max((len(sample.input_ids) for sample in samples), default=2)
    input_ids = torch.full((rows, longest), pad_id)
    labels = torch.full((rows, longest), IGNORED)
    for row, sample in enumerate(samples):
        length, tokens, is_target = len(sample.input_ids), sample.input_ids, sample.is_target
        input_ids[row, :length] = tokens
        labels[row, :length] = tokens if is_target is None else tokens.where(is_target, IGNORED)
    return Batch(input_ids, labels, [sample.sample_id for sample in samples] + [""] * (rows - len(samples)))


def train_batches(shards: Shards, batch_size: int, rank: int, world: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """Yield this rank's batches forever. Each epoch is reshuffled and divided over the ranks without overlap.

    Args:
        shards: The training split.
        batch_size: Samples per batch and rank.
        rank: This rank.
        world: Number of ranks.
        seed: Determines every epoch's order; the same on all ranks.
        start: Number of batches to skip, without reading them: those this rank has already consumed.

    Raises:
        BadInput: As `check_enough`.
    """
    check_enough(shards, batch_size, world)
    return _train_batches(shards, batch_size, rank, world, seed, start)


def check_enough(shards: Shards, batch_size: int, world: int) -> None:
    """Check that a split has a full batch for every rank.

    Raises:
        BadInput: If it does not.
    """
    if len(shards) < batch_size * world:
        raise BadInput(
            f"{shards.folder} has {len(shards)} samples, too few for one batch of {batch_size} on each of {world} "
            "ranks; use a larger corpus, a smaller --batch_size or a smaller --world_size."
        )


def _train_batches(shards: Shards, batch_size: int, rank: int, world: int, seed: int, start: int) -> Iterator[Batch]:
    sampler = DistributedSampler(shards, num_replicas=world, rank=rank, seed=seed, drop_last=True)
    rows = BatchSampler(sampler, batch_size, drop_last=True)
    first_epoch, passed = divmod(start, len(rows))
    for epoch in count(first_epoch):
        sampler.set_epoch(epoch)
        for indices in islice(rows, passed, None):
            yield collate([shards[index] for index in indices], shards.meta["pad_id"], batch_size)
        passed = 0


def grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Yield the batches in lists of ``size``; the last one may be shorter."""
    while group := list(islice(batches, size)):
        yield group


def poisson_steps(
    shards: Shards, batch_size: int, expected: int, rank: int, world: int, seed: int, start: int = 0
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches of each step forever. Poisson sampling: samples are drawn independently.

    A sample always belongs to the rank of its index modulo W, so it changes the messages of one rank only. All ranks
    know the whole draw and have as many micro-batches as the largest share needs, at least one; missing samples are
    filler rows.

    Args:
        shards: The training split.
        batch_size: Rows per micro-batch.
        expected: Expected number of samples per step, over all ranks.
        rank: This rank.
        world: Number of ranks.
        seed: Determines every step's draw.
        start: The first step.
    """
    for step in count(start):
        indices = drawn(len(shards), expected / len(shards), seed, step)
        ranks = indices % world
        local, most = indices[ranks == rank].tolist(), int(np.bincount(ranks).max(initial=0))
        yield [
            collate([shards[index] for index in local[first : first + batch_size]], shards.meta["pad_id"], batch_size)
            for first in range(0, max(most, 1), batch_size)
        ]


def drawn(samples: int, rate: float, seed: int, step: int) -> np.ndarray:
    """Return the ascending indices of a step's samples, each drawn with probability ``rate``; equal on all ranks."""
    return np.flatnonzero(np.random.default_rng([seed, step]).random(samples) < rate)


def eval_batches(shards: Shards, batch_size: int, rank: int, world: int, samples: int | None = None) -> Iterator[Batch]:
    """Yield this rank's share of a split: each sample is on exactly one rank, and all ranks have equally many batches.

    Args:
        shards: The split.
        batch_size: Rows per batch; missing samples are filler rows.
        rank: This rank.
        world: Number of ranks.
        samples: Use only the first samples; None for all.
    """
    count = len(shards) if samples is None else samples
    indices = range(rank, count, world)
    for start in range(0, len(range(0, count, world)), batch_size):
        chosen = [shards[index] for index in indices[start : start + batch_size]]
        yield collate(chosen, shards.meta["pad_id"], batch_size)
