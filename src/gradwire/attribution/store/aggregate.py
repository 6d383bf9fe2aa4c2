"""The command ``grads aggregate``: merge the ranks' rows into one matrix, one row per sample, in data order.

The ranks keep their files, unless they are discarded: then they keep ids and tables only, and a repeated call reads
the merged rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from gradwire.attribution.options import Count, PartOptions
from gradwire.attribution.store import provenance
from gradwire.attribution.store.provenance import Provenance
from gradwire.base.errors import BadInput
from gradwire.base.flags import RANKS
from gradwire.base.units import amount


class Options(PartOptions):
    """Flags of ``gradwire grads aggregate``."""

    base_path: Path = Field(description="the collection folder, with rank_<r>/dim<D>/")
    output_dir: Path | None = Field(None, description="where to write dim<D>/, or dim<D> itself (default: --base_path)")
    num_gpus: Annotated[int, RANKS] | None = Field(
        None, description="ranks that collected (default: from collect.json)"
    )
    dim: Count = Field(description="columns per row")


def target(options: Options) -> Path:
    """Return the output folder ``dim<N>``."""
    chosen = options.output_dir or options.base_path
    return chosen if re.fullmatch(r"dim\d+", chosen.name) else chosen / f"dim{options.dim}"


def output_dir(options: Options) -> Path | None:
    """Return the folder of the outputs; None if the collection has nothing for it, so that no folder is made."""
    try:
        check_asked(provenance.read(options.base_path), options.base_path, options.num_gpus, [options.dim])
    except BadInput:
        return None
    return target(options)


def main(options: Options) -> None:
    """Merge the ranks and write the matrix, its ids, its metadata and a manifest.

    Raises:
        BadInput: If a rank or a sample is missing, a row differs from what was collected, or the collection folder does
            not match the arguments.
        CheckFailed: If two rows of one sample disagree.
    """
    from gradwire.attribution.store import samples, store
    from gradwire.attribution.store.merge import merge, read_ranks, write

    origin = provenance.read(options.base_path)
    check_asked(origin, options.base_path, options.num_gpus, [options.dim])
    merged_names = store.merged_names(options.base_path, options.dim)
    names = store.all_names(target(options))
    in_place = names.rows.resolve() == merged_names.rows.resolve()
    if options.discard_parts and not in_place:
        raise BadInput(
            f"--discard_parts: the rows of {options.base_path} would be in {target(options)} alone; omit it, or "
            "--output_dir."
        )
    ids = samples.row_ids(origin, samples.samples(origin))
    merged = merge(read_ranks(options.base_path, options.dim, origin), ids, origin.tolerance)
    duplicates, deviation = merged.duplicates, merged.deviation
    merged_before = merged.sources[0].names == merged_names
    if merged_before:
        earlier = provenance.read_manifest(merged_names.rows.parent)
        duplicates, deviation = earlier.duplicates, earlier.duplicates_deviation
    checksums = write(merged, names, move=in_place and (options.discard_parts or merged_before))
    made = provenance.Manifest(
        **origin.model_dump(),
        dim=options.dim,
        order="as in the data",
        rows=len(merged.ids),
        duplicates=duplicates,
        duplicates_deviation=deviation,
        sha256=checksums,
    )
    provenance.write_manifest(target(options), made)
    if options.discard_parts:
        for rank in range(origin.world_size):
            store.discard_blocks(store.rank_folder(options.base_path, rank, options.dim))
            store.rank_names(options.base_path, rank, options.dim).rows.unlink(missing_ok=True)
    rows, ranks = amount(len(merged.ids), "row"), amount(origin.world_size, "rank")
    print(f"{rows} of {options.dim} from {ranks} in {target(options)}")


def check_asked(origin: Provenance, collection: Path, num_gpus: int | None, dims: Sequence[int]) -> None:
    """Check that a collection folder matches the arguments of a command.

    Raises:
        BadInput: If it was collected by a different number of ranks, or lacks one of these widths.
    """
    if num_gpus not in (None, origin.world_size):
        raise BadInput(f"--num_gpus {num_gpus}: {collection} was collected by {amount(origin.world_size, 'rank')}.")
    absent = sorted(set(dims) - set(origin.dims))
    if absent:
        raise BadInput(f"--dim {absent[0]}: {collection} has rows of {', '.join(map(str, origin.dims))} columns.")
