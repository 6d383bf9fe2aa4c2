"""The shards that a saved model reads: those of ``--data_path``, tokenized by the model's own tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.models import saved


def shards_folder(args: argparse.Namespace, rank: int = 0) -> Path:
    """The shards of a verb that takes ``--model_dir --data_path --max_length --cache_dir``.

    Args:
        args: The verb's arguments.
        rank: Rank 0 tokenizes a corpus file, the others wait for it.

    Raises:
        BadInput: If the model or the data are unusable, or do not fit each other.
        RunFault: If rank 0 makes no progress.
    """
    from gradwire.data.cache import shards_of

    model_dir = Path(args.model_dir)
    saved.check(model_dir)
    return shards_of(
        Path(args.data_path),
        tokenizer=str(model_dir),
        max_length=saved.max_length(model_dir) if args.max_length is None else args.max_length,
        cache_dir=args.cache_dir,
        rank=rank,
    )
