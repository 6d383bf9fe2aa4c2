"""The verb ``grads aggregate``: the ranks' blocks as one matrix, every sample once, in the order of the data."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.errors import BadInput
from gradwire.files import sha256_file, write_json

if TYPE_CHECKING:
    from gradwire.gradients.provenance import Provenance

MANIFEST = "manifest.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--base_path", type=Path, required=True, help="the run's folder, with rank_<r>/dim<D>/")
    parser.add_argument("--output_dir", type=Path, help="where dim<D>/ goes, or dim<D> itself (default: --base_path)")
    parser.add_argument("--num_gpus", type=int, help="ranks that collected (default: as the run's folder says)")
    parser.add_argument("--dim", type=int, required=True, metavar="N", help="columns of a row")


def target(args: argparse.Namespace) -> Path:
    """The folder to write: ``dim<N>``."""
    chosen: Path = args.output_dir or args.base_path
    return chosen if re.fullmatch(r"dim\d+", chosen.name) else chosen / f"dim{args.dim}"


def beside(args: argparse.Namespace) -> Path:
    """The folder of the outputs."""
    return target(args)


def main(args: argparse.Namespace) -> None:
    """Merge the ranks, then write the matrix, its ids, its facts, and a manifest of what they are.

    Raises:
        BadInput: If a rank or a sample is missing, or the run's folder holds something else than was asked for.
        CheckFailed: If two rows of one sample disagree.
    """
    from gradwire.gradients import merge, provenance, store

    origin = provenance.read(args.base_path)
    check_asked(origin, args.base_path, args.num_gpus, [args.dim])
    ranks = [store.rank_folder(args.base_path, rank, args.dim) for rank in range(origin.world_size)]
    ids = provenance.sample_ids(origin, provenance.samples(origin))
    merged = merge.merge([merge.read_rank(folder, args.dim) for folder in ranks], ids)
    names = store.all_names(target(args))
    store.write(names, merged.block)
    write_json(
        target(args) / MANIFEST,
        {
            **asdict(origin),
            "dim": args.dim,
            "order": "as in the data",
            "rows": len(merged.block.ids),
            "duplicates": merged.duplicates,
            "duplicates_deviation": merged.deviation,
            "sha256": {path.name: sha256_file(path) for path in names},
        },
    )
    print(f"{len(merged.block.ids)} rows of {args.dim} from {origin.world_size} ranks in {target(args)}")


def check_asked(origin: Provenance, run: Path, num_gpus: int | None, dims: list[int]) -> None:
    """See that a run folder holds what a verb was asked for.

    Raises:
        BadInput: If it was collected by another number of ranks, or has not these widths.
    """
    if num_gpus not in (None, origin.world_size):
        raise BadInput(f"--num_gpus {num_gpus}: {run} was collected by {origin.world_size} ranks.")
    absent = sorted(set(dims) - set(origin.dims))
    if absent:
        raise BadInput(f"--dim {absent[0]}: {run} has rows of {', '.join(map(str, origin.dims))} columns.")
