"""The verb ``norms``: write per-sample gradient norms to ``norms.parquet``, in data order."""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gradwire.attribution.options import GradMethod, SampleLoss
from gradwire.base.errors import BadInput, CheckFailed, NonFiniteGradient, RunFault
from gradwire.base.flags import COUNT, NATURAL, SEED, output_folder
from gradwire.base.rank_env import add_rank_arguments, rank_options
from gradwire.lm.data.defaults import LENGTH, Split
from gradwire.lm.models.shards import samples_of

if TYPE_CHECKING:
    from torch import nn

    from gradwire.attribution.persample.norms import Norms
    from gradwire.comm.collectives.world import World
    from gradwire.lm.data.batches import Batch
    from gradwire.lm.data.shards import Shards

FILE = "norms.parquet"
TOLERANCE = 1e-4  # relative difference from the norm of the sample alone on one rank


PRELOAD = ("gradwire.lm.models.saved", "gradwire.attribution.persample.norms")  # slow imports of each rank


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--model_dir", type=Path, required=True, help="a saved model, such as a run's final_model/")
    parser.add_argument("--data_path", type=Path, required=True, help="a shards folder, or a corpus file")
    parser.add_argument("--output_dir", type=output_folder, required=True, help=f"folder for {FILE}")
    parser.add_argument(
        "--split", choices=get_args(Split), help="split of a shards folder (default: train); not for a corpus file"
    )
    parser.add_argument("--max_samples", type=COUNT, help="use only the first N samples (default: all)")
    parser.add_argument(
        "--distribution",
        choices=("auto", "replicated", "distributed"),
        default="auto",
        help="distributed (auto on several ranks): each rank has its own samples and sums over all layers; "
        "replicated: all ranks have the same samples and split the layers",
    )
    parser.add_argument(
        "--strategy", choices=("ddp", "fsdp2"), default="ddp", help="ddp: full weights on every rank; fsdp2: sharded"
    )
    parser.add_argument(
        "--loss", choices=get_args(SampleLoss), default="mean", help="reduction of a sample's loss over its targets"
    )
    parser.add_argument(
        "--method",
        choices=get_args(GradMethod),
        default="auto",
        help="as in grads collect; auto: hooks, with vmap or the loop for parameters that hooks miss",
    )
    parser.add_argument("--batch_size", type=COUNT, default=16, help="samples per forward pass and rank")
    parser.add_argument(
        "--recompute", type=NATURAL, default=4, metavar="K", help="check K random norms by one backward pass each"
    )
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the choice of --recompute")
    parser.add_argument("--max_length", type=LENGTH, help="tokens per sample of a corpus file (default: the model's)")
    parser.add_argument("--cache_dir", type=Path, help="folder for a corpus file's shards (default: the user cache)")
    add_rank_arguments(parser)


def beside(args: argparse.Namespace) -> Path:
    """Return the folder of the output."""
    return args.output_dir


def preflight(args: argparse.Namespace) -> None:
    """Check the arguments, the model and the data before any rank starts.

    Raises:
        BadInput: If one of them is invalid.
    """
    from gradwire.lm.data.shards import check

    shards = samples_of(args)
    check(shards.folder.parent)
    count = _count(shards, args.max_samples)
    if (args.world_size or 1) > count:
        raise BadInput(f"{args.world_size} ranks for {count} samples of {args.data_path}: start at most {count} ranks.")


def main(args: argparse.Namespace) -> None:
    """Compute the norms; rank 0 checks some of them and writes the table.

    Raises:
        NonFiniteGradient: If a loss or a norm is not finite.
        CheckFailed: If two computations of a norm differ.
    """
    if "RANK" not in os.environ:
        preflight(args)

    from gradwire.comm import parallel
    from gradwire.comm.collectives.world import process_group
    from gradwire.lm.models import folder

    with process_group(**rank_options(args)) as world:
        shards = samples_of(args, world.rank)
        model: nn.Module = folder.load_finite(args.model_dir)
        if args.strategy == "fsdp2":
            model = parallel.wrap(model, "fsdp2", device=world.device)
        rows = collect(model.to(world.device), shards, args, world)
        if world.rank == 0:
            _check(rows, shards, args, world)
            _write(args.output_dir / FILE, rows)
            print(f"norms of {shards.describe(len(rows))} in {args.output_dir / FILE}")


