"""The verb ``grads collect``: projected per-sample gradients of a saved model, each row bound to its sample id."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from gradwire.attribution.options import (
    PROJECTION,
    SAVE_INTERVAL,
    AdamVariant,
    GradMethod,
    GradType,
    Projection,
    RowType,
    RowUnit,
    SampleLoss,
)
from gradwire.base.errors import BadInput
from gradwire.base.flags import COUNT, LORA_RANK, SEED, output_folder
from gradwire.base.rank_env import add_rank_arguments, rank_options
from gradwire.lm.data.defaults import LENGTH, Split
from gradwire.lm.models.shards import samples_of

if TYPE_CHECKING:
    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.collect.tokens import Tokens
    from gradwire.attribution.store.provenance import Provenance
    from gradwire.attribution.store.store import Block
    from gradwire.comm.collectives.world import World
    from gradwire.lm.data.shards import Shards


PROJECTION_OF_MODULES: Projection = "rademacher"  # not all projections have rows of modules: `projections.OF_PARTS`
PRELOAD = ("gradwire.attribution.collect.rows", "gradwire.lm.models.saved")  # slow imports of each rank


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="a saved model, such as a run's final_model/")
    parser.add_argument("--data_path", type=Path, required=True, help="a shards folder, or a corpus file")
    parser.add_argument(
        "--output_path",
        type=output_folder,
        required=True,
        help="the collection folder; rank_<r>/dim<D>/ is written there",
    )
    parser.add_argument(
        "--split", choices=get_args(Split), help="split of a shards folder (default: train); not for a corpus file"
    )
    parser.add_argument("--max_samples", type=COUNT, help="use only the first N samples (default: all)")
    parser.add_argument(
        "--dim", type=COUNT, nargs="+", required=True, metavar="N", help="columns per row; several share one pass"
    )
    parser.add_argument(
        "--grad_type",
        choices=(*get_args(GradType), "ekfac"),
        default="sgd",
        help="sgd: the gradient; adam: the update Adam would make with the saved moments; sign: the gradient's signs; "
        "ekfac: the gradient under the inverse curvature of `grads factors`",
    )
    parser.add_argument(
        "--adam_variant",
        choices=get_args(AdamVariant),
        default="torch",
        help="torch: as torch.optim.Adam; less: as LESS, betas 0.9 and 0.999, no bias correction, eps 1e-8 in the root",
    )
    parser.add_argument(
        "--optimizer_dir",
        type=Path,
        help="folder of Adam's moments (default: --lora_dir or --model_dir), or of the factors for ekfac",
    )
    parser.add_argument(
        "--loss",
        choices=get_args(SampleLoss),
        default="mean",
        help="reduction of a sample's weighted loss over its targets; mean divides by their number",
    )
    parser.add_argument(
        "--projection",
        choices=get_args(Projection),
        help="sjlt, srht: fast; rademacher, normal: dense and slow; factored: fastest, higher variance; none: the full "
        f"gradient, --dim must equal its size (default: {PROJECTION}; with --rows module, {PROJECTION_OF_MODULES})",
    )
    parser.add_argument(
        "--rows",
        choices=get_args(RowUnit),
        default="sample",
        help="a row for each sample; for each token that it predicts, with the id <sample id>@<position>; or for each "
        "module and the gradient of its parameters, with the id <sample id>@<module>",
    )
    parser.add_argument(
        "--store",
        choices=get_args(RowType),
        default="float32",
        help="row type of the files; all but float32 have a scale per row (onebit: the signs, 31 times smaller)",
    )
    parser.add_argument(
        "--method",
        choices=get_args(GradMethod),
        default="auto",
        help="loop: one backward pass per sample; vmap: torch.func; hooks: per layer; auto: hooks, else vmap",
    )
    parser.add_argument("--batch_size", type=COUNT, help="samples per forward pass (default: by free memory)")
    parser.add_argument(
        "--strategy",
        choices=("ddp", "fsdp2"),
        default="ddp",
        help="ddp: the full model on every rank; fsdp2: sharded weights (hooks and sgd only)",
    )
    adapter = parser.add_mutually_exclusive_group()
    adapter.add_argument("--lora_dir", type=Path, help="use the gradients of this LoRA adapter")
    adapter.add_argument("--lora_rank", type=LORA_RANK, metavar="R", help="use the gradients of a new LoRA adapter")
    parser.add_argument("--lora_seed", type=SEED, default=0, help="seed of the new adapter")
    parser.add_argument(
        "--metadata", default="", metavar="NAMES", help="extra columns: position,document,n_tokens,n_valid,perplexity"
    )
    parser.add_argument("--save_interval", type=COUNT, default=SAVE_INTERVAL, help="samples (or tokens) per file")
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the projection")
    parser.add_argument(
        "--restart", action="store_true", help="delete gradients of a different configuration in the folder"
    )
    parser.add_argument("--max_length", type=LENGTH, help="tokens per sample of a corpus file (default: the model's)")
    parser.add_argument("--cache_dir", type=Path, help="folder for a corpus file's shards (default: the user cache)")
    add_rank_arguments(parser)


def projection_of(args: argparse.Namespace) -> Projection:
    """Return the projection that is asked for, or the default of these rows."""
    chosen: Projection | None = args.projection
    return chosen or (PROJECTION_OF_MODULES if args.rows == "module" else PROJECTION)


def beside(args: argparse.Namespace) -> Path:
    """Return the collection folder."""
    return args.output_path


def preflight(args: argparse.Namespace) -> None:
    """Check the arguments, the model, the data and the collection folder before any rank starts.

    Raises:
        BadInput: If one of them is invalid.
    """
    from gradwire.attribution.projections import OF_PARTS, check_width
    from gradwire.attribution.store import provenance
    from gradwire.lm.data.shards import check
    from gradwire.lm.models import saved

    if args.rows == "module" and projection_of(args) not in OF_PARTS:
        raise BadInput(f"--rows module has no --projection {args.projection}: use {', '.join(OF_PARTS)}.")

    provenance.check_dense(args.model_dir)
    found = samples_of(args)
    check(found.folder.parent)
    shards = provenance.units(found, args.rows)
    if not (args.lora_dir or args.lora_rank):  # the size of an adapter is known once the model is loaded
        check_width(args.dim, saved.entries(args.model_dir))
    intended = _intended(args, shards, args.world_size or 1)
    if args.restart and provenance.differences(args.output_path, intended):
        provenance.discard(args.output_path)
    provenance.agree(args.output_path, intended)


def _intended(args: argparse.Namespace, shards: Shards | Tokens, world_size: int) -> Provenance:
    """Return what this call will collect, as far as known before the model is loaded."""
    from gradwire.attribution.collect import ekfac, metadata
    from gradwire.attribution.store import provenance
    from gradwire.base.source_digest import source_digest
    from gradwire.lm.models import lora, optimizer, saved

    digests = {"adam": optimizer.digest, "ekfac": ekfac.digest}
    samples = _first(shards, args.max_samples)
    if not samples:
        raise BadInput(f"--rows token: the chosen samples of {args.data_path} have no target, so there is no row.")
    if world_size > samples:
        raise BadInput(f"{world_size} ranks for {samples} samples of {args.data_path}: start at most {samples} ranks.")
    adapter: str | dict[str, int] | None = None
    if args.lora_dir:
        lora.check(args.lora_dir, args.model_dir)
        adapter = lora.digest(args.lora_dir)
    elif args.lora_rank:
        adapter = {"rank": args.lora_rank, "seed": args.lora_seed}
    return provenance.Provenance(
        format=provenance.FORMAT,
        source=source_digest("gradwire.attribution.collect.rows"),
        model_dir=str(args.model_dir),
        model_digest=saved.digest(args.model_dir),
        data_path=str(shards.folder.parent),
        data_digest=shards.digest,
        split=shards.meta["split"],
        samples=samples,
        world_size=world_size,
        dims=sorted(set(args.dim)),
        grad_type=args.grad_type,
        loss=args.loss,
        method=args.method,
        projection=projection_of(args),
        seed=args.seed,
        save_interval=args.save_interval,
        store=args.store,
        row_of=args.rows,
        strategy=args.strategy,
        adam_variant=args.adam_variant,
        optimizer_dir=args.optimizer_dir and str(args.optimizer_dir),
        optimizer_digest=digests.get(args.grad_type, lambda _: None)(
            args.optimizer_dir or args.lora_dir or args.model_dir
        ),
        lora=adapter,
        lora_dir=args.lora_dir and str(args.lora_dir),
        metadata=metadata.chosen(args.metadata),
        corpus=str(args.data_path) if args.data_path.is_file() else None,
    )


def _first(shards: Shards | Tokens, max_samples: int | None) -> int:
    """Return the number of rows of the first ``max_samples`` samples; None: of all."""
    from gradwire.attribution.collect.tokens import Tokens

    if isinstance(shards, Tokens):
        return len(shards) if max_samples is None else shards.of_samples(max_samples)
    return len(shards) if max_samples is None else min(max_samples, len(shards))


def main(args: argparse.Namespace) -> None:
    """Collect this rank's share of the samples; a repeated call resumes."""
    if "RANK" not in os.environ:
        preflight(args)

    from gradwire.attribution.collect import provenance
    from gradwire.attribution.store import provenance
    from gradwire.comm.collectives.world import all_alive, process_group

    with process_group(**rank_options(args)) as world:
        shards = provenance.units(samples_of(args, world.rank), args.rows)
        intended = _intended(args, shards, world.world_size)
        with all_alive(world, args.timeout) as check:
            collect(args.output_path, intended, world, args.batch_size, check)
        if world.rank == 0:
            print(f"gradients of {shards.describe(intended.samples)} in {args.output_path}")


