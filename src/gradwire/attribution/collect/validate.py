"""The command ``grads validate``: check that row i belongs to id i, in the ranks' files and the merged ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gradwire.attribution.options import Count, PlaceOptions
from gradwire.attribution.store import provenance
from gradwire.attribution.store.aggregate import check_asked
from gradwire.base.files import write_json
from gradwire.base.flags import NATURAL, RANKS, SEED

if TYPE_CHECKING:
    from gradwire.attribution.store.checks import CollectionAudit

RESULT = "validation.json"


class Options(PlaceOptions):
    """Flags of ``gradwire grads validate``."""

    output_dir: Path = Field(description="the collection folder; gets validation.json")
    check_ranks: bool = Field(False, description="check rank_<r>/dim<D>/ (default: both)")
    check_aggregated: bool = Field(False, description="check dim<D>/ (default: both)")
    num_gpus: Annotated[int, RANKS] | None = Field(
        None, description="ranks that collected (default: from collect.json)"
    )
    dim: tuple[Count, ...] | None = Field(None, description="widths to check (default: all)")
    recompute: Annotated[int, NATURAL] = Field(
        0, description="number of random rows to recompute if all other checks pass"
    )
    seed: Annotated[int, SEED] = Field(0, description="seed of the choice of --recompute")
    data_path: Path | None = Field(None, description="current folder of the shards (default: as collected)")
    corpus: Path | None = Field(None, description="current path of the corpus file (default: as collected)")


def output_dir(options: Options) -> Path | None:
    """Return the collection folder, if it exists."""
    return options.output_dir if options.output_dir.is_dir() else None


def main(options: Options) -> None:
    """Run the checks and write ``validation.json``, even if some fail.

    Raises:
        BadInput: If the collection folder, its model or its data are missing or have changed.
        CheckFailed: If a check failed, with the affected files.
    """
    from gradwire.attribution.store.checks import conclude

    if options.output_dir.is_dir():
        (options.output_dir / RESULT).unlink(missing_ok=True)
    checks = [check.report() for check in _audit(options).checks]
    write_json(options.output_dir / RESULT, {"passed": all(check["passed"] for check in checks), "checks": checks})
    conclude(checks, options.output_dir)
    print(f"{len(checks)} checks of {options.output_dir} passed")


def _audit(options: Options) -> CollectionAudit:
    """Run the selected checks; by default those of the ranks and of the merged rows."""
    from gradwire.attribution.store.checks import CollectionAudit
    from gradwire.attribution.store.samples import samples

    origin = provenance.read(options.output_dir)
    origin = origin.moved({name: getattr(options, name) for name in provenance.PLACES})
    dims = options.dim or origin.dims
    check_asked(origin, options.output_dir, options.num_gpus, dims)
    audit = CollectionAudit(options.output_dir, origin, samples(origin))
    if origin.corpus is not None:
        audit.corpus(Path(origin.corpus))
    audit.folders(options.dim)
    all_of_it = options.check_ranks == options.check_aggregated
    for dim in dims:
        if options.check_ranks or all_of_it:
            for rank in range(origin.world_size):
                audit.rank(rank, dim)
        if options.check_aggregated or all_of_it:
            audit.aggregated(dim)
    audit.custom()
    if options.recompute and not any(check.problems for check in audit.checks):  # else the provenance is in doubt
        import torch

        from gradwire.attribution.collect.rows import RowMaker
        from gradwire.comm.collectives import world

        drawn = random.Random(options.seed).sample(range(origin.samples), min(options.recompute, origin.samples))
        device = world.choose("auto", options.device, 1, world.detect_gpus()).device_type
        exact = origin.model_copy(update={"store": "float32"})
        audit.recomputed(RowMaker.load(exact, torch.device(device)).blocks, sorted(drawn))
    return audit
