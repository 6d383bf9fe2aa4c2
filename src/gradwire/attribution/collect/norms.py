"""The command ``norms``: write per-sample gradient norms to ``norms.parquet``, in data order."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from gradwire.attribution.options import Count, GradMethod, LossOptions, RowStrategy, SampleOptions
from gradwire.base.errors import BadInput, CheckFailed, NonFiniteGradient, RunFault
from gradwire.base.flags import NATURAL, SEED
from gradwire.base.rank_env import RankOptions, rank_options

if TYPE_CHECKING:
    from torch import nn

    from gradwire.attribution.persample.norms import Norms
    from gradwire.comm.collectives.world import World
    from gradwire.lm.data.batches import Batch
    from gradwire.lm.data.shards import Shards

FILE = "norms.parquet"
TOLERANCE = 1e-4  # relative difference from the norm of the sample alone on one rank


PRELOAD = ("gradwire.lm.models.saved", "gradwire.attribution.persample.norms")  # slow imports of each rank


class Options(LossOptions, SampleOptions, RankOptions):
    """Flags of ``gradwire norms``."""

    output_dir: Path = Field(description=f"folder for {FILE}")
    distribution: Literal["auto", "replicated", "distributed"] = Field(
        "auto",
        description="distributed (auto on several ranks): each rank has its own samples and sums over all layers; "
        "replicated: all ranks have the same samples and split the layers",
    )
    strategy: RowStrategy = Field("ddp", description="ddp: full weights on every rank; fsdp2: sharded")
    method: GradMethod = Field(
        "auto", description="as in grads collect; auto: hooks, with vmap or the loop for parameters that hooks miss"
    )
    batch_size: Count = Field(16, description="samples per forward pass and rank")
    recompute: Annotated[int, NATURAL] = Field(
        4, description="number of random norms to check by one backward pass each"
    )
    seed: Annotated[int, SEED] = Field(0, description="seed of the choice of --recompute")


def output_dir(options: Options) -> Path:
    """Return the folder of the output."""
    return options.output_dir


def preflight(options: Options) -> None:
    """Check the arguments, the model and the data before any rank starts.

    Raises:
        BadInput: If one of them is invalid.
    """
    count = options.count(len(options.checked_samples()))
    if (options.world_size or 1) > count:
        raise BadInput(
            f"{options.world_size} ranks for {count} samples of {options.data_path}: start at most {count} ranks."
        )


def main(options: Options) -> None:
    """Compute the norms; rank 0 checks some of them and writes the table.

    Raises:
        NonFiniteGradient: If a loss or a norm is not finite.
        CheckFailed: If two computations of a norm differ.
    """
    if "RANK" not in os.environ:
        preflight(options)

    from gradwire.comm.collectives.world import process_group

    with process_group(**rank_options(options)) as world:
        shards = options.samples(world.rank)
        rows = collect(shards, options, world)
        if world.rank == 0:
            _check(rows, shards, options, world)
            _write(options.output_dir / FILE, rows)
            print(f"norms of {shards.describe(len(rows))} in {options.output_dir / FILE}")


def collect(shards: Shards, options: Options, world: World) -> list[dict[str, Any]]:
    """Compute the table's rows, in data order, on all ranks."""
    from gradwire.attribution.persample import norms
    from gradwire.comm import parallel
    from gradwire.comm.collectives import ops
    from gradwire.lm.data.batches import eval_batches
    from gradwire.lm.models import causal

    model: nn.Module = causal.load_finite(options.model_dir)
    if options.strategy == "fsdp2":
        model = parallel.wrap(model, "fsdp2", device=world.device)
    model = model.to(world.device)
    replicated = options.distribution == "replicated"
    scope: norms.NormScope = "partial" if replicated and world.world_size > 1 else "complete"
    names = norms.share(model, world.rank, world.world_size) if scope == "partial" else None
    count = options.count(len(shards))
    squares: dict[str, float] = {}
    metadata: dict[str, tuple[float, int]] = {}
    rank, ranks = (0, 1) if replicated else (world.rank, world.world_size)
    batch_size = min(options.batch_size, -(-count // ranks))
    for batch in eval_batches(shards, batch_size, rank, ranks, count):
        batch = batch.to(world.device)
        computed = _norms(model, batch, options, names)
        spread = norms.layout_of(batch, options.distribution)
        for id_, square in norms.combined(batch.sample_id, computed.square, scope, spread).items():
            norms.check_agree(id_, squares.setdefault(id_, square), square)
        samples = zip(batch.sample_id, computed.loss.tolist(), computed.n_targets.tolist(), strict=True)
        metadata |= {id_: (loss, valid) for id_, loss, valid in samples if id_}
    for of_rank in ops.gather_objects(metadata):
        metadata |= of_rank
    ids = [shards.sample_id(position) for position in range(count)]
    return [_row(id_, squares[id_], *metadata[id_]) for id_ in ids]


def _norms(model: nn.Module, batch: Batch, options: Options, names: list[str] | None) -> Norms:
    """Compute the norms of a batch, in halves if it runs out of memory.

    Raises:
        RunFault: If a single sample does not fit.
    """
    import torch

    from gradwire.attribution.persample import norms
    from gradwire.attribution.persample.batch import note, out_of_memory

    count = len(batch.sample_id)
    try:
        return norms.norms(model, batch, options.loss, names, options.method)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        if count == 1 or options.strategy == "fsdp2":
            raise RunFault(f"out of memory with a batch of {count} samples: use a smaller --batch_size.") from error
    note(f"norms: out of memory; splitting a batch of {count} samples")
    halves = [_norms(model, half, options, names) for half in batch.split(-(-count // 2))]
    return norms.Norms(*(torch.cat(columns) for columns in zip(*halves, strict=True)))


def _row(id_: str, square: float, loss: float, n_valid: int) -> dict[str, Any]:
    if not (math.isfinite(square) and math.isfinite(loss)):
        raise NonFiniteGradient(f"the gradient of sample {id_!r} is not finite (loss {loss}, squared norm {square}).")
    return {"id": id_, "norm": math.sqrt(square), "loss": loss if n_valid else None, "n_valid": n_valid}


def _check(rows: list[dict[str, Any]], shards: Shards, options: Options, world: World) -> None:
    """Compare random norms with those of one backward pass per sample on one rank.

    Raises:
        CheckFailed: If one differs.
    """
    from gradwire.attribution.persample import loop
    from gradwire.lm.data.batches import collate
    from gradwire.lm.models import causal

    drawn = random.Random(options.seed).sample(range(len(rows)), min(options.recompute, len(rows)))
    if not drawn:
        return
    model = causal.load_finite(options.model_dir).to(world.device)
    for position in sorted(drawn):
        batch = collate([shards[position]], shards.meta["pad_id"], 1).to(world.device)
        gradients = loop.gradients(model, batch, options.loss).gradient
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
        if not abs(norm - rows[position]["norm"]) <= TOLERANCE * norm:
            raise CheckFailed(
                f"sample {rows[position]['id']!r} has norm {rows[position]['norm']:.6g} on {world.world_size} ranks, "
                f"but {norm:.6g} by one backward pass on one rank."
            )


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gradwire.base.files import atomic_write

    schema = pa.schema([("id", pa.string()), ("norm", pa.float64()), ("loss", pa.float64()), ("n_valid", pa.int64())])
    with atomic_write(path) as written:
        pq.write_table(pa.Table.from_pylist(rows, schema), written)
