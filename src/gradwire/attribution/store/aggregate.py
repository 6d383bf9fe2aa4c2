"""The verb ``grads aggregate``: merge the ranks' blocks into one matrix, one row per sample, in data order."""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.attribution.store.manifest import EXPORTS, NORMALIZED
from gradwire.base.errors import BadInput
from gradwire.base.files import remove_leftovers, sha256_file
from gradwire.base.flags import COUNT, RANKS, output_folder

if TYPE_CHECKING:
    from gradwire.attribution.store.merge import Merged
    from gradwire.attribution.store.provenance import Provenance
    from gradwire.attribution.store.store import Names


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--base_path", type=Path, required=True, help="the collection folder, with rank_<r>/dim<D>/")
    parser.add_argument(
        "--output_dir", type=output_folder, help="where to write dim<D>/, or dim<D> itself (default: --base_path)"
    )
    parser.add_argument("--num_gpus", type=RANKS, help="ranks that collected (default: from collect.json)")
    parser.add_argument("--dim", type=COUNT, required=True, metavar="N", help="columns per row")
    parser.add_argument("--normalize", action="store_true", help="also write all_normalized.pt, with rows of norm 1")
    parser.add_argument(
        "--export", nargs="+", choices=tuple(EXPORTS), default=[], help="also write the rows as all_orig.<format>"
    )


def target(args: argparse.Namespace) -> Path:
    """Return the output folder ``dim<N>``."""
    chosen: Path = args.output_dir or args.base_path
    return chosen if re.fullmatch(r"dim\d+", chosen.name) else chosen / f"dim{args.dim}"


def beside(args: argparse.Namespace) -> Path:
    """Return the folder of the outputs."""
    return target(args)


def main(args: argparse.Namespace) -> None:
    """Merge the ranks and write the matrix, its ids, its metadata and a manifest.

    Raises:
        BadInput: If a rank or a sample is missing, a row differs from what was collected, or the collection folder does
            not match the arguments.
        CheckFailed: If two rows of one sample disagree.
    """
    from gradwire.attribution.collect import types
    from gradwire.attribution.store import manifest, merge, provenance, store

    origin = provenance.read(args.base_path)
    check_asked(origin, args.base_path, args.num_gpus, [args.dim])
    ranks = [store.rank_folder(args.base_path, rank, args.dim) for rank in range(origin.world_size)]
    ids = provenance.row_ids(origin, provenance.samples(origin))
    merged = merge.merge(
        [merge.read_rank(folder, args.dim, origin) for folder in ranks], ids, types.TOLERANCE[origin.grad_type]
    )
    names = store.all_names(target(args))
    checksums = write(merged, names, args)
    made = manifest.Manifest(
        **asdict(origin),
        dim=args.dim,
        order="as in the data",
        rows=len(merged.ids),
        duplicates=merged.duplicates,
        duplicates_deviation=merged.deviation,
        sha256=checksums,
    )
    manifest.write(target(args), made)
    print(f"{len(merged.ids)} rows of {args.dim} from {origin.world_size} ranks in {target(args)}")


def further(args: argparse.Namespace) -> list[Path]:
    """Return the optional files that a call writes."""
    names = [NORMALIZED] * args.normalize + [EXPORTS[kind] for kind in args.export]
    return [target(args) / name for name in names]


def write(merged: Merged, names: Names, args: argparse.Namespace) -> dict[str, str]:
    """Write the merged rows to all outputs in one pass, then their table and ids; return each file's checksum."""
    from gradwire.attribution.store import row_file, store

    for name in (NORMALIZED, *EXPORTS.values()):  # left by a killed call with other flags
        remove_leftovers(target(args) / name)
    with ExitStack() as stack:
        codec = merged.sources[0].codec
        rows = stack.enter_context(row_file.tensor_writer(names.rows, merged.shape, codec.name))
        plain: list[row_file.Writer] = []
        scaled: list[row_file.Writer] = []
        hashed = {names.rows: rows}
        for path in further(args):
            if path.name == NORMALIZED:
                hashed[path] = stack.enter_context(row_file.tensor_writer(path, merged.shape))
                scaled.append(hashed[path])
            elif path.suffix == ".safetensors":
                hashed[path] = stack.enter_context(row_file.safetensors_writer(path, merged.shape))
                plain.append(hashed[path])
            else:
                plain.append(stack.enter_context(row_file.parquet_writer(path, merged.shape, merged.ids)))
        for chunk in merged.chunks():
            rows.append(chunk)
            decoded = merged.sources[0].decoded(chunk) if plain or scaled else chunk
            for writer in plain:
                writer.append(decoded)
            for writer in scaled:
                writer.append(row_file.normalized(decoded))
    store.write_metadata(names, merged.meta, merged.ids)
    checksums = {path: writer.sha256.hexdigest() for path, writer in hashed.items()}
    return {path.name: checksums.get(path) or sha256_file(path) for path in [*names, *further(args)]}


def check_asked(origin: Provenance, collection: Path, num_gpus: int | None, dims: list[int]) -> None:
    """Check that a collection folder matches the arguments of a verb.

    Raises:
        BadInput: If it was collected by a different number of ranks, or lacks one of these widths.
    """
    if num_gpus not in (None, origin.world_size):
        raise BadInput(f"--num_gpus {num_gpus}: {collection} was collected by {origin.world_size} ranks.")
    absent = sorted(set(dims) - set(origin.dims))
    if absent:
        raise BadInput(f"--dim {absent[0]}: {collection} has rows of {', '.join(map(str, origin.dims))} columns.")
