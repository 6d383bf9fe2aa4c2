"""The command ``grads score``: scores of every sample for a few queries, in one pass and without rows.

The whole gradients of the queries stay in memory, [Q, n]; those of the samples stream past them, and only their
products or cosines are written. Nothing is projected, so scores are exact where those of `grads influence` are
estimates. Under EK-FAC's curvature H the inner product gᵀ H⁻¹ q has the whole inverse on the side of the queries, and
costs no more than a plain one; for a cosine both sides are under the root of the inverse.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from gradwire.attribution.collect import collect
from gradwire.attribution.options import (
    AdamVariant,
    Count,
    LossOptions,
    Metric,
    ModuleOptions,
    PrecisionOptions,
    SampleOptions,
)
from gradwire.base.errors import BadInput, NonFiniteGradient
from gradwire.base.files import atomic_write, read_object, write_json
from gradwire.base.rank_env import RankOptions, rank_options
from gradwire.lm.data import Split

if TYPE_CHECKING:
    from torch import Tensor

    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.store.provenance import Provenance
    from gradwire.comm.collectives.world import World
    from gradwire.lm.data.shards import Shards

PRELOAD = ("gradwire.attribution.collect.rows", "gradwire.lm.models.saved")  # slow imports of each rank
MATRIX, SCORES, SETTINGS = "matrix.npy", "scores.parquet", "score.json"


class Options(LossOptions, ModuleOptions, PrecisionOptions, SampleOptions, RankOptions):
    """Flags of ``gradwire grads score``."""

    query_path: Path = Field(description="the queries: a shards folder, or a corpus file")
    query_split: Split | None = Field(None, description="split of a shards folder (default: train)")
    queries: Count | None = Field(None, description="use only the first N queries (default: all)")
    grad_type: Literal["sgd", "adam", "ekfac"] = Field(
        "sgd",
        description="gradients of the samples, as for collect; the queries' are plain, or with ekfac under the same "
        "curvature",
    )
    adam_variant: AdamVariant = Field("torch", description="as for collect")
    metric: Metric = Field("cosine", description="similarity of two gradients")
    optimizer_dir: Path | None = Field(None, description="as for collect")
    lora_dir: Path | None = Field(None, description="use the gradients of this LoRA adapter")
    batch_size: Count | None = Field(None, description="samples per forward pass (default: by free memory)")
    save_interval: Count = Field(1024, description="samples between two saves, from which a killed call resumes")
    output_dir: Path = Field(description=f"folder for {MATRIX}, {SCORES} and {SETTINGS}")


def output_dir(options: Options) -> Path:
    """Return the folder of the outputs."""
    return options.output_dir


def preflight(options: Options) -> None:
    """Check the arguments, the model, the samples, the queries and the folder before any rank starts.

    Raises:
        BadInput: If one of them is invalid, or the folder has scores of other settings.
    """
    from gradwire.attribution.collect.methods import check_dense

    check_dense(options.model_dir)
    options.checked_samples()
    asked = of_queries(options).checked_samples()
    claim(options.output_dir, settings_of(options, *intended(options, options.world_size or 1), asked))


def of_queries(options: Options) -> SampleOptions:
    """Return the options of the queries."""
    shared = {name: getattr(options, name) for name in SampleOptions.model_fields}
    of_their_own = {"data_path": options.query_path, "split": options.query_split, "max_samples": options.queries}
    return SampleOptions(**{**shared, **of_their_own})


def intended(options: Options, world_size: int) -> tuple[Provenance, Provenance]:
    """Return the provenance of the samples' gradients and of the queries'; errors as for `collect.intention`."""
    shared = ("loss", "modules", "bf16", "adam_variant", "optimizer_dir", "lora_dir", "save_interval")
    made = []
    for samples, grad_type, ranks in (
        (options, options.grad_type, world_size),
        (of_queries(options), "ekfac" if options.grad_type == "ekfac" else "sgd", 1),
    ):
        chosen = collect.Options(
            **{name: getattr(options, name) for name in shared},
            **{name: getattr(samples, name) for name in SampleOptions.model_fields},
            grad_type=grad_type,
            projection="none",
            dim=(1,),
            output_path=options.output_dir,
        )
        made.append(collect.intention(chosen, samples.samples(int(os.environ.get("RANK", "0"))), ranks))
    return made[0], made[1]


def settings_of(options: Options, train: Provenance, queries: Provenance, asked: Shards) -> dict[str, Any]:
    """Return what scores depend on, with the queries' ids, which are the columns of the matrix."""
    return {
        "samples": train.model_dump(exclude={"dims"}),
        "queries": queries.model_dump(exclude={"dims"}),
        "metric": options.metric,
        "columns": [asked.sample_id(position) for position in range(queries.samples)],
    }


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a folder, or check those of the scores that are there.

    Raises:
        BadInput: If the folder has scores of other settings.
    """
    from gradwire.attribution.store.provenance import PLACES

    def bound(of: dict[str, Any]) -> dict[str, Any]:
        flat = {f"{side}.{name}": value for side in ("samples", "queries") for name, value in of[side].items()}
        return {name: value for name, value in flat.items() if name.partition(".")[2] not in PLACES} | {
            "metric": of["metric"]
        }

    begun = (folder / MATRIX).is_file() or any(folder.glob("rank_*"))
    if not begun or not (folder / SETTINGS).is_file():
        write_json(folder / SETTINGS, settings)
        return
    try:
        noted = bound(read_object(folder / SETTINGS))
    except (KeyError, AttributeError):
        raise BadInput(f"{folder / SETTINGS} was changed: choose another --output_dir.") from None
    for name, value in bound(settings).items():
        if noted.get(name) != value:
            raise BadInput(
                f"{folder} has scores of another {name}: {noted.get(name)!r} there and {value!r} here; choose another "
                "--output_dir."
            )


def main(options: Options) -> None:
    """Score this rank's share of the samples, and join the scores of all ranks; a repeated call resumes."""
    if "RANK" not in os.environ:
        preflight(options)

    from gradwire.comm.collectives.world import process_group

    with process_group(**rank_options(options)) as world:
        score_share(options, world)


