"""Shards for verbs that are given a corpus file: tokenized once, by rank 0, into a cache."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire.data import tokenizer as tokenizers
from gradwire.data.shards import ALL, exist, meta, splits, wait_finalized
from gradwire.data.tokenization import tokenize
from gradwire.defaults import MAX_LENGTH, SHARD_SIZE, SHORTEST_MAX_LENGTH, VAL_FRACTION, VOCAB_SIZE
from gradwire.errors import BadInput
from gradwire.files import check_folder, digest, sha256_file

TIMEOUT = 600.0  # seconds without progress until the other ranks give rank 0 up


def shards_of(
    data_path: Path,
    *,
    tokenizer: str,
    max_length: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    cache_dir: Path | None = None,
    whole: bool = False,
    rank: int = 0,
    timeout: float = TIMEOUT,
) -> Path:
    """The shards folder for a ``--data_path``.

    Args:
        data_path: A shards folder or the folder that holds ``shards/``, returned as it is; or a corpus file.
        tokenizer: A tokenizer's folder, such as a saved model's: shards of another one are refused. Or ``bpe``: shards
            have theirs, for a corpus file one is trained.
        max_length: Tokens per sample: shards of longer ones are refused. None: theirs, or the default of a corpus.
        vocab_size: Size of the vocabulary of ``bpe``, for a corpus file.
        cache_dir: Where a corpus file's shards go; None: ``$XDG_CACHE_HOME/gradwire/<digest>``.
        whole: Take all documents of a corpus file, as the split ``all``; those of ``cache_dir`` go into its ``all/``.
        rank: Rank 0 tokenizes, the others poll until it has finished.
        timeout: Seconds without progress after which they give up.

    Raises:
        BadInput: If there is nothing usable at ``data_path``, or shards that do not fit.
        RunFault: If rank 0 makes no progress.
    """
    data_path = Path(data_path)
    for folder in (data_path, data_path / "shards"):
        if exist(folder):
            check_fit(folder, tokenizer, max_length)
            return folder
    max_length = MAX_LENGTH if max_length is None else max_length
    if max_length < SHORTEST_MAX_LENGTH:
        raise BadInput(f"--max_length {max_length} is too small; at least {SHORTEST_MAX_LENGTH}.")
    if not data_path.is_file():
        raise BadInput(f"{data_path} is neither a shards folder nor a corpus file; `gradwire tokenize` makes shards.")
    val_fraction = 0.0 if whole else VAL_FRACTION
    if cache_dir is None:
        cache_dir = default_cache(data_path, tokenizer, max_length, vocab_size, val_fraction)
    elif whole:
        cache_dir = cache_dir / ALL
    if rank == 0:
        check_folder(cache_dir, "the cache of a corpus file's shards (--cache_dir)")
        with locked(cache_dir):
            tokenize(
                data_path,
                cache_dir,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                max_length=max_length,
                shard_size=SHARD_SIZE,
                val_fraction=val_fraction,
                dataset=data_path.stem,
            )
    wait_finalized(cache_dir / "shards", timeout)
    return cache_dir / "shards"


def check_fit(folder: Path, tokenizer: str, max_length: int | None) -> None:
    """Refuse shards whose samples are longer than asked for, or whose tokens are another vocabulary's.

    Raises:
        BadInput: Saying which, and what to do.
    """
    longest = meta(folder, splits(folder)[0])["max_length"]
    if max_length is not None and longest > max_length:
        raise BadInput(
            f"{folder} holds samples of up to {longest} tokens, not {max_length}; run `gradwire tokenize` with "
            f"--max_length {max_length} into another folder."
        )
    if tokenizer != "bpe" and not tokenizers.alike(Path(tokenizer), folder.parent / "tokenizer"):
        raise BadInput(
            f"{folder} was made with another tokenizer than the one in {tokenizer}; run `gradwire tokenize` with "
            f"--tokenizer {tokenizer}, or give the corpus file itself."
        )


def default_cache(data_path: Path, tokenizer: str, max_length: int, vocab_size: int, val_fraction: float) -> Path:
    """A folder for exactly this corpus, tokenizer, length and split below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    origin = tokenizers.origin(tokenizer, data_path, vocab_size)
    cut = [max_length, SHARD_SIZE, val_fraction]
    return cache / "gradwire" / digest([data_path.stem, sha256_file(data_path), origin, *cut])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time fill a folder that several runs share; a dead process holds no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
