"""Samples of a collection: those of a split of shards, or their targets, for a row per token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from gradwire.attribution.options import RowUnit
from gradwire.attribution.store.provenance import FILE, Provenance
from gradwire.base.errors import BadInput
from gradwire.lm.data.shards import Sample, Shards, check


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
        return [self.shards.sample_id(position) for position in range(samples)]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"target {index} of {len(self)}")
        import torch

        number = self._number(index)
        sample = self.shards[number]
        chosen = torch.ones(len(sample.input_ids), dtype=torch.bool) if sample.is_target is None else sample.is_target
        position = int(chosen[1:].nonzero()[index - self._ends[number]]) + 1
        alone = torch.arange(position + 1) == position
        return Sample(f"{sample.sample_id}@{position}", sample.input_ids[: position + 1], alone)

    def sample_id(self, index: int) -> str:
        """Return a target's id."""
        return self[index].sample_id

    def tokens(self, index: int) -> list[int]:
        """Return the tokens up to a target."""
        tokens: list[int] = self[index].input_ids.tolist()
        return tokens

    def length(self, index: int) -> int:
        """Return the number of tokens up to a target."""
        return len(self[index].input_ids)

    def _number(self, index: int) -> int:
        """Return the position of the sample of a target."""
        return bisect_right(self._ends, index) - 1


def units(shards: Shards, row_of: RowUnit) -> Shards | Tokens:
    """Return the samples of a split, or their targets if a row is of a token."""
    return Tokens(shards) if row_of == "token" else shards


def units_of(shards: Shards | Tokens, samples: int | None) -> int:
    """Return the number of units of the first ``samples`` samples; None: of all."""
    if samples is None:
        return len(shards)
    return shards.of_samples(samples) if isinstance(shards, Tokens) else min(samples, len(shards))


def samples(provenance: Provenance) -> Shards | Tokens:
    """Open the samples of a collection; it uses the first ``provenance.samples`` of them.

    Raises:
        BadInput: If they are missing or have changed.
    """
    folder = Path(provenance.data_path)
    check(folder)
    available = units(Shards(folder, provenance.split), provenance.row_of)
    if available.digest != provenance.data_digest:
        raise BadInput(f"the samples in {folder} are not those that were collected: their digest differs.")
    if not provenance.world_size <= provenance.samples <= len(available):
        raise BadInput(
            f"{FILE} has {provenance.samples} samples on {provenance.world_size} ranks, but {folder} has "
            f"{len(available)} samples: the file was changed; collect the gradients again."
        )
    return available


def longest_first(samples: Shards | Tokens, positions: Iterable[int]) -> list[int]:
    """Order positions by the length of their samples, so that a batch has little padding.

    The longest come first, so that what does not fit into memory fails at once; equal ones in the order given.
    """
    return sorted(positions, key=lambda position: -samples.length(position))


def row_ids(provenance: Provenance, shards: Shards | Tokens) -> list[str]:
    """Return the ids of the collection's rows, in data order."""
    samples = (shards.sample_id(position) for position in range(provenance.samples))
    return [row_id for sample_id in samples for row_id in provenance.row_ids(sample_id)]
