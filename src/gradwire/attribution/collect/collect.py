"""The command ``grads collect``: projected per-sample gradients of a saved model, each row bound to its sample id."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from gradwire.attribution.options import (
    PROJECTION,
    PROJECTION_OF_MODULES,
    Count,
    ModuleOptions,
    PartOptions,
    PrecisionOptions,
    Projection,
    RowOptions,
    RowStrategy,
    RowUnit,
    SampleOptions,
)
from gradwire.base.errors import BadInput
from gradwire.base.flags import LORA_RANK, SEED
from gradwire.base.rank_env import RankOptions, rank_options

if TYPE_CHECKING:
    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.store.provenance import Provenance
    from gradwire.attribution.store.samples import Tokens
    from gradwire.comm.collectives.world import World
    from gradwire.lm.data.shards import Shards

PRELOAD = ("gradwire.attribution.collect.rows", "gradwire.lm.models.saved")  # slow imports of each rank


class Collection(RowOptions, ModuleOptions, PrecisionOptions, PartOptions, SampleOptions, RankOptions):
    """Flags of ``gradwire grads collect`` that a file for ``gradwire grads run`` may set, too."""

    dim: tuple[Count, ...] = Field(min_length=1, description="columns per row; several share one pass")
    rows: RowUnit = Field(
        "sample",
        description="a row for each sample; for each token that it predicts, with the id <sample id>@<position>; or "
        "for each module and the gradient of its parameters, with the id <sample id>@<module>",
    )
    seed: Annotated[int, SEED] = Field(0, description="seed of the projection")
    optimizer_dir: Path | None = Field(
        None,
        description="folder of Adam's moments (default: --lora_dir or --model_dir), or of the factors for ekfac",
    )
    strategy: RowStrategy = Field(
        "ddp", description="ddp: the full model on every rank; fsdp2: sharded weights (hooks only, not ekfac)"
    )
    batch_size: Count | None = Field(None, description="samples per forward pass (default: by free memory)")
    gradient_checkpointing: bool = Field(
        False, description="recompute the activations of a block in its backward pass, for larger models and batches"
    )
    lora_dir: Path | None = Field(None, description="use the gradients of this LoRA adapter")
    lora_rank: Annotated[int, LORA_RANK] | None = Field(
        None, description="use the gradients of a new LoRA adapter of this rank"
    )
    metadata: str = Field("", description="extra columns: position,document,n_tokens,n_valid,perplexity")
    restart: bool = Field(False, description="delete gradients of a different configuration in the folder")

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if self.lora_dir and self.lora_rank:
            raise ValueError("--lora_dir and --lora_rank exclude each other: give one of them")
        return self

    @property
    def chosen_projection(self) -> Projection:
        """The projection that is asked for, or the default of these rows."""
        return self.projection or (PROJECTION_OF_MODULES if self.rows == "module" else PROJECTION)


class Options(Collection):
    """Flags of ``gradwire grads collect``."""

    output_path: Path = Field(description="the collection folder; rank_<r>/dim<D>/ is written there")


def output_dir(options: Options) -> Path:
    """Return the collection folder."""
    return options.output_path


def preflight(options: Options) -> None:
    """Check the arguments, the model, the data and the collection folder before any rank starts.

    Raises:
        BadInput: If one of them is invalid.
    """
    from gradwire.attribution.collect.methods import check_dense
    from gradwire.attribution.projections import OF_PARTS, check_width
    from gradwire.attribution.store import provenance
    from gradwire.attribution.store.samples import units
    from gradwire.lm.models import saved

    if options.rows == "module" and options.chosen_projection not in OF_PARTS:
        raise BadInput(f"--rows module has no --projection {options.projection}: use {', '.join(OF_PARTS)}.")
    check_dense(options.model_dir)
    shards = units(options.checked_samples(), options.rows)
    if not (options.lora_dir or options.lora_rank):  # the size of an adapter is known once the model is loaded
        check_width(options.dim, saved.entries(options.model_dir))
    intended = intention(options, shards, options.world_size or 1)
    if options.restart and provenance.differences(options.output_path, intended):
        provenance.discard(options.output_path)
    provenance.agree(options.output_path, intended)


def intention(options: Options, shards: Shards | Tokens, world_size: int) -> Provenance:
    """Return the provenance of the rows, as far as known before the model is loaded.

    Raises:
        BadInput: If there is no row, there are more ranks than rows, or the adapter, the moments, the factors or a
            column are invalid.
    """
    from gradwire.attribution.collect import ekfac
    from gradwire.attribution.store import provenance
    from gradwire.attribution.store.samples import units_of
    from gradwire.attribution.store.store import chosen_columns
    from gradwire.base.source_digest import source_digest
    from gradwire.lm.data.shards import chat_format_of
    from gradwire.lm.models import lora, optimizer, saved

    samples = units_of(shards, options.max_samples)
    if not samples:
        raise BadInput(f"--rows token: the chosen samples of {options.data_path} have no target, so there is no row.")
    if world_size > samples:
        raise BadInput(
            f"{world_size} ranks for {samples} samples of {options.data_path}: start at most {samples} ranks."
        )
    adapter: str | dict[str, int] | None = None
    if options.lora_dir:
        lora.check(options.lora_dir, options.model_dir)
        adapter = lora.digest(options.lora_dir)
    elif options.lora_rank:
        adapter = {"rank": options.lora_rank, "seed": 0}
    step_dir = options.optimizer_dir or options.lora_dir or options.model_dir
    digests = {"adam": optimizer.digest, "ekfac": ekfac.digest}
    shared = {name: getattr(options, name) for name in RowOptions.model_fields}
    return provenance.Provenance(
        **{**shared, "projection": options.chosen_projection},
        format=provenance.FORMAT,
        source=source_digest("gradwire.attribution.collect.rows"),
        model_dir=str(options.model_dir),
        model_digest=saved.digest(options.model_dir),
        data_path=str(shards.folder.parent),
        data_digest=shards.digest,
        split=shards.meta["split"],
        samples=samples,
        world_size=world_size,
        dims=sorted(set(options.dim)),
        seed=options.seed,
        row_of=options.rows,
        of_modules=sorted(set(options.modules)),
        bf16=options.bf16,
        strategy=options.strategy,
        optimizer_dir=options.optimizer_dir and str(options.optimizer_dir),
        optimizer_digest=digests[options.grad_type](step_dir) if options.grad_type in digests else None,
        lora=adapter,
        lora_dir=options.lora_dir and str(options.lora_dir),
        metadata=chosen_columns(options.metadata),
        corpus=str(options.data_path) if options.data_path.is_file() else None,
        chat_format=chat_format_of(shards.meta),
    )


def main(options: Options) -> None:
    """Collect this rank's share of the samples; a repeated call resumes."""
    if "RANK" not in os.environ:
        preflight(options)

    from gradwire.attribution.store.samples import units
    from gradwire.comm.collectives.world import all_alive, process_group

    with process_group(**rank_options(options)) as world:
        shards = units(options.samples(world.rank), options.rows)
        intended = intention(options, shards, world.world_size)
        with all_alive(world, options.timeout) as check:
            collect(options, intended, world, check)
        if world.rank == 0:
            print(f"gradients of {shards.describe(intended.samples)} in {options.output_path}")


