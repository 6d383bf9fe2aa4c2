"""The verb ``grads validate``: check that row i belongs to id i, in the ranks' files and the merged ones."""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.attribution.store.aggregate import check_asked
from gradwire.base.errors import CheckFailed
from gradwire.base.files import write_json
from gradwire.base.flags import COUNT, NATURAL, RANKS, SEED
from gradwire.base.rank_env import DEVICES

if TYPE_CHECKING:
    from gradwire.attribution.store.checks import Audit
    from gradwire.attribution.store.provenance import Provenance

RESULT = "validation.json"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument("--output_dir", type=Path, required=True, help="the collection folder; gets validation.json")
    parser.add_argument("--check_ranks", action="store_true", help="check rank_<r>/dim<D>/ (default: both)")
    parser.add_argument("--check_aggregated", action="store_true", help="check dim<D>/ (default: both)")
    parser.add_argument("--num_gpus", type=RANKS, help="ranks that collected (default: from collect.json)")
    parser.add_argument("--dim", type=COUNT, nargs="+", metavar="N", help="widths to check (default: all)")
    parser.add_argument(
        "--recompute", type=NATURAL, default=0, metavar="K", help="recompute K random rows if all other checks pass"
    )
    parser.add_argument("--seed", type=SEED, default=0, help="seed of the choice of --recompute")
    parser.add_argument("--model_dir", type=Path, help="current folder of the model (default: as collected)")
    parser.add_argument("--data_path", type=Path, help="current folder of the shards (default: as collected)")
    parser.add_argument("--corpus", type=Path, help="current path of the corpus file (default: as collected)")
    parser.add_argument("--optimizer_dir", type=Path, help="current folder of Adam's moments (default: as collected)")
    parser.add_argument("--lora_dir", type=Path, help="current folder of the LoRA adapter (default: as collected)")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="for --recompute; auto: a GPU if there is one"
    )


def beside(args: argparse.Namespace) -> Path:
    """Return the collection folder."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Run the checks and write ``validation.json``, even if some fail.

    Raises:
        BadInput: If the collection folder, its model or its data are missing or have changed.
        CheckFailed: If a check failed, with the affected files.
    """
    (args.output_dir / RESULT).unlink(missing_ok=True)
    checks = [check.report() for check in _audit(args).checks]
    failed = [check for check in checks if not check["passed"]]
    write_json(args.output_dir / RESULT, {"passed": not failed, "checks": checks})
    if failed:
        details = "".join(f"\n  {check['name']}: {check['detail']}" for check in failed)
        raise CheckFailed(f"{len(failed)} of {len(checks)} checks of {args.output_dir} failed:{details}")
    print(f"{len(checks)} checks of {args.output_dir} passed")


def _audit(args: argparse.Namespace) -> Audit:
    """Run the selected checks; by default those of the ranks and of the merged rows."""
    import torch

    from gradwire.attribution.collect.rows import RowMaker
    from gradwire.attribution.store import provenance
    from gradwire.attribution.store.checks import Audit
    from gradwire.comm.collectives import world

    origin = _origin(args)
    dims = args.dim or origin.dims
    check_asked(origin, args.output_dir, args.num_gpus, dims)
    audit = Audit(args.output_dir, origin, provenance.samples(origin))
    if origin.corpus is not None:
        audit.corpus(Path(origin.corpus))
    audit.folders(args.dim)
    all_of_it = args.check_ranks == args.check_aggregated
    for dim in dims:
        if args.check_ranks or all_of_it:
            for rank in range(origin.world_size):
                audit.rank(rank, dim)
        if args.check_aggregated or all_of_it:
            audit.aggregated(dim)
    audit.custom()
    if args.recompute and not any(check.problems for check in audit.checks):  # else the provenance is in doubt
        drawn = random.Random(args.seed).sample(range(origin.samples), min(args.recompute, origin.samples))
        device = world.choose("auto", args.device, 1, world.detect_gpus()).device_type
        exact = replace(origin, store="float32")
        audit.recomputed(RowMaker.load(exact, torch.device(device)), sorted(drawn))
    return audit


def _origin(args: argparse.Namespace) -> Provenance:
    """Read the collection's provenance, with the paths given on the command line."""
    from gradwire.attribution.store import provenance

    origin = provenance.read(args.output_dir)
    places = {name: getattr(args, name) for name in provenance.PLACES}
    return replace(origin, **{name: str(place) for name, place in places.items() if place is not None})  # type: ignore[arg-type]
