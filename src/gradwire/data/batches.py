"""Batches of samples that carry their ids, and which rank gets which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from gradwire.data.shards import Sample, Shards
from gradwire.errors import BadInput

Item = TypeVar("Item")
IGNORED = -100  # the label that losses leave out


@dataclass(frozen=True)
class Batch:
    """Right-padded rows of tokens.

    Attributes:
        input_ids: ``[B, T]`` int64, T the longest sample's length.
        labels: ``[B, T]`` int64: the tokens themselves, -100 where padding is; a model shifts them by one.
        sample_id: The B samples' ids; "" marks a filler row, which has no labels.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_id: list[str]

    @property
    def n_targets(self) -> int:
        """Number of predicted tokens."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def split(self, size: int) -> list[Batch]:
        """The same rows as batches of ``size``, the last one perhaps smaller."""
        starts = range(0, len(self.sample_id), size)
        parts = zip(self.input_ids.split(size), self.labels.split(size), starts, strict=True)
        return [Batch(tokens, labels, self.sample_id[start : start + size]) for tokens, labels, start in parts]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )


def collate(samples: Sequence[Sample], pad_id: int, rows: int) -> Batch:
    """Put samples into a batch of ``rows`` rows; rows without a sample are filler."""
    longest = max((len(sample.input_ids) for sample in samples), default=2)
    input_ids = torch.full((rows, longest), pad_id)
    labels = torch.full((rows, longest), IGNORED)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = labels[row, :length] = sample.input_ids
    return Batch(input_ids, labels, [sample.sample_id for sample in samples] + [""] * (rows - len(samples)))


def train_batches(shards: Shards, batch_size: int, rank: int, world: int, seed: int, start: int = 0) -> Iterator[Batch]:
    """This rank's batches, without end: each epoch is shuffled anew and shared out without overlap.

    Args:
        shards: The training split.
        batch_size: Samples per batch and rank.
        rank: This rank.
        world: Number of ranks.
        seed: Determines every epoch's order, the same on all ranks.
        start: Batches this rank has consumed already; they are passed over without being read.

    Raises:
        BadInput: If an epoch has not one full batch for each rank.
    """
    if len(shards) < batch_size * world:
        raise BadInput(
            f"{shards.folder} has {len(shards)} samples, too few for one batch of {batch_size} on each of {world} "
            "ranks; give a larger corpus, a smaller --batch_size or a smaller --world_size."
        )
    return _train_batches(shards, batch_size, rank, world, seed, start)


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
    """The same batches, ``size`` at a time."""
    while group := list(islice(batches, size)):
        yield group


def poisson_steps(
    shards: Shards, batch_size: int, expected: int, rank: int, world: int, seed: int, start: int = 0
) -> Iterator[list[Batch]]:
    """This rank's micro-batches of each step, without end: every sample is in a step by a toss of its own coin.

    A sample's rank is its index modulo W, whatever else is drawn: it changes the messages of one rank only. All ranks
    know the whole draw and have as many micro-batches as the largest share needs, at least one; missing samples are
    filler rows.

    Args:
        shards: The training split.
        batch_size: Rows per micro-batch.
        expected: Samples of a step over all ranks, on average.
        rank: This rank.
        world: Number of ranks.
        seed: Determines every step's draw.
        start: The first step.
    """
    for step in count(start):
        indices = drawn(len(shards), expected / len(shards), seed, step)
        ranks = indices % world
        own, most = indices[ranks == rank].tolist(), int(np.bincount(ranks).max(initial=0))
        yield [
            collate([shards[index] for index in own[first : first + batch_size]], shards.meta["pad_id"], batch_size)
            for first in range(0, max(most, 1), batch_size)
        ]


def drawn(samples: int, rate: float, seed: int, step: int) -> np.ndarray:
    """The samples of a step, rising, the same on all ranks: each is drawn with probability ``rate``."""
    return np.flatnonzero(np.random.default_rng([seed, step]).random(samples) < rate)


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """The same items; a thread reads the next one while this one is worked on."""
    with ThreadPoolExecutor(1, thread_name_prefix="gradwire-batches") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item


def eval_batches(shards: Shards, batch_size: int, rank: int, world: int) -> Iterator[Batch]:
    """This rank's share of a split: over all ranks every sample exactly once, on each rank as many batches.

    Args:
        shards: The split.
        batch_size: Rows per batch; missing samples are filler rows.
        rank: This rank.
        world: Number of ranks.
    """
    indices = range(rank, len(shards), world)
    longest_share = len(range(0, len(shards), world))
    for start in range(0, longest_share, batch_size):
        samples = [shards[index] for index in indices[start : start + batch_size]]
        yield collate(samples, shards.meta["pad_id"], batch_size)