def collect(
    options: Options,
    intended: Provenance,
    world: World,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write this rank's blocks, then merge them into one block of all its samples.

    Samples are split as by ``DistributedSampler``, including its padding: ``grads aggregate`` compares the rows of
    samples that two ranks computed. A rank takes the longest of its samples first, and puts the rows back in order when
    it merges its blocks.

    Args:
        options: The collection folder, and how the rows are computed and kept.
        intended: The provenance of the rows; `provenance.FOUND` is filled in from the loaded model.
        world: The process group.
        check: Called before each file; raises to stop the collection.

    Raises:
        BadInput: If the folder holds gradients of a different configuration.
        NonFiniteGradient: If a sample's gradient is not finite.
    """
    from tqdm import tqdm

    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.store import merge, provenance, store
    from gradwire.attribution.store.samples import longest_first, samples

    collection, recomputing = options.output_path, options.gradient_checkpointing
    maker = RowMaker.load(intended, world.device, options.batch_size, world, gradient_checkpointing=recomputing)
    maker.projector.width(maker.dims)  # refuses what the projection does not support
    shards = samples(intended)
    counting = (position for position in range(intended.samples) if shards[position].n_targets)
    maker.check(shards, list(islice(counting, 2)) or [0])
    intended = maker.made_from
    provenance.agree(collection, intended)
    provenance.claim(collection, intended)
    if world.rank == 0:
        store.note_size(intended, options.discard_parts)

    sampler_indices, ends = intended.sampler_indices(world.rank), intended.ends()
    order = longest_first(shards, sampler_indices)
    missing = [dim for dim in intended.dims if not store.collected(collection, world.rank, dim)]
    folders = {dim: store.rank_folder(collection, world.rank, dim) for dim in missing}
    quiet = None if world.rank == 0 else True  # None: show a bar if stderr is a terminal
    for start, end in tqdm(list(pairwise([0, *ends])), desc="gradients", unit="file", disable=quiet):
        check()
        names = {dim: store.part_names(folder, end) for dim, folder in folders.items()}
        if _wanted(not all(part.exist() for part in names.values()), maker, world):
            blocks = maker.blocks(shards, order[start:end])
            for dim in missing:
                store.write(names[dim], blocks[dim])
    ids = [row_id for position in sampler_indices for row_id in intended.row_ids(shards.sample_id(position))]
    for dim in intended.dims:
        merge.join(collection, world.rank, dim, ids, intended, discard=options.discard_parts)


def _wanted(missing: bool, maker: RowMaker, world: World) -> bool:
    """Whether to compute a block; with sharded weights all ranks compute it if any rank lacks it."""
    if not maker.sharded:
        return missing
    import torch

    from gradwire.comm.collectives import ops

    return bool(ops.all_reduce(torch.tensor(float(missing), device=world.device), "max", purpose="control"))
