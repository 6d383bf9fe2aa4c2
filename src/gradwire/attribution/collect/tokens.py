"""Targets as samples of their own, for a row per token."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import torch

from gradwire.lm.data.shards import Sample, Shards


class Tokens:
    """The targets of a split's samples, in order, each as a sample: the tokens up to the target, which alone counts.

    Attention is causal, so its loss and gradient are those of this one target in its sample. Its id is
    ``<sample id>@<position>``, the target's position in the sample, from 0.

    Args:
        shards: The split.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards, self.folder, self.meta = shards, shards.folder, shards.meta
        self._ends = [0, *accumulate(sample.n_targets for sample in shards)]

    @property
    def digest(self) -> str:
        """The digest of the split's samples."""
        return self.shards.digest

    def describe(self, count: int) -> str:
        """Describe the first ``count`` targets."""
        return f"{count} targets of {self.shards.describe(len(self.sample_ids(count)))}"

    def of_samples(self, count: int) -> int:
        """Return the number of targets of the first ``count`` samples, or of all if there are fewer."""
        return self._ends[min(count, len(self.shards))]

    def sample_ids(self, count: int) -> list[str]:
        """Return the ids of the samples up to the last one of the first ``count`` targets; of all targets, all ids."""
        samples = len(self.shards) if count == len(self) else self._number(count - 1) + 1
        return [self.shards[at].sample_id for at in range(samples)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"target {index} of {len(self)}")
        number = self._number(index)
        sample = self.shards[number]
        chosen = torch.ones(len(sample.input_ids), dtype=torch.bool) if sample.is_target is None else sample.is_target
        position = int(chosen[1:].nonzero()[index - self._ends[number]]) + 1
        read = slice(position + 1)
        alone = torch.arange(position + 1) == position
        weights = None if sample.weights is None else sample.weights[read]
        return Sample(f"{sample.sample_id}@{position}", sample.input_ids[read], alone, weights)

    def _number(self, index: int) -> int:
        """Return the position of the sample of a target."""
        return bisect_right(self._ends, index) - 1
