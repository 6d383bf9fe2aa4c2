"""The command ``grads query``: the samples of a store whose gradients are nearest to that of a text.

The query's gradient is computed as the store's rows were, from the store's own manifest: model, adapter, loss, gradient
type, projection and seed. Scores are those of ``grads influence`` with the query as validation samples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from gradwire.attribution.options import Count, CurvatureOptions, Metric, Over, PlaceOptions, SampleOptions
from gradwire.attribution.store.provenance import PLACES
from gradwire.base.files import write_json
from gradwire.lm.data import Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gradwire.attribution.query.searcher import Searcher

RESULT = "query.json"
ASKED = ("prompt", "data_path", "sample_id")
LONGEST_ID, LEAST_TEXT = 200, 20  # characters in the table


class Options(CurvatureOptions, PlaceOptions):
    """Flags of ``gradwire grads query``."""

    store: Path = Field(description="a merged store (dim<N>/)")
    corpus: Path | None = Field(None, description="corpus file; shows whole documents instead of samples")
    shards: Path | None = Field(None, description="current folder of the store's shards (default: as collected)")
    prompt: str | None = Field(None, description="a text that fits into the model's context")
    data_path: Path | None = Field(None, description="a corpus file or a shards folder, of any number of samples")
    sample_id: str | None = Field(None, description="a sample of the store; needs no model")
    split: Split | None = Field(None, description="split of a shards folder (default: train)")
    over: Over = Field("mean", description="reduction over the query's samples")
    cache_dir: Path | None = Field(None, description="folder for a corpus file's shards (default: the user cache)")
    metric: Metric = Field("cosine", description="similarity of two gradients")
    top_k: Count = Field(10, description="number of samples to find")
    as_json: bool = Field(False, alias="json", description="print the result as JSON instead of a table")
    output_dir: Path | None = Field(None, description=f"also write {RESULT} there")

    @model_validator(mode="after")
    def _check_query(self) -> Self:
        if sum(getattr(self, name) is not None for name in ASKED) != 1:
            raise ValueError("give one of --prompt, --data_path and --sample_id")
        return self


def output_dir(options: Options) -> Path | None:
    """Return the folder of the output, if any."""
    return options.output_dir


def main(options: Options) -> None:
    """Compute the query's gradient, search, and show the samples found.

    Raises:
        BadInput: If the store, the query or the model are invalid, or do not belong together.
    """
    from gradwire.attribution.query.searcher import Searcher

    places = {"data_path": options.shards, **options.model_dump(include={*PLACES} - {"data_path"})}
    searcher = Searcher(options.store, places, options.device, options.chosen_damping)
    rows = rows_of(searcher, options)
    result: dict[str, Any] = {
        "store": str(options.store),
        **{name: str(getattr(options, name)) for name in ASKED if getattr(options, name) is not None},
        "query_samples": len(rows),
        "metric": options.metric,
        "over": options.over,
        "curvature": options.curvature,
        "damping": searcher.damping,
        "samples": len(searcher.store),
        "top": searcher.nearest(rows, options.metric, options.over, options.top_k),
    }
    if options.output_dir:
        write_json(options.output_dir / RESULT, result)
    print(json.dumps(result, indent=2, ensure_ascii=False) if options.as_json else table(result["top"]))


def rows_of(searcher: Searcher, options: Options) -> NDArray[np.float32]:
    """Return the query's rows [m, D]."""
    if options.sample_id is not None:
        return searcher.store.row(options.sample_id)[None]
    if options.prompt is not None:
        return searcher.of_prompt(options.prompt)
    asked = {"data_path": options.data_path, "split": options.split, "cache_dir": options.cache_dir}
    samples = SampleOptions(model_dir=searcher.model_dir, chat_format=searcher.chat_format, **asked).samples()
    return searcher.of_samples(samples)


def table(top: Sequence[Mapping[str, Any]], width: int | None = None) -> str:
    """Format the samples found, one per line of ``width`` columns (default: the terminal's), or more for long ids."""
    wide = width or shutil.get_terminal_size((120, 24)).columns
    ids = [_line(sample["sample_id"], LONGEST_ID) for sample in top]
    widest = max(len("sample_id"), *map(len, ids))
    head = f"{'rank':>4}  {'score':>10}  {'sample_id':<{widest}}  text"
    room = max(wide - len(head) + len("text"), LEAST_TEXT)
    lines = [
        f"{sample['rank']:>4}  {sample['score']:>10.4g}  {id_:<{widest}}  "
        + _line(f"{sample.get('title', '')} {sample.get('text', '')}", room)
        for sample, id_ in zip(top, ids, strict=True)
    ]
    return "\n".join([head, *lines])


def _line(text: str, width: int) -> str:
    """Shorten a text to one line, without characters that control a terminal."""
    shown = "".join(character if character.isprintable() else " " for character in text[: 2 * width])
    return shown if len(shown) <= width else f"{shown[: width - 1]}…"
