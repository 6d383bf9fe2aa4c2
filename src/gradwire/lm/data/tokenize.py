"""``gradwire tokenize``: train or copy a tokenizer, and write token shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from gradwire.base.flags import COUNT, FRACTION
from gradwire.base.strict import Strict
from gradwire.lm.data import (
    CHAT_FORMAT,
    LENGTH,
    MAX_LENGTH,
    SHARD_SIZE,
    SKIP_INVALID,
    VAL_FRACTION,
    VOCAB_SIZE,
    VOCABULARY,
    ChatFormat,
)


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
    from gradwire.lm.data.tokenization import tokenize

    tokenize(**{**options.model_dump(), "dataset": options.dataset or options.data_path.stem})
    if options.tokenizer_only:
        return
    train, val = (meta(options.output_dir / "shards", split) for split in SPLITS)
    for split in (train, val):
        print("{split}: {processed_documents} documents, {processed_samples} samples, {tokens} tokens".format(**split))
    print(f"unigram model on val: perplexity {val['unigram_ppl']:.2f}")