def score_share(options: Options, world: World) -> None:
    """Do what `main` does, on a rank of a process group."""
    from gradwire.comm.collectives import ops
    from gradwire.comm.collectives.world import all_alive

    train, queries = intended(options, world.world_size)
    shards, asked = options.samples(world.rank), of_queries(options).samples(world.rank)
    settings = settings_of(options, train, queries, asked)
    claim(options.output_dir, settings)
    if not all((options.output_dir / name).is_file() for name in (MATRIX, SCORES)):
        with all_alive(world, options.timeout) as check:
            score(options, train, queries, shards, asked, world, check)
        ops.gather_objects(None)  # all ranks have written their scores
        if world.rank == 0:
            join(options.output_dir, train, shards, len(settings["columns"]))
    if world.rank == 0:
        print(f"scores of {shards.describe(train.samples)} for {queries.samples} queries in {options.output_dir}")


def score(
    options: Options,
    train: Provenance,
    queries: Provenance,
    shards: Shards,
    asked: Shards,
    world: World,
    check: Callable[[], None],
) -> None:
    """Write this rank's scores, a file per ``--save_interval`` samples.

    Raises:
        BadInput: If the model, its adapter, moments or factors are invalid.
        NonFiniteGradient: If a gradient is not finite.
    """
    from gradwire.attribution.collect import gradient_types
    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.persample.batch import squares
    from gradwire.attribution.store.samples import longest_first

    typed = RowMaker.load(train, world.device, options.batch_size, world)
    counting = (position for position in range(train.samples) if shards[position].n_targets)
    typed.check(shards, list(islice(counting, 2)) or [0])
    plain = RowMaker(typed.model, queries, world.device, gradient_types.sgd, options.batch_size)
    plain.method = typed.method
    curved, cosine = options.grad_type == "ekfac", options.metric == "cosine"

    def lengths(rows: Tensor) -> Tensor:
        """Return the norms of rows, [B, 1]; 1 for zero rows."""
        norms = squares(rows).sqrt().float()[:, None]
        return norms.where(norms > 0, 1)

    against = gradients(typed if curved else plain, asked, queries.samples)
    if cosine:
        against /= lengths(against)
    elif curved:
        typed.kind(against)  # the other root of the inverse, so that samples need none
    maker = plain if curved and not cosine else typed

    def similarities(rows: Tensor) -> Tensor:
        products = rows @ against.T
        return (products / lengths(rows) if cosine else products).cpu()

    order, ends = longest_first(shards, train.sampler_indices(world.rank)), train.ends()
    for start, end in pairwise([0, *ends]):
        check()
        if not (file := part(options.output_dir, world.rank, end)).is_file():
            positions = order[start:end]
            values = np.concatenate([block.numpy() for block in maker.gradients(shards, positions, similarities)])
            if not np.isfinite(values).all():
                place = positions[int(np.flatnonzero(~np.isfinite(values).all(1))[0])]
                raise NonFiniteGradient(f"the gradient of sample {shards[place].sample_id!r} is not finite.")
            with atomic_write(file) as made, made.open("wb") as stream:
                np.save(stream, values.astype("<f4"))


def gradients(maker: RowMaker, shards: Shards, count: int) -> Tensor:
    """Return the gradients [count, n] of the first samples, in their order.

    Raises:
        BadInput: If none has a target.
        NonFiniteGradient: If one is not finite.
    """
    import torch

    from gradwire.attribution.store.samples import longest_first

    order = longest_first(shards, range(count))
    rows = torch.empty(count, maker.numel, device=maker.device)
    rows[order] = torch.cat(maker.gradients(shards, order, lambda computed: computed.clone()))
    if not rows.isfinite().all():
        place = int((~rows.isfinite().all(1)).nonzero()[0])
        raise NonFiniteGradient(f"the gradient of the query {shards[place].sample_id!r} is not finite.")
    if not rows.any():
        raise BadInput(f"{shards.folder.parent} has no query with a target, so its gradient is zero.")
    return rows


def part(folder: Path, rank: int, end: int) -> Path:
    """Return the file of a rank's scores up to its ``end``-th sample."""
    return folder / f"rank_{rank}" / f"scores-{end}.npy"


def join(folder: Path, train: Provenance, shards: Shards, columns: int) -> None:
    """Put the scores of all ranks in the order of the data, and delete their files."""
    import shutil

    from gradwire.attribution.query.influence import write_scores
    from gradwire.attribution.store.samples import longest_first

    with atomic_write(folder / MATRIX) as path:
        shape = (train.samples, columns)
        matrix = np.lib.format.open_memmap(path, "w+", "<f4", shape)
        for rank in range(train.world_size):
            order = longest_first(shards, train.sampler_indices(rank))
            for start, end in pairwise([0, *train.ends()]):
                matrix[order[start:end]] = np.load(part(folder, rank, end), allow_pickle=False)
        matrix.flush()
        means = matrix.mean(1, dtype=np.float64)[:, None]
    ids = [shards.sample_id(position) for position in range(train.samples)]
    write_scores(folder / SCORES, ids, [], means)
    for rank in range(train.world_size):
        shutil.rmtree(folder / f"rank_{rank}")
