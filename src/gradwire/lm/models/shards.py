"""The shards of ``--data_path``, tokenized by a saved model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.base.errors import BadInput
from gradwire.lm.models import saved

if TYPE_CHECKING:
    from gradwire.lm.data.shards import Shards


def samples_of(args: Any, rank: int = 0) -> Shards:
    """The samples for a verb that also takes ``--split``: a split of a shards folder, or a whole corpus file.

    Raises:
        BadInput: As `shards_folder`, and for a split of a corpus file.
        RunFault: As `shards_folder`.
    """
    from gradwire.lm.data.shards import Shards, splits

    if args.split and Path(args.data_path).is_file():
        raise BadInput(
            f"--split {args.split}: {args.data_path} is a corpus file, which is used whole; omit --split, or run "
            "`gradwire tokenize` and pass its shards folder."
        )
    folder = shards_folder(args, rank, whole=True)
    return Shards(folder, args.split or splits(folder)[0])


def shards_folder(args: Any, rank: int = 0, *, whole: bool = False) -> Path:
    """The shards folder for a verb that takes ``--model_dir --data_path --max_length --cache_dir``.

    Args:
        args: The verb's arguments.
        rank: This rank. Rank 0 tokenizes a corpus file, the others wait for it.
        whole: Hold no documents out for validation.

    Raises:
        BadInput: If the model or the data are unusable, or do not match.
        RunFault: If rank 0 makes no progress.
    """
    from gradwire.lm.data.tokenization import shards_of

    model_dir = Path(args.model_dir)
    saved.check(model_dir)
    return shards_of(
        Path(args.data_path),
        tokenizer=str(model_dir),
        max_length=saved.max_length(model_dir) if args.max_length is None else args.max_length,
        cache_dir=args.cache_dir,
        whole=whole,
        rank=rank,
    )
