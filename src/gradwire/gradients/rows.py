"""From samples to projected rows: a model, its projector, and the widths they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradwire.data.batches import collate
from gradwire.data.shards import Shards
from gradwire.errors import BadInput, NonFiniteGradient
from gradwire.gradients import project, store
from gradwire.gradients.project import Projector
from gradwire.gradients.provenance import Provenance
from gradwire.gradients.store import Block
from gradwire.models import folder, saved
from gradwire.persample.loop import SampleGradient, gradients, trainable

STACK_BYTES = 1 << 29  # of gradients that wait for one projection: each sign that is generated serves them all


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of any samples, as their provenance says."""

    model: nn.Module
    projector: Projector
    dims: Sequence[int]
    device: torch.device

    @classmethod
    def load(cls, provenance: Provenance, device: torch.device) -> RowMaker:
        """Load the model and build its projector.

        Raises:
            BadInput: If the model is unusable, or is another one now.
        """
        if saved.digest(Path(provenance.model_dir)) != provenance.model_digest:
            raise BadInput(f"the model in {provenance.model_dir} is not the one that was collected from.")
        model = folder.load(Path(provenance.model_dir)).to(device)
        sizes = {name: parameter.numel() for name, parameter in trainable(model).items()}
        return cls(model, project.build(provenance.projection, sizes, provenance.seed), provenance.dims, device)

    def fingerprints(self) -> dict[str, str]:
        """The projector's digest by width."""
        return {str(dim): self.projector.fingerprint(dim) for dim in self.dims}

    def blocks(self, shards: Shards, positions: Sequence[int]) -> dict[int, Block]:
        """The block of each width for the samples at ``positions``, on the CPU.

        Raises:
            NonFiniteGradient: If a sample's gradient is not finite.
        """
        height = max(1, STACK_BYTES // (4 * self._numel()))
        stacks = [self._stack(shards, positions[first : first + height]) for first in range(0, len(positions), height)]
        return {dim: store.concatenated(stack[dim] for stack in stacks) for dim in self.dims}

    def _numel(self) -> int:
        return sum(parameter.numel() for parameter in trainable(self.model).values())

    def _stack(self, shards: Shards, positions: Sequence[int]) -> dict[int, Block]:
        """As many samples as are projected at once."""
        samples = [shards[position] for position in positions]
        batch = collate(samples, shards.meta["pad_id"], len(samples)).to(self.device)
        gradient_rows = torch.empty(len(positions), self._numel(), device=self.device)
        facts = []
        for row, sample in zip(gradient_rows, gradients(self.model, batch), strict=True):
            torch.cat([gradient.flatten() for gradient in sample.gradient.values()], out=row)
            facts.append(_facts(sample, row))
        projected = self.projector.project(gradient_rows, self.dims)
        return {dim: store.bind(rows.cpu(), facts) for dim, rows in projected.items()}


def _facts(sample: SampleGradient, row: Tensor) -> dict[str, float | int | str | None]:
    """What the store keeps of a sample beside its row."""
    norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
    if not norm < float("inf"):
        raise NonFiniteGradient(f"the gradient of sample {sample.sample_id!r} is not finite (loss {sample.loss}).")
    flag = None if sample.n_targets else "no_target"
    return {
        "sample_id": sample.sample_id,
        "loss": sample.loss,
        "n_targets": sample.n_targets,
        "norm": norm,
        "flag": flag,
    }
