"""``gradwire tokenize``: train or copy a tokenizer, and write token shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.base.flags import COUNT, FRACTION, output_folder
from gradwire.lm.data.defaults import LENGTH, MAX_LENGTH, SHARD_SIZE, VAL_FRACTION, VOCAB_SIZE, VOCABULARY


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--data_path", type=Path, required=True, metavar="FILE", help="corpus: a JSON array or .jsonl")
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, metavar="DIR", help="gets tokenizer/, shards/{train,val}/"
    )
    parser.add_argument(
        "--tokenizer", default="bpe", metavar="{bpe,DIR}", help="train byte-level BPE, or use a folder such as GPT-2's"
    )
    parser.add_argument("--vocab_size", type=VOCABULARY, default=VOCAB_SIZE, metavar="N", help="vocabulary size of bpe")
    parser.add_argument("--max_length", type=LENGTH, default=MAX_LENGTH, metavar="N", help="maximum tokens per sample")
    parser.add_argument("--shard_size", type=COUNT, default=SHARD_SIZE, metavar="N", help="samples per shard")
    parser.add_argument(
        "--val_fraction", type=FRACTION, default=VAL_FRACTION, metavar="F", help="fraction of documents for validation"
    )
    parser.add_argument("--tokenizer_only", action="store_true", help="make DIR/tokenizer and no shards")
    parser.add_argument(
        "--restart", action="store_true", help="replace shards made with other settings, corpus or source code"
    )
    parser.add_argument("--dataset", metavar="NAME", help="name in the records; None: the corpus file's")


def beside(args: argparse.Namespace) -> Path:
    """The folder for a failure record."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Make the tokenizer and, without ``--tokenizer_only``, the shards."""
    from gradwire.lm.data.shards import SPLITS, meta
    from gradwire.lm.data.tokenization import tokenize

    tokenize(
        args.data_path,
        args.output_dir,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
        shard_size=args.shard_size,
        val_fraction=args.val_fraction,
        dataset=args.dataset or args.data_path.stem,
        tokenizer_only=args.tokenizer_only,
        restart=args.restart,
    )
    if args.tokenizer_only:
        return
    train, val = (meta(args.output_dir / "shards", split) for split in SPLITS)
    for each in (train, val):
        print("{split}: {processed_documents} documents, {processed_samples} samples, {tokens} tokens".format(**each))
    print(f"unigram model on val: perplexity {val['unigram_ppl']:.2f}")
