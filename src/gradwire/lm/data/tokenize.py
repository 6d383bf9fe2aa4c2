"""``gradwire tokenize``: make a tokenizer and token shards of a corpus file, also in the cache of other commands.

What imports much is imported where it is used, since the flags are here.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.files import check_folder, check_regular, digest, lock, sha256_file
from gradwire.base.flags import COUNT, FRACTION
from gradwire.base.strict import Strict
from gradwire.lm.data import (
    CHAT_FORMAT,
    LENGTH,
    MAX_LENGTH,
    SHARD_SIZE,
    SHORTEST_MAX_LENGTH,
    SKIP_INVALID,
    VAL_FRACTION,
    VOCAB_SIZE,
    VOCABULARY,
    ChatFormat,
    check_shard,
)

TIMEOUT = 600.0  # seconds without progress after which the other ranks stop waiting for rank 0


class Options(Strict):
    """Flags of ``gradwire tokenize``."""

    data_path: Path = Field(description="corpus: a JSON array or .jsonl")
    output_dir: Path = Field(description="gets tokenizer/, shards/{train,val}/")
    tokenizer: str = Field("bpe", description="bpe: train byte-level BPE; else a folder such as GPT-2's")
    vocab_size: Annotated[int, VOCABULARY] = Field(VOCAB_SIZE, description="vocabulary size of bpe")
    max_length: Annotated[int, LENGTH] = Field(MAX_LENGTH, description="maximum tokens per sample")
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    skip_invalid: bool = Field(False, description=SKIP_INVALID)
    shard_size: Annotated[int, COUNT] = Field(SHARD_SIZE, description="samples per shard")
    val_fraction: Annotated[float, FRACTION] = Field(VAL_FRACTION, description="fraction of documents for validation")
    tokenizer_only: bool = Field(False, description="make the tokenizer and no shards")
    restart: bool = Field(False, description="replace shards made with other settings, corpus or source code")
    dataset: str | None = Field(None, description="name in the records (default: the corpus file's)")


def output_dir(options: Options) -> Path:
    """The folder for a failure record."""
    return options.output_dir


def main(options: Options) -> None:
    """Make the tokenizer and, without ``--tokenizer_only``, the shards."""
    from gradwire.lm.data.shards import SPLITS, meta

    tokenize(**{**options.model_dump(), "dataset": options.dataset or options.data_path.stem})
    if options.tokenizer_only:
        return
    train, val = (meta(options.output_dir / "shards", split) for split in SPLITS)
    for split in (train, val):
        print("{split}: {processed_documents} documents, {processed_samples} samples, {tokens} tokens".format(**split))
    print(f"unigram model on val: perplexity {val['unigram_ppl']:.2f}")


def tokenize(
    data_path: Path,
    output_dir: Path,
    *,
    tokenizer: str,
    vocab_size: int,
    max_length: int,
    shard_size: int,
    val_fraction: float,
    dataset: str,
    chat_format: ChatFormat | None = None,
    skip_invalid: bool = False,
    tokenizer_only: bool = False,
    restart: bool = False,
) -> None:
    """Write ``output_dir/tokenizer`` and ``output_dir/shards``; existing ones are kept if they match.

    The corpus is read once to train a tokenizer and once to tokenize, and validated both times; nothing is left of an
    invalid one.

    Args:
        data_path: The corpus file.
        output_dir: Parent of both folders.
        tokenizer: ``bpe``, or a tokenizer folder.
        vocab_size: Vocabulary size of ``bpe``.
        max_length: Maximum number of tokens per sample.
        shard_size: Samples per shard.
        val_fraction: Fraction of the documents for validation; 0 makes the one split ``all``.
        dataset: Name of the corpus in records.
        chat_format: As for `chats.chosen`.
        skip_invalid: Leave out invalid documents.
        tokenizer_only: Make no shards.
        restart: Replace shards made with other settings, another corpus or other source code.

    Raises:
        BadInput: If the corpus, a setting, or existing files in ``output_dir`` are invalid.
    """
    from gradwire.lm.data import chats, corpus
    from gradwire.lm.data import tokenizer as tokenizers
    from gradwire.lm.data.writer import write_shards

    check_shard(max_length, shard_size)
    tokenizer_folder, shards = output_dir / "tokenizer", output_dir / "shards"
    with lock(output_dir / ".lock", patience_s=math.inf):
        kept = tokenizer_folder.exists()
        try:
            ready = tokenizers.prepare(tokenizer, tokenizer_folder, data_path, vocab_size, skip_invalid)
            if tokenizer_only:
                return
            settings = {
                "dataset": dataset,
                "dataset_digest": corpus.sha256(data_path),
                "tokenizer_digest": sha256_file(tokenizer_folder / tokenizers.TOKENIZER),
                "max_length": max_length,
                "shard_size": shard_size,
                "val_fraction": val_fraction,
                "skip_invalid": skip_invalid,
                "source": source(),
            }
            write_shards(shards, data_path, ready, chats.chosen(chat_format, ready.template), settings, restart)
        except BadInput:
            if not kept:
                shutil.rmtree(tokenizer_folder, ignore_errors=True)
            raise


def shards_of(
    data_path: Path,
    *,
    tokenizer: str,
    max_length: int | None = None,
    vocab_size: int = VOCAB_SIZE,
    chat_format: ChatFormat | None = None,
    skip_invalid: bool = False,
    cache_dir: Path | None = None,
    whole: bool = False,
    rank: int = 0,
    timeout: float = TIMEOUT,
) -> Path:
    """Return the shards folder for a ``--data_path``.

    Args:
        data_path: A shards folder or the parent of ``shards/``, used as it is; or a corpus file.
        tokenizer: A tokenizer folder, such as a saved model's; shards made with another one are an error. Or ``bpe``:
            shards bring their own tokenizer, and for a corpus file one is trained.
        max_length: Tokens per sample; shards with longer ones are an error. None: as the shards, or the default.
        vocab_size: Vocabulary size of ``bpe``, for a corpus file.
        chat_format: As for `chats.chosen`; shards with chats of another format are an error.
        skip_invalid: Leave out invalid documents of a corpus file.
        cache_dir: Where to write a corpus file's shards; None: ``$XDG_CACHE_HOME/gradwire/<digest>``.
        whole: Put all documents of a corpus file into the split ``all``; in a ``cache_dir``, below ``all/``.
        rank: Rank 0 tokenizes; the others poll until it has finished.
        timeout: Seconds without progress after which the others stop waiting.

    Raises:
        BadInput: If ``data_path`` is missing, or neither a shards folder nor a corpus file, or the shards do not match.
        RunFault: If rank 0 makes no progress.
    """
    from gradwire.lm.data.shards import ALL, exist, wait_finalized

    data_path = Path(data_path)
    for folder in (data_path, data_path / "shards"):
        if exist(folder):
            check_fit(folder, tokenizer, max_length, chat_format)
            return folder
    max_length = MAX_LENGTH if max_length is None else max_length
    if max_length < SHORTEST_MAX_LENGTH:
        raise BadInput(f"--max_length {max_length} is too small; at least {SHORTEST_MAX_LENGTH}.")
    check_regular(data_path)
    if not data_path.exists():
        raise BadInput(f"{data_path} does not exist: give a shards folder or a corpus file.")
    if not data_path.is_file():
        raise BadInput(f"{data_path} is neither a shards folder nor a corpus file; `gradwire tokenize` makes shards.")
    val_fraction = 0.0 if whole else VAL_FRACTION
    if cache_dir is None:
        cache_dir = default_cache(
            data_path, tokenizer, vocab_size, [max_length, SHARD_SIZE, val_fraction, chat_format, skip_invalid]
        )
    elif whole:
        cache_dir = cache_dir / ALL
    if rank == 0:
        check_folder(cache_dir, "the cache of a corpus file's shards (--cache_dir)")
        tokenize(
            data_path,
            cache_dir,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            max_length=max_length,
            shard_size=SHARD_SIZE,
            val_fraction=val_fraction,
            dataset=data_path.stem,
            chat_format=chat_format,
            skip_invalid=skip_invalid,
        )
    wait_finalized(cache_dir / "shards", timeout)
    return cache_dir / "shards"


def check_fit(folder: Path, tokenizer: str, max_length: int | None, chat_format: ChatFormat | None = None) -> None:
    """Check that shards have samples of at most ``max_length`` tokens, the vocabulary of ``tokenizer``, and the format.

    Raises:
        BadInput: If they do not; the message has the command that makes shards that do.
    """
    from gradwire.lm.data import chats
    from gradwire.lm.data import tokenizer as tokenizers
    from gradwire.lm.data.shards import chat_format_of, meta, splits

    made = meta(folder, splits(folder)[0])
    longest, of_chats = made["max_length"], chat_format_of(made)
    if chat_format and of_chats and chat_format != chats.kind(of_chats):
        raise BadInput(
            f"{folder} has chats in the format {chats.kind(of_chats)}, not {chat_format}; run `gradwire tokenize` with "
            f"--chat_format {chat_format} into another folder."
        )
    if max_length is not None and longest > max_length:
        raise BadInput(
            f"{folder} holds samples of up to {longest} tokens, not {max_length}; run `gradwire tokenize` with "
            f"--max_length {max_length} into another folder."
        )
    if tokenizer != "bpe" and not tokenizers.alike(Path(tokenizer), folder.parent / "tokenizer"):
        raise BadInput(
            f"{folder} was made with another tokenizer than the one in {tokenizer}; run `gradwire tokenize` with "
            f"--tokenizer {tokenizer}, or pass the corpus file itself."
        )


def default_cache(data_path: Path, tokenizer: str, vocab_size: int, settings: Sequence[Any]) -> Path:
    """Return the folder in the user's cache for exactly this corpus, tokenizer, settings and source code."""
    from gradwire.lm.data import corpus
    from gradwire.lm.data import tokenizer as tokenizers

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    origin = tokenizers.origin(tokenizer, data_path, vocab_size)
    return cache / "gradwire" / digest([data_path.stem, corpus.sha256(data_path), origin, *settings, source()])


def source() -> str:
    """Return the digest of the source code that determines shards."""
    from gradwire.base.source_digest import source_digest

    return source_digest("gradwire.lm.data.tokenize")
