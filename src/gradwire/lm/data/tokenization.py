"""Make a tokenizer and token shards from a corpus file."""

from __future__ import annotations

import shutil
from pathlib import Path

from gradwire.base.errors import BadInput
from gradwire.base.files import sha256_file
from gradwire.base.source_digest import source_digest
from gradwire.lm.data import corpus
from gradwire.lm.data import tokenizer as tokenizers
from gradwire.lm.data.defaults import check_shard
from gradwire.lm.data.writer import write_shards


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
        tokenizer_only: Make no shards.
        restart: Replace shards made with other settings, another corpus or other source code.

    Raises:
        BadInput: If the corpus, a setting, or existing files in ``output_dir`` are invalid.
    """
    check_shard(max_length, shard_size)
    tokenizer_folder, shards = output_dir / "tokenizer", output_dir / "shards"
    kept = tokenizer_folder.exists()
    try:
        ready = tokenizers.prepare(tokenizer, tokenizer_folder, data_path, vocab_size)
        if tokenizer_only:
            return
        settings = {
            "dataset": dataset,
            "dataset_digest": corpus.sha256(data_path),
            "tokenizer_digest": sha256_file(tokenizer_folder / tokenizers.TOKENIZER),
            "max_length": max_length,
            "shard_size": shard_size,
            "val_fraction": val_fraction,
            "source": source_digest("gradwire.lm.data.tokenization"),
        }
        write_shards(shards, data_path, ready, settings, restart)
    except BadInput:
        if not kept:
            shutil.rmtree(tokenizer_folder, ignore_errors=True)
        raise