def collect(model: nn.Module, shards: Shards, args: argparse.Namespace, world: World) -> list[dict[str, Any]]:
    """Compute the table's rows, in data order, on all ranks."""
    from gradwire.attribution.persample import norms
    from gradwire.comm.collectives import ops

    replicated = args.distribution == "replicated"
    scope: norms.NormScope = "partial" if replicated and world.world_size > 1 else "complete"
    names = norms.share(model, world.rank, world.world_size) if scope == "partial" else None
    count = _count(shards, args.max_samples)
    squares: dict[str, float] = {}
    metadata: dict[str, tuple[float, int]] = {}
    for batch in batches(shards, count, args.batch_size, world, replicated):
        batch = batch.to(world.device)
        found = _norms(model, batch, args, names)
        spread = norms.layout_of(batch, args.distribution)
        _merge(squares, norms.combined(batch.sample_id, found.square, scope, spread))
        samples = zip(batch.sample_id, found.loss.tolist(), found.n_targets.tolist(), strict=True)
        metadata |= {id_: (loss, valid) for id_, loss, valid in samples if id_}
    for of_rank in ops.gather_objects(metadata):
        metadata |= of_rank
    ids = [shards[position].sample_id for position in range(count)]
    return [_row(id_, squares[id_], *metadata[id_]) for id_ in ids]


def _norms(model: nn.Module, batch: Batch, args: argparse.Namespace, names: list[str] | None) -> Norms:
    """Compute the norms of a batch, in halves if it runs out of memory.

    Raises:
        RunFault: If a single sample does not fit.
    """
    import torch

    from gradwire.attribution.persample import norms
    from gradwire.attribution.persample.batch import note, out_of_memory

    count = len(batch.sample_id)
    try:
        return norms.norms(model, batch, args.loss, names, args.method)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        if count == 1 or args.strategy == "fsdp2":
            raise RunFault(f"out of memory with a batch of {count} samples: use a smaller --batch_size.") from error
    note(f"norms: out of memory; splitting a batch of {count} samples")
    halves = [_norms(model, half, args, names) for half in batch.split(-(-count // 2))]
    return norms.Norms(*(torch.cat(columns) for columns in zip(*halves, strict=True)))


def batches(shards: Shards, count: int, batch_size: int, world: World, replicated: bool) -> Iterator[Batch]:
    """Yield this rank's batches of the first ``count`` samples, padded to equal number and size on all ranks."""
    from gradwire.lm.data.batches import collate

    positions: Sequence[int] = range(count) if replicated else range(world.rank, count, world.world_size)
    longest = count if replicated else -(-count // world.world_size)
    batch_size = min(batch_size, longest)
    for first in range(0, longest, batch_size):
        samples = [shards[position] for position in positions[first : first + batch_size]]
        yield collate(samples, shards.meta["pad_id"], batch_size)


def _row(id_: str, square: float, loss: float, n_valid: int) -> dict[str, Any]:
    if not (math.isfinite(square) and math.isfinite(loss)):
        raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite (loss {loss}, squared norm {square}).")
    return {"id": id_, "norm": math.sqrt(square), "loss": loss if n_valid else None, "n_valid": n_valid}


def _merge(squares: dict[str, float], found: Any) -> None:
    from gradwire.attribution.persample.norms import check_agree

    for id_, value in found.items():
        check_agree(id_, squares.setdefault(id_, value), value)


def _check(rows: list[dict[str, Any]], shards: Shards, args: argparse.Namespace, world: World) -> None:
    """Compare random norms with those of one backward pass per sample on one rank.

    Raises:
        CheckFailed: If one differs.
    """
    from gradwire.attribution.persample import loop
    from gradwire.lm.data.batches import collate
    from gradwire.lm.models import folder

    drawn = random.Random(args.seed).sample(range(len(rows)), min(args.recompute, len(rows)))
    if not drawn:
        return
    model = folder.load_finite(args.model_dir).to(world.device)
    for position in sorted(drawn):
        batch = collate([shards[position]], shards.meta["pad_id"], 1).to(world.device)
        found = loop.gradients(model, batch, args.loss).gradient
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found.values()))
        if not abs(norm - rows[position]["norm"]) <= TOLERANCE * norm:
            raise CheckFailed(
                f"sample {rows[position]['id']!r} has norm {rows[position]['norm']:.6g} on {world.world_size} ranks, "
                f"but {norm:.6g} by one backward pass on one rank."
            )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gradwire.base.files import whole

    schema = pa.schema([("id", pa.string()), ("norm", pa.float64()), ("loss", pa.float64()), ("n_valid", pa.int64())])
    with whole(path) as part:
        pq.write_table(pa.Table.from_pylist(rows, schema), part)


def _count(shards: Shards, most: int | None) -> int:
    return len(shards) if most is None else min(most, len(shards))
