"""The verb ``grads query``: the samples of a store whose gradients are nearest to that of a text.

The query's gradient is computed as the store's rows were, from the store's own manifest: model, adapter, loss, gradient
type, projection and seed. Scores are those of ``grads influence`` with the query as validation samples.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from gradwire.attribution.query import curvature
from gradwire.attribution.query.index import METRICS
from gradwire.base.files import write_json
from gradwire.base.flags import COUNT, output_folder
from gradwire.base.rank_env import DEVICES
from gradwire.lm.data.defaults import Split
from gradwire.lm.models.shards import samples_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gradwire.attribution.query.searcher import Searcher

RESULT = "query.json"
ASKED = ("prompt", "data_path", "sample_id")
WIDEST_ID = 40  # characters of an id in the table


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", metavar="TEXT", help="a text that fits into the model's context")
    asked.add_argument("--data_path", type=Path, help="a corpus file or a shards folder, of any number of samples")
    asked.add_argument("--sample_id", metavar="ID", help="a sample of the store; needs no model")
    parser.add_argument("--split", choices=get_args(Split), help="split of a shards folder (default: train)")
    parser.add_argument("--over", choices=("mean", "max"), default="mean", help="reduction over the query's samples")
    parser.add_argument("--cache_dir", type=Path, help="folder for a corpus file's shards (default: the user cache)")
    parser.add_argument("--metric", choices=METRICS, default=METRICS[0], help="similarity of two gradients")
    parser.add_argument("--top_k", type=COUNT, default=10, help="number of samples to find")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--output_dir", type=output_folder, help=f"also write {RESULT} there")
    store_arguments(parser)


def store_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of a store and of the places of what it was collected from."""
    parser.add_argument("--store", type=Path, required=True, metavar="DIR", help="a merged store (dim<N>/)")
    parser.add_argument(
        "--index", action="store_true", help="score only what the index of `grads index` proposes; it may miss samples"
    )
    parser.add_argument("--corpus", type=Path, help="corpus file; shows whole documents instead of samples")
    parser.add_argument("--model_dir", type=Path, help="current folder of the model (default: as collected)")
    parser.add_argument("--shards", type=Path, help="current folder of the store's shards (default: as collected)")
    parser.add_argument("--optimizer_dir", type=Path, help="current folder of Adam's moments (default: as collected)")
    parser.add_argument("--lora_dir", type=Path, help="current folder of the LoRA adapter (default: as collected)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto: a GPU if there is one")
    curvature.arguments(parser)


def beside(args: argparse.Namespace) -> Path | None:
    """Return the folder of the output, if any."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Compute the query's gradient, search, and show the samples found.

    Raises:
        BadInput: If the store, the query or the model are invalid, or do not belong together.
    """
    from gradwire.attribution.query.searcher import Searcher

    searcher = Searcher(args.store, places(args), args.device, curvature.damping_of(args), args.index)
    rows = rows_of(searcher, args)
    result = {
        "store": str(args.store),
        **{name: str(getattr(args, name)) for name in ASKED if getattr(args, name) is not None},
        "query_samples": len(rows),
        "metric": args.metric,
        "over": args.over,
        "curvature": args.curvature,
        "damping": searcher.damping,
        "index": searcher.index.kind if searcher.index else None,
        "samples": len(searcher.store.rows.ids),
        "top": searcher.nearest(rows, args.metric, args.over, args.top_k),
    }
    if args.output_dir:
        write_json(args.output_dir / RESULT, result)
    print(json.dumps(result, indent=2, ensure_ascii=False) if args.json else table(result["top"]))


def places(args: argparse.Namespace) -> dict[str, Path | None]:
    """Return the current paths of what the store was collected from, by the names of `provenance.PLACES`."""
    names = ("corpus", "model_dir", "optimizer_dir", "lora_dir")
    return {"data_path": args.shards, **{name: getattr(args, name) for name in names}}


def rows_of(searcher: Searcher, args: argparse.Namespace) -> NDArray[np.float32]:
    """Return the query's rows [m, D]."""
    if args.sample_id is not None:
        return searcher.stored(args.sample_id)
    if args.prompt is not None:
        return searcher.of_prompt(args.prompt)
    reading = {"model_dir": searcher.model_dir, "max_length": None}
    return searcher.of_samples(samples_of(argparse.Namespace(**{**vars(args), **reading})))


def table(top: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """Format the samples found, one per line of at most ``width`` columns (default: the terminal's)."""
    wide = width or shutil.get_terminal_size((120, 24)).columns
    ids = [_line(one["sample_id"], WIDEST_ID) for one in top]
    widest = max(len("sample_id"), *map(len, ids))
    head = f"{'rank':>4}  {'score':>10}  {'sample_id':<{widest}}  text"
    lines = [
        f"{one['rank']:>4}  {one['score']:>10.4g}  {id_:<{widest}}  {one.get('title', '')} {one.get('text', '')}"
        for one, id_ in zip(top, ids, strict=True)
    ]
    return "\n".join([head, *(_line(line, wide) for line in lines)])


def _line(text: str, width: int) -> str:
    """Shorten a text to one line, without characters that control a terminal."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 2 * width])
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"
