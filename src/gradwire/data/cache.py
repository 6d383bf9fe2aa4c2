"""Shards for verbs that are given a corpus file: tokenized once, by rank 0, into a cache."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradwire.data import tokenizer as tokenizers
from gradwire.data.shards import META, SPLITS, wait_finalized
from gradwire.data.tokenization import tokenize
from gradwire.data.tokenize import SHARD_SIZE, VAL_FRACTION
from gradwire.errors import BadInput
from gradwire.files import digest, sha256_file

TIMEOUT = 600.0  # seconds without progress until the other ranks give rank 0 up


def shards_of(
    data_path: Path,
    *,
    tokenizer: str,
    max_length: int,
    vocab_size: int = 2048,
    cache_dir: Path | None = None,
    rank: int = 0,
    timeout: float = TIMEOUT,
) -> Path:
    """The shards folder for a ``--data_path``.

    Args:
        data_path: A shards folder or the folder that holds ``shards/``, returned as it is; or a corpus file.
        tokenizer: ``bpe`` or a tokenizer's folder, for a corpus file.
        max_length: Tokens per sample at most, for a corpus file.
        vocab_size: Size of the vocabulary of ``bpe``.
        cache_dir: Where a corpus file's shards go; None: ``$XDG_CACHE_HOME/gradwire/<digest>``.
        rank: Rank 0 tokenizes, the others poll until it has finished.
        timeout: Seconds without progress after which they give up.

    Raises:
        BadInput: If there is nothing usable at ``data_path``.
        RunFault: If rank 0 makes no progress.
    """
    data_path = Path(data_path)
    for folder in (data_path, data_path / "shards"):
        if all((folder / split / META).exists() for split in SPLITS):
            return folder
    if not data_path.is_file():
        raise BadInput(f"{data_path} is neither a shards folder nor a corpus file; `gradwire tokenize` makes shards.")
    cache_dir = cache_dir or default_cache(data_path, tokenizer, max_length, vocab_size)
    if rank == 0:
        with locked(cache_dir):
            tokenize(
                data_path,
                cache_dir,
                tokenizer=tokenizer,
                vocab_size=vocab_size,
                max_length=max_length,
                shard_size=SHARD_SIZE,
                val_fraction=VAL_FRACTION,
                dataset=data_path.stem,
            )
    wait_finalized(cache_dir / "shards", timeout)
    return cache_dir / "shards"


def default_cache(data_path: Path, tokenizer: str, max_length: int, vocab_size: int) -> Path:
    """A folder for exactly this corpus, tokenizer and length below the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    origin = tokenizers.origin(tokenizer, data_path, vocab_size)
    return cache / "gradwire" / digest([data_path.stem, sha256_file(data_path), origin, max_length])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let only one process at a time fill a folder that several runs share; a dead process holds no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
