"""A small corpus with its shards, and a small saved model that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gradwire.attribution.store.provenance import FORMAT, Provenance
from gradwire.base.files import write_json
from gradwire.lm.data.tokenize import tokenize
from gradwire.lm.data.tokenizer import load as load_tokenizer
from gradwire.lm.models import causal

MAX_LENGTH = 24


class Small(NamedTuple):
    """Where things are."""

    corpus: Path
    shards: Path
    model: Path


def make(root: Path) -> Small:
    """17 documents of one to five samples each, and an untrained model with its tokenizer."""
    words = ["gradient", "sample", "wire", "rank", "shard", "token", "id", "row", "byte", "sum"]
    texts = [" ".join(words[(i * j + j) % 10] for j in range(4 + 5 * (i % 5))) for i in range(17)]
    documents = [{"id": f"doc/{i}é", "title": f"Title {i}", "text": text} for i, text in enumerate(texts)]
    write_json(root / "corpus.json", documents)
    tokenize(
        root / "corpus.json",
        root / "data",
        tokenizer="bpe",
        vocab_size=290,
        max_length=MAX_LENGTH,
        shard_size=5,
        val_fraction=0.2,
        dataset="small",
    )
    vocab_size = load_tokenizer(root / "data" / "tokenizer").vocab_size
    model = causal.build("micro", vocab_size, MAX_LENGTH, seed=3)
    causal.save(model.state_dict(), model.config, root / "data" / "tokenizer", root / "final_model", {"steps": 0})
    return Small(root / "corpus.json", root / "data" / "shards", root / "final_model")


def origin(samples: int, **given: Any) -> Provenance:
    """The origin of rows, without paths: ``sgd`` rows of one rank, in one file."""
    nowhere = dict.fromkeys(("source", "model_dir", "model_digest", "data_path", "data_digest"), "")
    usual = {
        "format": FORMAT,
        "split": "train",
        "world_size": 1,
        "dims": [64],
        "grad_type": "sgd",
        "loss": "mean",
        "seed": 0,
    }
    return Provenance(**{**nowhere, **usual, "samples": samples, "save_interval": samples, **given})
