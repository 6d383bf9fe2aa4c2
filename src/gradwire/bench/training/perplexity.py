"""The command ``perplexity``: token-weighted perplexity of a saved model over a split."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from gradwire.base.flags import COUNT, output_file
from gradwire.base.rank_env import Device
from gradwire.base.strict import Strict
from gradwire.lm.data import CHAT_FORMAT, LENGTH, SKIP_INVALID, ChatFormat


class Options(Strict):
    """Flags of ``gradwire perplexity``."""

    model_dir: Path = Field(description="a saved model, such as a run's final_model/")
    data_path: Path = Field(description="a shards folder, or a corpus file (JSON or .jsonl)")
    split: Literal["val", "train", "all"] = Field("val", description="all: both splits")
    batch_size: Annotated[int, COUNT] = Field(32, description="samples per forward pass")
    output: Annotated[Path, output_file] | None = Field(
        None, description="file to write (default: perplexity.json next to --model_dir)"
    )
    device: Device = Field("auto", description="auto: cuda if there is a GPU, else cpu")
    max_length: Annotated[int, LENGTH] | None = Field(
        None, description="tokens per sample of a corpus file (default: the model's)"
    )
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    skip_invalid: bool = Field(False, description=SKIP_INVALID)
    cache_dir: Path | None = Field(None, description="folder for a corpus file's shards (default: the user's cache)")


def output(options: Options) -> Path:
    """The file to write."""
    return options.output or options.model_dir.parent / "perplexity.json"


def output_dir(options: Options) -> Path:
    """The folder of the file to write."""
    return output(options).parent


def main(options: Options) -> None:
    """Print ``avg_loss`` (nats per target) and ``ppl``, and write them as JSON: null if the model's run diverged.

    Raises:
        BadInput: If the model or the data cannot be read, or the perplexity of another model is not finite.
    """
    from gradwire.base.errors import BadInput
    from gradwire.base.failures import diverged
    from gradwire.base.files import write_json
    from gradwire.bench.training.objective import evaluate
    from gradwire.comm.collectives.world import process_group
    from gradwire.lm.data.batches import eval_batches
    from gradwire.lm.data.shards import Shards, check, splits
    from gradwire.lm.models import causal
    from gradwire.lm.models.saved import shards_folder

    shards = shards_folder(options)
    check(shards)
    chosen = splits(shards) if options.split == "all" else (options.split,)
    opened = [Shards(shards, split) for split in chosen]
    batches = [eval_batches(split, min(options.batch_size, len(split)), 0, 1) for split in opened]
    with process_group(device=options.device) as world:
        model = causal.load(options.model_dir).to(world.device)
        quality = evaluate(model, chain(*batches), world.device)
    finite = math.isfinite(quality.ppl)
    if not finite and not diverged(options.model_dir.parent):
        wrong = causal.not_finite(model)
        raise BadInput(
            f"the loss of the model in {options.model_dir} is {quality.loss:g}, so it has no perplexity: "
            + (f"{wrong} is not finite" if wrong else "its weights are finite, and its logits overflow float32")
            + f". Training diverged, or the file is damaged; {output(options)} is not written."
        )
    print(f"avg_loss {quality.loss:.6f}  ppl {quality.ppl:.4f}  over {quality.n_targets} targets of {options.split}")
    if not finite:
        print(f"{output(options)}: the run diverged; its perplexity is null")  # JSON has no infinity
    write_json(
        output(options),
        {
            "avg_loss": quality.loss if finite else None,
            "ppl": quality.ppl if finite else None,
            "n_targets": quality.n_targets,
            "split": options.split,
        },
    )