def collect(
    collection: Path,
    intended: Provenance,
    world: World,
    batch_size: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write this rank's blocks, then one block of all its samples.

    Samples are split as by ``DistributedSampler``, including its padding: ``grads aggregate`` compares the rows of
    samples that two ranks computed.

    Args:
        collection: The collection folder.
        intended: What to collect; `provenance.FOUND` is filled in from the loaded model.
        world: The process group.
        batch_size: Samples per forward pass; None for as many as fit.
        check: Called before each file; raises to stop the collection.

    Raises:
        BadInput: If the folder holds gradients of a different configuration.
        NonFiniteGradient: If a sample's gradient is not finite.
    """
    from tqdm import tqdm

    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.store import provenance, store

    maker = RowMaker.load(intended, world.device, batch_size, world)
    shards = provenance.samples(intended)
    counting = (at for at in range(intended.samples) if shards[at].counts)
    maker.check(shards, list(islice(counting, 2)) or [0])
    intended = maker.made_from
    provenance.agree(collection, intended)
    provenance.claim(collection, intended)

    sampler_indices, ends = intended.sampler_indices(world.rank), intended.ends()
    folders = {dim: store.rank_folder(collection, world.rank, dim) for dim in intended.dims}
    quiet = None if world.rank == 0 else True  # None: show a bar if stderr is a terminal
    for start, end in tqdm(list(pairwise([0, *ends])), desc="gradients", unit="file", disable=quiet):
        check()
        names = {dim: store.part_names(folder, end) for dim, folder in folders.items()}
        if _wanted(not all(part.exist() for part in names.values()), maker, world):
            for dim, block in maker.blocks(shards, sampler_indices[start:end]).items():
                store.write(names[dim], block)
    for folder in folders.values():
        whole = store.all_names(folder)
        if not whole.exist():
            store.write(whole, store.concatenated(_again(folder, ends, intended)))


def _again(folder: Path, ends: list[int], origin: Provenance) -> Iterator[Block]:
    """Read a folder's blocks; an earlier call may have written some of them."""
    from gradwire.attribution.store import store

    return (store.read_bound(store.part_names(folder, end), origin.identity) for end in ends)


def _wanted(missing: bool, maker: RowMaker, world: World) -> bool:
    """Whether to compute a block; with sharded weights all ranks compute it if any rank lacks it."""
    if not maker.sharded:
        return missing
    import torch

    from gradwire.comm.collectives import ops

    return bool(ops.all_reduce(torch.tensor(float(missing), device=world.device), "max", purpose="control"))
