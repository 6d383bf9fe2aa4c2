"""Computation of projected gradient rows from samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradwire.attribution import projections
from gradwire.attribution.collect import ekfac, metadata
from gradwire.attribution.collect import types as gradient_types
from gradwire.attribution.collect.fused import Fused, Images, fused_rows
from gradwire.attribution.persample import hooks, loop, vmap
from gradwire.attribution.persample.batch import PerSample, n_targets, note, out_of_memory, squares, trainable, zeroed
from gradwire.attribution.persample.layer_factors import Direct
from gradwire.attribution.store import store
from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.store import Block
from gradwire.base.errors import BadInput, GradwireError, NonFiniteGradient, RunFault
from gradwire.comm import parallel
from gradwire.comm.collectives import ops
from gradwire.comm.collectives.world import World
from gradwire.lm.data.batches import Batch, collate
from gradwire.lm.data.shards import Sample
from gradwire.lm.models import folder, lora, optimizer, saved

STACK_BYTES = {"cpu": 1 << 29, "cuda": 1 << 33}  # of gradients per projection, which share the generated signs
BATCH_AT_MOST = {"cpu": 16, "cuda": 64}  # larger batches are not faster
SHARE = 0.5  # of free memory that a batch may use
CHECKED = 1e-3  # largest deviation from the loop, relative to the gradient's norm; float32 with TF32 allowed

METHODS: dict[str, Callable[..., PerSample]] = {
    "loop": loop.gradients,
    "vmap": vmap.gradients,
    "hooks": hooks.gradients,
}
FALLBACKS = {"hooks": "vmap", "vmap": "loop"}
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
    """

    def __init__(
        self,
        model: nn.Module,
        provenance: Provenance,
        device: torch.device,
        kind: gradient_types.GradientType = gradient_types.sgd,
        batch_size: int | None = None,
        sharded: bool = False,
    ) -> None:
        self.model, self.provenance, self.device, self.kind, self.sharded = model, provenance, device, kind, sharded
        self.dims = provenance.dims
        self.method = provenance.computed_by or resolved(provenance.method, model)
        self.projector = projections.build(provenance.projection, shapes(model), provenance.seed)
        modules = projections.by_module(shapes(model)) if provenance.row_of == "module" else {}
        self.modules = [*modules]
        of_modules = [projections.build(provenance.projection, own, provenance.seed) for own in modules.values()]
        self.parts = of_modules or [self.projector]
        self.batch_size, self.height = batch_size, sys.maxsize
        self._memory: Tensor | None = None
        projections.check_width(self.dims, self.numel)
        if sharded and not self.fused:
            raise BadInput(
                "--strategy fsdp2 shards the weights and forms the gradient of one parameter at a time: it requires "
                "--method hooks (or auto) and --grad_type sgd."
            )

    @classmethod
    def load(
        cls, provenance: Provenance, device: torch.device, batch_size: int | None = None, world: World | None = None
    ) -> RowMaker:
        """Load the model, and its adapter and optimizer moments if requested.

        Raises:
            BadInput: If one of them is invalid or has changed.
        """
        model_dir = Path(provenance.model_dir)
        if saved.digest(model_dir) != provenance.model_digest:
            raise BadInput(f"the model in {model_dir} is not that of the collection.")
        model: nn.Module = folder.load_finite(model_dir)
        if provenance.lora is not None:
            model = lora.attach(model, model_dir, **provenance.lora_options())
        kind = kind_of(provenance, model, device)
        sharded = provenance.strategy == "fsdp2"
        model = parallel.wrap(model, "fsdp2", device=device) if sharded and world is not None else model.to(device)
        return cls(model, provenance, device, kind, batch_size, sharded and world is not None)

    @property
    def fused(self) -> bool:
        """Whether rows are projected during the backward pass, without forming whole gradients."""
        streamed = self.sharded or self.provenance.projection == "factored"
        return streamed and (self.method, self.provenance.grad_type) == ("hooks", "sgd")

    @cached_property
    def numel(self) -> int:
        """Number of entries of a gradient."""
        return sum(parameter.numel() for parameter in trainable(self.model).values())

    @cached_property
    def made_from(self) -> Provenance:
        """The provenance with the fields that require the loaded model: `provenance.FOUND`."""
        fingerprints = {str(dim): self.projector.fingerprint(dim) for dim in self.dims}
        return replace(self.provenance, fingerprints=fingerprints, computed_by=self.method, modules=self.modules)

    def blocks(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        """Compute the block of each width for the samples at ``positions``, on the CPU.

        Batches are of similar lengths, so that little is padding. The rows are in the order of ``positions``.

        Raises:
            NonFiniteGradient: If a sample's gradient is not finite.
            RunFault: If a single sample does not fit in memory.
        """
        order = sorted(range(len(positions)), key=lambda at: -len(shards[positions[at]].input_ids))
        longest = [positions[at] for at in order]
        with self._sufficient_memory():
            if self.batch_size is None:
                self.batch_size = self.fitting(shards, longest[0])
            if self.fused:
                stacks, self.batch_size = self._halving(longest, self.batch_size, partial(self._fused_stack, shards))
            else:
                height = min(self.height, max(1, STACK_BYTES[self.device.type] // (4 * self.numel)))
                stacks, fitted = self._halving(longest, height, partial(self._stack, shards))
                self.height = fitted if fitted < height else self.height
        of_sample = len(self.parts)
        back = [at * of_sample + part for at in np.argsort(order).tolist() for part in range(of_sample)]
        return {dim: store.concatenated(stack[dim] for stack in stacks).take(back) for dim in self.dims}

    def check(self, shards: Samples, positions: Sequence[int]) -> None:
        """Check that the method agrees with the loop; with ``auto``, fall back to the next method that does.

        Args:
            shards: The samples.
            positions: Different samples with targets, the same on all ranks. They form one batch, which detects layers
                that mix samples.

        Raises:
            BadInput: If the method does not support the model.
            NonFiniteGradient: If a sample's gradient is not finite.
            RunFault: If the method computes a different gradient.
        """
        with self._sufficient_memory():
            self._halving(positions, len(positions), partial(self._check, shards))

    def _check(self, shards: Samples, positions: Sequence[int]) -> None:
        batch = self._batch(shards, [shards[position] for position in positions])
        while self.method != "loop":
            try:
                self._compare(batch)
                break
            except Exception as error:
                if out_of_memory(error) or isinstance(error, NonFiniteGradient):
                    raise
                if self.provenance.method != "auto" or self.sharded:
                    if isinstance(error, GradwireError):
                        raise
                    raise BadInput(f"--method {self.method} does not support this model, use loop: {error}") from error
                failed, self.method = self.method, FALLBACKS[self.method]
                note(f"--method auto uses {self.method}, because {failed} fails: {error}")

    def _compare(self, batch: Batch) -> None:
        wanted = self._looped(batch)
        if self.fused:
            made = self._fused(batch).rows
        else:
            made = {0: flattened(METHODS[self.method](self.model, batch, self.provenance.loss))}
        for dim, rows in made.items():
            norms, apart = (one.flatten(1).norm(dim=1).tolist() for one in (wanted[dim], rows - wanted[dim]))
            for id_, norm, off in zip(batch.sample_id, norms, apart, strict=True):
                if not norm < float("inf"):
                    raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite.")
                if not off <= CHECKED * norm:
                    raise RunFault(
                        f"--method {self.method} computes a different gradient of sample {id_!r} than the loop: "
                        f"deviation {off:.1e}, norm {norm:.1e}. Use --method vmap or loop."
                    )

    def _looped(self, batch: Batch) -> dict[int, Tensor]:
        """Compute the reference by one backward pass per sample: rows if fused, full gradients if not."""
        if not self.fused:
            return {0: flattened(loop.gradients(self.model, batch, self.provenance.loss))}
        alone = [self._looped_alone(one) for one in batch.split(1)]
        return {dim: torch.cat([rows[dim] for rows in alone]) for dim in self.dims}

    def _looped_alone(self, one: Batch) -> dict[int, Tensor]:
        """Compute one sample's rows by a backward pass."""
        images, loss = Images(self.parts, 1, self.dims, self.device), self.provenance.loss
        if self.sharded:
            found: Iterable[tuple[str, Tensor]] = loop.of_sharded(self.model, one, loss)
        else:
            found = loop.gradients(self.model, one, loss).gradient.items()
        for name, gradient in found:
            images.add(name, Direct(gradient))
        return images.finished()

    def fitting(self, shards: Samples, position: int) -> int:
        """Estimate the batch size from free memory and the tensors that one sample saves for its backward pass."""
        held = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal held
            held += ops.nbytes(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            self.model(self._batch(shards, [shards[position]]).input_ids, use_cache=False)
        each = held + 3 * 4 * (self.projector.formed if self.fused else self.numel)
        most = max(1, min(BATCH_AT_MOST[self.device.type], int(SHARE * free_memory(self.device) / each)))
        if not self.sharded:
            return most
        return int(ops.all_reduce(torch.tensor(most, device=self.device), "min", purpose="control"))

    def _batch(self, shards: Samples, samples: Sequence[Sample]) -> Batch:
        return collate(samples, shards.meta["pad_id"], len(samples)).to(self.device)

    def _stack(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        """Compute the blocks of samples that are projected together."""
        rows = self._whole(len(positions))
        records: list[dict[str, Any]] = []

        def fill(part: Sequence[int]) -> None:
            samples = [shards[position] for position in part]
            first = len(records) // len(self.parts)
            own = rows[first : first + len(part)]
            batch, out = self._batch(shards, samples), self.by_name(own)
            found = METHODS[self.method](self.model, batch, self.provenance.loss, out=out)
            self.kind(own)
            zeroed(own, found.n_targets == 0)
            norms = [squares(one).sqrt() for one in self._split(own)]
            records.extend(self._metadata_of(samples, part, found.loss, found.n_targets, torch.stack(norms, 1)))

        assert self.batch_size is not None
        _, self.batch_size = self._halving(positions, self.batch_size, fill)
        made = [part.project(own, self.dims) for part, own in zip(self.parts, self._split(rows), strict=True)]
        projected = {dim: by_sample([found[dim] for found in made]) for dim in self.dims}
        return {dim: store.bind(found.cpu(), records, self.made_from) for dim, found in projected.items()}

    def _whole(self, samples: int) -> Tensor:
        """Return uninitialised gradients [samples, numel] in memory that later calls use again."""
        if self._memory is None or len(self._memory) < samples:
            self._memory = None
            self._memory = torch.empty(samples, self.numel, device=self.device)
        return self._memory[:samples]

    def by_name(self, rows: Tensor) -> dict[str, Tensor]:
        """View gradients [n, numel] as those of each parameter, [n, *shape]."""
        of = shapes(self.model)
        parts = rows.split([math.prod(shape) for shape in of.values()], dim=1)
        return {name: part.view(-1, *shape) for part, (name, shape) in zip(parts, of.items(), strict=True)}

    def _split(self, rows: Tensor) -> Sequence[Tensor]:
        """Split gradients [n, numel] by the parts of the parameters."""
        return rows.split([sum(part.sizes.values()) for part in self.parts], dim=1)

    def _fused_stack(self, shards: Samples, positions: Sequence[int]) -> dict[int, Block]:
        samples = [shards[position] for position in positions]
        batch = self._batch(shards, samples)
        made = self._fused(batch)
        records = self._metadata_of(samples, positions, made.loss, n_targets(batch.labels), made.square_norm.sqrt())
        return {dim: store.bind(rows.flatten(0, 1).cpu(), records, self.made_from) for dim, rows in made.rows.items()}

    def _fused(self, batch: Batch) -> Fused:
        return fused_rows(self.model, batch, self.parts, self.dims, self.provenance.loss)

    def _halving(
        self, positions: Sequence[int], size: int, work: Callable[[Sequence[int]], Result]
    ) -> tuple[list[Result], int]:
        """Run ``work`` on ``size`` samples at a time, halving on out of memory; return results and final size."""
        results = []
        at = 0
        while at < len(positions):
            part = positions[at : at + size]
            try:
                results.append(work(part))
                at += len(part)
                continue
            except RuntimeError as error:
                if not out_of_memory(error) or len(part) == 1 or self.sharded:
                    raise
            size, self._memory = len(part) // 2, None  # outside the handler, which keeps the failed tensors alive
            print(f"gradwire grads collect: out of memory; reducing to {size} samples at once", file=sys.stderr)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return results, size

    @contextmanager
    def _sufficient_memory(self) -> Iterator[None]:
        """Turn an out-of-memory error that cannot be avoided by halving into a RunFault."""
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise RunFault(
                f"{self.batch_size if self.sharded else 1} samples do not fit into the memory of {self.device}: use a "
                "smaller --batch_size or --save_interval, a smaller model, or --strategy fsdp2 on more ranks."
            ) from error

    def _metadata_of(
        self, samples: Sequence[Sample], positions: Sequence[int], losses: Tensor, targets: Tensor, norms: Tensor
    ) -> list[dict[str, Any]]:
        """Return the metadata of each row for the store; ``norms`` are [samples, parts].

        Raises:
            NonFiniteGradient: If a gradient is not finite.
        """
        records = []
        found = zip(samples, positions, losses.tolist(), targets.tolist(), norms.tolist(), strict=True)
        for sample, position, loss, count, of_parts in found:
            if not all(norm < float("inf") for norm in of_parts):
                raise NonFiniteGradient(f"the gradient of sample {sample.sample_id!r} is not finite (loss {loss}).")
            row_ids = self.made_from.row_ids(sample.sample_id)
            for row_id, norm in zip(row_ids, of_parts, strict=True):
                record = {
                    "sample_id": row_id,
                    "loss": loss if count else None,
                    "n_targets": count,
                    "norm": norm,
                    "flag": None if count else "no_target",
                }
                whole = sample._replace(sample_id=self.provenance.sample_id(row_id))
                records.append(record | metadata.columns(self.provenance.metadata, whole, position, record))
        return records


def resolved(method: str, model: nn.Module) -> str:
    """Resolve ``auto``: hooks if the layers of all trainable parameters are supported, else vmap.

    Raises:
        BadInput: If the method is ``hooks`` and a layer is not supported.
    """
    unknown = hooks.unsupported(model)
    if method == "hooks" and unknown:
        raise BadInput(f"--method hooks does not support the layer of {', '.join(unknown[:3])}: use vmap or loop.")
    if method != "auto":
        return method
    if unknown:
        print(f"gradwire: --method auto uses vmap: hooks do not support the layer of {unknown[0]}", file=sys.stderr)
        return "vmap"
    return "hooks"


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the trainable parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in trainable(model).items()}


def kind_of(provenance: Provenance, model: nn.Module, device: torch.device) -> gradient_types.GradientType:
    """Build the gradient type, with Adam's moments or EK-FAC's factors if needed.

    Raises:
        BadInput: If these are missing, have changed, or do not fit the model.
    """
    if provenance.grad_type == "sgd":
        return gradient_types.sgd
    if provenance.grad_type == "sign":
        return gradient_types.Sign([*shapes(model).values()])
    place = provenance.step_dir
    if provenance.grad_type == "ekfac":
        if ekfac.digest(place) != provenance.optimizer_digest:
            raise BadInput(f"the factors in {place} are not those that were collected with.")
        return ekfac.load(place, provenance.model_digest, provenance.loss, shapes(model), device)
    found = optimizer.load(place, model)
    if optimizer.digest(found.path.parent) != provenance.optimizer_digest:
        raise BadInput(f"the moments in {found.path} are not those that were collected with.")
    return gradient_types.Adam.of(found, shapes(model), provenance.adam_variant, device)


def flattened(found: PerSample) -> Tensor:
    """Concatenate the gradients of all parameters into rows [B, n]."""
    return torch.cat([gradient.flatten(1) for gradient in found.gradient.values()], dim=1)


def by_sample(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows [n, D] of each part of the parameters as one matrix, a sample's rows next to each other."""
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 1)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of this rank's GPU, or its share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return 1024 * available // ranks
