"""Computation of projected gradient rows from samples, as many at once as fit in memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradwire.attribution import projections
from gradwire.attribution.collect import gradient_types
from gradwire.attribution.collect.methods import (
    CHECKED,
    CHECKED_BF16,
    METHODS,
    compare,
    flattened,
    following,
    fused_rows,
    looped_rows,
    resolved,
)
from gradwire.attribution.persample.batch import (
    PerSample,
    n_targets,
    out_of_memory,
    restrict,
    shapes,
    squares,
    trainable,
    zeroed,
)
from gradwire.attribution.store import store
from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.store import COLUMNS, Block
from gradwire.base.errors import BadInput, NonFiniteGradient, RunFault
from gradwire.base.units import amount
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch, collate
from gradwire.lm.data.shards import Sample
from gradwire.lm.models import causal, lora, saved

STACK_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}  # of gradients per projection, which share the generated signs
BATCH_AT_MOST = {"cpu": 16, "cuda": 64}  # larger batches are not faster
SHARE = 0.5  # of free memory that a batch may use
Result = TypeVar("Result")


class Samples(Protocol):
    """Samples by position, such as `lm.data.shards.Shards`."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """Metadata, of which ``pad_id`` is used."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Return a sample."""
        ...


class RowMaker:
    """Computes the rows of samples according to a provenance.

    Args:
        model: A causal language model on its device.
        provenance: Configuration of the rows.
        kind: The gradient type.
        batch_size: Samples per forward pass; None for as many as fit in memory.
        sharded: Whether the model's weights are sharded. All ranks then run equal numbers and sizes of batches.
        kind_of: With sharded weights, the gradient type of one parameter; None for the gradient itself.
    """

    def __init__(
        self,
        model: nn.Module,
        provenance: Provenance,
        device: torch.device,
        kind: gradient_types.GradientType = gradient_types.sgd,
        batch_size: int | None = None,
        sharded: bool = False,
        kind_of: Callable[[str], gradient_types.GradientType] | None = None,
    ) -> None:
        self.model, self.provenance, self.device, self.kind, self.sharded = model, provenance, device, kind, sharded
        self.kind_of = kind_of
        self.dims = provenance.dims
        self.method = provenance.computed_by or resolved(provenance.method, model)
        self.projector = projections.build(provenance.projection, shapes(model), provenance.seed)
        modules = projections.by_module(shapes(model)) if provenance.row_of == "module" else {}
        self.modules = [*modules]
        of_modules = [projections.build(provenance.projection, of, provenance.seed) for of in modules.values()]
        self.parts = of_modules or [self.projector]
        self.batch_size, self.height = batch_size, sys.maxsize
        self._buffer: Tensor | None = None
        projections.check_width(self.dims, self.numel)
        if sharded and not self.fused:
            raise BadInput(
                "--strategy fsdp2 shards the weights and forms the gradient of one parameter at a time: it requires "
                "--method hooks (or auto), and has no --grad_type ekfac."
            )

    @classmethod
    def load(
        cls,
        provenance: Provenance,
        device: torch.device,
        batch_size: int | None = None,
        world: World | None = None,
        *,
        gradient_checkpointing: bool = False,
    ) -> RowMaker:
        """Load the model, and its adapter and optimizer moments if requested.

        Raises:
            BadInput: If one of them is invalid or has changed.
        """
        model_dir = Path(provenance.model_dir)
        if saved.digest(model_dir) != provenance.model_digest:
            raise BadInput(f"the model in {model_dir} is not that of the collection.")
        model: nn.Module = causal.load_finite(model_dir, torch.bfloat16 if provenance.bf16 else torch.float32)
        if isinstance(provenance.lora, dict):
            model = lora.attach(model, model_dir, rank=provenance.lora["rank"], seed=provenance.lora["seed"])
        elif provenance.lora is not None:
            adapter = Path(provenance.lora_dir or "")
            if lora.digest(adapter) != provenance.lora:
                raise BadInput(f"the LoRA adapter in {adapter} is not the one that was collected with.")
            model = lora.attach(model, model_dir, adapter=adapter)
        chosen = projections.of_modules(shapes(model), provenance.of_modules)
        typed = gradient_types.build(provenance, model, chosen, device)
        restrict(model, chosen)
        if gradient_checkpointing:
            causal.checkpoint_blocks(model)
        sharded = provenance.strategy == "fsdp2" and world is not None
        if sharded:
            from gradwire.comm import parallel

            model, linear = parallel.wrap(model, "fsdp2", device=device), provenance.grad_type == "sgd"
            kind_of = None if linear else lambda name: typed({name: chosen[name]})
            return cls(model, provenance, device, batch_size=batch_size, sharded=True, kind_of=kind_of)
        return cls(model.to(device), provenance, device, typed(chosen), batch_size)

    @property
    def fused(self) -> bool:
        """Whether rows are projected during the backward pass, without forming whole gradients."""
        if self.method != "hooks":
            return False
        if self.sharded:
            return self.provenance.grad_type != "ekfac"
        return (self.provenance.projection, self.provenance.grad_type) == ("factored", "sgd")

    @cached_property
    def numel(self) -> int:
        """Number of entries of a gradient."""
        return sum(parameter.numel() for parameter in trainable(self.model).values())

    @cached_property
    def made_from(self) -> Provenance:
        """The provenance with the fields that require the loaded model: `provenance.FOUND`."""
        fingerprints = {str(dim): self.projector.fingerprint(dim) for dim in self.dims}
        known = {"fingerprints": fingerprints, "computed_by": self.method, "modules": self.modules}
        return self.provenance.model_copy(update=known)

    def blocks(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        """Compute the block of each width for the samples at ``positions``, on the CPU.

        Batches are of similar lengths, so that little is padding. The rows are in the order of ``positions``.

        Raises:
            NonFiniteGradient: If a sample's gradient is not finite.
            RunFault: If a single sample does not fit in memory.
        """
        order = sorted(range(len(positions)), key=lambda place: -len(shards[positions[place]].input_ids))
        longest = [positions[place] for place in order]
        with self._sufficient():
            if self.batch_size is None:
                self.batch_size = self.fitting(shards, longest[0])
            if self.fused:
                stacks, self.batch_size = self._halving(longest, self.batch_size, partial(self._fused_stack, shards))
            else:
                height = min(self.height, max(1, STACK_BYTES[self.device.type] // (4 * self.numel)))
                stacks, fitted = self._halving(longest, height, partial(self._stack, shards))
                self.height = fitted if fitted < height else self.height
        width = len(self.parts)
        back = [place * width + part for place in np.argsort(order).tolist() for part in range(width)]
        return {dim: store.concatenated(stack[dim] for stack in stacks).take(back) for dim in self.dims}

    def gradients(self, shards: Samples, positions: Sequence[int], use: Callable[[Tensor], Result]) -> list[Result]:
        """Call ``use`` with the whole gradients [B, n] of batches of the samples, in the order given.

        The next batch overwrites them. Errors are those of `blocks`, but gradients may be other than finite.

        Args:
            shards: The samples.
            positions: Which of them, the longest first.
            use: Its results are returned.
        """

        def work(chosen: Sequence[int]) -> Result:
            filled = self._gradients(len(chosen))
            self._fill(self._batch(shards, chosen), filled)
            return use(filled)

        with self._sufficient():
            if self.batch_size is None:
                self.batch_size = self.fitting(shards, positions[0])
            results, self.batch_size = self._halving(positions, self.batch_size, work)
        return results

    def check(self, shards: Samples, positions: Sequence[int]) -> None:
        """Check that the method agrees with the loop; with ``auto``, fall back to the next method that does.

        Args:
            shards: The samples.
            positions: Different samples with targets, the same on all ranks. They form one batch, which detects layers
                that mix samples.

        Raises:
            BadInput: If the method does not support the model.
            NonFiniteGradient: If a sample's gradient is not finite.
            RunFault: If the method computes a different gradient, or a single sample does not fit in memory.
        """
        with self._sufficient():
            self._halving(positions, len(positions), lambda chosen: self._settle(self._batch(shards, chosen)))

    def _settle(self, batch: Batch) -> None:
        """Check the method on a batch; with ``auto``, set it to the next one until one agrees with the loop."""
        automatic = self.provenance.method == "auto" and not self.sharded
        tolerance = CHECKED_BF16 if self.provenance.bf16 else CHECKED
        while self.method != "loop":
            try:
                compare(self.method, batch.sample_id, *self._both(batch), tolerance)
                break
            except Exception as error:
                self.method = following(self.method, error, automatic)

    def _both(self, batch: Batch) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Compute a batch by the method and by the loop: rows if these are fused, else gradients."""
        loss = self.provenance.loss
        if self.fused:
            rows = fused_rows(self.model, batch, self.parts, self.dims, loss).rows
            return dict(rows), looped_rows(self.model, batch, self.parts, self.dims, loss, self.sharded)
        methods = (METHODS[self.method], METHODS["loop"])
        computed, looped = (flattened(method(self.model, batch, loss)) for method in methods)
        return {0: computed}, {0: looped}

    def _halving(
        self, positions: Sequence[int], size: int, work: Callable[[Sequence[int]], Result]
    ) -> tuple[list[Result], int]:
        """Run ``work`` on ``size`` samples at a time, on half as many if memory runs out.

        With sharded weights the other ranks run the same batches, so that this one cannot use smaller ones alone.

        Returns:
            The results, and the size that fitted.
        """
        results: list[Result] = []
        done = 0
        while done < len(positions):
            chosen = positions[done : done + size]
            try:
                results.append(work(chosen))
                done += len(chosen)
                continue
            except RuntimeError as error:
                if not out_of_memory(error) or len(chosen) == 1 or self.sharded:
                    raise
            size = len(chosen) // 2
            self._release()  # outside the handler, which keeps the failed tensors alive
            print(f"gradwire grads collect: out of memory; reducing to {size} samples at once", file=sys.stderr)
        return results, size

    @contextmanager
    def _sufficient(self) -> Iterator[None]:
        """Turn an out-of-memory error that cannot be avoided by halving into a RunFault."""
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            samples = amount((self.batch_size or 1) if self.sharded else 1, "sample")
            raise RunFault(
                f"gradients of {samples} do not fit into the memory of {self.device}: use a smaller --batch_size or "
                "--save_interval, a smaller model, or --strategy fsdp2 on more ranks."
            ) from error

    def _release(self) -> None:
        self._buffer = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fitting(self, shards: Samples, position: int) -> int:
        """Estimate the batch size from free memory and the tensors that one sample saves for its backward pass."""
        formed = 3 * 4 * (self.projector.formed if self.fused else self.numel)
        of_sample = saved_bytes(self.model, self._batch(shards, [position])) + formed
        free = int(SHARE * free_bytes(self.device) / of_sample)
        fitted = max(1, min(BATCH_AT_MOST[self.device.type], free))
        if not self.sharded:
            return fitted
        return int(ops.all_reduce(torch.tensor(fitted, device=self.device), "min", purpose="control"))

    def _batch(self, shards: Samples, positions: Sequence[int]) -> Batch:
        return collate([shards[position] for position in positions], shards.meta["pad_id"], len(positions)).to(
            self.device
        )

    def _stack(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        """Compute the blocks of samples that are projected together."""
        rows = self._gradients(len(positions))
        records: list[dict[str, Any]] = []

        def fill(chosen: Sequence[int]) -> None:
            first = len(records) // len(self.parts)
            filled = rows[first : first + len(chosen)]
            computed = self._fill(self._batch(shards, chosen), filled)
            norms = torch.stack([squares(of_part).sqrt() for of_part in self._split(filled)], 1)
            records.extend(self._records(shards, chosen, computed.loss, computed.n_targets, norms))

        assert self.batch_size is not None
        _, self.batch_size = self._halving(positions, self.batch_size, fill)
        images = [part.project(of_part, self.dims) for part, of_part in zip(self.parts, self._split(rows), strict=True)]
        return {dim: self._bound(torch.stack([image[dim] for image in images], 1), records) for dim in self.dims}

    def _fill(self, batch: Batch, rows: Tensor) -> PerSample:
        """Write the gradients of a batch, of the gradient type, into rows [B, n]."""
        computed = METHODS[self.method](self.model, batch, self.provenance.loss, out=self.by_name(rows))
        self.kind(rows)
        zeroed(rows, computed.n_targets == 0)
        return computed

    def _fused_stack(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        """Compute the blocks of a batch whose gradients are projected during the backward pass."""
        batch = self._batch(shards, positions)
        computed = fused_rows(self.model, batch, self.parts, self.dims, self.provenance.loss, self.kind_of)
        targets, norms = n_targets(batch.labels), computed.square_norm.sqrt()
        records = self._records(shards, positions, computed.loss, targets, norms)
        return {dim: self._bound(rows, records) for dim, rows in computed.rows.items()}

    def _bound(self, rows: Tensor, records: Sequence[Mapping[str, Any]]) -> Block:
        """Return the block of rows [samples, parts, D]."""
        return store.bind(rows.flatten(0, 1).cpu(), records, self.made_from)

    def _gradients(self, samples: int) -> Tensor:
        """Return uninitialised gradients [samples, numel] in memory that later calls use again."""
        if self._buffer is None or len(self._buffer) < samples:
            self._buffer = None
            self._buffer = torch.empty(samples, self.numel, device=self.device)
        return self._buffer[:samples]

    def by_name(self, rows: Tensor) -> dict[str, Tensor]:
        """View gradients [n, numel] as those of each parameter, [n, *shape]."""
        of = shapes(self.model)
        columns = rows.split([math.prod(shape) for shape in of.values()], dim=1)
        return {name: values.view(-1, *shape) for values, (name, shape) in zip(columns, of.items(), strict=True)}

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """Split gradients [n, numel] by the parts of the parameters."""
        return rows.split([sum(part.sizes.values()) for part in self.parts], dim=1)

    def _records(
        self, shards: Samples, positions: Sequence[int], losses: Tensor, targets: Tensor, norms: Tensor
    ) -> list[dict[str, Any]]:
        """Return the metadata of each row for the store; ``norms`` are [samples, parts].

        Raises:
            NonFiniteGradient: If a gradient is not finite.
        """
        records = []
        computed = zip(positions, losses.tolist(), targets.tolist(), norms.tolist(), strict=True)
        for position, loss, count, of_parts in computed:
            sample = shards[position]
            if not all(norm < float("inf") for norm in of_parts):
                raise NonFiniteGradient(f"the gradient of sample {sample.sample_id!r} is not finite (loss {loss}).")
            for row_id, norm in zip(self.made_from.row_ids(sample.sample_id), of_parts, strict=True):
                record = {
                    "sample_id": row_id,
                    "loss": loss if count else None,
                    "n_targets": count,
                    "norm": norm,
                    "flag": None if count else "no_target",
                }
                whole = sample._replace(sample_id=self.provenance.sample_id(row_id))
                further = {name: COLUMNS[name].of(whole, position, record) for name in self.provenance.metadata}
                records.append(record | further)
        return records


def saved_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the bytes that a forward pass saves for the backward pass."""
    total = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += ops.nbytes(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch.input_ids, use_cache=False)
    return total


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return 1024 * available // ranks
