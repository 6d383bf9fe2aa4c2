"""From a corpus file to a tokenizer and token shards, in one call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from gradwire.data import corpus
from gradwire.data import tokenizer as tokenizers
from gradwire.data.shards import SPLITS, finalized
from gradwire.data.writer import split_of, write_shards
from gradwire.errors import BadInput
from gradwire.files import sha256_file
from gradwire.source import source_digest


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
    """Write ``output_dir/tokenizer`` and ``output_dir/shards``; what is there already, and fits, is kept.

    The corpus is read once to check all of it before anything is written, once to train a tokenizer, and once to
    tokenize.

    Args:
        data_path: The corpus file.
        output_dir: Gets both folders.
        tokenizer: ``bpe``, or a tokenizer's folder.
        vocab_size: Size of the vocabulary of ``bpe``.
        max_length: Tokens per sample, at most.
        shard_size: Samples per shard.
        val_fraction: Share of the documents that validate.
        dataset: The name that records give the corpus.
        tokenizer_only: Stop when the tokenizer is there.
        restart: Replace shards that other settings, another corpus or other source code made.

    Raises:
        BadInput: If the corpus, a setting, or what lies in ``output_dir`` is unusable.
    """
    shards = output_dir / "shards"
    if not finalized(shards):
        check_corpus(data_path, val_fraction)
    ready = tokenizers.prepare(tokenizer, output_dir / "tokenizer", data_path, vocab_size)
    if tokenizer_only:
        return
    settings = {
        "dataset": dataset,
        "dataset_digest": sha256_file(data_path),
        "tokenizer_digest": sha256_file(output_dir / "tokenizer" / tokenizers.TOKENIZER),
        "max_length": max_length,
        "shard_size": shard_size,
        "val_fraction": val_fraction,
        "source": source_digest("gradwire.data.tokenization"),
    }
    write_shards(shards, data_path, ready, settings, restart)


def check_corpus(data_path: Path, val_fraction: float) -> None:
    """Read the whole corpus.

    Raises:
        BadInput: If a document is unusable, or the corpus too small to give each split one.
    """
    documents = corpus.distinct(corpus.documents(data_path), str(data_path))
    counts = Counter(split_of(document.id, val_fraction) for document in documents)
    for split in SPLITS:
        if not counts[split]:
            raise BadInput(
                f"{data_path} is too small: of its {counts.total()} documents none falls to {split} with "
                f"--val_fraction {val_fraction:g}; give more documents or another fraction."
            )
